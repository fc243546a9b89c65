"""Random inputs for any network: numbers, token ids, masks.

May import NumPy and, from d5suite, `data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d5suite.data.arrays import Batch, Stream
from d5suite.data.sources import WHOLE, DataSource

EVALUATION = 1
"""Added to the seed of training batches, for different evaluation batches."""


@dataclass(frozen=True)
class RandomInput:
    """The random values of one input.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Shape of one sample.
    dtype : numpy.dtype
    values : tuple of int, optional
        First value and the one past the last, for uniform values; without it normal noise. In the
        range 0 to 1 the first value along the last axis is always 1: in a causal attention mask,
        every token then sees at least one token.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    values: tuple[int, int] | None = None

    def draw(self, samples: int, generator: np.random.Generator) -> np.ndarray:
        """Draw samples."""
        size = (samples, *self.shape)
        found = generator.standard_normal(size) if self.values is None else generator.integers(*self.values, size)
        if self.values == (0, 2) and self.shape:
            found[..., 0] = 1
        return found.astype(self.dtype)


class RandomBatches(Stream):
    """Batches that depend on the seed and the epoch only, one per epoch."""

    def __init__(
        self, inputs: Sequence[RandomInput], classes: int, *, batch_size: int, seed: Sequence[int],
        shard: tuple[int, int] = WHOLE, labels: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.inputs, self.classes, self.batch_size, self.seed, self.shard = inputs, classes, batch_size, seed, shard
        self.labels = labels

    def __len__(self) -> int:
        return 1

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """See `Stream.epoch`."""
        generator, count = np.random.default_rng([*self.seed, number * self.shard[1] + self.shard[0]]), self.batch_size
        drawn = [each.draw(count, generator) for each in self.inputs]
        labels = generator.integers(0, self.classes, (count, *self.labels))
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
    classes : int
    seed : int
    labels : tuple of int, optional
        Shape of a sample's labels; by default a sample has one label.
    """

    def __init__(self, inputs: Sequence[RandomInput], *, classes: int, seed: int, labels: tuple[int, ...] = ()) -> None:
        super().__init__(Path(), classes=classes, shape=(1, 1, 1))
        self.inputs, self.seed, self.labels = inputs, seed, labels

    def training(self, *, batch_size: int, workers: int, seed: int, shard: tuple[int, int] = WHOLE) -> Stream:
        """See `DataSource.training`."""
        return RandomBatches(
            self.inputs, self.classes, batch_size=batch_size, seed=[seed], shard=shard, labels=self.labels
        )

    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """See `DataSource.evaluation`."""
        return RandomBatches(
            self.inputs, self.classes, batch_size=batch_size, seed=[self.seed, EVALUATION], labels=self.labels
        )
