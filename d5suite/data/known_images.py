"""Images of known content, which reveal a loader's pixels, labels, order and crops.

An image's blue channel has one level, which identifies the image and so its label. Red grows from
left to right and green from top to bottom, so a crop's corners show where it was cut and whether it
was mirrored. Chequered images have no blue; their squares show the resolution and the range of
values. May import NumPy and Pillow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from d5suite.data.transforms import OFFSET, SCALE, TrainTransform

CLASSES = 5
"""Number of classes; the last one holds the chequered images."""

PLACED, CHEQUERED = 24, 8
"""Numbers of images that show a position, and of chequered images."""

IMAGES = PLACED + CHEQUERED

SQUARE = 4
"""Pixels of a chequered image's squares. A decoder that reads an eighth of a JPEG's resolution sees
grey."""

MARGIN = 8
"""Pixels by which an image is larger than a loader's output. MXNet's ImageRecordIter tears crops of
an image that has the output's size: docs/findings.md."""

_LOWEST, _STEP = 40, 8
_QUALITY = 95


def write_known_images(root: Path, size: int) -> None:
    """Write a training set in ImageNet's layout.

    Parameters
    ----------
    root : Path
        The folder to make.
    size : int
        Height and width that a loader will return, in pixels.
    """
    for label in range(CLASSES):
        (root / "train" / f"n{label:08d}").mkdir(parents=True)
    for number, picture in enumerate(known_images(size)):
        folder = root / "train" / f"n{label_of(number):08d}"
        picture.save(folder / f"n{label_of(number):08d}_{number}.JPEG", "JPEG", quality=_QUALITY, subsampling=0)


def known_images(size: int) -> Iterator[Image.Image]:
    """Draw the images: first the images that show a position, then the chequered images."""
    size += MARGIN
    ramp = np.linspace(0, 255, size)
    for number in range(PLACED):
        blue = np.full((size, size), _LOWEST + _STEP * number)
        yield _picture(np.tile(ramp, (size, 1)), np.tile(ramp[:, None], (1, size)), blue)
    squares = np.arange(size) // SQUARE
    chequered = 255 * ((squares[:, None] + squares) % 2)
    for _ in range(CHEQUERED):
        yield _picture(chequered, chequered, np.zeros((size, size)))


def _picture(*channels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8))


def label_of(number: int) -> int:
    """Return an image's label."""
    return number % (CLASSES - 1) if number < PLACED else CLASSES - 1


def levels(images: np.ndarray) -> np.ndarray:
    """Undo the normalisation: float64 levels 0..255, channels first, from either layout."""
    planes = images if images.shape[1] == 3 else images.transpose(0, 3, 1, 2)
    found: np.ndarray = (planes.astype(np.float64) - OFFSET[:, None, None]) / SCALE[:, None, None]
    return found


@dataclass(frozen=True)
class SeenImages:
    """What the images from a loader show, in the order of the images.

    Attributes
    ----------
    numbers : numpy.ndarray
        int64 (N,): number of the image, read from its blue; `PLACED` for chequered images.
    apart : numpy.ndarray
        float64 (N,): distance of blue from the level of the image recognized; 0 if chequered.
    constant : numpy.ndarray
        int64 (N,): the channel that varies least; blue, which is 2, unless it clearly varies.
    """

    numbers: np.ndarray
    apart: np.ndarray
    constant: np.ndarray

    @classmethod
    def of(cls, pixels: np.ndarray) -> SeenImages:
        """Recognise images by their levels, float64 (N, 3, H, W)."""
        blue = np.median(pixels[:, 2], axis=(1, 2))
        steps = (blue - _LOWEST) / _STEP
        chequered = blue < _LOWEST / 2
        numbers = np.where(chequered, PLACED, np.clip(np.rint(steps), 0, PLACED - 1)).astype(np.int64)
        apart = np.where(chequered, 0.0, np.abs(steps - numbers) * _STEP)
        varies = pixels.std(axis=(2, 3))
        clearly = varies[:, 2] > varies.min(axis=1) + _STEP
        return cls(numbers, apart, np.where(clearly, varies.argmin(axis=1), 2))


def crops(pixels: np.ndarray) -> np.ndarray:
    """Return where images that show a position were cut, from their levels: float64 (N, 4).

    Columns are left, right, top and bottom as fractions of the image; left and right are exchanged
    if it is mirrored.
    """
    red, green = pixels[:, 0].mean(axis=1), pixels[:, 1].mean(axis=2)  # by column, by row
    return np.stack([red[:, 0], red[:, -1], green[:, 0], green[:, -1]], axis=1) / 255


def neutral_areas(size: int, count: int) -> np.ndarray:
    """Draw areas of the neutral transform's crops of these images, as fractions of the image."""
    generator = np.random.default_rng(0)
    size += MARGIN
    drawn = [TrainTransform(size).parameters(size, size, generator) for _ in range(count)]
    return np.array([crop.height * crop.width for crop in drawn]) / size**2


def neutral_squares(size: int) -> np.ndarray:
    """Return the levels of chequered images after the neutral transform: float64 (N, 3, H, W)."""
    generator, transform = np.random.default_rng(0), TrainTransform(size)
    chequered = list(known_images(size))[PLACED:]
    return levels(np.stack([transform(picture, generator) for picture in chequered]))
