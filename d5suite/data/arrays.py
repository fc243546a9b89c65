"""Batches of arrays that are in memory, with the interface of `d5suite.data.loader.Loader`.

Imports NumPy and its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from d5suite.data.samplers import Sampler
from d5suite.errors import ConfigurationError

Batch = tuple[np.ndarray, np.ndarray]
"""Images float32 (batch size, C, H, W) and labels int64 (batch size, ...)."""


class ArrayBatches:
    """Batches of arrays that are in memory.

    Parameters
    ----------
    images, labels : numpy.ndarray
        float32 (N, C, H, W) and int64 (N, ...).
    sampler : Sampler
        The order of each epoch.
    batch_size : int
    drop_last : bool
        Leave out a last batch that is not full.

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
        """Batches per epoch."""
        return self._count

    def __enter__(self) -> ArrayBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """Iterate over an epoch from 0 on, without its first ``start`` batches."""
        order = self.sampler.order(number)
        for batch in range(start, self._count):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield self.images[chosen], self.labels[chosen]

    def batches(self, first_epoch: int = 0) -> Iterator[Batch]:
        """Iterate endlessly, from an epoch on."""
        return itertools.chain.from_iterable(map(self.epoch, itertools.count(first_epoch)))
