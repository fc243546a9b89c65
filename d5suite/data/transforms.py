"""From a decoded image to a network's input: the definition that every native loader must follow.

**Training** (`TrainTransform`): random-resized-crop, horizontal flip with probability 1/2,
normalise. The crop covers 8-100% of the image's area with an aspect ratio of 3/4-4/3 (Szegedy et
al., "Going deeper with convolutions", 2015, section 6; the sampling procedure is that of
torchvision's RandomResizedCrop, the reference of published ResNets). **Evaluation**
(`EvalTransform`): short side to ``resize``, centre crop of ``size``, normalise (He et al., 2015;
256 and 224 there; rounding as in torchvision's Resize and CenterCrop).

The pixels:

1. The crop is cut first and resized afterwards, so pixels outside the crop have no influence.
2. Resizing is bilinear with antialiasing in Pillow's definition: a triangle filter whose width
   grows with the reduction, horizontal then vertical, each pass rounded to 8 bits. Pillow computes
   it in integers, so it is exact on every machine.
3. Normalising is ``value * scale + offset`` in float32 with ``scale = 1 / (255 std)`` and ``offset
   = -mean / std``, one rounding per operation. It equals ``(value / 255 - mean) / std`` to float32
   rounding.
4. The result is float32, shape (3, size, size), RGB.

An image's random numbers come only from `sample_rng(seed, epoch, index)`, so neither the number of
workers nor their order changes a pixel. Only `Generator.random` is used, the draw whose stream
NumPy is least likely to change.

May import NumPy and Pillow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from d5suite.data.decode import MAX_PIXELS
from d5suite.errors import ConfigurationError, DataError

MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training pixels per channel (RGB, 0..1), as in published ResNet recipes."""
STD = (0.229, 0.224, 0.225)
"""Standard deviation of the same pixels."""

SCALE = np.array([1 / (255 * std) for std in STD], np.float32)
"""float32 (3,): the factor of a pixel value 0..255."""
OFFSET = np.array([-mean / std for mean, std in zip(MEAN, STD, strict=True)], np.float32)
"""float32 (3,): added to the scaled value."""

_CROP_SCALE = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_CROP_ATTEMPTS = 10


class Crop(NamedTuple):
    """A rectangle of the source image, in pixels, and whether it is mirrored left to right."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


class Transform(Protocol):
    """A transform for the loader.

    For worker processes it must be a dataclass of an importable module, with plain values.
    """

    @property
    def size(self) -> int:
        """Height and width of the output."""

    def __call__(self, image: Image.Image, rng: np.random.Generator, out: np.ndarray | None = None) -> np.ndarray:
        """Return an RGB image as float32 (3, size, size), in `out` if given."""


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of the dataset's image `index` in `epoch`."""
    return np.random.default_rng([0, seed, epoch, index])


def sample_order(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return a random order of `length` images for `epoch`: int64 (length,), a permutation."""
    return np.argsort(np.random.default_rng([1, seed, epoch]).random(length), kind="stable")


def random_resized_crop(height: int, width: int, rng: np.random.Generator) -> Crop:
    """Draw the crop and the flip of a training image.

    Try ten times to draw a fitting area and aspect ratio (uniform in its logarithm); if none fits,
    take the largest centre crop within the allowed aspect ratios (torchvision's procedure).

    Parameters
    ----------
    height, width : int
        Size of the decoded image in pixels.
    rng : numpy.random.Generator
        From `sample_rng`. Always exactly 41 numbers are drawn.

    Returns
    -------
    Crop
        A rectangle inside the image of at least one pixel by one.
    """
    draws = rng.random(4 * _CROP_ATTEMPTS + 1)
    flip = bool(draws[-1] < 0.5)
    log_ratio = (math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1]))
    for area_draw, ratio_draw, top_draw, left_draw in draws[:-1].reshape(_CROP_ATTEMPTS, 4).tolist():
        area = height * width * (_CROP_SCALE[0] + (_CROP_SCALE[1] - _CROP_SCALE[0]) * area_draw)
        ratio = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * ratio_draw)
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(top_draw * (height - crop_height + 1))
            left = int(left_draw * (width - crop_width + 1))
            return Crop(top, left, crop_height, crop_width, flip)
    crop_height, crop_width = height, width
    if width / height < _CROP_RATIO[0]:
        crop_height = min(height, round(width / _CROP_RATIO[0]))
    elif width / height > _CROP_RATIO[1]:
        crop_width = min(width, round(height * _CROP_RATIO[1]))
    return Crop((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width, flip)


def normalise(pixels: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Normalise uint8 (height, width, 3) to float32 (3, height, width), into `out` if given."""
    planes = pixels.transpose(2, 0, 1)
    if out is None:
        out = np.empty(planes.shape, np.float32)
    np.multiply(planes, SCALE[:, None, None], out=out)
    return np.add(out, OFFSET[:, None, None], out=out)


@dataclass(frozen=True)
class TrainTransform:
    """Random-resized-crop to `size`, random horizontal flip, normalise; see the module."""

    size: int

    def __post_init__(self) -> None:
        _check_size("size", self.size)

    def parameters(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        """Return the crop and flip of an image, for native loaders."""
        return random_resized_crop(height, width, rng)

    def __call__(self, image: Image.Image, rng: np.random.Generator, out: np.ndarray | None = None) -> np.ndarray:
        """Return an RGB image as float32 (3, size, size), in `out` if given."""
        top, left, height, width, flip = self.parameters(image.height, image.width, rng)
        cut = image.crop((left, top, left + width, top + height))
        pixels = np.asarray(cut.resize((self.size, self.size), Image.Resampling.BILINEAR))
        return normalise(pixels[:, ::-1] if flip else pixels, out)


@dataclass(frozen=True)
class EvalTransform:
    """Short side to `resize` (``round(size * 256 / 224)``), centre crop of `size`, normalise."""

    size: int
    resize: int = 0

    def __post_init__(self) -> None:
        _check_size("size", self.size)
        if not self.resize:
            object.__setattr__(self, "resize", round(self.size * 256 / 224))
        if self.resize < self.size:
            raise ConfigurationError(f"resize is {self.resize}, smaller than the crop of {self.size}")

    def parameters(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (resized height, resized width, top, left) of an image.

        Raises
        ------
        DataError
            If the resized image would have more than `MAX_PIXELS` pixels, as a very thin image has.
        """
        short, long = min(height, width), max(height, width)
        resized_long = int(self.resize * long / short)
        if self.resize * resized_long > MAX_PIXELS:
            raise DataError(
                f"{width} x {height} pixels become {self.resize} x {resized_long:,} when the short side is resized, "
                f"more than the limit of {MAX_PIXELS:,} pixels",
                hint="Cut the image, or remove it from the dataset.",
            )
        tall = height > width
        resized_height, resized_width = (resized_long, self.resize) if tall else (self.resize, resized_long)
        top, left = round((resized_height - self.size) / 2), round((resized_width - self.size) / 2)
        return resized_height, resized_width, top, left

    def __call__(
        self, image: Image.Image, rng: np.random.Generator | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Transform an RGB image to float32 (3, size, size), `out` if given; `rng` is unused."""
        resized_height, resized_width, top, left = self.parameters(image.height, image.width)
        # Resizing only the crop's rectangle is faster, but Pillow rounds such a box to float32,
        # which changes pixels by up to two levels.
        resized = image.resize((resized_width, resized_height), Image.Resampling.BILINEAR)
        return normalise(np.asarray(resized.crop((left, top, left + self.size, top + self.size))), out)


def crop_and_resize(
    image: Image.Image, transform: TrainTransform | EvalTransform, rng: np.random.Generator
) -> Image.Image:
    """Crop, resize and flip an image by Pillow alone, for native loaders.

    Parameters
    ----------
    image : PIL.Image.Image
    transform : TrainTransform or EvalTransform
    rng : numpy.random.Generator
        Used by a `TrainTransform` only.

    Returns
    -------
    PIL.Image.Image
        Height and width are the transform's `size`.
    """
    size = transform.size
    if isinstance(transform, EvalTransform):
        height, width, top, left = transform.parameters(image.height, image.width)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        return resized.crop((left, top, left + size, top + size))
    top, left, height, width, flip = transform.parameters(image.height, image.width, rng)
    cut = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else cut


def _check_size(name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{name} is {value}; it must be at least 1 pixel")
