"""Prove that two image datasets hold the same images, labels and classes, in any format and order.

For record files, the records are compared, as frameworks read them, and checked against the
indexes.
May import, from d5suite, `data` and `errors`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from d5suite.data.convert import shown
from d5suite.data.formats import read_split, splits_of
from d5suite.data.formats.store import Store
from d5suite.data.reading import ImageReader
from d5suite.errors import DataError

_SHOWN = 5  # differences named


@dataclass(frozen=True)
class SplitComparison:
    """The result of comparing one split of two datasets.

    Attributes
    ----------
    split : str
    images : int
        Number of images in both datasets.
    size : int
        Bytes of these images.
    digest : str
        SHA-256 of all names, labels and images in the first dataset.
    differences : int
        Number of differences.
    named : list of str
        Descriptions of the first differences.
    """

    split: str
    images: int
    size: int
    digest: str
    differences: int
    named: list[str]


def compare(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, progress: bool = True
) -> Iterator[SplitComparison]:
    """Compare two datasets split by split; encoded images by their SHA-256.

    Images are matched by file name, together with the folder if that is not unique.

    Parameters
    ----------
    first, second : path
        In any format.
    progress : bool
        Show a progress bar, if standard error is a terminal.

    Raises
    ------
    DataError
        If a dataset is damaged, has an index that disagrees with its records, or has images of the
        same name.
    """
    splits = [_splits(path) for path in (first, second)]
    for split in sorted(splits[0].keys() | splits[1].keys()):
        if split in splits[0] and split in splits[1]:
            one = read_split(first, splits[0][split], scan=True)
            yield _compare(split, one, read_split(second, splits[1][split], scan=True), progress)
        else:
            present, missing = (first, second) if split in splits[0] else (second, first)
            yield SplitComparison(split, 0, 0, "", 1, [f"in {present}, not in {missing}"])


def _splits(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the splits of a dataset by their common names: ``validation`` is ``val``."""
    found = splits_of(path)
    return {"val" if split == "validation" and "val" not in found else split: split for split in found}


def _compare(split: str, one: Store, other: Store, progress: bool) -> SplitComparison:
    named: list[str] = []
    count = 0
    if (one.label_names, one.class_names, one.several) != (other.label_names, other.class_names, other.several):
        count += 1
        named.append(_classes_difference(one, other))
    numbers = _by_name(one, other)
    for names, others, here in ((numbers[0], numbers[1], one), (numbers[1], numbers[0], other)):
        missing = [name for name in names if name not in others]
        count += len(missing)
        named += [f"{name} is in {here.path} only" for name in missing[:_SHOWN]]
    both = sorted(numbers[0].keys() & numbers[1].keys())
    total, size = hashlib.sha256(), 0
    readers = ImageReader(), ImageReader()
    for name in shown(both, len(both), f"Comparing {split}", progress):
        contents, labels = [], []
        for store, reader, number in zip((one, other), readers, (numbers[0][name], numbers[1][name]), strict=True):
            contents.append(reader.read(store.files[number], number))
            labels.append(store.label_text(number))
        digests = [hashlib.sha256(content).hexdigest() for content in contents]
        size += len(contents[0])
        total.update(f"{digests[0]} {labels[0]} {name}\n".encode())
        if digests[0] != digests[1]:
            count += 1
            named.append(f"{name}: the images differ, {len(contents[0]):,} and {len(contents[1]):,} bytes")
        if labels[0] != labels[1]:
            count += 1
            named.append(f"{name}: the labels differ, {labels[0]} and {labels[1]}")
    for reader in readers:
        reader.close()
    return SplitComparison(split, len(both), size, total.hexdigest(), count, named[:_SHOWN])


def _classes_difference(one: Store, other: Store) -> str:
    if one.several != other.several:
        return "images have one label in one dataset, and several in the other"
    pairs = itertools.zip_longest(one.label_names, other.label_names)
    for number, (a, b) in enumerate(pairs):
        if a != b:
            return f"class {number} differs: {a} and {b}"
    label = next(x for x in one.label_names if one.class_names.get(x) != other.class_names.get(x))
    return f"class {label} is called {one.class_names.get(label)!r} and {other.class_names.get(label)!r}"


def _by_name(*stores: Store) -> list[dict[str, int]]:
    """Return image numbers by file name, or by folder and file name if those are not unique."""
    found = [{name.rsplit("/", 1)[-1]: number for number, name in enumerate(store.names)} for store in stores]
    if all(len(numbers) == len(store) for numbers, store in zip(found, stores, strict=True)):
        return found
    found = [{name.partition("/")[2]: number for number, name in enumerate(store.names)} for store in stores]
    for numbers, store in zip(found, stores, strict=True):
        if len(numbers) < len(store):
            raise DataError(f"images of {store.split!r} have the same name", where=str(store.path))
    return found
