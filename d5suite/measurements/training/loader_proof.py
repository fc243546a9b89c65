"""The proof of a framework's own loader, on images of known content.

A loader draws its own order and crops, so no pixel of a dataset's batches is known. Each check
names the fault that it exists for.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.data.convert import convert
from d5suite.data.formats import open_store
from d5suite.data.known_images import (
    IMAGES,
    PLACED,
    SeenImages,
    crops,
    label_of,
    levels,
    neutral_areas,
    neutral_squares,
    write_known_images,
)
from d5suite.data.transforms import TrainTransform
from d5suite.validate.check import Check

EPOCHS = 3
"""Number of epochs that are read: 72 crops."""

BATCH = 8
"""Images of a batch; it divides an epoch."""

LOST = 0.35
"""Accepted loss of contrast between squares of 4 pixels, or of their edges. OpenCV and Pillow
differ by a tenth; at an eighth of the resolution two thirds or more are lost."""

RANGE = 0.03
"""Accepted error of black and of white, as a fraction of their distance."""

LEVELS = 3.5
"""Accepted distance from an image's blue, in levels of 255: JPEG and rounding cause up to 2."""

MIRRORED = 0.24
"""Accepted distance of the share of mirrored images from 1/2: four standard deviations."""

AREA = 0.15
"""Accepted error of the crops' mean area, a fraction of the image's: four standard deviations and a
rounding. Without crops it is off by 0.5."""

VARIED = 0.5
"""Accepted relative error of the standard deviation of the crops' areas."""

REPEATED = 0.5
"""Accepted share of crops that equal those of other images, to 1% of the image."""

OWN = "the framework's own loader"

Loader = Callable[..., Any]


def prove_known_images(loader: Loader, *, stored: str, size: int, workers: int, seed: int) -> Iterator[Check]:
    """Check a native loader on images of known content, in the storage format that it will read.

    Parameters
    ----------
    loader : callable
        An adapter's ``native_loader``.
    stored : str
        The format.
    size : int
        Height and width of the images that the loader returns.
    workers, seed : int
        Worker processes and seed of the loader.
    """
    with tempfile.TemporaryDirectory(prefix="d5suite-images-") as folder:
        root = Path(folder) / "folder"
        write_known_images(root, size)
        if stored != "folder":
            convert(root, Path(folder) / stored, stored)
        dataset = open_store(Path(folder) / stored, "train")
        batches = loader(dataset, TrainTransform(size), batch_size=BATCH, workers=workers, seed=seed)
        with contextlib.closing(batches):
            taken = [_arrays(next(batches)) for _ in range(EPOCHS * IMAGES // BATCH)]
    images, labels = (np.concatenate(each) for each in zip(*taken, strict=True))
    yield from check_known_images(levels(images), labels, size)


def _arrays(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    images, labels = (np.array(part) for part in batch)
    return images, labels


def check_known_images(pixels: np.ndarray, labels: np.ndarray, size: int) -> Iterator[Check]:
    """Check `EPOCHS` epochs of known images: levels, float64 (N, 3, H, W), and labels (N,)."""
    seen = SeenImages.of(pixels)
    other = seen.constant != 2
    said = f"what should be blue is channel {seen.constant[other][0] + 1} of 3" if other.any() else ""
    yield Check(f"channels of {OWN} that are not red, green, blue", float(other.mean()), 0.0, said)
    placed = seen.numbers < PLACED
    yield from _range(pixels, ~placed, float(seen.apart.max()), size)
    yield from _labels(seen.numbers, labels)
    yield from _order(seen.numbers)
    yield from _crops(pixels[placed], size)


def _range(pixels: np.ndarray, chequered: np.ndarray, apart: float, size: int) -> Iterator[Check]:
    """Check resolution and normalisation, from squares of black and yellow, and from the blue."""
    if not chequered.any():
        yield Check(f"chequered images of {OWN} are missing", 1.0, 0.0)
        return
    found, wanted = [
        np.stack([each[:, channel] for channel in (0, 1)]) for each in (pixels[chequered], neutral_squares(size))
    ]
    kept = min(_contrast(found) / _contrast(wanted), _edges(found) / _edges(wanted))
    text = f"{kept:.0%} of the neutral contrast between squares of 4 pixels, or of their edges"
    yield Check(f"resolution lost by {OWN}", max(1 - kept, 0.0), LOST, text)
    ends, right = (np.percentile(each.reshape(2, -1), (10, 90), axis=1) for each in (found, wanted))
    errors = np.abs(ends - right).max() / 255
    text = "; ".join(
        f"{name} from {low:.0f} to {high:.0f} of 255 where the neutral one goes from {least:.0f} to {most:.0f}"
        for name, low, high, least, most in zip(("red", "green"), *ends, *right, strict=True)
    )
    yield Check(f"normalisation of {OWN}: black and white", float(errors), RANGE, text)
    yield Check(f"normalisation of {OWN}: levels of blue", apart, LEVELS, "distance from the nearest image's")


def _contrast(planes: np.ndarray) -> float:
    return float(planes.std(axis=(2, 3)).mean())


def _edges(planes: np.ndarray) -> float:
    return float(np.abs(np.diff(planes, axis=2)).mean() + np.abs(np.diff(planes, axis=3)).mean())


def _labels(numbers: np.ndarray, labels: np.ndarray) -> Iterator[Check]:
    right = np.array([label_of(number) for number in numbers])
    wrong = np.flatnonzero(labels != right)
    said = f"first: {labels[wrong[0]]} instead of {right[wrong[0]]}" if len(wrong) else ""
    yield Check(f"labels of {OWN} that are not their images'", len(wrong) / len(labels), 0.0, said)


def _order(numbers: np.ndarray) -> Iterator[Check]:
    """Check that every epoch has each image once, in another random order."""
    epochs = numbers.reshape(EPOCHS, IMAGES)
    whole = np.sort([min(number, PLACED) for number in range(IMAGES)])
    missing = [len(set(whole) - set(epoch)) for epoch in epochs]
    wrong = max(float((np.sort(epoch) != whole).any()) for epoch in epochs)
    text = f"{max(missing)} of {PLACED + 1} kinds of images are missing in an epoch"
    yield Check(f"images that {OWN} repeats or leaves out within an epoch", wrong, 0.0, text)
    same = float(any((epoch == epochs[0]).all() for epoch in epochs[1:]))
    yield Check(f"order of {OWN} is the same in each epoch", same, 0.0)
    by_class = np.sort([label_of(number) for number in range(IMAGES)])
    in_order = float(any(np.array_equal([label_of(number) for number in epoch], by_class) for epoch in epochs))
    yield Check(f"order of {OWN} is that of the files", in_order, 0.0)


def _crops(pixels: np.ndarray, size: int) -> Iterator[Check]:
    """Check that crops are as large and mirrored as often as in the neutral transform."""
    cut = crops(pixels)
    areas, mirrored = np.abs((cut[:, 1] - cut[:, 0]) * (cut[:, 3] - cut[:, 2])), cut[:, 1] < cut[:, 0]
    wanted = neutral_areas(size, 1000)
    share = float(mirrored.mean())
    yield Check(f"augmentation of {OWN}: mirrored images", abs(share - 0.5), MIRRORED, f"{share:.0%} are mirrored")
    text = f"{areas.mean():.2f} of the image, neutral {wanted.mean():.2f}"
    yield Check(f"augmentation of {OWN}: mean area of crops", abs(float(areas.mean() - wanted.mean())), AREA, text)
    text = f"standard deviation {areas.std():.2f}, neutral {wanted.std():.2f}"
    error = abs(float(areas.std() / wanted.std()) - 1)
    yield Check(f"augmentation of {OWN}: spread of crops' areas", error, VARIED, text)
    different = len(np.unique(cut.round(2), axis=0))
    repeated = 1 - different / len(cut)
    yield Check(f"augmentation of {OWN}: crops that were seen before", repeated, REPEATED, f"{different} different")
