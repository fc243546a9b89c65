"""What can happen during a run beside training: progress shown, series written, reasons to stop.

Imports h5py, rich, the contract and its neighbours.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import h5py
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from d5suite.errors import ConfigurationError
from d5suite.files import atomic_path
from d5suite.training.loop import Event, Run
from d5suite.validate.metrics import Metric

LOSS_EVERY_STEPS = 50
"""Losses are fetched so often: each time waits for the device, which on a GPU leaves it idle for a moment."""


class ProgressBar(Event):
    """A bar of the epoch's steps on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_start(self, run: Run) -> None:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=run.steps_per_epoch)

    def on_step(self, run: Run) -> None:
        if self._bar is not None:
            progress = run.progress
            shown = " ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
            done = progress.batch // run.accumulate
            self._bar.update(self._task, completed=done, description=f"epoch {progress.epoch + 1}/{run.epochs} {shown}")

    def on_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.stop()


class StopOnDivergence(Event):
    """Ends a run whose loss is no longer a number.

    Parameters
    ----------
    every_steps : int
        How often the losses are fetched.
    """

    def __init__(self, every_steps: int = LOSS_EVERY_STEPS) -> None:
        self._every = every_steps
        self._seen = 0

    def on_step(self, run: Run) -> None:
        if run.progress.step % self._every == 0:
            self._look(run)

    def on_epoch(self, run: Run) -> None:
        self._look(run)

    def _look(self, run: Run) -> None:
        fresh = [(step, loss) for step, loss in run.losses() if step > self._seen]
        for step, loss in fresh:
            self._seen = step
            if not math.isfinite(loss):
                rate = run.trainer.learning_rate
                run.stop(f"training diverged: the loss of step {step} is {loss} (learning rate {rate:g})")
                return


class StopAtTime(Event):
    """Ends a run after so many seconds of training."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step(self, run: Run) -> None:
        if run.seconds >= self._seconds:
            run.stop(f"the time limit of {self._seconds:g} s of training is reached")


class StopEarly(Event):
    """Ends a run whose metric has not become better for some epochs.

    Parameters
    ----------
    metric : Metric
        One that is evaluated.
    patience : int
        Epochs without a better value.
    """

    def __init__(self, metric: Metric, patience: int) -> None:
        self._metric, self._patience = metric, patience
        self._best: float | None = None
        self._waited = 0

    def on_epoch(self, run: Run) -> None:
        value = _value(run, self._metric)
        sign = 1 if self._metric.better == "higher" else -1
        if self._best is None or sign * value > sign * self._best:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            run.stop(f"{self._metric.name} has not become better than {self._best:g} for {self._patience} epochs")


class Target(Event):
    """Ends a run when its metric reaches the metric's acceptance bound, and remembers where that was.

    Attributes
    ----------
    reached : tuple of (float, int, int) or None
        Training time in seconds, steps and samples.
    """

    def __init__(self, metric: Metric) -> None:
        if metric.bound is None:
            raise ConfigurationError(f"metric {metric.name} has no bound to reach")
        self._metric = metric
        self.reached: tuple[float, int, int] | None = None

    def on_epoch(self, run: Run) -> None:
        value = _value(run, self._metric)
        if self._metric.accepts(value):
            progress = run.progress
            self.reached = (progress.seconds, progress.step, progress.samples)
            run.stop(f"{self._metric.name} has reached {value:g}")


def _value(run: Run, metric: Metric) -> float:
    if metric.name not in run.progress.metrics:
        raise ConfigurationError(f"metric {metric.name} is not evaluated in this run")
    return run.progress.metrics[metric.name]


class Series(Event):
    """The run's series in memory: one row per epoch, and the loss of every step.

    Attributes
    ----------
    epochs : list of dict
        ``epoch``, ``step``, ``samples``, ``seconds``, ``learning_rate``, the mean ``loss`` and the metrics.
    losses : list of (int, float)
        By step.
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.losses: list[tuple[int, float]] = []

    def on_epoch(self, run: Run) -> None:
        fresh = run.losses()
        self.losses.extend(fresh)
        progress = run.progress
        mean = float(np.mean([loss for _, loss in fresh])) if fresh else math.nan
        self.epochs.append(
            {
                "epoch": progress.epoch,
                "step": progress.step,
                "samples": progress.samples,
                "seconds": progress.seconds,
                "learning_rate": run.trainer.learning_rate,
                "loss": mean,
                **progress.metrics,
            }
        )


class CSVSeries(Series):
    """`Series` as a CSV file, written anew after every epoch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def on_epoch(self, run: Run) -> None:
        super().on_epoch(run)
        with atomic_path(self._path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.epochs[0]))
            writer.writeheader()
            writer.writerows(self.epochs)


class HDF5Series(Series):
    """`Series` as an HDF5 file, written anew after every epoch: ``epochs/NAME`` and ``steps/step``, ``steps/loss``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def on_epoch(self, run: Run) -> None:
        super().on_epoch(run)
        with atomic_path(self._path) as temporary, h5py.File(temporary, "w") as file:
            for name in self.epochs[0]:
                file[f"epochs/{name}"] = np.array([row[name] for row in self.epochs])
            file["steps/step"] = np.array([step for step, _ in self.losses])
            file["steps/loss"] = np.array([loss for _, loss in self.losses])
