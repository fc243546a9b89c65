"""The images and verified labels of an Open Images V4 tree on disk.

Open Images (Kuznetsova et al., "The Open Images Dataset V4", IJCV 2020) gives an image several
labels, each verified by a person as present or absent; all other classes are unknown. Accepted,
with the published names:

- ``train/<ImageID>.jpg``, and likewise ``validation`` and ``test``;
- ``train-annotations-human-imagelabels.csv``, and likewise for the other splits, in the root or the
  split's folder: a line of ``ImageID,Source,LabelName,Confidence`` per verified label; confidence
  is 1 (present) or 0 (absent);
- ``class-descriptions.csv`` in the root: ``LabelName,DisplayName``, with or without this header;
- ``classes-trainable.txt`` in the root, optional: one LabelName per line.

The classes are the trainable labels in the order of this file. Without it, they are all labels in
the label files of all splits, sorted, so that all splits number them alike.

Rules for untidy trees:

- rows of described but untrainable labels are skipped (V4 has many); a label without description is
  an error;
- an image without a verified label among the classes is skipped and counted; a missing image with
  such a label is an error;
- a duplicate row counts once; contradicting rows are an error.

The label file is read in pieces, and only numbers are kept: the file of ``train`` has 28 million
rows for 9 million images, and a dense array would need 500 GB. May import NumPy and, from d5suite,
`data.reading` and `errors`. No image is opened here.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, overload

import numpy as np

from d5suite.data import reading
from d5suite.errors import DataError

SPLITS = ("train", "validation", "test")
DESCRIPTIONS_FILE = "class-descriptions.csv"
TRAINABLE_FILE = "classes-trainable.txt"
LABELS_HEADER = ("ImageID", "Source", "LabelName", "Confidence")
_DESCRIPTIONS_HEADER = ["LabelName", "DisplayName"]
_SUFFIX = ".jpg"
_CONFIDENCES = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
_BYTES_AT_ONCE = 1 << 22
_NAMES_AT_ONCE = 1 << 16
_LONGEST_ID = 255  # bytes in the name of a file
_MARKS_OF_ROW = np.frombuffer(b",,,\n", np.uint8)
_SKIPPED = -1
_UNDESCRIBED = -2
_MAKE_ONE = "`d5suite data make openimages --out DIR` makes a small one in the right layout."


def labels_file(split: str) -> str:
    """Return the published name of a split's file of verified labels."""
    return f"{split}-annotations-human-imagelabels.csv"


class SparseLabels:
    """Verified labels in sparse form; indexing gives dense rows.

    Attributes
    ----------
    starts : numpy.ndarray
        int64 (N + 1,): the labels of image i are at ``starts[i]`` up to ``starts[i + 1]`` in
        `classes` and `values`.
    classes : numpy.ndarray
        int32 (number of labels,), ascending within an image.
    values : numpy.ndarray
        int8 (number of labels,): 1 present, 0 absent.
    shape : tuple of int
        (N, C): number of images and of classes.
    """

    def __init__(self, starts: np.ndarray, classes: np.ndarray, values: np.ndarray, class_count: int) -> None:
        self.starts = starts
        self.classes = classes
        self.values = values
        self.shape = (len(starts) - 1, class_count)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: int | slice | np.ndarray) -> np.ndarray:
        """Return the labels of some images.

        Parameters
        ----------
        indices : int, slice or integer array (n,)
            The images; negative numbers count from the end.

        Returns
        -------
        numpy.ndarray
            int64 (n, C), or (C,) for one image: 1 present, 0 absent, -1 not verified.

        Raises
        ------
        IndexError
            If there is no such image.
        """
        rows = np.arange(len(self))[indices]
        start, chosen = reading.take_runs(self.starts, rows.reshape(-1))
        dense = np.full((rows.size, self.shape[1]), -1, np.int64)
        dense[np.repeat(np.arange(rows.size), np.diff(start)), self.classes[chosen]] = self.values[chosen]
        return dense if rows.ndim else dense[0]

    def verified(self, number: int) -> tuple[list[int], list[int]]:
        """Return the classes that are present in an image, and those that are absent."""
        row = slice(*self.starts[number : number + 2].tolist())
        classes, present = self.classes[row], self.values[row] == 1
        return classes[present].tolist(), classes[~present].tolist()


class OpenImages:
    """One split of an Open Images tree: its images and their verified labels.

    Parameters
    ----------
    root : path
        The folder that holds ``train``, ``validation`` or ``test``.
    split : {"train", "validation", "test"}
        The images to use.
    classes : int, optional
        Number of classes to use, from the first; images without a verified label among these are
        skipped. By default all.

    Attributes
    ----------
    root : pathlib.Path
        Absolute.
    split : str
        As given.
    label_names : list of str
        LabelName (like ``/m/04hgtk``) of every class; a class is a position in this list.
    class_names : dict of str to str
        DisplayName of every described label by LabelName, trainable or not.
    files : sequence of str
        Absolute path of every image, ordered by ImageID.
    labels : SparseLabels
        ``labels[indices]`` is int64 (n, C): 1 present, 0 absent, -1 not verified.
    skipped : int
        Number of images on disk without a verified label among the classes; not in `files`.
    left_out : str
        Message about files and folders that are not images; empty if there are none.

    Raises
    ------
    DataError
        If a file, a folder or an image is missing, a file is malformed, or its rows contradict each
        other or the classes.
    """

    def __init__(
        self, root: str | os.PathLike[str], split: Literal["train", "validation", "test"], *, classes: int | None = None
    ) -> None:
        reading.check_split(split, SPLITS)
        reading.check_classes(classes)
        self.root = Path(os.path.abspath(root))
        self.split = split
        folder = self.root / split
        if not folder.is_dir():
            what = f"no {split!r} folder in this directory" if self.root.is_dir() else "the directory does not exist"
            raise DataError(what, where=str(self.root), hint=_MAKE_ONE)
        self.class_names = _read_descriptions(self.root / DESCRIPTIONS_FILE)
        self.label_names = reading.first_classes(self._known(), classes, self.root)

        file = self._labels_file(split)
        if file is None:
            raise DataError(
                "the file with the verified labels is missing",
                where=str(self.root / labels_file(split)),
                hint="It belongs in the root or in the folder of its split.",
            )
        number = dict.fromkeys(self.class_names, _SKIPPED) | {name: i for i, name in enumerate(self.label_names)}
        ids, keys = _read_labels(file, number, len(self.label_names))
        if not len(ids):
            raise DataError("no image has a verified label among the classes", where=str(file), hint=_MAKE_ONE)
        self.skipped, self.left_out = _count_others(folder, ids, file)
        self.files: Sequence[str] = _Files(str(folder), ids)
        self.labels = _sparse(ids, keys, self.label_names, file)

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        return (
            f"OpenImages({str(self.root)!r}, {self.split!r}): {len(self):,} images, {len(self.label_names):,} classes, "
            f"{len(self.labels.values):,} verified labels"
        )

    def _known(self) -> list[str]:
        """Return all classes: the trainable list, else the sorted labels of all label files."""
        list_file = self.root / TRAINABLE_FILE
        if list_file.exists():
            return _read_trainable(list_file, self.class_names)
        found: set[str] = set()
        for split in SPLITS:
            if file := self._labels_file(split):
                for line, columns in _pieces(file):
                    found.update(columns[2])
                    if not found <= self.class_names.keys():
                        place = next(i for i, name in enumerate(columns[2]) if name not in self.class_names)
                        raise _undescribed(columns[2][place], line + place, file)
        return sorted(found)

    def _labels_file(self, split: str) -> Path | None:
        candidates = (self.root / labels_file(split), self.root / split / labels_file(split))
        return next((file for file in candidates if file.exists()), None)


class _Files(Sequence[str]):
    """Paths that are composed on demand: nine million strings would take a gigabyte."""

    def __init__(self, folder: str, ids: np.ndarray) -> None:
        self._folder = folder
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return os.path.join(self._folder, self._ids[index].decode() + _SUFFIX)


def _read_descriptions(file: Path) -> dict[str, str]:
    """Read ``LabelName,DisplayName``; return the second by the first."""
    if not file.exists():
        raise DataError("the file with the names of the labels is missing", where=str(file), hint=_MAKE_ONE)
    names: dict[str, str] = {}
    with reading.naming_errors(file), open(file, encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        for row in rows:
            if rows.line_num == 1 and row == _DESCRIPTIONS_HEADER:
                continue
            if len(row) < 2 or not row[0]:
                raise DataError(f"line {rows.line_num} is not 'LabelName,DisplayName'", where=str(file))
            display = ",".join(row[1:])  # a comma in a name may not be quoted
            if names.setdefault(row[0], display) != display:
                raise DataError(f"line {rows.line_num} gives label {row[0]!r} a second name", where=str(file))
    return names


def _read_trainable(file: Path, described: Mapping[str, str]) -> list[str]:
    names: dict[str, None] = {}
    with reading.naming_errors(file), open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            name = line.strip()
            if name in names:
                raise DataError(f"line {number} has label {name!r} a second time", where=str(file))
            if name and name not in described:
                raise _undescribed(name, number, file)
            if name:
                names[name] = None
    if not names:
        raise DataError("the list of trainable classes is empty", where=str(file))
    return list(names)


def _pieces(file: Path) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield pieces of a label file: the first line's number (from 1), and the four columns."""
    header = ",".join(LABELS_HEADER)
    with reading.naming_errors(file), open(file, "rb") as content:
        if content.readline(_BYTES_AT_ONCE).removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n") != header.encode():
            raise DataError(f"the first line is not '{header}'", where=str(file))
        line = 2
        while piece := content.read(_BYTES_AT_ONCE) + content.readline(_BYTES_AT_ONCE):
            piece = piece.replace(b"\r\n", b"\n")
            piece += b"" if piece.endswith(b"\n") else b"\n"
            # Vectorised: splitting 28 million rows one by one takes a minute.
            marks = np.frombuffer(piece, np.uint8)
            marks = marks[(marks == ord(",")) | (marks == ord("\n"))]
            rows, rest = divmod(len(marks), len(_MARKS_OF_ROW))
            wrong = np.append((marks[: len(marks) - rest].reshape(-1, 4) != _MARKS_OF_ROW).any(axis=1), rest > 0)
            fields = piece.decode("latin-1").replace("\n", ",").split(",")
            columns = [fields[column : 4 * rows : 4] for column in range(4)]
            odd = not piece.isascii() or b"\0" in piece
            if not wrong.any() and (odd or max(map(len, columns[0])) > _LONGEST_ID):
                # A NumPy array of bytes is as wide as its longest item, and strips trailing zeros.
                joined = ["".join(row) for row in zip(*columns, strict=True)]
                wrong = np.array([not row.isascii() or "\0" in row for row in joined])
                wrong |= np.array([len(image) > _LONGEST_ID for image in columns[0]])
            if wrong.any():
                raise DataError(f"line {line + wrong.argmax()} is not '{header}'", where=str(file))
            yield line, columns
            line += rows


def _read_labels(file: Path, number: Mapping[str, int], class_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the verified labels of the classes.

    Returns
    -------
    ids : numpy.ndarray
        Bytes (N,): the ImageIDs, sorted.
    keys : numpy.ndarray
        int64, one per distinct row, sorted: ``(image * class_count + class) * 2 + value``.
    """
    # The published files keep the rows of an image together, so store an ImageID once per run.
    runs, lengths, cells = [np.empty(0, "S1")], [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    for line, (images, _, names, confidences) in _pieces(file):
        classes = np.fromiter(map(number.get, names, itertools.repeat(_UNDESCRIBED)), np.int32, len(names))
        values = np.fromiter(map(_CONFIDENCES.get, confidences, itertools.repeat(-1)), np.int32, len(names))
        if (values < 0).any():
            place = int((values < 0).argmax())
            raise DataError(f"line {line + place} has confidence {confidences[place]!r}, not 0 or 1", where=str(file))
        if (classes == _UNDESCRIBED).any():
            place = int((classes == _UNDESCRIBED).argmax())
            raise _undescribed(names[place], line + place, file)
        kept = classes >= 0
        if kept.any():
            ids = np.array(images, "S")[kept]
            begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
            runs.append(ids[begins])
            lengths.append(np.diff(begins, append=len(ids)))
            cells.append((classes * 2 + values)[kept])
    ids, image = np.unique(np.concatenate(runs), return_inverse=True)
    keys = np.repeat(image, np.concatenate(lengths))
    keys *= 2 * class_count
    keys += np.concatenate(cells)
    keys.sort()
    return ids, keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys


def _count_others(folder: Path, ids: np.ndarray, file: Path) -> tuple[int, str]:
    """Check that all `ids` are in a folder; count its other images, and describe other files."""
    others: list[str] = []
    images = reading.images_in(folder, lambda name: name.endswith(_SUFFIX), others)
    names = (os.fsencode(name.removesuffix(_SUFFIX)) for name in images)
    pieces = [np.empty(0, "S1")]
    while piece := list(itertools.islice(names, _NAMES_AT_ONCE)):
        pieces.append(np.array(piece, "S"))
    message = reading.describe_left_out([name for name in others if not name.endswith(".csv")])  # label files
    if message:
        warnings.warn(f"{folder}: {message}", stacklevel=3)
    on_disk = np.concatenate(pieces)
    present = np.isin(ids, on_disk, assume_unique=True)
    if not present.all():
        image = ids[present.argmin()].decode()
        (line, *_) = _lines_of(file, image)
        if not re.fullmatch(r"[0-9A-Za-z_-]+", image):
            raise DataError(f"line {line}: {image!r} is not an ImageID", where=str(file))
        absent = len(ids) - int(present.sum())
        raise DataError(
            f"line {line}: image {image} is not in {folder}{reading.nor_others(absent)}",
            where=str(file),
            hint="Add the missing images, or remove their rows.",
        )
    return len(on_disk) - len(ids), message


def _sparse(ids: np.ndarray, keys: np.ndarray, label_names: Sequence[str], file: Path) -> SparseLabels:
    cells = keys >> 1
    clashes = np.flatnonzero(cells[1:] == cells[:-1])
    if len(clashes):
        image, label = divmod(int(cells[clashes[0]]), len(label_names))
        name = ids[image].decode()
        lines = ", ".join(map(str, _lines_of(file, name, label_names[label])))
        raise DataError(
            f"lines {lines} contradict each other about label {label_names[label]} of image {name}", where=str(file)
        )
    starts = np.searchsorted(cells, np.arange(len(ids) + 1) * len(label_names))
    return SparseLabels(
        starts, (cells % len(label_names)).astype(np.int32), (keys & 1).astype(np.int8), len(label_names)
    )


def _lines_of(file: Path, image: str, label: str | None = None) -> list[int]:
    """Find the lines of an image or of one of its labels, for an error message."""
    return [
        line + place
        for line, columns in _pieces(file)
        for place, (found, name) in enumerate(zip(columns[0], columns[2], strict=True))
        if found == image and label in (None, name)
    ]


def _undescribed(name: str, line: int, file: Path) -> DataError:
    return DataError(
        f"line {line}: label {name!r} is not in {DESCRIPTIONS_FILE}",
        where=str(file),
        hint="The files must be of one version of Open Images.",
    )
