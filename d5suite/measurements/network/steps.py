"""Timed steps that call a network's executor, and the answers they keep for the checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.network import Executor, Native
from d5suite.measurements.base import Measurement, Phase, Step
from d5suite.measurements.tables import TIMES
from d5suite.workloads.network import FEEDS, NetworkWorkload

TURNS = 2
"""Number of batches that inference and gradients take in turn; each needs a reference."""


class NetworkMeasurement(Measurement):
    """A measurement of an executor's calls on a whole batch: for any network and every pass."""

    of_any_network = True
    takes_memory = True
    takes_energy = True
    takes_layers = True
    takes_cold = True
    table = TIMES


class KeptAnswers:
    """Tensors of some timed answers, on the device.

    For each batch, the last answer within every doubling of the number of calls is kept, from the
    first to the last.

    Parameters
    ----------
    names : sequence of str
        The tensors to keep.

    Attributes
    ----------
    calls : int
        Answers seen.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.calls = 0
        self._kept: dict[tuple[int, int], Native] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, batch: int, answer: Native) -> None:
        """Keep the next answer, to the batch of this number."""
        self.calls += 1
        key = batch, self.calls.bit_length()
        self._kept[key], self._numbers[key] = {name: answer[name] for name in self.names}, self.calls

    @property
    def kept(self) -> int:
        """Answers that are kept."""
        return len(self._kept)

    def fetch(self, executor: Executor) -> dict[int, list[dict[str, np.ndarray]]]:
        """Return the kept tensors by batch, in order of the calls."""
        found: dict[int, list[dict[str, np.ndarray]]] = {}
        for batch, doubling in sorted(self._kept):
            found.setdefault(batch, []).append(executor.fetch(self._kept[batch, doubling]))
        return found

    def latest(self, count: int) -> list[Native]:
        """Return the kept tensors of the last answers, the oldest first."""
        return [self._kept[key] for key in sorted(self._kept, key=self._numbers.__getitem__)[-count:]]

    def losses(self, executor: Executor) -> dict[int, list[float]]:
        """Return the kept losses by batch, in order of the calls."""
        (name,) = self.names
        return {batch: [float(each[name]) for each in found] for batch, found in self.fetch(executor).items()}


class NetworkStep(Step):
    """A call of an executor on a fed batch, at the generic point of the weights.

    Parameters
    ----------
    workload : NetworkWorkload
    call : callable
        Takes a native feed.
    feeds : sequence of callable
        Each makes the feed of one batch when it is first needed; samples take the batches in turn.
    whole : sequence of callable, optional
        The same for batches whose images all differ. Samples take these in turn once they have
        taken each of `feeds`: images that repeat could be computed once.
    kept : sequence of str, optional
        Tensors of an answer to keep for the checks; by default the loss.

    Attributes
    ----------
    answer : mapping or None
        The whole answer of the last call.
    answers : KeptAnswers
        Tensors of timed calls.
    feed : mapping
        The last call's native feed.
    turn : int
        Number of that feed's batch; -1 before timing. Batches of `whole` follow those of `feeds`.
    proved : int
        Number of batches that have a reference; they come first.
    median_s : float
        Median of the samples, in seconds.
    computes : str
        What the call does, as a recording names it.
    """

    computes = "forward"

    def __init__(
        self,
        workload: NetworkWorkload,
        call: Callable[[Native], Native],
        feeds: Sequence[Callable[[], Native]],
        kept: Sequence[str] = (),
        whole: Sequence[Callable[[], Native]] = (),
    ) -> None:
        self.workload = workload
        self.call = call
        self.items = workload.case.batch_size
        self.macs = None if workload.network.as_written else workload.macs
        self.built_s = workload.built_s()
        self.feed = feeds[0]()
        self.median_s = 0.0
        self.proved = len(feeds)
        self._made = {0: self.feed}
        self._feeds = [*feeds, *whole]
        self._kept = kept
        self._forget()

    def _forget(self) -> None:
        """Drop all answers; the next timed call takes the first batch."""
        self.answer: Native | None = None
        self.answers = KeptAnswers(self._kept or self.workload.network.require_loss()[1:])
        self.turn = -1

    def run(self) -> object:
        self.answer = None  # freed here, as if it had not been kept
        self.answer = self.call(self.feed)
        return self.answer

    def synchronize(self) -> None:
        self.workload.executor.synchronize()

    def next_input(self) -> None:
        self.keep_answer()
        self.turn += 1
        if self.turn == len(self._feeds):
            self.turn = self.proved % len(self._feeds)
        if self.turn in (0, self.proved) and self.turn not in self._made:
            self._made.clear()  # before the others are made, which take as much memory
        if self.turn not in self._made:
            self._made[self.turn] = self._feeds[self.turn]()
        self.feed = self._made[self.turn]

    def feed_again(self, turn: int) -> Native:
        """Feed the batch of this number once more."""
        return self._feeds[turn]()

    def keep_answer(self) -> None:
        """Keep what the checks need of the last timed call."""
        if self.turn >= 0 and self.answer is not None:
            self.answers.add(self.turn, self.answer)

    def phases(self) -> Iterable[Phase]:
        yield from super().phases()
        yield Phase(self, "call", self.computes)
        yield Phase(self.workload.executor, "feed", "feed", role="data_transfer")

    def reset(self) -> None:
        self._forget()
        self.workload.restore(self.workload.executor)

    def kept_bytes(self) -> int:
        network, size = self.workload.network, self.workload.case.batch_size

        def bytes_of(names: Sequence[str]) -> int:
            shapes = [network.shapes.get(name, ()) for name in names]
            return sum(8 * math.prod(size if n is None else n for n in shape) for shape in shapes)

        answers = self.answers.kept * bytes_of(self.answers.names)
        return len(self._made) * bytes_of(network.inputs) + answers

    def begin(self) -> None:
        self._forget()
        self.workload.to_generic_point(self.workload.executor)

    def time(self, settings: SamplingSettings) -> Samples:
        samples = super().time(settings)
        self.keep_answer()
        self.median_s = samples.median_s
        return samples


def training_feeds(workload: NetworkWorkload, count: int = FEEDS) -> list[Callable[[], Native]]:
    """Return functions that feed the batches a training step takes in turn."""
    return [lambda index=index: workload.feed(index) for index in range(count)]  # type: ignore[misc]


def whole_feeds(workload: NetworkWorkload, count: int = FEEDS) -> list[Callable[[], Native]]:
    """Return functions that feed whole batches; none if `training_feeds` feeds whole batches."""
    if workload.oracle_batch == workload.case.batch_size:
        return []
    return [lambda index=index: workload.feed_whole(index) for index in range(count)]  # type: ignore[misc]
