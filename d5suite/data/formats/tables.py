"""The table of a split in an HDF5 group: names, labels and locations, as plain arrays.

An HDF5 dataset holds such a table beside the images. A folder of record files holds it as
``SPLIT.index.h5``, so that the files need not be scanned. Lists of strings are UTF-8, one per line,
in an array of bytes. A file is untrusted: everything that is read is checked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from d5suite.data.formats.store import Labels, Store, check_name, sniff
from d5suite.data.formats.store import read_classes as read_class_list
from d5suite.data.openimages import SparseLabels
from d5suite.data.reading import FilePieces
from d5suite.errors import DataError
from d5suite.files import atomic_hdf5

VERSION = 1
_INDEX_FORMAT = "d5suite image index"


@contextlib.contextmanager
def opened(path: Path, form: str) -> Iterator[h5py.File]:
    """Open an HDF5 file of d5suite for reading; turn HDF5's errors into a `DataError`.

    Raises
    ------
    DataError
        If it is not HDF5, truncated, damaged or of another layout.
    """
    content = sniff(path)
    if content != "HDF5":
        raise DataError(f"is not an HDF5 file: its content is {content}", where=f"{path}, byte 0")
    try:
        with h5py.File(path, "r", locking=False) as file:
            found = file.attrs.get("format"), file.attrs.get("version")
            if found != (form, VERSION):
                raise DataError(f"is not in format {form!r}, version {VERSION}: it says {found}", where=str(path))
            if file.userblock_size:
                raise DataError("has a user block", where=str(path))
            yield file
    except DataError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"is a truncated or damaged HDF5 file: {error}",
            where=f"{path}, byte {path.stat().st_size}",
            hint="Fetch or convert it again.",
        ) from None


def dataset(group: h5py.Group, name: str, dtype: type) -> h5py.Dataset:
    """Return a one-dimensional uncompressed array in this file; it cannot exceed the file.

    Raises
    ------
    DataError
        If it is missing or of another kind.
    """
    path = group.file.filename
    where = f"{path}, {group.name.rstrip('/')}/{name}"
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DataError("is missing", where=where)
    found = group[name]
    if not isinstance(found, h5py.Dataset) or found.dtype != np.dtype(dtype) or found.ndim != 1:
        raise DataError(f"is not a one-dimensional array of {np.dtype(dtype)}", where=where)
    layout = found.id.get_create_plist()
    if layout.get_nfilters() or layout.get_external_count() or found.is_virtual:
        raise DataError(
            "is compressed, or lies outside this file", where=where, hint="`d5suite data convert` writes plain ones."
        )
    stored = found.id.get_storage_size()
    if not found.nbytes <= stored <= os.path.getsize(path):
        raise DataError(f"should hold {found.nbytes:,} bytes and holds {stored:,}", where=where)
    return found


def numbers(group: h5py.Group, name: str, dtype: type, count: int | None = None) -> np.ndarray:
    """Read an array of numbers, of length `count` if given."""
    found = dataset(group, name, dtype)
    if count is not None and len(found) != count:
        raise DataError(
            f"has {len(found):,} entries, not {count:,}",
            where=f"{group.file.filename}, {group.name.rstrip('/')}/{name}",
        )
    values: np.ndarray = found[...]
    return values


def strings(group: h5py.Group, name: str) -> list[str]:
    """Read a list of strings."""
    content = numbers(group, name, np.uint8).tobytes().decode("utf-8")
    return content.split("\n") if content else []


def write_strings(group: h5py.Group, name: str, values: Sequence[str]) -> None:
    """Write a list of strings without line breaks."""
    group[name] = np.frombuffer("\n".join(values).encode(), np.uint8)


def write_classes(group: h5py.Group, store: Store) -> None:
    """Write label names and class names; an empty class name means none."""
    write_strings(group, "label_names", store.label_names)
    write_strings(group, "class_names", [store.class_names.get(name, "") for name in store.label_names])


def read_classes(group: h5py.Group) -> tuple[list[str], dict[str, str]]:
    """Read what `write_classes` wrote."""
    labels = strings(group, "label_names")
    # A list of one empty string is read as an empty list.
    names = strings(group, "class_names") or [""] * len(labels)
    if not labels or len(names) != len(labels) or len(set(labels)) < len(labels):
        raise DataError("the list of classes does not match their names", where=group.file.filename)
    return labels, {label: name for label, name in zip(labels, names, strict=True) if name}


def write_images(group: h5py.Group, store: Store) -> None:
    """Write names and labels."""
    write_strings(group, "names", store.names)
    if isinstance(store.labels, SparseLabels):
        group["label_starts"] = store.labels.starts.astype(np.int64)
        group["label_classes"] = store.labels.classes.astype(np.int32)
        group["label_values"] = store.labels.values.astype(np.int8)
    else:
        group["labels"] = store.labels.astype(np.int64)


def read_images(group: h5py.Group, class_count: int) -> tuple[list[str], Labels]:
    """Read what `write_images` wrote."""
    path = group.file.filename
    names = [check_name(name, path) for name in strings(group, "names")]
    if not names:
        raise DataError("no images", where=path)
    if "label_starts" not in group:
        labels = numbers(group, "labels", np.int64, len(names))
        if labels.min() < 0 or labels.max() >= class_count:
            raise DataError(f"a label is outside of the {class_count} classes", where=f"{path}, {group.name}/labels")
        return names, labels
    starts = numbers(group, "label_starts", np.int64, len(names) + 1)
    _check_starts(starts, path)
    classes = numbers(group, "label_classes", np.int32, int(starts[-1]))
    values = numbers(group, "label_values", np.int8, int(starts[-1]))
    if len(classes) and (classes.min() < 0 or classes.max() >= class_count or not np.isin(values, (0, 1)).all()):
        raise DataError(f"a label is outside of the {class_count} classes", where=f"{path}, {group.name}/label_classes")
    return names, SparseLabels(starts, classes, values, class_count)


def _check_starts(starts: np.ndarray, path: str) -> None:
    if starts[0] or (np.diff(starts) < 0).any():
        raise DataError("a list of starts is not ascending from 0", where=path)


def index_file(folder: Path, split: str) -> Path:
    """Return the path of the index of a split of record files."""
    return folder / f"{split}.index.h5"


def index(store: Store) -> Store:
    """Write the index of a scanned split if its folder is writable; return the split."""
    with contextlib.suppress(OSError, RuntimeError):
        write_index(store)
    return store


def write_index(store: Store) -> None:
    """Write the index of a split of record files beside them."""
    places = store.files
    assert isinstance(places, FilePieces)
    with atomic_hdf5(index_file(store.path, store.split)) as file:
        file.attrs["format"], file.attrs["version"] = _INDEX_FORMAT, VERSION
        write_classes(file, store)
        write_images(file, store)
        write_strings(file, "files", [os.path.basename(path) for path in places.files])
        file["file_sizes"] = np.array([os.path.getsize(path) for path in places.files], np.int64)
        for name in ("file", "record", "start", "offset", "length"):
            file[name] = getattr(places, name)


def read_index(files: Sequence[Path], split: str) -> Store:
    """Read the index of a split of record files.

    Parameters
    ----------
    files : sequence of pathlib.Path
        The record files, in order.
    split : str

    Raises
    ------
    DataError
        If the index is damaged or does not fit the files.
    """
    path = index_file(files[0].parent, split)
    with opened(path, _INDEX_FORMAT) as file:
        label_names, class_names = read_classes(file)
        names, labels = read_images(file, len(label_names))
        sizes = [item.stat().st_size for item in files]
        expected = dict(zip(strings(file, "files"), numbers(file, "file_sizes", np.int64).tolist(), strict=True))
        actual = dict(zip((item.name for item in files), sizes, strict=True))
        for name in sorted(expected.keys() | actual.keys()):
            _check_size(path, files[0].parent / name, expected.get(name, 0), actual.get(name, 0))
        starts = numbers(file, "start", np.int64, len(names) + 1)
        _check_starts(starts, str(path))
        places = FilePieces(
            [str(item) for item in files],
            numbers(file, "file", np.int32, len(names)),
            numbers(file, "record", np.int64, len(names)),
            starts,
            numbers(file, "offset", np.int64, int(starts[-1])),
            numbers(file, "length", np.int64, int(starts[-1])),
        )
    wrong = (places.file < 0) | (places.file >= len(files))
    if not wrong.any():
        ends = np.array(sizes)[places.file]
        ends = np.repeat(ends, np.diff(starts))
        outside = (places.offset < 0) | (places.length < 0) | (places.offset > ends)
        outside |= places.length > ends - places.offset
        wrong = np.concatenate([[0], np.cumsum(outside)])[starts]
        wrong = np.diff(wrong) > 0
        wrong |= (np.diff(starts) < 1) | (places.record < 0)
    if wrong.any():
        raise DataError(
            f"the index places image {int(wrong.argmax())} outside of its file", where=str(path), hint=_again(path)
        )
    return Store(files[0].parent, split, label_names, class_names, names, labels, places)


def _again(path: Path) -> str:
    return f"Delete {path.name}; it is rebuilt when the store is next opened."


def _right_file(path: Path) -> str:
    return f"If the file is right, delete {path.name}; it is rebuilt when the store is next opened."


def _check_size(index: Path, file: Path, expected: int, actual: int) -> None:
    if actual < expected:
        raise DataError(
            f"the file ends after {actual:,} bytes, but had {expected:,} when {index.name} was made",
            where=f"{file}, byte {actual}",
            hint=f"It was cut short: fetch or convert it again. {_right_file(index)}",
        )
    if actual > expected:
        raise DataError(
            f"the file changed since {index.name} was made: from {expected:,} to {actual:,} bytes",
            where=f"{file}, byte {expected}",
            hint=_right_file(index),
        )


def indexed(folder: Path, split: str, files: Sequence[Path]) -> Store | None:
    """Read the index of a split of record files, if there is one.

    Raises
    ------
    DataError
        As `read_index`, or if its classes differ from the folder's list.
    """
    path = index_file(folder, split)
    if not path.exists():
        return None
    store = read_index(files, split)
    known = read_class_list(folder)
    if known is not None and (known[0], known[2]) != (store.label_names, store.several):
        raise DataError(
            f"the index of {split!r} has different classes from the list of classes",
            where=str(folder),
            hint=_again(path),
        )
    return store


def check_same(found: Store, index: Store) -> None:
    """Compare the records of a split with its index.

    Raises
    ------
    DataError
        If an image's place, name or labels differ, or the classes.
    """
    path = index_file(found.path, found.split)
    places, others = found.files, index.files
    assert isinstance(places, FilePieces)
    assert isinstance(others, FilePieces)
    for number in range(min(len(found), len(index))):
        if found.files[number] != index.files[number]:
            what = f"record {number} is not where the index places it"
        elif found.names[number] != index.names[number]:
            what = f"record {number} is {found.names[number]!r}, but {index.names[number]!r} in the index"
        elif (label := found.label_text(number)) != (other := index.label_text(number)):
            what = f"record {number} has label {label}, but {other} in the index"
        else:
            continue
        where = f"{places.files[places.file[number]]}, byte {places.record[number]}"
        raise DataError(what, where=where, hint=_right_file(path))
    if len(found) != len(index):
        raise DataError(f"has {len(index):,} images for {len(found):,} records", where=str(path), hint=_again(path))
    if (found.label_names, found.class_names) != (index.label_names, index.class_names):
        raise DataError("has different classes from the records", where=str(path), hint=_again(path))
