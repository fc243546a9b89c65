"""Epochs of steps with a backend's native optimizer.

Time is training time: evaluation, checkpoints and other events stand still on the run's clock. Losses stay on the
device until an event asks for them, because fetching one waits for the step. Imports NumPy, the contract, measuring
and its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.levels.network import Executor, Native
from d5suite.levels.schedule import Constant, Schedule
from d5suite.levels.training import Trainer
from d5suite.measure.clock import now
from d5suite.validate.metrics import Metric

Batch = tuple[np.ndarray, np.ndarray]
"""Images float32 (N, C, H, W), and labels int64 (N,) or (N, classes)."""


class Batches(Protocol):
    """What the loop asks of its data."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from 0 on, without its first ``start``."""


@dataclass
class Progress:
    """Where a run is.

    Attributes
    ----------
    epoch : int
        Epochs completed.
    batch : int
        Batches taken of the epoch that is running; a multiple of the batches per step.
    step : int
        Updates made.
    samples : int
        Images trained on.
    seconds : float
        Training time.
    metrics : dict of str to float
        The last evaluation's.
    stopped : str
        Why the run ended before its last epoch; empty if it did not.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = ""


class Run:
    """A training run: what events see and can stop.

    Parameters
    ----------
    trainer : Trainer
    batches : Batches
    epochs : int
        At most so many, counted from the run's beginning, also when it is resumed.
    schedule : Schedule
        Of the learning rate.
    accumulate : int
        Batches per update; what an epoch has beyond a multiple is left out.
    events : sequence of Event
        Told what happens, in this order.
    evaluate : callable, optional
        Gives the metrics, by name; called at the end of every epoch, off the clock, before the events.
    progress : Progress, optional
        Where a resumed run goes on.

    Raises
    ------
    ConfigurationError
        If an epoch has no step.
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: Batches,
        *,
        epochs: int,
        schedule: Schedule | None = None,
        accumulate: int = 1,
        events: Sequence[Event] = (),
        evaluate: Callable[[Executor], dict[str, float]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.trainer = trainer
        self.batches = batches
        self.epochs = epochs
        self.schedule = schedule or Constant()
        self.accumulate = accumulate
        self.events = events
        self.progress = progress or Progress()
        self._losses: list[tuple[int, float]] = []
        self._pending: list[tuple[int, Any]] = []
        self._evaluate = evaluate
        self._running_since: float | None = None
        if accumulate < 1 or self.steps_per_epoch < 1:
            raise ConfigurationError(
                f"an epoch of {len(batches)} batches has no step of {accumulate} batches",
                hint="Use a smaller batch size or accumulate fewer batches.",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Updates per epoch."""
        return len(self.batches) // self.accumulate

    @property
    def seconds(self) -> float:
        """Training time until now."""
        running = 0.0 if self._running_since is None else now() - self._running_since
        return self.progress.seconds + running

    def stop(self, why: str) -> None:
        """End the run after the event that is being told now."""
        self.progress.stopped = self.progress.stopped or why

    def losses(self) -> list[tuple[int, float]]:
        """The losses of the epoch's steps until now, by step; waits for the device."""
        _, loss = self.trainer.executor.network.require_loss()
        for step, native in self._pending:
            self._losses.extend((step, float(value)) for value in self.trainer.executor.fetch({loss: native}).values())
        self._pending.clear()
        return self._losses

    def train(self) -> Progress:
        """Run until the last epoch is over or an event stops it.

        Returns
        -------
        Progress
        """
        self._tell("on_start")
        try:
            while self.progress.epoch < self.epochs and not self.progress.stopped:
                self._epoch()
        finally:
            self._pause()
            for event in self.events:
                event.on_end(self)
        return self.progress

    def _epoch(self) -> None:
        progress, executor, trainer = self.progress, self.trainer.executor, self.trainer
        network = executor.network
        label, loss = network.require_loss()
        rate, per_epoch = trainer.optimizer.learning_rate, self.steps_per_epoch
        on_batch = [event.on_batch for event in self.events if type(event).on_batch is not Event.on_batch]
        on_step = [event.on_step for event in self.events if type(event).on_step is not Event.on_step]
        stream = iter(self.batches.epoch(progress.epoch, start=progress.batch))
        self._resume()
        while progress.batch < per_epoch * self.accumulate:
            group: list[Native] = []
            for images, labels in itertools.islice(stream, self.accumulate):
                group.append(executor.feed({network.input: images, label: labels}))
                progress.samples += len(images)
                for tell in on_batch:
                    tell(self)
            if len(group) < self.accumulate:
                raise ConfigurationError(f"epoch {progress.epoch} ended after {progress.batch + len(group)} batches")
            trainer.set_learning_rate(rate * self.schedule.factor(progress.step, per_epoch))
            answer = trainer.step(*group)
            progress.step += 1
            progress.batch += self.accumulate
            self._pending.append((progress.step, answer[loss]))
            for tell in on_step:
                tell(self)
            if progress.stopped:
                break
        executor.synchronize()
        self._pause()
        if progress.stopped:
            return
        progress.epoch, progress.batch = progress.epoch + 1, 0
        if self._evaluate is not None:
            progress.metrics = self._evaluate(executor)
        self._tell("on_epoch")
        self._pending.clear()
        self._losses = []

    def _tell(self, what: str) -> None:
        for event in self.events:
            getattr(event, what)(self)

    def _resume(self) -> None:
        self._running_since = now()

    def _pause(self) -> None:
        self.progress.seconds = self.seconds
        self._running_since = None

    def off_the_clock(self, work: Callable[[], None]) -> None:
        """Do something during a step's events that is no training."""
        self.trainer.executor.synchronize()
        was_running = self._running_since is not None
        self._pause()
        work()
        if was_running:
            self._resume()


class Event:
    """Something that happens during a run; a subclass overrides what it needs.

    ``on_batch`` and ``on_step`` are called on the clock: what takes long there belongs into `Run.off_the_clock`.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step of a run or of a resumed run."""

    def on_batch(self, run: Run) -> None:
        """After each batch has been handed to the framework, before its update."""

    def on_step(self, run: Run) -> None:
        """After each update."""

    def on_epoch(self, run: Run) -> None:
        """After each epoch and its evaluation."""

    def on_end(self, run: Run) -> None:
        """After the last epoch, a stop or an error."""


def evaluator(
    batches: Batches, metrics: Sequence[Metric], *, limit: int | None = None
) -> Callable[[Executor], dict[str, float]]:
    """A function that gives an executor's metrics on a dataset in inference mode.

    Parameters
    ----------
    batches : Batches
        Their first epoch is used.
    metrics : sequence of Metric
    limit : int, optional
        Use the first so many batches only.
    """

    def evaluate(executor: Executor) -> dict[str, float]:
        network = executor.network
        outputs, labels = [], []
        for images, wanted in itertools.islice(batches.epoch(0), limit):
            outputs.append(executor.fetch(executor.forward(executor.feed({network.input: images})))[network.output])
            labels.append(wanted)
        answer, wanted = np.concatenate(outputs), np.concatenate(labels)
        return {metric.name: metric.compute(answer, wanted) for metric in metrics}

    return evaluate
