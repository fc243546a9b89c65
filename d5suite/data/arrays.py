"""`Stream`, the interface of batches, and batches of arrays in memory.

May import NumPy and, from d5suite, `data` and `errors`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from d5suite.data.samplers import Sampler
from d5suite.errors import ConfigurationError

Batch = tuple[np.ndarray, np.ndarray]
"""Images float32 (N, C, H, W), and labels int64 (N,), or (N, classes) with several per image."""

_Self = TypeVar("_Self", bound="Stream")


class Stream(ABC):
    """Batches in epochs, for use in a ``with`` statement."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per epoch."""

    @abstractmethod
    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """Iterate over epoch `number` from batch `start`, both from 0."""

    def batches(self, first_epoch: int = 0) -> Iterator[Batch]:
        """Iterate endlessly from `first_epoch`."""
        return itertools.chain.from_iterable(map(self.epoch, itertools.count(first_epoch)))

    def close(self) -> None:  # noqa: B027 - optional
        """Free resources; idempotent."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ArrayBatches(Stream):
    """Batches of arrays in memory.

    Parameters
    ----------
    images, labels : numpy.ndarray
        float32 (N, C, H, W) and int64 (N, ...).
    sampler : Sampler
        The order of each epoch.
    batch_size : int
    drop_last : bool
        Whether to drop a last batch that is not full.

    Raises
    ------
    ConfigurationError
        If there is no batch.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, sampler: Sampler, *, batch_size: int, drop_last: bool = True
    ) -> None:
        self.images = images
        self.labels = labels
        self.sampler = sampler
        self.batch_size = batch_size
        whole, rest = divmod(len(sampler), batch_size)
        self._count = whole + (1 if rest and not drop_last else 0)
        if not self._count:
            raise ConfigurationError(
                f"{len(sampler)} images do not fill one batch of {batch_size}", hint="Use a smaller batch size."
            )

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """See `Stream.epoch`."""
        order = self.sampler.order(number)
        for batch in range(start, self._count):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield self.images[chosen], self.labels[chosen]
