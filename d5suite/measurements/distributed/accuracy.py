"""Time to accuracy of several ranks, and the bytes they send on the way."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from d5suite.distributed.gathering import gather
from d5suite.errors import ConfigurationError
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.network import Executor
from d5suite.measurements.base import Step
from d5suite.measurements.distributed import checks
from d5suite.measurements.distributed.efficiency import MeasurementOfRanks
from d5suite.measurements.distributed.facts import FACTS, SCALING
from d5suite.measurements.distributed.placement import SCHEMA as PLACEMENT
from d5suite.measurements.distributed.placement import placements
from d5suite.measurements.distributed.proof import prove_scheme
from d5suite.measurements.distributed.steps import DistributedStep
from d5suite.measurements.schemas import array, mapping, number, record
from d5suite.measurements.tables import Column, Table
from d5suite.measurements.training.accuracy import RUN, TARGET, TargetRuns, require_real_images
from d5suite.measurements.training.training_step import prove_training
from d5suite.optimizers.schedules import schedule_from_dict
from d5suite.training.loop import Batches, evaluator
from d5suite.validate.check import Check
from d5suite.workloads.network import NetworkWorkload, load_network


class DistributedAccuracyStep(DistributedStep):
    """Training runs of all ranks to the target, each with its own weights and order of the data.

    An epoch takes each image at most once: every rank has its own part, and all ranks make the same
    number of steps. Then every rank evaluates, off the clock, the parameters with which the
    scheme's run would end, and continues from its own parameters.
    """

    def __init__(self, workload: NetworkWorkload) -> None:
        if (accumulate := workload.case.training["accumulate"]) != 1:
            raise ConfigurationError(
                f"this preset accumulates {accumulate} batches per update; with ranks it must be 1",
                hint="Leave it out: -k distributed_step.",
            )
        super().__init__(workload)
        self.runs = TargetRuns(workload)

    def time(self, settings: SamplingSettings) -> Samples:
        """Train every run; see `TargetRuns.samples`. An epoch takes as long as its slowest rank."""
        for index in range(self.workload.case.training["runs"]):
            self._train_to_target(index)
        samples, self.items = self.runs.samples(self.first_call_s)
        return samples

    def _train_to_target(self, index: int) -> None:
        workload, settings, metric = self.workload, self.workload.case.training, self.runs.metric
        found = self.runs.add(index)
        self.reset()
        workload.restore(workload.executor, load_network(workload.case, found["seed"]).initializers)
        self.scheme = self.make_scheme(self.replica)  # may hold parameters from the start
        with self._data(found["seed"]) as (stream, unseen):
            evaluate = evaluator(unseen, [metric])
            lengths = gather(self.communicator, None if stream is None else len(stream))
            steps = min(each for each in lengths if each is not None)
            rate = schedule_from_dict(settings["schedule"])
            known = self.facts()["bytes_per_step"]
            sent, seconds = math.nan if known is None else known * steps, 0.0
            for epoch in range(1, settings["epochs"] + 1):
                factors = [rate.factor((epoch - 1) * steps + step, steps) for step in range(steps)]
                took, losses = self._epoch(epoch - 1, stream, factors)
                gathered = gather(self.communicator, [took, losses, self._evaluated(evaluate)])
                seconds += max(each[0] for each in gathered)
                loss = float(np.mean([each for _, losses, _ in gathered for each in losses]))
                accuracy = gathered[0][2]
                found.update({"epochs": epoch, metric.name: accuracy})
                row = {"seconds": seconds, "loss": loss, metric.name: accuracy, "bytes": sent * epoch}
                for key, value in row.items():
                    self.runs.curves.setdefault(f"run_{index}_{key}", []).append(value)
                where = f"run {index + 1}/{settings['runs']}, epoch {epoch}/{settings['epochs']} at {accuracy:.4g}"
                self.runs.tell(where)
                if not math.isfinite(loss):
                    found["stopped"] = f"training diverged: the mean loss of epoch {epoch} is {loss}"
                    return
                if metric.accepts(accuracy):
                    made = steps * epoch
                    found |= {"seconds": seconds, "steps": made, "samples": made * self.items_per_step}
                    found |= {"bytes": row["bytes"]} if known is not None else {}
                    return

    @contextlib.contextmanager
    def _data(self, seed: int) -> Any:
        """Yield this rank's training images, None on a server, and the evaluation images."""
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
        """Make one step per factor of the learning rate; return seconds and losses."""
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

    def _evaluated(self, evaluate: Callable[[Executor], dict[str, float]]) -> float:
        """Evaluate the parameters with which all ranks would end now."""
        kept = None if self.serving or self.scheme.synchronous else self.replica.weights()
        if not self.serving:
            self.scheme.finish()
        value = evaluate(self.workload.executor)[self.runs.metric.name]
        if kept is not None:
            self.replica.load_weights(kept)
        return value

    @property
    def items_per_step(self) -> int:
        """Images of all ranks in a step."""
        return self.workload.case.batch_size * len(self.trainers)

    def record(self, samples: Samples) -> dict[str, Any]:
        transport = self._transport() if self.is_opaque else ""
        placed = placements(self.communicator, self.workload.job.device, transport)
        return {**self.runs.record(), "distributed": self.facts(), "placement": placed}

    def series(self) -> dict[str, list[float]]:
        return self.runs.curves


BYTES = number("sent by all ranks, if it is known", minimum=0)


class DistributedAccuracy(MeasurementOfRanks):
    """Training runs of several ranks to a target: accuracy by time and by bytes sent."""

    name = "distributed_accuracy"
    level = 3
    takes_turns = False
    loads = True
    needs = ("gradient", "level 2", "level 3")
    trains = True
    plot = "curves_and_bytes"
    checks_after = (checks.equal_parameters,)
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
    schema = record(
        {
            "target": TARGET,
            "runs": array(mapping({**RUN, "bytes": BYTES}, optional=["bytes"]), "one for each seed", minItems=1),
            "distributed": mapping(FACTS, ["synchronous"], description="how ranks worked together"),
            "scaling": SCALING,
            "placement": PLACEMENT,
        },
        optional=["scaling", "placement"],
    )

    def prepare(self, workload: NetworkWorkload) -> Step:
        require_real_images(workload)
        return DistributedAccuracyStep(workload)

    def prove(self, workload: NetworkWorkload, step: DistributedAccuracyStep) -> Iterable[Check]:
        """Prove the step of several ranks; whether it reaches the target is measured."""
        yield from prove_training(workload)
        yield from workload.once("distributed", lambda: prove_scheme(workload, step))
