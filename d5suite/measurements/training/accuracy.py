"""Time to accuracy: training runs until a metric reaches its target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from d5suite.errors import ConfigurationError, ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.tables import Column, Table
from d5suite.measurements.training.checks import (
    back_to_back,
    counted_updates,
    next_update,
    trained_output,
    whole_batch_step,
)
from d5suite.measurements.training.steps import TrainerStep
from d5suite.measurements.training.training_step import prove_training
from d5suite.optimizers.schedules import schedule_from_dict
from d5suite.training.events import Series, StopOnDivergence, Target
from d5suite.training.loop import Event, Run, evaluator
from d5suite.validate.check import Check
from d5suite.validate.metrics import METRICS, Metric
from d5suite.workloads.network import NetworkWorkload, load_network

TELL_EPOCHS_S, TELL_STEPS_S = 1.0, 10.0
"""Least seconds between two reports of a long run, after an epoch and within one, where the device
has to be waited for."""


class AccuracyStep(TrainerStep):
    """Training runs to the target, each from weights and in an order of its own.

    Compilation is not counted: the step is compiled before the first run, and all runs use it.
    Evaluation and the making of loaders are off the clock, waiting for data is on it.
    """

    def __init__(self, workload: NetworkWorkload) -> None:
        settings = workload.case.training
        self.metric = replace(METRICS[settings["metric"]], bound=settings["target"])
        self.accumulate: int = settings["accumulate"]
        super().__init__(workload)
        self._series: dict[str, list[float]] = {}
        self._runs: list[dict[str, Any]] = []

    def run(self) -> object:
        """Make one update from as many batches as training accumulates."""
        feeds = [
            self.workload.executor.feed(self.workload.arrays(batch))
            for batch in itertools.islice(itertools.cycle(self.workload.batches), self.accumulate)
        ]
        return self.workload.trainer.step(*feeds)

    def time(self, settings: SamplingSettings) -> Samples:
        """Train every run; a sample is the time of one.

        Raises
        ------
        ValidationError
            If a run does not reach the target: a time to accuracy is then not a number. The
            workload has all runs with their curves.
        """
        for index in range(self.workload.case.training["runs"]):
            self._train(index)
        require_reached(self._runs, self.metric)
        times = [float(found["seconds"]) for found in self._runs]
        self.items = int(np.median([found["samples"] for found in self._runs]))
        return Samples(self.first_call_s or 0.0, [], times, True, "rounds")

    def _train(self, index: int) -> None:
        workload, settings, metric = self.workload, self.workload.case.training, self.metric
        seed = workload.job.seed + index
        workload.restart(load_network(workload.case, seed).initializers)
        target, told = Target(metric), Series()
        found: dict[str, Any] = {"seed": seed}
        self._runs.append(found)

        def keep(run: Run) -> None:
            progress = run.progress
            found.update({"epochs": progress.epoch, metric.name: progress.metrics.get(metric.name)})
            if target.reached is not None:
                found.update(zip(("seconds", "steps", "samples"), target.reached, strict=True))
            elif progress.stopped:
                found["stopped"] = progress.stopped
            for key in ("seconds", "loss", metric.name):
                self._series[f"run_{index}_{key}"] = [row[key] for row in told.epochs]
            at = f" at {found[metric.name]:.4g}" if progress.metrics else ""
            done = f", step {progress.batch // self.accumulate}/{run.steps_per_epoch}" if progress.batch else ""
            where = f"run {index + 1}/{settings['runs']}, epoch {progress.epoch}/{run.epochs}{at}{done}"
            series = {key: or_none(values) for key, values in self._series.items()}
            workload.tell(where, {**self._facts(), "series": series})

        with (
            workload.loader(seed=seed) as stream,
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
                events=[StopOnDivergence(), told, target, _Reports(keep)],
                evaluate=evaluator(unseen, [metric]),
            )
            try:
                run.train()
            except ValidationError as error:  # such as logits that are not finite; other runs may do better
                run.stop(str(error))
        keep(run)
        self.updates = run.progress.step

    def _facts(self) -> dict[str, Any]:
        return {"target": target_of(self.workload), "runs": self._runs}

    def record(self, samples: Samples) -> dict[str, Any]:
        return self._facts()

    def series(self) -> dict[str, list[float]]:
        return self._series


def require_reached(runs: Sequence[Mapping[str, Any]], metric: Metric) -> None:
    """Raise `ValidationError` unless all runs have reached the metric's bound."""
    missed = [found for found in runs if "seconds" not in found]
    if not missed:
        return
    worst = missed[0]
    at, why = worst[metric.name], worst.get("stopped")
    raise ValidationError(
        f"{len(missed)} of {len(runs)} runs did not reach {metric.name} {metric.bound}: that of seed "
        f"{worst['seed']} ended after {worst['epochs']} epochs "
        f"{'before it was evaluated' if at is None else f'at {at}'}{f': {why}' if why else ''}",
        hint="A time to accuracy is a number only if all runs get there: see learning rate and schedule.",
    )


def target_of(workload: NetworkWorkload) -> dict[str, Any]:
    """Return the runs' target, for their record."""
    settings = workload.case.training
    return {"metric": settings["metric"], "value": settings["target"], "source": settings.get("source", "")}


def require_real_images(workload: NetworkWorkload) -> None:
    """Raise `ConfigurationError` if a target of real images is given drawn ones."""
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
    needs = ("gradient", "level 2")
    trains = True
    plot = "curves"
    checks_after = (trained_output, counted_updates, next_update, whole_batch_step, back_to_back)
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
    schema: ClassVar[Mapping[str, Any]] = {
        "required": ["target", "runs"],
        "properties": {
            "target": {
                "type": "object",
                "required": ["metric", "value"],
                "description": "what every run reached; the samples are the times",
                "properties": {
                    "metric": {"type": "string"},
                    "value": {"type": "number"},
                    "source": {"type": "string", "description": "where it is published"}
                }
            },
            "runs": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["seed", "epochs", "seconds", "steps", "samples"],
                    "properties": {
                        "seed": {"type": "integer"},
                        "epochs": {"type": "integer"},
                        "seconds": {"type": "number", "description": "of training"},
                        "steps": {"type": "integer"},
                        "samples": {"type": "integer", "description": "images trained on"}
                    }
                }
            }
        }
    }  # fmt: skip

    def prepare(self, workload: NetworkWorkload) -> Step:
        """See `Measurement.prepare`.

        Raises
        ------
        ConfigurationError
            If the target is one of the real dataset, and the images are drawn.
        """
        require_real_images(workload)
        return AccuracyStep(workload)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove the training step; whether it reaches the target is measured."""
        return prove_training(workload)


class _Reports(Event):
    """Tells where a run is, off its clock, at most once in `TELL_EPOCHS_S` or `TELL_STEPS_S`."""

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


def or_none(values: Iterable[float]) -> list[float | None]:
    """Return the values with None in place of NaN and infinity, which JSON lacks."""
    return [value if math.isfinite(value) else None for value in values]
