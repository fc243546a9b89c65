"""The order in which a training run takes its images: a function of (seed, epoch) only, so that a run can be resumed.

Imports NumPy, `d5suite.data.transforms` and `d5suite.errors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from d5suite.data.transforms import sample_order
from d5suite.errors import ConfigurationError


class Sampler(Protocol):
    """Which images an epoch takes, and in which order."""

    def __len__(self) -> int:
        """Images per epoch."""

    def order(self, epoch: int) -> np.ndarray:
        """Positions in the dataset, int64 (len(self),), of an epoch from 0 on."""

    def describe(self) -> dict[str, Any]:
        """What the order depends on, JSON-able: a run that is resumed must find the same."""


class Ordered:
    """The dataset's own order, in every epoch.

    Parameters
    ----------
    length : int
        Images in the dataset.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def order(self, epoch: int) -> np.ndarray:
        """See `Sampler.order`."""
        return np.arange(self.length)

    def describe(self) -> dict[str, Any]:
        """See `Sampler.describe`."""
        return {"name": "ordered", "images": self.length}


class Shuffled:
    """Every image once, in an order drawn anew for each epoch.

    Parameters
    ----------
    length : int
        Images in the dataset.
    seed : int
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def order(self, epoch: int) -> np.ndarray:
        """See `Sampler.order`."""
        return sample_order(self.seed, epoch, self.length)

    def describe(self) -> dict[str, Any]:
        """See `Sampler.describe`."""
        return {"name": "shuffled", "images": self.length, "seed": self.seed}


class ClassBalanced:
    """As many images of each class as of any other, to within one, whatever the dataset holds of them.

    A class's images come in a random order, and again in another one when they are used up, so that none comes twice
    as often as another of its class, plus once.

    Parameters
    ----------
    labels : numpy.ndarray
        int64 (N,), one class per image.
    seed : int
    length : int, optional
        Images per epoch; by default N.

    Raises
    ------
    ConfigurationError
        If there are no labels, or several per image.
    """

    def __init__(self, labels: np.ndarray, seed: int = 0, length: int | None = None) -> None:
        labels = np.asarray(labels)
        if labels.ndim != 1 or not len(labels):
            raise ConfigurationError(
                f"a class-balanced sampler needs one class per image, not labels of shape {labels.shape}"
            )
        self.seed = seed
        self._length = len(labels) if length is None else length
        self._of_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int) -> np.ndarray:
        """See `Sampler.order`."""
        generator = np.random.default_rng([self.seed, epoch, 0xC1A55])
        streams = [_again_and_again(generator, images) for images in self._of_class]
        classes = np.resize(generator.permutation(len(streams)), self._length)
        return np.array([next(streams[label]) for label in generator.permutation(classes)], np.int64)

    def describe(self) -> dict[str, Any]:
        """See `Sampler.describe`."""
        images = [len(images) for images in self._of_class]
        return {"name": "class-balanced", "images of each class": images, "seed": self.seed, "length": len(self)}


def _again_and_again(generator: np.random.Generator, images: np.ndarray) -> Iterator[int]:
    while True:
        yield from generator.permutation(images).tolist()
