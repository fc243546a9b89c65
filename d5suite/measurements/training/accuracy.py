"""Time to accuracy: training runs until a metric reaches its target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from d5suite.errors import ConfigurationError, ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.schemas import array, integer, mapping, number, record, text
from d5suite.measurements.tables import Column, Table
from d5suite.measurements.training import checks
from d5suite.measurements.training.steps import TrainerStep
from d5suite.measurements.training.training_step import prove_training
from d5suite.optimizers.schedules import schedule_from_dict
from d5suite.training.events import Series, StopOnDivergence, Target
from d5suite.training.loop import Event, Run, evaluator
from d5suite.validate.check import Check
from d5suite.validate.metrics import METRICS
from d5suite.workloads.network import NetworkWorkload, load_network

TELL_EPOCHS_S, TELL_STEPS_S = 1.0, 10.0
"""Shortest time between two reports of a long run: after an epoch, and within one, where a report
waits for the device."""


TARGET = mapping(
    {"metric": text(), "value": number(), "source": text("where it is published")},
    optional=["source"],
    description="what every run reached; the samples are the times",
)
RUN = {
    "seed": integer("of this run"),
    "epochs": integer("trained until the end or the target"),
    "seconds": number("of training"),
    "steps": integer("trained until the end or the target"),
    "samples": integer("images trained on"),
}


class TargetRuns:
    """Training runs to a target.

    Attributes
    ----------
    metric : Metric
        The metric, whose bound is the target.
    runs : list of dict
        ``seed``, ``epochs`` and the metric; ``seconds``, ``steps`` and ``samples`` of a run that
        reached the target; ``stopped`` of one that ended early.
    curves : dict of str to list of float
        Series of all runs by epoch.
    """

    def __init__(self, workload: NetworkWorkload) -> None:
        settings = workload.case.training
        self.metric = replace(METRICS[settings["metric"]], bound=settings["target"])
        self.runs: list[dict[str, Any]] = []
        self.curves: dict[str, list[float]] = {}
        self._workload = workload

    def add(self, index: int) -> dict[str, Any]:
        """Add the run of this number, from 0; each has its own seed."""
        self.runs.append({"seed": self._workload.job.seed + index, "epochs": 0, self.metric.name: None})
        return self.runs[-1]

    def tell(self, where: str) -> None:
        """Report the runs so far."""
        curves = {key: [v if math.isfinite(v) else None for v in values] for key, values in self.curves.items()}
        self._workload.tell(where, {**self.record(), "series": curves})

    def samples(self, first_call_s: float | None) -> tuple[Samples, int]:
        """Return the runs' times as samples, and the median of the images trained on.

        Raises
        ------
        ValidationError
            If a run did not reach the target: a time to accuracy is then not a number. `tell` has
            reported all runs with their curves.
        """
        metric, missed = self.metric, [found for found in self.runs if "seconds" not in found]
        if missed:
            first = missed[0]
            at, why = first[metric.name], first.get("stopped")
            raise ValidationError(
                f"{len(missed)} of {len(self.runs)} runs did not reach {metric.name} {metric.bound}: the run with seed "
                f"{first['seed']} ended after {first['epochs']} epochs "
                f"{'before it was evaluated' if at is None else f'at {at}'}{f': {why}' if why else ''}",
                hint="A time to accuracy is a number only if all runs get there: see learning rate and schedule.",
            )
        times = [float(found["seconds"]) for found in self.runs]
        samples = Samples(first_call_s or 0.0, [], times, True, "rounds")
        return samples, int(np.median([found["samples"] for found in self.runs]))

    def record(self) -> dict[str, Any]:
        """Return target and runs."""
        settings = self._workload.case.training
        target = {"metric": settings["metric"], "value": settings["target"], "source": settings.get("source", "")}
        return {"target": target, "runs": self.runs}


class AccuracyStep(TrainerStep):
    """Training runs to the target, each with its own weights and order of the data.

    Compilation does not count: the step is compiled before the first run, and all runs use it. The
    clock stops while loaders start and during evaluation; it runs while training waits for data.
    """

    def __init__(self, workload: NetworkWorkload) -> None:
        self.accumulate: int = workload.case.training["accumulate"]
        super().__init__(workload)
        self.runs = TargetRuns(workload)

    def run(self) -> object:
        """Make one update from as many batches as training accumulates."""
        feeds = [
            self.workload.executor.feed(self.workload.arrays(batch))
            for batch in itertools.islice(itertools.cycle(self.workload.batches), self.accumulate)
        ]
        return self.workload.trainer.step(*feeds)

    def time(self, settings: SamplingSettings) -> Samples:
        """Train every run; see `TargetRuns.samples`."""
        for index in range(self.workload.case.training["runs"]):
            self._train(index)
        samples, self.items = self.runs.samples(self.first_call_s)
        return samples

    def _train(self, index: int) -> None:
        workload, settings, metric = self.workload, self.workload.case.training, self.runs.metric
        found = self.runs.add(index)
        workload.restart(load_network(workload.case, found["seed"]).initializers)
        target, curves = Target(metric), Series()

        def report(run: Run) -> None:
            progress = run.progress
            found.update({"epochs": progress.epoch, metric.name: progress.metrics.get(metric.name)})
            if target.reached is not None:
                found.update(zip(("seconds", "steps", "samples"), target.reached, strict=True))
            elif progress.stopped:
                found["stopped"] = progress.stopped
            for key in ("seconds", "loss", metric.name):
                self.runs.curves[f"run_{index}_{key}"] = [row[key] for row in curves.epochs]
            at = f" at {found[metric.name]:.4g}" if progress.metrics else ""
            done = f", step {progress.batch // self.accumulate}/{run.steps_per_epoch}" if progress.batch else ""
            self.runs.tell(f"run {index + 1}/{settings['runs']}, epoch {progress.epoch}/{run.epochs}{at}{done}")

        with (
            workload.loader(seed=found["seed"]) as stream,
            workload.source.evaluation(
                batch_size=workload.case.batch_size, workers=workload.job.loader_workers
            ) as unseen,
        ):
            run = Run(
                workload.trainer,
                stream,
                epochs=settings["epochs"],
                schedule=schedule_from_dict(settings["schedule"]),
                accumulate=self.accumulate,
                events=[StopOnDivergence(), curves, target, _Reports(report)],
                evaluate=evaluator(unseen, [metric]),
            )
            try:
                run.train()
            except ValidationError as error:  # such as logits that are not finite; other runs may do better
                run.stop(str(error))
        report(run)
        self.updates = run.progress.step

    def record(self, samples: Samples) -> dict[str, Any]:
        return self.runs.record()

    def series(self) -> dict[str, list[float]]:
        return self.runs.curves


def require_real_images(workload: NetworkWorkload) -> None:
    """Raise `ConfigurationError` if the target is for real images, and the images are drawn."""
    settings = workload.case.training
    if settings.get("source") and workload.dataset["synthetic"]:
        kind = workload.case.dataset["kind"]
        raise ConfigurationError(
            f"these images are drawn by d5suite, and {settings['metric']} {settings['target']} means the real {kind}",
            where=workload.case.dataset["root"],
            hint=f"Give the real one with --{kind}.",
        )


class TimeToAccuracy(Measurement):
    """Training runs to a target."""

    name = "time_to_accuracy"
    level = 2
    takes_turns = False
    loads = True
    needs = ("gradient", "level 2")
    trains = True
    plot = "curves"
    checks_after = (
        checks.trained_output,
        checks.counted_updates,
        checks.next_update,
        checks.whole_batch_step,
        checks.back_to_back,
    )
    table = Table(
        (
            Column("target", "target.value"),
            Column("runs", "runs", "runs that got there", shown="wide or one file"),
            Column("median s", "median_s"),
            Column("interval", "median_ci95", "interval with its confidence"),
            Column("steps", "runs.steps", "median"),
            Column("images", "runs.samples", "median", shown="wide"),
            Column("epochs", "runs.epochs", "median", shown="wide or one file"),
        ),
        "medians of the runs; the interval is of the time, with its confidence",
        width=16,
    )
    schema = record(
        {
            "target": TARGET,
            "runs": array(mapping(RUN), "one for each seed", minItems=1),
        }
    )

    def prepare(self, workload: NetworkWorkload) -> Step:
        """See `Measurement.prepare`.

        Raises
        ------
        ConfigurationError
            If the target is for the real dataset, and the images are drawn.
        """
        require_real_images(workload)
        return AccuracyStep(workload)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove the training step; whether it reaches the target is measured."""
        return prove_training(workload)


class _Reports(Event):
    """Reports a run's progress off its clock, at intervals of `TELL_EPOCHS_S` or `TELL_STEPS_S`."""

    def __init__(self, tell: Callable[[Run], None]) -> None:
        self._tell = tell
        self._last = now()

    def on_step(self, run: Run) -> None:
        if now() - self._last >= TELL_STEPS_S:
            run.off_the_clock(lambda: self._now(run))

    def on_epoch(self, run: Run) -> None:
        if now() - self._last >= TELL_EPOCHS_S:
            self._now(run)

    def _now(self, run: Run) -> None:
        self._tell(run)
        self._last = now()
