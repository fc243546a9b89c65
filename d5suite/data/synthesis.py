"""Make small learnable image sets in the layouts of ImageNet and Open Images, in seconds.

`d5suite.data.drawing` draws the images. An ImageNet image shows one class, an Open Images image up
to four. Each set includes the files that trip readers of the real sets: a greyscale JPEG, a CMYK
JPEG and a PNG named like a JPEG; in Open Images also untrainable labels, and an image without any
trainable label.

The same parameters give the same bytes, with the same versions of NumPy and Pillow. May import
NumPy, Pillow and, from d5suite, `data`, `errors` and `files`.
"""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image

from d5suite.data.convert import convert, shown
from d5suite.data.drawing import MAX_CLASSES, class_name, draw, draw_several
from d5suite.data.imagenet import MAPPING_FILE, VAL_LABELS_FILE
from d5suite.data.openimages import DESCRIPTIONS_FILE, LABELS_HEADER, SPLITS, TRAINABLE_FILE, labels_file
from d5suite.errors import ConfigurationError, DataError
from d5suite.files import atomic_folder, made_once

FORMAT_VERSION = 1
"""Raise it whenever the same parameters give different files, to invalidate cached sets."""

_MOST_SHOWN = 4  # classes in one image of Open Images
_UNTRAINABLE = {"/m/0bl9f": "Drawing", "/m/01mwkf": "Monochrome, or nearly"}


class _DrawnImage(NamedTuple):
    file: str
    shown: int | list[int]  # one class, or several side by side
    key: list[int]  # of its random numbers


@dataclass(frozen=True)
class ImageSet(ABC):
    """The parameters of a synthetic image set, in one of the layouts below.

    Parameters
    ----------
    classes : int
        At most 1000.
    seed : int
        Seed of all random numbers.
    min_side, max_side : int
        Range of the height and of the width in pixels.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    """

    layout: ClassVar[str]

    classes: int = 10
    seed: int = field(default=0, kw_only=True)
    min_side: int = field(default=250, kw_only=True)
    max_side: int = field(default=500, kw_only=True)

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("classes", self.classes, 1, MAX_CLASSES),
            *((name, value, 1, 100_000) for name, value in self._counts().items()),
            ("seed", self.seed, 0, 2**63),
            ("min_side", self.min_side, 16, self.max_side),
            ("max_side", self.max_side, self.min_side, 10_000),
        ):
            if not least <= value <= most:
                raise ConfigurationError(f"{name} is {value}; it must be from {least} to {most}")

    def _counts(self) -> dict[str, int]:
        """Return the numbers of images by parameter."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each not in fields(ImageSet)}

    def make(self, out: str | os.PathLike[str], *, progress: bool = True) -> None:
        """Make the set atomically: `out` never holds part of a set.

        Parameters
        ----------
        out : path
            The folder to make; it may exist if it is empty.
        progress : bool
            Show a progress bar, if standard error is a terminal.

        Raises
        ------
        DataError
            If `out` is not empty, is not a folder, or cannot be written.
        """
        target = Path(os.path.abspath(out))
        try:
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                kind = "the directory is not empty" if target.is_dir() else "exists and is not a directory"
                raise DataError(f"{kind}; nothing was changed", where=str(target), hint="Name a new directory.")
            with atomic_folder(target) as root:
                pictures, odd = self._write_labels(root)
                self._draw_all(root, pictures, odd, progress)
        except OSError as error:
            raise DataError(f"cannot make the image set: {error.strerror or error}", where=str(target)) from None

    def cached(self, *, progress: bool = True) -> Path:
        """Return the set's folder in the cache; see `d5suite.files.made_once`.

        Raises
        ------
        DataError
            If the cache folder is not writable.
        """
        images = f"{self.classes}x{'+'.join(map(str, self._counts().values()))}"
        sides = f"{self.min_side}-{self.max_side}px"
        name = f"{self.layout}-v{FORMAT_VERSION}-{images}-{sides}-seed{self.seed}"
        return made_once(name, lambda target: self.make(target, progress=progress))

    @abstractmethod
    def _write_labels(self, root: Path) -> tuple[list[_DrawnImage], Sequence[str]]:
        """Write the label files; return the images to draw, and the candidates for odd files."""

    def _draw_all(self, root: Path, pictures: Sequence[_DrawnImage], odd: Sequence[str], progress: bool) -> None:
        kinds = {odd[place * len(odd) // 3]: kind for place, kind in enumerate(("L", "CMYK", "PNG"))}

        def save(picture: _DrawnImage) -> None:
            rng = np.random.default_rng([self.seed, *picture.key])
            height, width = rng.integers(self.min_side, self.max_side + 1, 2).tolist()
            if isinstance(picture.shown, int):
                image = draw(picture.shown, height, width, rng)
            else:
                image = draw_several(picture.shown, height, width, rng)
            _save(image, root / picture.file, kinds.get(picture.file, "JPEG"))

        # Threads suffice: Pillow and NumPy release the interpreter lock in everything slow here.
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        try:
            for _ in shown(pool.map(save, pictures), len(pictures), "Making images", progress):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class SyntheticImageNet(ImageSet):
    """A set with ImageNet's folders, file names and label files.

    Parameters
    ----------
    train_per_class, val_per_class : int
        Images of each class in ``train/<wnid>/`` and in the flat ``val/``.

    Notes
    -----
    `ImageSet` describes the other parameters.
    """

    layout: ClassVar[str] = "imagenet"

    train_per_class: int = 32
    val_per_class: int = 8

    def _write_labels(self, root: Path) -> tuple[list[_DrawnImage], Sequence[str]]:
        wnids = [f"n{1440764 + 2773 * label:08d}" for label in range(self.classes)]
        names = [f"{wnid} {class_name(label)}\n" for label, wnid in enumerate(wnids)]
        (root / MAPPING_FILE).write_text("".join(names), encoding="utf-8")
        train = []
        for label, wnid in enumerate(wnids):
            (root / "train" / wnid).mkdir(parents=True)
            for number in range(self.train_per_class):
                train.append(_DrawnImage(f"train/{wnid}/{wnid}_{number}.JPEG", label, [2, 0, label, number]))
        (root / "val").mkdir()
        labels = np.repeat(np.arange(self.classes), self.val_per_class)
        val, lines, seen = [], ["ImageId,PredictionString"], [0] * self.classes
        for number, label in enumerate(np.random.default_rng([self.seed, 1]).permutation(labels).tolist(), start=1):
            name = f"ILSVRC2012_val_{number:08d}"
            val.append(_DrawnImage(f"val/{name}.JPEG", label, [2, 1, label, seen[label]]))
            seen[label] += 1
            lines.append(f"{name},{wnids[label]}")
        (root / VAL_LABELS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return train + val, [picture.file for picture in train]


@dataclass(frozen=True)
class SyntheticOpenImages(ImageSet):
    """A set with Open Images' folders, file names and label files.

    An image shows one to four classes. The first class is verified as present, the others with
    probability 3/4. The same number of random absent classes is verified as absent. All other
    labels are unknown.

    Parameters
    ----------
    train_images, validation_images, test_images : int
        Images with labels in every split; there is one more without labels. The classes take turns
        as an image's first class, so a split of at least `classes` images shows every class.

    Notes
    -----
    `ImageSet` describes the other parameters.
    """

    layout: ClassVar[str] = "openimages"

    train_images: int = 320
    validation_images: int = 80
    test_images: int = 80

    def _write_labels(self, root: Path) -> tuple[list[_DrawnImage], Sequence[str]]:
        names = [_label_name(label) for label in range(self.classes)]
        described = {name: class_name(label) for label, name in enumerate(names)} | _UNTRAINABLE
        _write_csv(root / DESCRIPTIONS_FILE, sorted(described.items()))  # without a header, as published
        (root / TRAINABLE_FILE).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        pictures = []
        for split, (split_name, count) in enumerate(zip(SPLITS, self._counts().values(), strict=True)):
            (root / split_name).mkdir()
            rng = np.random.default_rng([self.seed, 3, split])
            ids = sorted(f"{number:016x}" for number in rng.choice(2**48, count + 1, replace=False).tolist())
            firsts = rng.permutation(np.arange(count) % self.classes).tolist()
            unverified = ids.pop(int(rng.integers(count)))  # on disk, without a trainable label
            rows = [(unverified, "verification", name, "1") for name in _UNTRAINABLE]
            pictures.append(_DrawnImage(f"{split_name}/{unverified}.jpg", [], [4, split, count]))
            for number, (image, first) in enumerate(zip(ids, firsts, strict=True)):
                others = rng.permutation(np.delete(np.arange(self.classes), first)).tolist()
                more = int(rng.integers(min(_MOST_SHOWN, self.classes)))
                present, absent = [first, *others[:more]], others[more:]
                pictures.append(_DrawnImage(f"{split_name}/{image}.jpg", present, [4, split, number]))
                verified = [(label, "1") for label in present if label == first or rng.random() < 0.75]
                verified += [(label, "0") for label in absent[: len(present)]]
                for label, confidence in sorted(verified):
                    source = "verification" if split or rng.random() < 0.9 else "crowdsource-verification"
                    rows.append((image, source, names[label], confidence))
                if rng.random() < 0.2:
                    rows.append((image, "verification", "/m/0bl9f", "0"))
            _write_csv(root / labels_file(split_name), [LABELS_HEADER, *sorted(rows)])
        labelled = [picture.file for picture in pictures if picture.shown]
        return pictures, [file for file in labelled if file.startswith(f"{SPLITS[0]}/")]


def make_imagenet(out: str | os.PathLike[str], *, progress: bool = True, **parameters: int) -> None:
    """Make a `SyntheticImageNet` of these parameters; see `ImageSet.make`."""
    SyntheticImageNet(**parameters).make(out, progress=progress)


def make_openimages(out: str | os.PathLike[str], *, progress: bool = True, **parameters: int) -> None:
    """Make a `SyntheticOpenImages` of these parameters; see `ImageSet.make`."""
    SyntheticOpenImages(**parameters).make(out, progress=progress)


def cached_imagenet(*counts: int, progress: bool = True, **parameters: int) -> Path:
    """Return the folder of a `SyntheticImageNet` of these parameters; see `ImageSet.cached`."""
    return SyntheticImageNet(*counts, **parameters).cached(progress=progress)


def cached_openimages(*counts: int, progress: bool = True, **parameters: int) -> Path:
    """Return the folder of a `SyntheticOpenImages` of these parameters; see `ImageSet.cached`."""
    return SyntheticOpenImages(*counts, **parameters).cached(progress=progress)


def cached_conversion(source: Path, to: str) -> Path:
    """Return the cached conversion of a cached set to another storage format.

    Raises
    ------
    DataError
        If the cache folder is not writable, or as in `d5suite.data.convert.convert`.
    """
    return made_once(f"{source.name}-{to}", lambda target: convert(source, target, to))


def _label_name(label: int) -> str:
    """Return a name in Open Images' style; names are not sorted by class."""
    return f"/m/0{(label + 1) * 7_368_787 % 2**25:07x}"


def _write_csv(file: Path, rows: Sequence[Sequence[str]]) -> None:
    with open(file, "w", encoding="utf-8", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)


def _save(image: Image.Image, file: Path, kind: str) -> None:
    if kind == "PNG":
        image.save(file, "PNG")
    else:
        image = image.convert(kind) if kind != "JPEG" else image
        image.save(file, "JPEG", quality=90)
