"""Time to accuracy of several ranks, and the bytes that they send until then."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from d5suite.distributed.gathering import gather
from d5suite.errors import ConfigurationError
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.network import Executor
from d5suite.measurements.base import Step
from d5suite.measurements.distributed.checks import equal_parameters
from d5suite.measurements.distributed.efficiency import MeasurementOfRanks
from d5suite.measurements.distributed.facts import FACTS, REQUIRED, SCALING
from d5suite.measurements.distributed.proof import prove_scheme
from d5suite.measurements.distributed.steps import DistributedStep
from d5suite.measurements.tables import Column, Table
from d5suite.measurements.training.accuracy import (
    TimeToAccuracy,
    or_none,
    require_reached,
    require_real_images,
    target_of,
)
from d5suite.measurements.training.training_step import prove_training
from d5suite.optimizers.schedules import schedule_from_dict
from d5suite.training.loop import Batches, evaluator
from d5suite.validate.check import Check
from d5suite.validate.metrics import METRICS
from d5suite.workloads.network import NetworkWorkload, load_network


class DistributedAccuracyStep(DistributedStep):
    """Training runs of all ranks to the target, each from weights and in an order of its own.

    An epoch takes each image at most once: every rank has its own part, and all make as many steps.
    Then each evaluates the parameters that the scheme's run would be judged by, off the clock, and
    goes on from its own.
    """

    def __init__(self, workload: NetworkWorkload) -> None:
        settings = workload.case.training
        if settings["accumulate"] != 1:
            raise ConfigurationError(
                f"this preset accumulates {settings['accumulate']} batches per update; with ranks it must be 1",
                hint="Leave it out: -k distributed_step.",
            )
        super().__init__(workload)
        self.metric = replace(METRICS[settings["metric"]], bound=settings["target"])
        self._runs: list[dict[str, Any]] = []
        self._series: dict[str, list[float]] = {}

    def time(self, settings: SamplingSettings) -> Samples:
        """Train every run; a sample is the time of one: of the slowest rank in each epoch.

        Raises
        ------
        ValidationError
            If a run does not reach the target. The workload has all runs with their
            curves.
        """
        for index in range(self.workload.case.training["runs"]):
            self._train_to_target(index)
        require_reached(self._runs, self.metric)
        times = [float(found["seconds"]) for found in self._runs]
        self.items = int(np.median([found["samples"] for found in self._runs]))
        return Samples(self.first_call_s or 0.0, [], times, True, "rounds")

    def _train_to_target(self, index: int) -> None:
        workload, settings, name = self.workload, self.workload.case.training, self.metric.name
        found: dict[str, Any] = {"seed": workload.job.seed + index, "epochs": 0, name: None}
        self._runs.append(found)
        self.reset()
        workload.restore(workload.executor, load_network(workload.case, found["seed"]).initializers)
        self.scheme = self.make_scheme(self.replica)  # may hold parameters from the start
        with self._data(found["seed"]) as (stream, unseen):
            evaluate = evaluator(unseen, [self.metric])
            lengths = gather(self.communicator, None if stream is None else len(stream))
            steps = min(each for each in lengths if each is not None)
            rate = schedule_from_dict(settings["schedule"])
            known = self.facts()["bytes_per_step"]
            sent, seconds = math.nan if known is None else known * steps, 0.0
            for epoch in range(settings["epochs"]):
                factors = [rate.factor(epoch * steps + step, steps) for step in range(steps)]
                took, losses = self._epoch(epoch, stream, factors)
                told = gather(self.communicator, [took, losses, self._judged(evaluate)])
                seconds += max(each[0] for each in told)
                loss = float(np.mean([each for _, losses, _ in told for each in losses]))
                accuracy = told[0][2]
                found.update({"epochs": epoch + 1, name: accuracy})
                row = {"seconds": seconds, "loss": loss, name: accuracy, "bytes": sent * (epoch + 1)}
                for key, value in row.items():
                    self._series.setdefault(f"run_{index}_{key}", []).append(value)
                series = {key: or_none(values) for key, values in self._series.items()}
                where = f"run {index + 1}/{settings['runs']}, epoch {epoch + 1}/{settings['epochs']} at {accuracy:.4g}"
                workload.tell(where, {**self._told(), "series": series})
                if not math.isfinite(loss):
                    found["stopped"] = f"training diverged: the mean loss of epoch {epoch + 1} is {loss}"
                    return
                if self.metric.accepts(accuracy):
                    made = steps * (epoch + 1)
                    found |= {"seconds": seconds, "steps": made, "samples": made * self._batch}
                    found |= {"bytes": row["bytes"]} if known is not None else {}
                    return

    @contextlib.contextmanager
    def _data(self, seed: int) -> Any:
        """Yield the rank's training images, None on a server rank, and those of evaluation."""
        workload, rank = self.workload, self.communicator.rank
        batch_size, workers = workload.case.batch_size, workload.job.loader_workers
        with contextlib.ExitStack() as stack:
            stream = None
            if rank in self.trainers:
                shard = self.trainers.index(rank), len(self.trainers)
                own = workload.source.training(batch_size=batch_size, workers=workers, seed=seed, shard=shard)
                stream = stack.enter_context(own)
            unseen = workload.source.evaluation(batch_size=batch_size, workers=workers)
            yield stream, stack.enter_context(unseen)

    def _epoch(self, epoch: int, stream: Batches | None, factors: list[float]) -> tuple[float, list[float]]:
        """Make a step for each factor of the learning rate; return the seconds and the losses."""
        workload, executor, heartbeat = self.workload, self.workload.executor, self.workload.heartbeat
        _, name = workload.network.require_loss()
        pending = []
        self.communicator.barrier()
        if heartbeat is not None:
            heartbeat.steps = 1
        start = now()
        if stream is None:
            self.scheme.serve()
        else:
            batches = itertools.islice(stream.epoch(epoch), len(factors))
            for factor, batch in zip(factors, batches, strict=True):
                workload.trainer.set_learning_rate(workload.optimizer.learning_rate * factor)
                pending.append(self.scheme.step(executor.feed(workload.arrays(batch))))
                self._beat()
        self._end_of_steps()
        self.synchronize()
        took = now() - start
        if heartbeat is not None:
            heartbeat.steps = 0
        return took, [float(executor.fetch(loss)[name]) for loss in pending]

    def _judged(self, evaluate: Callable[[Executor], dict[str, float]]) -> float:
        """Evaluate the parameters with which all ranks would end now."""
        kept = None if self.serving or self.scheme.synchronous else self.replica.weights()
        if not self.serving:
            self.scheme.finish()
        value = evaluate(self.workload.executor)[self.metric.name]
        if kept is not None:
            self.replica.load_weights(kept)
        return value

    @property
    def _batch(self) -> int:
        """Images of all ranks in a step."""
        return self.workload.case.batch_size * len(self.trainers)

    def _told(self) -> dict[str, Any]:
        return {"target": target_of(self.workload), "runs": self._runs}

    def record(self, samples: Samples) -> dict[str, Any]:
        return {**self._told(), "distributed": self.facts()}

    def series(self) -> dict[str, list[float]]:
        return self._series


_ONE_PROCESS: Any = TimeToAccuracy.schema["properties"]
_RUN = _ONE_PROCESS["runs"]["items"]


class DistributedAccuracy(MeasurementOfRanks):
    """Training runs of several ranks to a target: over time, and over what they send."""

    name = "distributed_accuracy"
    level = 3
    takes_turns = False
    needs = ("gradient", "level 2", "level 3")
    trains = True
    plot = "curves_and_bytes"
    checks_after = (equal_parameters,)
    table = Table(
        (
            Column("target", "target.value"),
            Column("runs", "runs", "runs that got there", shown="wide or one file"),
            Column("median s", "median_s"),
            Column("interval", "median_ci95", "interval with its confidence", shown="wide"),
            Column("GB sent", "runs.bytes", "median", scale=1e-9),
            Column("steps", "runs.steps", "median"),
            Column("epochs", "runs.epochs", "median", shown="wide or one file"),
        ),
        "medians of the runs; sent: by all ranks until the target, by the scheme's definition",
        width=32,
    )
    schema: ClassVar[Mapping[str, Any]] = {
        "required": ["target", "runs", "distributed"],
        "properties": {
            "target": _ONE_PROCESS["target"],
            "runs": {
                **_ONE_PROCESS["runs"],
                "items": {
                    **_RUN,
                    "properties": {
                        **_RUN["properties"],
                        "bytes": {"type": "number", "minimum": 0, "description": "sent by all ranks, if it is known"},
                    },
                },
            },
            "distributed": {"type": "object", "required": REQUIRED, "properties": FACTS},
            "scaling": SCALING,
        },
    }

    def prepare(self, workload: NetworkWorkload) -> Step:
        require_real_images(workload)
        return DistributedAccuracyStep(workload)

    def prove(self, workload: NetworkWorkload, step: DistributedAccuracyStep) -> Iterable[Check]:
        """Prove the step of several ranks; whether it reaches the target is measured."""
        yield from prove_training(workload)
        yield from workload.once("distributed", lambda: prove_scheme(workload, step))
