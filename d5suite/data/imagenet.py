"""The files and labels of an ImageNet (ILSVRC2012 classification) tree on disk.

Accepted below the root, or below Kaggle's ``ILSVRC/Data/CLS-LOC``:

- ``train/<wnid>/*.JPEG``: one folder per class;
- ``val/<wnid>/*.JPEG``, or the flat ``val/ILSVRC2012_val_*.JPEG`` with ``LOC_val_solution.csv`` in
  the root;
- ``LOC_synset_mapping.txt`` in the root, optional: the name of every class.

A label is the position of the class's wnid (WordNet identifier, like n01440764) in the sorted list
of wnids, as in torchvision and in every published ImageNet checkpoint. The wnids are the folders of
``train`` if it exists, else the lines of the mapping, else the folders of ``val``, so that both
splits number the classes alike.

Rules for untidy trees:

- a class missing from an existing mapping is an error; a mapped class that the tree lacks is not;
- in ``LOC_val_solution.csv``, a row with an unknown class or a missing image is an error, and so is
  an image without a row. A row of a mapped class that ``train`` lacks is skipped if its image is
  also missing: a tree may hold some of the classes with the lists of all;
- in both files, a duplicate row counts once; contradicting rows are an error;
- a folder, FIFO or dangling link with an image name is an error, and so is a FIFO or dangling link
  among class folders. A warning counts all other entries that are left out, except hidden files.

May import NumPy and, from d5suite, `data.reading` and `errors`. No image is opened here.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from d5suite.data import reading
from d5suite.errors import DataError

MAPPING_FILE = "LOC_synset_mapping.txt"
VAL_LABELS_FILE = "LOC_val_solution.csv"
_SUFFIXES = (".jpeg", ".jpg", ".png")
_MAKE_ONE = "`d5suite data make imagenet --out DIR` makes a small one in the right layout."


class ImageNet:
    """One split of an ImageNet tree: its files and their classes.

    Parameters
    ----------
    root : path
        The folder that holds ``train`` and ``val`` (or Kaggle's ``ILSVRC``).
    split : {"train", "val"}
        The images to use.
    classes : int, optional
        Number of classes to use, the first ones by wnid; by default all.

    Attributes
    ----------
    root : pathlib.Path
        Absolute.
    split : str
        As given.
    wnids : list of str
        The classes, sorted; a label is a position in this list.
    class_names : dict of str to str
        Name of each class by wnid; empty without a mapping file.
    files : list of str
        Absolute path of every image, ordered by class and then by name (a flat ``val``: by name).
    paths : list of pathlib.Path
        The same as `Path` objects, made on first use.
    labels : numpy.ndarray
        int64 (number of images,).
    left_out : str
        Message about files and folders that are not images of a class; empty if there are none.

    Raises
    ------
    DataError
        If the folder, a class, an image or a label is missing, a class folder is empty, a label
        names an unknown class, or rows of a file contradict each other.
    """

    def __init__(
        self, root: str | os.PathLike[str], split: Literal["train", "val"], *, classes: int | None = None
    ) -> None:
        reading.check_split(split, ("train", "val"))
        reading.check_classes(classes)
        self.root = Path(os.path.abspath(root))
        self.split = split
        folder = self._folder(split)
        self.class_names = read_mapping(self.root / MAPPING_FILE)

        known = self._wnids()
        if not known:
            raise DataError(
                f"no classes: {folder.name} has no class folders and the root no {MAPPING_FILE}",
                where=str(folder),
                hint=_MAKE_ONE,
            )
        unnamed = sorted(set(known) - self.class_names.keys()) if self.class_names else []
        if unnamed:
            raise DataError(
                f"class {unnamed[0]} is not in this list{reading.nor_others(len(unnamed))}",
                where=str(self.root / MAPPING_FILE),
                hint="Complete the list, or remove it: class names are optional.",
            )
        self.wnids = reading.first_classes(known, classes, self.root)
        class_folders = _class_folders(folder)
        self._left_out: list[str] = []
        self.left_out = ""
        if class_folders:
            self.files, labels = self._foldered(folder, class_folders, known)
        else:
            self.files, labels = self._flat(folder, known)
        if not self.files:
            raise DataError("no images", where=str(folder), hint=_MAKE_ONE)
        if self._left_out:
            self.left_out = reading.describe_left_out(self._left_out)
            warnings.warn(f"{folder}: {self.left_out}", stacklevel=2)
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        return f"ImageNet({str(self.root)!r}, {self.split!r}): {len(self):,} images, {len(self.wnids):,} classes"

    @cached_property
    def paths(self) -> list[Path]:
        """`files` as `Path` objects."""
        return [Path(file) for file in self.files]

    def _folder(self, split: str) -> Path:
        candidates = [self.root / split, self.root / "ILSVRC" / "Data" / "CLS-LOC" / split]
        for folder in candidates:
            if folder.is_dir():
                return folder
        if not self.root.is_dir():
            raise DataError("the directory does not exist", where=str(self.root), hint=_MAKE_ONE)
        raise DataError(
            f"no {split!r} folder in this directory",
            where=str(self.root),
            hint=f"An ImageNet tree holds train/<wnid>/*.JPEG and val/. {_MAKE_ONE}",
        )

    def _wnids(self) -> list[str]:
        try:
            train = _class_folders(self._folder("train"))
        except DataError:  # a tree with val only
            train = []
        return train or sorted(self.class_names) or _class_folders(self._folder("val"))

    def _foldered(self, folder: Path, class_folders: list[str], known: list[str]) -> tuple[list[str], list[int]]:
        unknown = sorted(set(class_folders) - set(known))
        if unknown:
            raise DataError(f"class folder of unknown wnid {unknown[0]!r}", where=str(folder / unknown[0]))
        files: list[str] = []
        labels: list[int] = []
        self._left_out += _beside(folder)
        for label, wnid in enumerate(self.wnids):
            class_folder = folder / wnid
            if not class_folder.is_dir():
                raise DataError(f"no folder for class {wnid}", where=str(class_folder))
            names, others = _images(class_folder)
            self._left_out += [f"{wnid}/{name}" for name in others]
            if not names:
                raise DataError(
                    f"the folder of class {wnid} holds no images",
                    where=str(class_folder),
                    hint="Put its .JPEG files there, or remove the class from the whole tree.",
                )
            files.extend(os.path.join(class_folder, name) for name in names)
            labels.extend([label] * len(names))
        return files, labels

    def _flat(self, folder: Path, known: list[str]) -> tuple[list[str], list[int]]:
        names, self._left_out = _images(folder)
        if not names:
            raise DataError("neither class folders nor images", where=str(folder), hint=_MAKE_ONE)
        label_file = self.root / VAL_LABELS_FILE
        row_of = _read_val_labels(label_file)
        number = {wnid: label for label, wnid in enumerate(known)}
        missing = row_of.keys() - {os.path.splitext(name)[0] for name in names}
        _check_rows(row_of, missing, number.keys(), self.class_names.keys(), folder, label_file)
        files: list[str] = []
        labels: list[int] = []
        for name in names:
            row = row_of.get(os.path.splitext(name)[0])
            if row is None:
                raise DataError(f"no label for this image in {VAL_LABELS_FILE}", where=str(folder / name))
            if number[row[0]] < len(self.wnids):
                files.append(os.path.join(folder, name))
                labels.append(number[row[0]])
        return files, labels


def _class_folders(folder: Path) -> list[str]:
    with reading.naming_errors(folder), os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".") and not entry.name.lower().endswith(_SUFFIXES)
        )


def _beside(folder: Path) -> list[str]:
    """Return the files beside class folders; raise for anything else."""
    with reading.naming_errors(folder), os.scandir(folder) as entries:
        # A hidden folder may be a misnamed class; hidden files belong to the system.
        names = [
            entry.name
            for entry in entries
            if entry.name.startswith(".") == entry.is_dir() or entry.name.lower().endswith(_SUFFIXES)
        ]
    for name in sorted(names):
        if not (folder / name).exists() or not ((folder / name).is_file() or name.startswith(".")):
            raise DataError(
                "this entry among the class folders is neither a class folder nor a file",
                where=str(folder / name),
                hint="Remove it, or put the class there.",
            )
    return names


def _images(folder: Path) -> tuple[list[str], list[str]]:
    """Return a folder's images, and the names of other files that are not hidden."""
    others: list[str] = []
    return sorted(reading.images_in(folder, lambda name: name.lower().endswith(_SUFFIXES), others)), others


def read_mapping(file: Path) -> dict[str, str]:
    """Read lines like ``n01440764 tench, Tinca tinca``; the name may be missing.

    Raises
    ------
    DataError
        If it cannot be read, or two lines give a class different names.
    """
    names: dict[str, str] = {}
    if not file.exists():
        return names
    with reading.naming_errors(file), open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            wnid, _, name = line.strip().partition(" ")
            if wnid and names.setdefault(wnid, name.strip()) != name.strip():
                raise DataError(f"line {number} gives class {wnid!r} a second name", where=str(file))
    return names


def _read_val_labels(file: Path) -> dict[str, tuple[str, int]]:
    """Read Kaggle's ``ImageId,PredictionString`` (wnid, boxes); return wnid and line by image."""
    if not file.exists():
        raise DataError(
            f"val holds images without class folders, and {file.name} with their labels is missing",
            where=str(file),
            hint="Copy it from the ILSVRC2012 CLS-LOC archive, or sort the images into val/<wnid>/.",
        )
    row_of: dict[str, tuple[str, int]] = {}
    with reading.naming_errors(file), open(file, encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        if next(rows, None) != ["ImageId", "PredictionString"]:
            raise DataError("the first line is not 'ImageId,PredictionString'", where=str(file))
        for row in rows:
            if len(row) != 2 or not row[1].split():
                raise DataError(f"line {rows.line_num} is not 'image name,wnid ...'", where=str(file))
            wnid = row[1].split()[0]
            other, line = row_of.setdefault(row[0], (wnid, rows.line_num))
            if other != wnid:
                raise DataError(
                    f"lines {line}, {rows.line_num} contradict each other about image {row[0]}: {other} and {wnid}",
                    where=str(file),
                )
    return row_of


def _check_rows(
    row_of: Mapping[str, tuple[str, int]], missing: Set[str], known: Set[str], named: Set[str], folder: Path, file: Path
) -> None:
    """Check the labelled images against the classes and against the `missing` images."""
    for image, (wnid, line) in row_of.items():
        if wnid not in known and not (image in missing and wnid in named):
            raise DataError(f"line {line}: image {image} is labelled with unknown wnid {wnid!r}", where=str(file))
    absent = [(line, image) for image, (wnid, line) in row_of.items() if image in missing and wnid in known]
    if absent:
        line, image = absent[0]
        raise DataError(
            f"line {line}: image {image} is not in {folder}{reading.nor_others(len(absent))}",
            where=str(file),
            hint="Add the missing images, or remove their rows.",
        )
