"""The order of images in training: a function of (seed, epoch) only, so that runs can resume.

May import NumPy and, from d5suite, `data.transforms` and `errors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from d5suite.data.transforms import sample_order
from d5suite.errors import ConfigurationError


class Sampler(Protocol):
    """The images of an epoch, in order."""

    def __len__(self) -> int:
        """Return the number of images per epoch."""

    def order(self, epoch: int) -> np.ndarray:
        """Return positions in the dataset, int64 (len(self),), for an epoch counted from 0."""

    def describe(self) -> dict[str, Any]:
        """Return the settings of the order, in JSON's types; a resumed run must have the same."""


class Ordered:
    """The dataset's own order in every epoch.

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
    """Every image once, in a new random order each epoch.

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


class Sharded:
    """One rank's images: every `ranks`-th batch of another sampler's order.

    Every image belongs to exactly one rank, also in a last batch that is not full. Batch ``i`` of
    rank ``r`` is batch ``i * ranks + r`` of a single process.

    Parameters
    ----------
    sampler : Sampler
        The order of all ranks.
    rank, ranks : int
    batch_size : int
        Images in one rank's batch.
    """

    def __init__(self, sampler: Sampler, rank: int, ranks: int, batch_size: int) -> None:
        self.sampler, self.rank, self.ranks, self.batch_size = sampler, rank, ranks, batch_size

    def _own(self) -> np.ndarray:
        return np.arange(len(self.sampler)) // self.batch_size % self.ranks == self.rank

    def __len__(self) -> int:
        return int(self._own().sum())

    def order(self, epoch: int) -> np.ndarray:
        """See `Sampler.order`."""
        return self.sampler.order(epoch)[self._own()]

    def describe(self) -> dict[str, Any]:
        """See `Sampler.describe`."""
        shard = {"rank": self.rank, "ranks": self.ranks, "batch size": self.batch_size}
        return {"name": "sharded", "sampler": self.sampler.describe(), **shard}


class ClassBalanced:
    """The same number of images of every class, to within one, whatever the dataset's distribution.

    The images of a class come in random order, and in a new random order when they are used up, so
    their counts differ by at most one.

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
