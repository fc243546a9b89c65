"""Quantised gradients: few bits per element, rounded at random without bias.

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
class QuantisedSettings(SchemeSettings):
    """QSGD: Alistarh et al., "QSGD: communication-efficient SGD" (NIPS 2017), section 3 and 4.

    With the L2 norm n of a bucket v and s levels, an element is sent as an integer l between 0 and
    s, and its sign: |v| s / n, rounded up with the probability that keeps its mean.

    Attributes
    ----------
    levels : int
        s from 1 to 127. One level takes 2 bits per element, up to 7 levels take 4, more take 8.
    bucket : int
        Number of elements that share a norm: a multiple of 4.
    seed : int
        Seed for random rounding, combined with the rank and the step.
    """

    levels: int = 127
    bucket: int = 512
    seed: int = 0

    name: ClassVar[str] = "quantised"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(1 <= self.levels <= 127, f"there are 1 to 127 levels, not {self.levels}")
        self._require(self.bucket > 0 and self.bucket % 4 == 0, f"a bucket is a multiple of 4, not {self.bucket}")
        self._require(self.seed >= 0, f"the seed must not be negative: {self.seed}")

    @property
    def bits(self) -> int:
        """Bits of an element on the wire."""
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: whole buckets and their norms, all-gathered."""
        buckets = math.ceil(elements / self.bucket)
        return size * (size - 1) * buckets * (itemsize + self.bucket * self.bits // 8)


def quantise(values: np.ndarray, settings: QuantisedSettings, random: np.random.Generator) -> np.ndarray:
    """Return what is sent, uint8: the buckets' norms, then the packed elements."""
    levels, bits = settings.levels, settings.bits
    buckets = values.reshape(-1, settings.bucket)
    norms = np.sqrt(np.einsum("ij,ij->i", buckets, buckets))
    scaled = np.abs(buckets) * (levels / np.where(norms > 0, norms, 1))[:, None].astype(values.dtype)
    scaled += random.random(scaled.shape, values.dtype.type)
    rounded = np.minimum(np.floor(scaled), levels)
    codes = (np.copysign(rounded, buckets) + levels).astype(np.uint8).reshape(-1, 8 // bits)
    packed = codes[:, 0].copy()
    for place in range(1, 8 // bits):
        packed |= codes[:, place] << (place * bits)
    return np.concatenate([norms.view(np.uint8), packed])


def restore(sent: np.ndarray, settings: QuantisedSettings, dtype: np.dtype) -> np.ndarray:
    """Return the values, (buckets, elements), from what `quantise` returned."""
    levels, bits = settings.levels, settings.bits
    buckets = sent.size // (dtype.itemsize + settings.bucket * bits // 8)
    norms, packed = np.split(sent, [buckets * dtype.itemsize])
    codes = [(packed >> (place * bits)) & (2**bits - 1) for place in range(8 // bits)]
    values = np.stack(codes, axis=1).reshape(buckets, settings.bucket).astype(dtype)
    values -= levels
    values *= norms.copy().view(dtype)[:, None] / dtype.type(levels)
    return values


class Quantised(Common):
    """Every rank applies the mean of all ranks' quantised gradients, including its own.

    With 8 bits, less is sent than by all-reduce of float32 up to 7 ranks.
    """

    name = "quantised"
    collective = "all_gather"
    compresses = True
    settings_type = QuantisedSettings
    settings: QuantisedSettings
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(TRANSFERS, "all quantised gradients are one message")

    _mean: Flat | None = None
    _steps = 0

    def _step(self, feed: Native) -> Native:
        loss, gradients = self.replica.gradients(feed)
        if self._mean is None:
            self._mean = Flat(gradients, self.settings.bucket)
        communicator, settings, mean = self.communicator, self.settings, self._mean.array
        own = quantise(self._mean.fill(gradients), settings, self._random())
        wire = np.empty((communicator.size, own.size), np.uint8)
        wire[communicator.rank] = own
        with self.exposed():
            communicator.all_gather(wire)
        mean[:] = 0
        for row in wire:
            mean += restore(row, settings, mean.dtype).reshape(-1)
        mean /= communicator.size
        self.replica.apply(self._mean.views)
        return loss

    def _random(self) -> np.random.Generator:
        """Return a generator for the rounding of the next step."""
        seeds = np.random.SeedSequence([self.settings.seed, self.communicator.rank, self._steps])
        self._steps += 1
        return np.random.Generator(np.random.SFC64(seeds))  # NumPy's fastest

    def restart(self) -> None:
        """See `Scheme.restart`."""
        self._steps = 0
