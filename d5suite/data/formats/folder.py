"""Folders of JPEG files: Open Images' layout with ``class-descriptions.csv``, else ImageNet's."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from d5suite.data import openimages
from d5suite.data.formats.store import SPLITS, Store
from d5suite.data.formats.writing import StoreWriter
from d5suite.data.imagenet import MAPPING_FILE, VAL_LABELS_FILE, ImageNet
from d5suite.data.reading import FileLocation
from d5suite.errors import DataError

_KAGGLE = Path("ILSVRC") / "Data" / "CLS-LOC"


def splits(path: Path) -> list[str]:
    """Return the splits in the folder."""
    return [split for split in SPLITS if (path / split).is_dir() or (path / _KAGGLE / split).is_dir()]


def dataset(path: Path, split: str, classes: int | None = None) -> ImageNet | openimages.OpenImages:
    """Open a split as `ImageNet` or `OpenImages`.

    Raises
    ------
    DataError
        As `ImageNet` or `OpenImages`.
    """
    if (path / openimages.DESCRIPTIONS_FILE).exists():
        return openimages.OpenImages(path, split, classes=classes)  # type: ignore[arg-type]
    return ImageNet(path, split, classes=classes)  # type: ignore[arg-type]


def read(path: Path, split: str) -> Store:
    """Read the files and labels of one split.

    Raises
    ------
    DataError
        As `ImageNet` or `OpenImages`.
    """
    found = dataset(path, split)
    label_names = found.wnids if isinstance(found, ImageNet) else found.label_names
    class_names = {label: name for label in label_names if (name := found.class_names.get(label))}
    names = [_name(file, split) for file in found.files]
    files: list[FileLocation] = [*found.files]
    return Store(path, split, label_names, class_names, names, found.labels, files)


def _name(file: str, split: str) -> str:
    """Return a path relative to the dataset: the split, perhaps a class folder, the file."""
    above, _, last = file.rpartition("/")
    above, _, parent = above.rpartition("/")
    return f"{split}/{last}" if parent == split else f"{split}/{parent}/{last}"


class Writer(StoreWriter):
    """Write one file per image."""

    def open(self, kept: Mapping[str, int] | None) -> None:
        """Make the folders."""
        for store in self.stores.values():
            for folder in {os.path.dirname(name) for name in store.names}:
                (self.target / folder).mkdir(parents=True, exist_ok=True)

    def write(self, split: str, number: int, content: bytes) -> None:
        """See `StoreWriter.write`."""
        with open(self.target / self.stores[split].names[number], "wb") as file:
            file.write(content)

    def sync(self) -> dict[str, int]:
        """Flush all files of the system, in one call instead of one per image."""
        os.sync()
        return {}

    def finish(self) -> None:
        """Write the label files."""
        first = next(iter(self.stores.values()))
        if first.several:
            with open(self.target / openimages.DESCRIPTIONS_FILE, "w", encoding="utf-8", newline="") as file:
                described = [(label, first.class_names.get(label, "")) for label in first.label_names]
                csv.writer(file, lineterminator="\n").writerows(described)
            (self.target / openimages.TRAINABLE_FILE).write_text("".join(f"{label}\n" for label in first.label_names))
            for split, store in self.stores.items():
                _write_verified(self.target / openimages.labels_file(split), store)
        else:
            if first.class_names:
                lines = (f"{label} {first.class_names.get(label, '')}".rstrip() + "\n" for label in first.label_names)
                (self.target / MAPPING_FILE).write_text("".join(lines), encoding="utf-8")
            if "val" in self.stores:
                _write_val_labels(self.target / VAL_LABELS_FILE, self.stores["val"])
        self.sync()


def _write_verified(file: Path, store: Store) -> None:
    labels = store.labels
    assert isinstance(labels, openimages.SparseLabels)
    with open(file, "w", encoding="ascii") as lines:
        lines.write(",".join(openimages.LABELS_HEADER) + "\n")
        for number, name in enumerate(store.names):
            image = os.path.splitext(os.path.basename(name))[0]
            for place in range(labels.starts[number], labels.starts[number + 1]):
                label = store.label_names[labels.classes[place]]
                lines.write(f"{image},verification,{label},{labels.values[place]}\n")


def _write_val_labels(file: Path, store: Store) -> None:
    """Write the labels of the images in a flat ``val``, like Kaggle's file."""
    labels = store.labels
    assert isinstance(labels, np.ndarray)
    flat = [number for number, name in enumerate(store.names) if name.count("/") == 1]
    if flat:
        with open(file, "w", encoding="utf-8") as lines:
            lines.write("ImageId,PredictionString\n")
            for number in flat:
                image = os.path.splitext(os.path.basename(store.names[number]))[0]
                if "," in image or '"' in image:
                    raise DataError(f"a comma in the name {image!r} of an image", where=str(store.path))
                lines.write(f"{image},{store.label_names[labels[number]]}\n")
