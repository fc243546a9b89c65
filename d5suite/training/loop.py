"""The neutral training loop: epochs of steps with a backend's native optimizer.

Time is training time: the run's clock stops during evaluation, checkpoints and epoch events. Losses
stay on the device until an event reads them, because a fetch waits for the step. Imports NumPy, the
contract, `d5suite.optimizers`, the clock and metrics.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.instruments.clock import now
from d5suite.levels.network import Executor, Native
from d5suite.levels.training import Trainer
from d5suite.optimizers.schedules import Constant, Schedule
from d5suite.validate.metrics import Metric

Batch = tuple[np.ndarray, np.ndarray]
"""Images, float32 (N, C, H, W), and labels, int64 (N,) or (N, classes)."""


class Batches(Protocol):
    """Training or evaluation data.

    If the data have a ``batch_size``, a ``seed`` or a ``sampler`` with ``describe``, as
    `ArrayBatches` and `Loader` do, these must be the same in a resumed run.
    """

    def __len__(self) -> int:
        """Return the number of batches per epoch."""

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, counted from 0, without the first ``start`` batches."""


@dataclass
class Progress:
    """The position of a run.

    Attributes
    ----------
    epoch : int
        Epochs completed.
    batch : int
        Batches taken in the current epoch; a multiple of the batches per update.
    step : int
        Updates made.
    samples : int
        Images trained on.
    seconds : float
        Training time.
    metrics : dict of str to float
        The last evaluation's metrics.
    stopped : str
        Why the run ended before its last epoch; otherwise empty.
    losses : list of (int, float)
        In a `Run.snapshot`: the current epoch's losses, by step.
    events : dict of str to dict
        In a `Run.snapshot`: the events' states, by class name and number.
    settings : dict
        In a `Run.snapshot`: `Run.settings`.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    losses: list[tuple[int, float]] = field(default_factory=list, repr=False)
    events: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    settings: dict[str, Any] = field(default_factory=dict, repr=False)


class Run:
    """A training run, which events observe and can stop.

    Parameters
    ----------
    trainer : Trainer
    batches : Batches
    epochs : int
        Maximum number of epochs, counted from the run's first start.
    schedule : Schedule
        Schedule of the learning rate.
    accumulate : int
        Batches per update; the remainder of an epoch is dropped.
    events : sequence of Event
        Events, called in this order.
    evaluate : callable, optional
        Returns metrics by name; called after every epoch, off the clock, before the events.
    progress : Progress, optional
        Position at which to resume; the run copies it.

    Attributes
    ----------
    resumable : bool
        Whether the run can be resumed from the current weights: the last step is complete, and
        there was no error or divergence.

    Raises
    ------
    ConfigurationError
        If an epoch has no step, or a resumed run has other data settings.

    Notes
    -----
    Ctrl-C takes effect after the current step is complete; a second Ctrl-C, at once.
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
        self.resumable = True
        before = progress or Progress()
        self.progress = replace(before, losses=[], events={}, settings={})
        self._losses = list(before.losses)
        self._pending: deque[tuple[int, Any]] = deque()
        self._evaluate = evaluate
        self._running_since: float | None = None
        self._whole = True  # neither a step nor an epoch's events are in progress
        self._interrupted = False
        if accumulate < 1 or self.steps_per_epoch < 1:
            raise ConfigurationError(
                f"an epoch has {len(batches)} batches, fewer than the {accumulate} per update",
                hint="Use a smaller batch size or accumulate fewer batches.",
            )
        self._check_settings(before.settings)
        if self.progress.batch % accumulate or self.progress.batch > self.batches_per_epoch:
            raise ConfigurationError(
                f"the resumed run is at batch {self.progress.batch} of its epoch, and an epoch has "
                f"{self.batches_per_epoch} here, in steps of {accumulate}",
                hint="Resume with the same data, batch size and accumulation.",
            )
        for name, event in self._named_events():
            if name in before.events:
                event.load_state(before.events[name])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the images of a step, and the schedule; JSON-able."""
        sampler = getattr(self.batches, "sampler", None)
        describe = getattr(sampler, "describe", dict)
        found = {f"the sampler's {name}": value for name, value in describe().items()}
        found |= {name: getattr(self.batches, name) for name in ("seed", "batch_size") if hasattr(self.batches, name)}
        found |= {"accumulate": self.accumulate, "batches per epoch": len(self.batches)}
        plain: dict[str, Any] = json.loads(json.dumps({**found, "schedule": self.schedule.to_dict()}, default=str))
        return plain

    def _check_settings(self, before: dict[str, Any]) -> None:
        ours = self.settings
        differing = [name for name in before if name in ours and before[name] != ours[name]]
        if "schedule" in differing:  # may be intended
            differing.remove("schedule")
            warnings.warn(
                f"the resumed run had the schedule {before['schedule']}, and continues with {ours['schedule']}",
                stacklevel=3,
            )
        if differing:
            name = differing[0]
            raise ConfigurationError(
                f"the resumed run had {name} {before[name]!r}, and this one has {ours[name]!r}",
                hint="Resume with the same data, batch size and accumulation, or omit `progress` to begin a new run "
                "from these parameters.",
            )

    def _named_events(self) -> Iterator[tuple[str, Event]]:
        seen: Counter[str] = Counter()
        for event in self.events:
            kind = type(event).__name__
            yield f"{kind} {seen[kind]}", event
            seen[kind] += 1

    def snapshot(self) -> Progress:
        """Return the state that a resumed run needs besides parameters and optimizer state.

        Waits for the device.
        """
        return replace(
            self.progress,
            losses=list(self.losses()) if self.progress.batch else [],
            events={name: state for name, event in self._named_events() if (state := event.state())},
            settings=self.settings,
        )

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches that an epoch takes."""
        return self.steps_per_epoch * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates per epoch."""
        return len(self.batches) // self.accumulate

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds."""
        running = 0.0 if self._running_since is None else now() - self._running_since
        return self.progress.seconds + running

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.trainer.optimizer.learning_rate * self.schedule.factor(step - 1, self.steps_per_epoch)

    def stop(self, why: str, *, diverged: bool = False) -> None:
        """End the run after the current event; a diverged run cannot be resumed."""
        self.progress.stopped = self.progress.stopped or why
        self.resumable = self.resumable and not diverged

    def losses(self) -> list[tuple[int, float]]:
        """Return the epoch's losses so far, by step; waits for the device."""
        _, loss = self.trainer.executor.network.require_loss()
        while self._pending:
            step, native = self._pending[0]
            self._losses.append((step, float(self.trainer.executor.fetch({loss: native})[loss])))
            self._pending.popleft()
        return self._losses

    def train(self) -> Progress:
        """Train until the last epoch, or until an event stops the run."""
        error: BaseException | None = None
        started: list[Event] = []
        with self._whole_steps():
            try:
                for event in self.events:
                    event.on_start(self)
                    started.append(event)
                while self.progress.epoch < self.epochs and not self.progress.stopped:
                    self._epoch()
            except BaseException as raised:
                error = raised
                self.resumable = self.resumable and self._whole and not isinstance(raised, Exception)
            self._whole = True
            self._pause()
            for event in started:
                try:
                    event.on_end(self)
                except BaseException as raised:
                    error = raised if error is None else error
        if error is not None:
            raise error
        return self.progress

    @contextlib.contextmanager
    def _whole_steps(self) -> Iterator[None]:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not usual or threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._whole or self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _is_whole(self) -> None:
        self._whole = True
        if self._interrupted:
            raise KeyboardInterrupt

    def _epoch(self) -> None:
        progress, executor, trainer = self.progress, self.trainer.executor, self.trainer
        network = executor.network
        label, loss = network.require_loss()
        on_batch = [event.on_batch for event in self.events if type(event).on_batch is not Event.on_batch]
        on_step = [event.on_step for event in self.events if type(event).on_step is not Event.on_step]
        stream = iter(self.batches.epoch(progress.epoch, start=progress.batch))
        self._resume()
        while progress.batch < self.batches_per_epoch:
            group: list[Native] = []
            samples = 0
            for images, labels in itertools.islice(stream, self.accumulate):
                group.append(executor.feed({**network.arrays(images), label: labels}))
                samples += len(images)
                for tell in on_batch:
                    tell(self)
            if len(group) < self.accumulate:
                raise ConfigurationError(f"epoch {progress.epoch} ended after {progress.batch + len(group)} batches")
            self._whole = False
            trainer.set_learning_rate(self.learning_rate(progress.step + 1))
            answer = trainer.step(*group)
            progress.step += 1
            progress.batch += self.accumulate
            progress.samples += samples
            self._pending.append((progress.step, answer[loss]))
            self._is_whole()
            for tell in on_step:
                tell(self)
            if progress.stopped:
                break
        executor.synchronize()
        self._pause()
        if progress.stopped:
            return
        metrics = progress.metrics if self._evaluate is None else self._evaluate(executor)
        self._whole = False
        progress.epoch, progress.batch, progress.metrics = progress.epoch + 1, 0, metrics
        for event in self.events:
            event.on_epoch(self)
        self._pending.clear()
        self._losses = []
        self._is_whole()

    def _resume(self) -> None:
        self._running_since = now()

    def _pause(self) -> None:
        self.progress.seconds = self.seconds
        self._running_since = None

    def off_the_clock(self, work: Callable[[], None]) -> None:
        """Do work during a step's events that does not count as training time."""
        self.trainer.executor.synchronize()
        was_running = self._running_since is not None
        self._pause()
        work()
        if was_running:
            self._resume()


class Event:
    """Callbacks of a run; a subclass overrides the methods that it needs.

    ``on_batch`` and ``on_step`` count as training time: use `Run.off_the_clock` for slow work.
    """

    def on_start(self, run: Run) -> None:
        """Called before the first step of a new or resumed run."""

    def on_batch(self, run: Run) -> None:
        """Called after each batch is fed, before the update."""

    def on_step(self, run: Run) -> None:
        """Called after each update."""

    def on_epoch(self, run: Run) -> None:
        """Called after each epoch and the evaluation."""

    def on_end(self, run: Run) -> None:
        """Called for every started event after the last epoch, a stop or an error."""

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state that checkpoints keep for a resumed run."""
        return {}

    def load_state(self, values: dict[str, Any]) -> None:
        """Restore the state that `state` returned; called before `on_start` of a resumed run."""


def evaluator(
    batches: Batches, metrics: Sequence[Metric], *, limit: int | None = None
) -> Callable[[Executor], dict[str, float]]:
    """Return a function that computes an executor's metrics on a dataset in inference mode.

    Parameters
    ----------
    batches : Batches
        The dataset, whose first epoch is used.
    metrics : sequence of Metric
    limit : int, optional
        Number of batches to use; by default all.
    """

    def evaluate(executor: Executor) -> dict[str, float]:
        network = executor.network
        outputs, labels = [], []
        for images, wanted in itertools.islice(batches.epoch(0), limit):
            outputs.append(executor.fetch(executor.forward(executor.feed(network.arrays(images))))[network.output])
            labels.append(wanted)
        answer, wanted = np.concatenate(outputs), np.concatenate(labels)
        return {metric.name: metric.compute(answer, wanted) for metric in metrics}

    return evaluate
