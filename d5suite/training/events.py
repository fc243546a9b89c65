"""Events of a run: a progress bar, series, and stop conditions.

Imports h5py, metrics, `d5suite.training.loop`, and rich where a bar is shown.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from d5suite.errors import ConfigurationError, DataError
from d5suite.files import atomic_hdf5, check_writable, declared, write_bytes
from d5suite.training.loop import Event, Run
from d5suite.validate.metrics import Metric

if TYPE_CHECKING:
    from rich.progress import Progress

LOSS_EVERY_STEPS = 50
"""Steps between fetches of the loss: a fetch waits for the device and leaves a GPU idle briefly."""


class ProgressBar(Event):
    """Shows a bar of the epoch's steps on standard error if that is a terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_start(self, run: Run) -> None:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
    """Ends a run whose loss is not finite, before the run is evaluated.

    Parameters
    ----------
    every_steps : int
        Steps between fetches of the losses, which are also fetched after every epoch, off the
        clock.
    """

    def __init__(self, every_steps: int = LOSS_EVERY_STEPS) -> None:
        self._every = every_steps
        self._seen = 0

    def on_step(self, run: Run) -> None:
        if run.progress.batch >= run.batches_per_epoch:
            run.off_the_clock(lambda: self._look(run))
        elif run.progress.step % self._every == 0:
            self._look(run)

    def _look(self, run: Run) -> None:
        losses = run.losses()
        for number, (step, loss) in enumerate(losses):
            if step > self._seen and not math.isfinite(loss):
                before = f", that of the previous step is {losses[number - 1][1]:.6g}" if number else ""
                run.stop(
                    f"training diverged: the loss of step {step} is {loss}{before} "
                    f"(learning rate {run.learning_rate(step):g})",
                    diverged=True,
                )
                break
        self._seen = losses[-1][0]


class StopAtTime(Event):
    """Ends a run after this many seconds of training."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step(self, run: Run) -> None:
        if run.seconds >= self._seconds:
            run.stop(f"the time limit of {self._seconds:g} s of training is reached")


class StopEarly(Event):
    """Ends a run whose metric has not improved for some epochs.

    Parameters
    ----------
    metric : Metric
        One of the run's evaluated metrics.
    patience : int
        Epochs without improvement.
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
            run.stop(f"{self._metric.name} has not improved on {self._best:g} for {self._patience} epochs")

    def state(self) -> dict[str, Any]:
        return {"metric": self._metric.name, "best": self._best, "waited": self._waited}

    def load_state(self, values: dict[str, Any]) -> None:
        if values["metric"] == self._metric.name:
            self._best, self._waited = values["best"], values["waited"]


class Target(Event):
    """Ends a run when a metric reaches the acceptance bound, and records the time.

    Attributes
    ----------
    reached : tuple of (float, int, int) or None
        Seconds of training, steps and samples until the bound was reached; None if it was not.
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

    def state(self) -> dict[str, Any]:
        return {"metric": self._metric.name, "bound": self._metric.bound, "reached": self.reached}

    def load_state(self, values: dict[str, Any]) -> None:
        if (values["metric"], values["bound"]) == (self._metric.name, self._metric.bound) and values["reached"]:
            seconds, step, samples = values["reached"]
            self.reached = (seconds, step, samples)


def _value(run: Run, metric: Metric) -> float:
    if metric.name not in run.progress.metrics:
        raise ConfigurationError(f"metric {metric.name} is not evaluated in this run")
    return run.progress.metrics[metric.name]


Row = dict[str, float]


class Series(Event):
    """The run's series in memory: a row per epoch, and the loss of every step.

    Attributes
    ----------
    epochs : list of dict
        ``epoch``, ``step``, ``samples``, ``seconds``, ``learning_rate``, the mean ``loss`` and the
        metrics.
    losses : list of (int, float)
        Each step's number and loss.
    """

    def __init__(self) -> None:
        self.epochs: list[Row] = []
        self.losses: list[tuple[int, float]] = []

    def on_start(self, run: Run) -> None:
        progress = run.progress
        begun = progress.step - progress.batch // run.accumulate
        self.epochs = [row for row in self.epochs if row["epoch"] <= progress.epoch]
        self.losses = [(step, loss) for step, loss in self.losses if step <= begun]

    def on_epoch(self, run: Run) -> None:
        fresh = run.losses()
        self.losses.extend(fresh)
        self.epochs.append({**_row(run, run.progress.epoch, fresh), **run.progress.metrics})


def _row(run: Run, epoch: int, losses: Sequence[tuple[int, float]]) -> Row:
    progress = run.progress
    return {
        "epoch": epoch,
        "step": progress.step,
        "samples": progress.samples,
        "seconds": progress.seconds,
        "learning_rate": run.trainer.learning_rate,
        "loss": float(np.mean([loss for _, loss in losses])) if losses else math.nan,
    }


class _FileSeries(Series):
    """A `Series` in a file that is rewritten after every epoch.

    A resumed run keeps the rows of earlier epochs. If a run ends within an epoch, that epoch's row
    has no metrics.

    Parameters
    ----------
    path : Path

    Raises
    ------
    DataError
        During a run, if the file cannot be written or is not a series that can be resumed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def on_start(self, run: Run) -> None:
        with declared(self._path, "the series"):
            check_writable(self._path)
        if run.progress.step and self._path.exists():
            try:
                self._read()
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, csv.Error) as error:
                raise DataError(
                    f"not a series of a run that can be resumed: {error}",
                    where=str(self._path),
                    hint="Move it away to begin a new series, or name another file.",
                ) from error
        super().on_start(run)

    def on_epoch(self, run: Run) -> None:
        super().on_epoch(run)
        self._save(self.epochs, self.losses)

    def on_end(self, run: Run) -> None:
        if run.progress.batch:
            fresh = run.losses()
            self._save([*self.epochs, _row(run, run.progress.epoch + 1, fresh)], [*self.losses, *fresh])

    def _save(self, rows: list[Row], losses: list[tuple[int, float]]) -> None:
        with declared(self._path, "the series"):
            self._write(rows, losses, list(dict.fromkeys(name for row in rows for name in row)))

    @abstractmethod
    def _write(self, rows: list[Row], losses: list[tuple[int, float]], columns: list[str]) -> None:
        """Write the file."""

    @abstractmethod
    def _read(self) -> None:
        """Read the file into `epochs` and `losses`."""


class CSVSeries(_FileSeries):
    """A `Series` as a CSV file, with one row per epoch; missing values are empty."""

    def _write(self, rows: list[Row], losses: list[tuple[int, float]], columns: list[str]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        write_bytes(self._path, text.getvalue().encode())

    def _read(self) -> None:
        with self._path.open(newline="", encoding="utf-8") as file:
            table = list(csv.DictReader(file, strict=True))
        self.epochs = [{name: _number(text) for name, text in row.items() if text} for row in table]
        if not all("epoch" in row for row in self.epochs):
            raise ValueError("a row has no epoch")


class HDF5Series(_FileSeries):
    """A `Series` as an HDF5 file: ``epochs/NAME``, and ``steps/step`` and ``steps/loss``."""

    def _write(self, rows: list[Row], losses: list[tuple[int, float]], columns: list[str]) -> None:
        with atomic_hdf5(self._path) as file:
            for name in columns:
                file[f"epochs/{name}"] = np.array([row.get(name, math.nan) for row in rows])
            file["steps/step"] = np.array([step for step, _ in losses], np.int64)
            file["steps/loss"] = np.array([loss for _, loss in losses], np.float64)

    def _read(self) -> None:
        with h5py.File(self._path, "r") as file:
            columns = {name: values[()].tolist() for name, values in file["epochs"].items()}
            steps, losses = file["steps/step"][()].tolist(), file["steps/loss"][()].tolist()
        self.epochs = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        self.losses = list(zip(steps, losses, strict=True))


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)
