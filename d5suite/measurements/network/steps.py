"""Steps on a network's executor, for the measurements of levels 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from d5suite.instruments.freshness import Durations, compare_durations, timed
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.network import Native
from d5suite.measurements.base import Step, check_computes
from d5suite.validate.check import Check
from d5suite.workloads.network import FEEDS, NetworkWorkload


class ExecutorStep(Step):
    """A call of an executor on a fed batch.

    Parts of its answers stay on the device: for each batch in turn the last answer within every
    doubling of the number of calls, from the first to the last.

    Parameters
    ----------
    workload : NetworkWorkload
    call : callable
        Takes a native feed.
    feeds : sequence of callable
        Make the native feeds that the step takes in turn, each when it is first needed.

    Attributes
    ----------
    answer : mapping or None
        Of the last call, whole.
    """

    def __init__(
        self, workload: NetworkWorkload, call: Callable[[Native], Native], feeds: list[Callable[[], Native]]
    ) -> None:
        self.workload = workload
        self.call = call
        self.items = workload.case.batch_size
        self.macs = workload.macs
        self.feed = feeds[0]()
        self.answer: Native | None = None
        self._made = [self.feed]
        self._feeds = feeds
        self._median_s = 0.0
        self.forget()

    def forget(self) -> None:
        """Restart with the first batch, and drop all answers."""
        self.answer = None
        self.turn, self.calls = -1, 0
        self._kept: dict[tuple[int, int], Native] = {}

    def run(self) -> object:
        self.answer = None  # freed here, as if nobody had kept it
        self.answer = self.call(self.feed)
        return self.answer

    def synchronize(self) -> None:
        self.workload.executor.synchronize()

    def next_input(self) -> None:
        self.note()
        self.turn = (self.turn + 1) % len(self._feeds)
        if self.turn == len(self._made):
            self._made.append(self._feeds[self.turn]())
        self.feed = self._made[self.turn]

    def note(self) -> None:
        """Keep the tensors of the last answer that `kept` names."""
        if self.turn >= 0 and self.answer is not None:
            self.calls += 1
            self._kept[self.turn, self.calls.bit_length()] = {name: self.answer[name] for name in self.kept}

    @property
    def kept(self) -> Sequence[str]:
        """Names of the tensors of each answer that are kept: the loss."""
        return self.workload.network.require_loss()[1:]

    def answers(self) -> dict[int, list[dict[str, np.ndarray]]]:
        """Return the kept tensors, fetched, by turn and in order."""
        found: dict[int, list[dict[str, np.ndarray]]] = {}
        for turn, doubling in sorted(self._kept):
            found.setdefault(turn, []).append(self.workload.executor.fetch(self._kept[turn, doubling]))
        return found

    def losses(self) -> dict[int, list[float]]:
        """Return the kept losses, by turn and in order."""
        (name,) = self.kept
        return {turn: [float(each[name]) for each in found] for turn, found in self.answers().items()}

    def reset(self) -> None:
        self.forget()
        self.workload.restore(self.workload.executor)

    def begin(self) -> None:
        """Restore the initial state, in which timing begins."""
        self.reset()

    def time(self, settings: SamplingSettings) -> Samples:
        self.begin()
        samples = super().time(settings)
        self.note()
        self._median_s = samples.median_s
        return samples

    def call_fresh(self, arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Check]:
        """Call with a batch never fed before; return the answer, and whether it was remembered.

        To be called while the weights are those of the timed calls: loading others may make an
        adapter forget. The answer is fetched at once: further calls may overwrite it.
        """
        feed = self.workload.executor.feed(arrays)
        native, took = timed(lambda: self.call(feed), self.synchronize)
        answer = self.fetch(native)
        found = compare_durations(
            lambda: timed(lambda: self.call(self.feed), self.synchronize)[1],
            lambda number: self._moved(arrays, number),
            Durations(self._median_s, took),
        )
        return answer, check_computes(found)

    def fetch(self, native: Native) -> dict[str, np.ndarray]:
        """Fetch what is needed of an answer to check it."""
        return self.workload.executor.fetch(native)

    def _moved(self, arrays: Mapping[str, np.ndarray], number: int) -> Callable[[], float]:
        """Return a function that times a call with these values in other places."""
        moved = {name: np.roll(value.reshape(-1), number + 1).reshape(value.shape) for name, value in arrays.items()}
        feed = self.workload.executor.feed(moved)
        return lambda: timed(lambda: self.call(feed), self.synchronize)[1]


def training_feeds(workload: NetworkWorkload, count: int = FEEDS) -> list[Callable[[], Native]]:
    """Return the batches that a step of training takes in turn."""
    return [lambda index=index: workload.feed(index) for index in range(count)]  # type: ignore[misc]
