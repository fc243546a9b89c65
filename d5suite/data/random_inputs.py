"""Inputs of any network: drawn numbers, token ids and masks, or what a user gives.

May import NumPy and, from d5suite, `data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from d5suite.data.arrays import Batch, Stream
from d5suite.data.sources import WHOLE, DataSource

EVALUATION = 1
"""Added to the seed of training batches, for different evaluation batches."""


@dataclass(frozen=True)
class RandomInput:
    """The values of one input, or of the labels.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Shape of one sample.
    dtype : numpy.dtype
    values : tuple, optional
        First value and the one past the last, for uniform values; without it, values are normal
        noise. If values are 0 and 1, the first one along the last axis is always 1: in a causal
        attention mask, every token then sees at least one token.
    given : bool
        Whether a user chose the range; then all values are drawn.
    sample : numpy.ndarray, optional
        Rows of this shape that a user gives instead; see `rows_of`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    values: tuple[float, float] | None = None
    given: bool = field(default=False, repr=False)
    sample: np.ndarray | None = field(default=None, repr=False, compare=False)

    def draw(self, samples: int, generator: np.random.Generator, number: int = 0) -> np.ndarray:
        """Draw the samples of batch ``number``."""
        if self.sample is not None:
            return rows_of(self.sample, samples, number).astype(self.dtype)
        size = (samples, *self.shape)
        if self.values is None:
            return generator.standard_normal(size).astype(self.dtype)
        if self.dtype.kind == "f" and self.given:
            return generator.uniform(*self.values, size).astype(self.dtype)
        low, high = self.values
        wide = np.uint64 if high > np.iinfo(np.int64).max else np.int64
        found = generator.integers(int(low), int(high), size, dtype=wide)
        if self.values == (0, 2) and self.shape and not self.given:
            found[..., 0] = 1
        return found.astype(self.dtype)


def rows_of(sample: np.ndarray, samples: int, number: int) -> np.ndarray:
    """Fill batch ``number`` with a sample's rows.

    Batches take the rows in turn. Each repetition in a batch, and each further batch, is shifted by
    one more place along the longest axis: equal rows could be computed once, and answers to equal
    batches could not be told apart. The first batch begins with the sample itself.

    Parameters
    ----------
    sample : numpy.ndarray
        Rows along the first axis.
    samples : int
        Rows of a batch.
    number : int
    """
    order = np.arange(samples)
    rows, shifts = (number * samples + order) % len(sample), number + order // len(sample)
    if sample.ndim < 2:
        return sample[rows]
    longest = max(range(1, sample.ndim), key=lambda axis: (sample.shape[axis], axis))
    return np.concatenate([np.roll(sample[rows[shifts == shift]], shift, longest) for shift in np.unique(shifts)])


class RandomBatches(Stream):
    """Batches that depend only on seed, epoch and shard, one per epoch."""

    def __init__(
        self, inputs: Sequence[RandomInput], labels: RandomInput, *, batch_size: int, seed: Sequence[int],
        shard: tuple[int, int] = WHOLE,
    ) -> None:  # fmt: skip
        self.inputs, self.labels, self.batch_size, self.seed, self.shard = inputs, labels, batch_size, seed, shard

    def __len__(self) -> int:
        return 1

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """See `Stream.epoch`."""
        place, count = number * self.shard[1] + self.shard[0], self.batch_size
        generator = np.random.default_rng([*self.seed, place])
        drawn = [each.draw(count, generator, place) for each in self.inputs]
        labels = self.labels.draw(count, generator)
        if len(drawn) == 1 and self.inputs[0].shape != ():
            batch = drawn[0]
        else:
            batch = np.empty(count, [(each.name, each.dtype, each.shape) for each in self.inputs])
            for each, values in zip(self.inputs, drawn, strict=True):
                batch[each.name] = values
        if start == 0:
            yield batch, labels


class RandomSource(DataSource):
    """An endless supply of `RandomBatches`.

    Parameters
    ----------
    inputs : sequence of RandomInput
    labels : RandomInput
        Labels, or the targets of a squared error.
    seed : int
    """

    def __init__(self, inputs: Sequence[RandomInput], *, labels: RandomInput, seed: int) -> None:
        super().__init__(Path(), classes=1, shape=(1, 1, 1))
        self.inputs, self.labels, self.seed = inputs, labels, seed

    def training(self, *, batch_size: int, workers: int, seed: int, shard: tuple[int, int] = WHOLE) -> Stream:
        """See `DataSource.training`."""
        return RandomBatches(self.inputs, self.labels, batch_size=batch_size, seed=[seed], shard=shard)

    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """See `DataSource.evaluation`."""
        return RandomBatches(self.inputs, self.labels, batch_size=batch_size, seed=[self.seed, EVALUATION])
