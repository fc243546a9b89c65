"""What schemes share: one flat array for many, means over ranks, the end of a run.

Imports NumPy, `d5suite.errors` and `d5suite.levels` only.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from d5suite.errors import D5Error
from d5suite.levels.distributed import Communicator, Scheme
from d5suite.levels.network import Native


class Flat:
    """Several arrays, one after the other, in one contiguous array.

    Parameters
    ----------
    like : mapping of str to numpy.ndarray
        Arrays whose order, shapes and dtype the flat array takes over.
    multiple : int
        The array's length is rounded up to a multiple of this; the rest is zero.

    Attributes
    ----------
    array : numpy.ndarray
        One-dimensional.
    views : dict of str to numpy.ndarray
        Views of the parts, by name, in the arrays' shapes.
    """

    def __init__(self, like: Mapping[str, np.ndarray], multiple: int = 1) -> None:
        dtypes = {str(each.dtype) for each in like.values()}
        if len(dtypes) != 1:
            raise D5Error(f"cannot send gradients of different dtypes together: {', '.join(sorted(dtypes))}")
        count = sum(each.size for each in like.values())
        first = next(iter(like.values()))  # of the same class: the simulation's arrays have no memory
        self.array = np.zeros_like(first, shape=(math.ceil(count / multiple) * multiple,))
        self.views: dict[str, np.ndarray] = {}
        start = 0
        for name, each in like.items():
            self.views[name] = self.array[start : start + each.size].reshape(each.shape)
            start += each.size

    def fill(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Copy the values into the flat array, and return it."""
        for name, view in self.views.items():
            np.copyto(view, values[name], casting="no")
        return self.array


def mean(communicator: Communicator, array: np.ndarray) -> None:
    """Replace an array by its mean over ranks."""
    communicator.all_reduce(array)
    array /= communicator.size


TRANSFERS = ("order", "slice_bytes", "credit_bytes")
"""Settings of the order of transfers."""


class Common(Scheme):
    """A scheme that, with a single rank, is a plain trainer."""

    def step(self, feed: Native) -> Native:
        """See `Scheme.step`."""
        return self.replica.trainer.step(feed) if self.communicator.size == 1 else self._step(feed)

    def finish(self) -> None:
        """See `Scheme.finish`."""
        if self.communicator.size > 1:
            self._finish()
            self._share_statistics()

    @abstractmethod
    def _step(self, feed: Native) -> Native:
        """Make a step of several ranks."""

    def _finish(self) -> None:
        """Make the replicas' parameters equal; in most schemes they already are."""
        return

    def _average_weights(self) -> None:
        weights = Flat(held := self.replica.weights())
        mean(self.communicator, weights.fill(held))
        self.replica.load_weights(weights.views)

    def _share_statistics(self) -> None:
        """Average running statistics over the training ranks, or send one rank's to the server."""
        executor, communicator = self.replica.trainer.executor, self.communicator
        names = executor.network.statistics
        if not names or (self.settings.statistics == "local" and not self._has_server):
            return
        held = executor.parameters()
        flat = Flat({name: held[name] for name in names})
        statistics = flat.fill(held)
        if self.settings.statistics == "averaged":
            if self.serves:
                statistics[:] = 0
            communicator.all_reduce(statistics)
            statistics /= communicator.size - self._has_server
        elif communicator.rank == 0:
            communicator.receive(statistics, 1)
        elif communicator.rank == 1:
            communicator.send(statistics, 0)
        executor.load_parameters(flat.views)

    _has_server = False
    """Whether rank 0 serves and trains nothing."""
