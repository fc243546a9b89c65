"""`Store`, one split of a dataset in any format, and shared code for names, classes and labels."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d5suite.data.imagenet import MAPPING_FILE, read_mapping
from d5suite.data.openimages import SparseLabels
from d5suite.data.reading import FileLocation, FilePieces, first_classes, masked_crc32c_bytes, take_runs
from d5suite.errors import DataError, JobError
from d5suite.files import read_json, write_json

SPLITS = ("train", "val", "validation", "test")
"""The names of splits."""

CLASSES_FILE = "classes.json"
"""The classes of a folder of record files."""

RECORDIO_MAGIC = 0xCED7230A
_HDF5_START = b"\x89HDF\r\n\x1a\n"
_GZIP_START = b"\x1f\x8b"

Labels = np.ndarray | SparseLabels


@dataclass(frozen=True)
class Store:
    """One split of an image dataset: locations, labels and names of its images, and classes.

    Attributes
    ----------
    path : pathlib.Path
        Absolute path of the dataset.
    split : str
        ``train``, ``val``, ``validation`` or ``test``.
    label_names : list of str
        WordNet identifier or LabelName of every class; a label is a position in this list.
    class_names : dict of str to str
        Display names by label name, if there are any.
    names : sequence of str
        Path of every image in its original folder, such as ``train/n01440764/n01440764_18.JPEG``.
    labels : numpy.ndarray or SparseLabels
        int64 (images,). With several per image ``labels[indices]`` is int64 (n, classes): 1
        present, 0 verified as absent, -1 unknown.
    files : sequence of FileLocation
        The location of every image.
    """

    path: Path
    split: str
    label_names: list[str]
    class_names: dict[str, str]
    names: Sequence[str]
    labels: Labels
    files: Sequence[FileLocation]

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, {self.split!r}): {len(self):,} images, {len(self.label_names):,} classes"

    @property
    def several(self) -> bool:
        """Whether an image has several labels."""
        return isinstance(self.labels, SparseLabels)

    @property
    def label_arrays(self) -> tuple[np.ndarray, ...]:
        """The labels as plain arrays: one array, or three for several labels per image."""
        labels = self.labels
        return (labels.starts, labels.classes, labels.values) if isinstance(labels, SparseLabels) else (labels,)

    def sizes(self) -> np.ndarray:
        """Return the encoded bytes of every image, int64 (images,).

        Raises
        ------
        DataError
            If a file is missing.
        """
        if isinstance(self.files, FilePieces):
            return self.files.sizes()
        try:
            return np.fromiter((os.stat(str(file)).st_size for file in self.files), np.int64, len(self))
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=str(error.filename)) from None

    def label_text(self, number: int) -> str:
        """Return an image's label name, or verified labels such as ``+/m/01yrx -/m/0bt9lr``."""
        if not isinstance(self.labels, SparseLabels):
            return self.label_names[int(self.labels[number])]
        signs = zip("+-", self.labels.verified(number), strict=True)
        return " ".join(sorted(sign + self.label_names[label] for sign, row in signs for label in row)) or "none"

    def first_classes(self, count: int) -> Store:
        """Return the store with the first classes, and images with a label among these.

        Raises
        ------
        DataError
            If there are fewer classes, or no such image.
        """
        label_names = first_classes(self.label_names, count, self.path)
        labels: Labels
        if isinstance(self.labels, SparseLabels):
            kept = self.labels.classes < count
            starts = np.concatenate([[0], np.cumsum(kept)])[self.labels.starts]
            numbers = np.flatnonzero(np.diff(starts))
            labels = SparseLabels(
                take_runs(starts, numbers)[0], self.labels.classes[kept], self.labels.values[kept], count
            )
        else:
            numbers = np.flatnonzero(self.labels < count)
            labels = self.labels[numbers]
        if not len(numbers):
            raise DataError(f"no image of the first {count} classes", where=str(self.path))
        assert isinstance(self.files, FilePieces)
        return dataclasses.replace(
            self,
            label_names=label_names,
            names=[self.names[number] for number in numbers.tolist()],
            labels=labels,
            files=self.files.take(numbers),
        )


def check_name(name: str, where: str) -> str:
    """Return the name of an image.

    Raises
    ------
    DataError
        If the name is unsafe as a path below a folder, or as a line of a list.
    """
    parts = name.split("/")
    if not name.isprintable() or len(name) > 4096 or any(p in ("", ".", "..") or len(p.encode()) > 255 for p in parts):
        raise DataError(f"unsafe name of an image: {name[:80]!r}", where=where)
    return name


def full_name(split: str, label: str, name: str, where: str) -> str:
    """Return the full name of an image from a name in a record, which may lack the folders."""
    if not name.startswith(f"{split}/"):
        name = f"{split}/{label}/{name.rsplit('/', 1)[-1]}" if label else f"{split}/{name}"
    return check_name(name, where)


def sniff(path: Path) -> str:
    """Return the kind of a file by its first bytes.

    Raises
    ------
    DataError
        If the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from None
    if head.startswith(_HDF5_START):
        return "HDF5"
    if head.startswith(_GZIP_START):
        return "compressed by gzip"
    if head.startswith(struct.pack("<I", RECORDIO_MAGIC)):
        return "RecordIO"
    if len(head) >= 12 and head[8:12] == masked_crc32c_bytes(head[:8]):
        return "TFRecord"
    return "something else" if head else "empty"


def write_classes(folder: Path, store: Store) -> None:
    """Write the classes of a folder of record files."""
    classes = [[name, store.class_names.get(name)] for name in store.label_names]
    write_json(folder / CLASSES_FILE, {"several labels per image": store.several, "classes": classes})


def read_classes(folder: Path) -> tuple[list[str], dict[str, str], bool] | None:
    """Read label names, class names and whether images have several labels; None without a list.

    ImageNet's own list of classes is also accepted.

    Raises
    ------
    DataError
        If the file is not a list of classes.
    """
    file = folder / CLASSES_FILE
    if not file.exists():
        names = read_mapping(folder / MAPPING_FILE)
        return (sorted(names), {label: name for label, name in names.items() if name}, False) if names else None
    try:
        content = read_json(file)
        labels = [label for label, _ in content["classes"]]
        names = {label: name for label, name in content["classes"] if name is not None}
        several = content["several labels per image"]
        sound = all(isinstance(text, str) for text in (*labels, *names.values())) and isinstance(several, bool)
    except (JobError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"is not a list of classes: {getattr(error, 'what', error)}", where=str(file)) from None
    if not sound or not labels or len(set(labels)) < len(labels):
        raise DataError("is not a list of different classes and their names", where=str(file))
    return labels, names, several


class LabelReader:
    """Collect the labels of records one by one, and check them against the folder's classes.

    Parameters
    ----------
    folder : pathlib.Path
        Folder of the records. If it has no list of classes, the classes are the labels in the
        records, sorted; numerically if all are numbers.
    """

    def __init__(self, folder: Path) -> None:
        known = read_classes(folder)
        self.known = known is not None
        self.label_names, self.class_names, self.several = known or ([], {}, False)
        self._number = {name: number for number, name in enumerate(self.label_names)}
        # Our own list also determines the numbers of classes in records. Without it, the records
        # only need to be consistent.
        self._called = dict(self._number) if (folder / CLASSES_FILE).exists() else {}
        self._named = {number: name for name, number in self._called.items()}
        self._labels: list[int] = []
        self._starts = [0]
        self._values: list[int] = []

    def add(self, label: int | str, where: str) -> str:
        """Add the only label of an image, by number or name; return the name."""
        if isinstance(label, int):
            if not self.known:
                label = str(label)
            elif not 0 <= label < len(self.label_names):
                raise DataError(f"label {label}, but there are {len(self.label_names)} classes", where=where)
            else:
                label = self.label_names[label]
        if label not in self._number:
            if self.known:
                raise DataError(f"class {label!r} is not in the list of classes", where=where)
            self._number[label] = len(self._number)
        self._labels.append(self._number[label])
        return label

    def add_both(self, label: str, number: int, where: str) -> str:
        """Add the only label of an image; name and number must match in all records."""
        record = len(self._labels)
        self.add(label, where)
        if (other := self._called.setdefault(label, number)) != number:
            raise DataError(
                f"record {record} gives class {label!r} the number {number} instead of {other}", where=where
            )
        if (name := self._named.setdefault(number, label)) != label:
            raise DataError(
                f"record {record} gives class {label!r} the number {number}, which {name!r} has", where=where
            )
        return label

    def add_several(self, positive: Sequence[int], negative: Sequence[int], where: str) -> None:
        """Add the verified labels of an image: present ones and absent ones."""
        values = sorted([(label, 1) for label in positive] + [(label, 0) for label in negative])
        labels = [label for label, _ in values]
        if labels and not 0 <= labels[0] <= labels[-1] < len(self.label_names):
            raise DataError(f"labels up to {labels[-1]}, but there are {len(self.label_names)} classes", where=where)
        if len(set(labels)) < len(labels):
            raise DataError("a label occurs twice", where=where)
        self._labels += labels
        self._values += [value for _, value in values]
        self._starts.append(len(self._labels))

    def result(self) -> tuple[list[str], dict[str, str], Labels]:
        """Return the label names, the class names and the labels."""
        if self.several:
            starts, values = np.array(self._starts, np.int64), np.array(self._values, np.int8)
            classes = np.array(self._labels, np.int32)
            return self.label_names, self.class_names, SparseLabels(starts, classes, values, len(self.label_names))
        labels = np.array(self._labels, np.int64)
        if self.known:
            return self.label_names, self.class_names, labels
        numbers = all(re.fullmatch(r"-?\d+", name) for name in self._number)
        names = sorted(self._number, key=int if numbers else None)
        place = np.empty(len(names), np.int64)
        place[[self._number[name] for name in names]] = np.arange(len(names))
        return names, {}, place[labels]
