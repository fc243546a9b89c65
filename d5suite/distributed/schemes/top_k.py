"""Sparse gradients with error feedback: only the largest elements are sent, the rest is kept.

Imports NumPy and `d5suite.levels` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d5suite.distributed.schemes.common import TRANSFERS, Common, Flat
from d5suite.levels.distributed import SchemeSettings
from d5suite.levels.network import Native


@dataclass(frozen=True)
class TopKSettings(SchemeSettings):
    """Stich et al., "Sparsified SGD with memory" (NeurIPS 2018), over all parameters together.

    Attributes
    ----------
    density : float
        Above 0, at most 1: the fraction of all elements that a rank sends, at least one element.
        Lin et al., "Deep gradient compression" (ICLR 2018), use 0.001.
    """

    density: float = 0.01

    name: ClassVar[str] = "top_k"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.density <= 1, f"the density lies above 0 and at most at 1, not at {self.density}")

    def kept(self, elements: int) -> int:
        """Return k, the number of elements that a rank sends."""
        return math.ceil(self.density * elements)

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: k values and 32-bit indices, all-gathered."""
        return size * (size - 1) * self.kept(elements) * (itemsize + 4)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices, uint32, of the largest magnitudes; of equal ones the first.

    NaN is larger than any number, so that a gradient that is not finite spreads.
    """
    magnitudes = np.abs(values)
    magnitudes[np.isnan(magnitudes)] = np.inf
    least = np.partition(magnitudes, -count)[-count]
    above = np.flatnonzero(magnitudes > least)
    level = np.flatnonzero(magnitudes == least)[: count - len(above)]
    return np.concatenate([above, level]).astype(np.uint32)


class TopK(Common):
    """Each rank sends the k largest elements of its gradient plus what it has not sent before.

    All ranks apply the mean over ranks. Less is sent than by all-reduce while the density is below
    one over the number of ranks.
    """

    name = "top_k"
    collective = "all_gather"
    compresses = True
    settings_type = TopKSettings
    settings: TopKSettings
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        TRANSFERS, "the largest elements of all tensors are one message"
    )

    _mean: Flat | None = None

    def _step(self, feed: Native) -> Native:
        loss, gradients = self.replica.gradients(feed)
        if self._mean is None:
            self._mean = Flat(gradients)
            self._unsent = np.zeros_like(self._mean.array)
        mean, unsent, size = self._mean.array, self._unsent, self.communicator.size
        unsent += self._mean.fill(gradients)
        count = self.settings.kept(unsent.size)
        indices = largest(unsent, count)
        wire = np.empty((size, count * (4 + unsent.itemsize)), np.uint8)
        own = wire[self.communicator.rank]
        own[: 4 * count] = indices.view(np.uint8)
        own[4 * count :] = unsent[indices].view(np.uint8)
        unsent[indices] = 0
        with self.exposed():
            self.communicator.all_gather(wire)
        mean[:] = 0
        for row in wire:
            # A copy of the values: they need not be aligned.
            mean[row[: 4 * count].copy().view(np.uint32)] += row[4 * count :].copy().view(mean.dtype)
        mean /= size
        self.replica.apply(self._mean.views)
        return loss

    def restart(self) -> None:
        """See `Scheme.restart`."""
        self._mean = None
