"""The training step of several ranks: forward, backward, communication and update."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np

from d5suite.distributed.gathering import gather
from d5suite.distributed.schemes import make_scheme
from d5suite.errors import JobError, ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples, quiet_interpreter
from d5suite.instruments.settings import SamplingSettings
from d5suite.instruments.warmup import still_falls, warm_up
from d5suite.levels.distributed import Replica, Scheme, Traffic
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.measurements.base import Step
from d5suite.measurements.distributed.afterwards import check_messages, check_replica, check_scheme, right_weights
from d5suite.measurements.distributed.efficiency import MeasurementOfRanks
from d5suite.measurements.distributed.facts import FACTS, SCALING
from d5suite.measurements.distributed.parts import SCHEMA as PARTS
from d5suite.measurements.distributed.parts import steps_of, take_parts
from d5suite.measurements.tables import WORST_ERROR, Column, Table
from d5suite.measurements.training.step import prove_training
from d5suite.statistics.ranks import spread, straggler_ratio
from d5suite.validate.check import Check
from d5suite.validate.distributed.rules import IN_TURN, check_weights
from d5suite.validate.norms import FLOAT64, relative_l2
from d5suite.workloads.network import FEEDS, NetworkWorkload

PROOF_STEPS = 3
"""Steps in float64 that a scheme must make as one process, or its rule, does: momentum shows from
the second on, its decay from the third."""

CHUNK_S = 2.0
"""Seconds of steps between two looks at the losses, so that a rank that diverges is soon named."""

TRAFFIC = tuple(name for name in asdict(Traffic()) if name != "calls")

STEPS = Table(
    (
        Column("median ms", "median_s", scale=1e3),
        Column("images/s", "throughput.value"),
        Column("comm", "distributed.parts.communicating_s", scale=1e3),
        Column("wait", "distributed.parts.waiting_s", scale=1e3, shown="wide"),
        Column("slowest", "distributed.straggler_ratio", "hundredths", shown="wide"),
        Column("scaling", "scaling", "efficiency"),
        WORST_ERROR,
    ),
    "comm, wait: ms of a step, mean of ranks; slowest: rank's computing over the median; scaling: images/s per "
    "rank over that of fewest ranks in the run, the efficiency",
    width=32,
)


class DistributedStep(Step):
    """One step of all ranks, each on batches of its own part of the data.

    Attributes
    ----------
    trainers : list of int
        Ranks that train; others only serve.
    serving : bool
        Whether there are others.
    times : list of list of float
        By rank: seconds of each step.
    first_losses : list of float
        Of this rank's first timed steps, one for each batch that it takes in turn.
    feeds : list
        Native batches that this rank takes in turn, those already made.
    traffic : dict of str to float
        What this rank has counted in the timed steps.
    random : mapping of str to numpy.ndarray
        State of Dropout's generator before them; empty without Dropout.
    """

    def __init__(self, workload: NetworkWorkload) -> None:
        if workload.job.distributed is None:
            raise JobError("a distributed step needs a job with 'distributed'", hint="Give --ranks N.")
        self.workload, self.communicator, self.how = workload, workload.communicator, workload.job.distributed
        self.replica = workload.backend.replica(workload.trainer)
        self.scheme = self.make_scheme(self.replica)
        serving = gather(self.communicator, self.scheme.serves)
        self.trainers = [rank for rank, serves in enumerate(serving) if not serves]
        self.items = workload.case.batch_size * len(self.trainers)
        self.macs = workload.macs * len(self.trainers)
        self.times: list[list[float]] = []
        self.serving = any(serving)
        self.first_losses: list[float] = []
        self.random: Arrays = {}
        self.feeds: list[Native] = []
        self._turn = 0
        self._losses: list[Native] = []
        self._parts: dict[str, float | None] = {}
        self.traffic = dict.fromkeys(TRAFFIC, 0.0)
        self._counted = 0

    def make_scheme(self, replica: Replica, **settings: Any) -> Scheme:
        """Make one rank's part of the job's scheme, with other settings if they are given."""
        chosen = {**self.how.settings, **settings}
        return make_scheme(self.how.scheme, replica, self.communicator, self.workload.backend, **chosen)

    @property
    def _is_opaque(self) -> bool:
        """Whether the framework communicates, so that nothing of it can be counted or clocked."""
        return self.how.native and self.communicator.size > 1

    # Data.

    def batches(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the batches that a rank takes in turn; a server rank takes none."""
        if rank not in self.trainers:
            return []
        return self.workload.batches_of(self.trainers.index(rank), len(self.trainers))

    def few(self, rank: int, step: int) -> dict[str, np.ndarray]:
        """Return the first images of a rank's batch, for float64."""
        images, labels = self.batches(rank)[step % FEEDS]
        count = self.workload.oracle_batch
        return self.workload.arrays((images[:count], labels[:count]))

    def _next_feed(self) -> Native:
        turn, self._turn = self._turn % FEEDS, self._turn + 1
        if turn == len(self.feeds):
            arrays = self.workload.arrays(self.batches(self.communicator.rank)[turn])
            self.feeds.append(self.workload.executor.feed(arrays))
        return self.feeds[turn]

    # Steps.

    def run(self) -> object:
        return self._steps(1)

    def synchronize(self) -> None:
        self.workload.executor.synchronize()

    def reset(self) -> None:
        self.workload.restore(self.workload.executor)
        self.workload.trainer.load_state(self.workload.trainer.initial_state())
        self.scheme = self.make_scheme(self.replica)
        self._turn = 0
        self._losses.clear()
        self.first_losses = []

    def _steps(self, count: int) -> list[float]:
        """Make steps, and return this rank's times; none on a server rank."""
        times = []
        before = self._sent()
        if self.scheme.serves:
            self.scheme.serve()
        else:
            times = [self._step() for _ in range(count)]
        self._end_of_steps()
        for name, value in self._sent().items():
            self.traffic[name] += value - before[name]
        self._counted += count
        return times

    def _step(self) -> float:
        """Make a step of a rank that trains; return its seconds."""
        feed = self._next_feed()
        self.synchronize()
        start = now()
        loss = self.scheme.step(feed)
        self.synchronize()
        took = now() - start
        self._losses.append(loss)
        self._beat()
        return took

    def _end_of_steps(self) -> None:
        if self.serving:  # a server knows that a run is over when the others finish it
            self.scheme.finish()
            self.scheme = self.make_scheme(self.replica)

    def _beat(self) -> None:
        if self.workload.heartbeat is not None and self.workload.heartbeat.steps:
            self.workload.heartbeat.steps += 1

    def _sent(self) -> dict[str, float]:
        traffic = self.communicator.traffic.values()
        return {name: sum(getattr(each, name) for each in traffic) for name in TRAFFIC}

    def _together(self, count: int) -> list[list[float]]:
        """Make steps on all ranks, and return the times of each; raise if a rank has diverged."""
        times = self._steps(count)
        executor, made = self.workload.executor, len(self._losses)
        _, name = self.workload.network.require_loss()
        losses = [float(executor.fetch(each)[name]) for each in self._losses]
        self._losses.clear()
        self.first_losses += losses[: FEEDS - len(self.first_losses)]
        wrong = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
        found = gather(self.communicator, [times, wrong, str(losses[wrong]) if wrong is not None else ""])
        diverged = [(index, rank, loss) for rank, (_, index, loss) in enumerate(found) if index is not None]
        if diverged:
            index, rank, loss = min(diverged)
            raise ValidationError(
                f"training diverged first on rank {rank} ({self.communicator.hosts[rank]}): "
                f"loss {loss} in step {self._turn - made + index + 1}",
                hint="Lower the learning rate (--optimizer), or look at that rank's data and memory.",
            )
        return [found[rank][0] for rank in range(self.communicator.size)]

    def time(self, settings: SamplingSettings) -> Samples:
        """Take the samples: every rank makes as many steps, because all decide from all times.

        A sample is the time of the slowest rank where ranks wait for each other, else the mean.
        """
        self.reset()
        self.random = self.workload.executor.random_state() if self.workload.executor.drops else {}
        first_call_s = max(gather(self.communicator, self.first_call_s or 0.0))
        heartbeat = self.workload.heartbeat
        self.communicator.barrier()
        try:
            if heartbeat is not None:
                heartbeat.steps = 1
            with quiet_interpreter(settings):
                warmup_s, steady = warm_up(lambda: self._sample(self._together(1))[0], settings)
                known = warmup_s[-3:] or self._sample(self._together(1))
                step_s = max(statistics.median(known), 1e-9)
                count = min(settings.max_rounds, max(settings.min_rounds, int(settings.max_time_s / step_s)))
                chunk = max(1, int(CHUNK_S / step_s))
                self.times = [[] for _ in range(self.communicator.size)]
                self.traffic, self._counted = dict.fromkeys(TRAFFIC, 0.0), 0
                for start in range(0, count, chunk):
                    for own, more in zip(self.times, self._together(min(chunk, count - start)), strict=True):
                        own += more
                self._take_parts(count)
        finally:
            if heartbeat is not None:
                heartbeat.steps = 0
        samples_s = self._sample(self.times)
        return Samples(
            first_call_s, warmup_s, samples_s, steady and not still_falls(samples_s),
            "rounds" if count == settings.max_rounds else "time", settings.confidence,
        )  # fmt: skip

    def _take_parts(self, timed: int) -> None:
        """Make a few more steps, whose parts are clocked."""
        if self._is_opaque:
            return
        counted = dict(self.traffic), self._counted
        if self.scheme.serves:
            self._steps(0)
        else:
            self._parts = take_parts(self.scheme, self._step, steps_of(timed))
            self._end_of_steps()
        self.traffic, self._counted = counted
        self._losses.clear()

    def _sample(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Combine the times of all ranks, step by step."""
        together = max if self.scheme.synchronous else statistics.fmean
        return [together(each) for each in zip(*(times[rank] for rank in self.trainers), strict=True)]

    # Proofs.

    def proof(self) -> Iterator[Check]:
        """Check the first steps in float64 and as timed.

        In float64 a synchronous scheme makes the steps of one process on all ranks' batches, and
        each other scheme those of its published rule. As timed, the losses are those in float64.
        """
        workload, executor = self.workload, self.workload.exact
        name = f"{self.how.scheme}, {self.communicator.size} ranks, {executor.mode} fp64"
        batches = self.by_rank(self.few, PROOF_STEPS)
        losses, found = self.train(self.scheduled(self.replica_of(executor)), batches)
        right = right_weights(self, self.replica_of(executor), batches)
        against = f"{name} vs {self.rule_name}"
        rounding = getattr(self.scheme.settings, "rounding", 0.0)
        if rounding:  # later steps amplify it
            found, right = found[:1], right[:1]
        yield max(check_weights(against, found, right, max(FLOAT64, rounding)), key=lambda check: check.error)
        workload.proved_scheme = losses, name
        yield from self._check_losses("")

    def _check_losses(self, when: str) -> Iterator[Check]:
        """Check the first steps' losses as timed against those in float64."""
        executor, (losses, name) = self.workload.executor, self.workload.proved_scheme
        if executor.drops:  # no float64 run drops the same
            return
        own, _ = self.train(self.scheduled(self.replica_of(executor)), self.by_rank(self._full, PROOF_STEPS))
        if own:
            what = f"losses of {PROOF_STEPS} steps{when}, {executor.mode} {executor.precision} vs {name}"
            yield Check(what, relative_l2(np.array(own), np.array(losses)), self.losses_tolerance)

    @property
    def losses_tolerance(self) -> float:
        """Accepted error of the losses of a few steps."""
        return max(self.workload.tolerance.trajectory, float(np.max(self.workload.proved_run.tolerances)))

    @property
    def rule_name(self) -> str:
        """The definition that `right_weights` follows."""
        return "one process" if self.scheme.synchronous else "its rule"

    def _full(self, rank: int, step: int) -> dict[str, np.ndarray]:
        """Return `few`, repeated until the batch is full."""
        return self.workload.arrays(self.workload.repeated(*self.batches(rank)[step % FEEDS]))

    def by_rank(self, make: Callable[[int, int], Arrays], steps: int) -> list[list[Arrays | None]]:
        """Return batches by step and rank from a function of both; None on a server rank."""
        ranks = range(self.communicator.size)
        return [[make(rank, step) if rank in self.trainers else None for rank in ranks] for step in range(steps)]

    def scheduled(self, replica: Replica) -> Scheme:
        """Make a scheme with a fixed order of updates."""
        if self._is_opaque and not self.scheme.synchronous:
            return self.make_scheme(replica, **{IN_TURN: True})
        return self.make_scheme(replica, **({"schedule": self.trainers} if self.serving else {}))

    def train(self, scheme: Scheme, batches: Sequence[Sequence[Arrays | None]]) -> tuple[list[float], list[Arrays]]:
        """Train through a scheme; return this rank's losses, and weights by step and at the end."""
        replica = scheme.replica
        executor = replica.trainer.executor
        _, name = executor.network.require_loss()
        losses, weights = [], []
        if scheme.serves:
            scheme.serve()
        else:
            for each in batches:
                arrays = each[self.communicator.rank]
                assert arrays is not None
                losses.append(float(executor.fetch(scheme.step(executor.feed(arrays)))[name]))
                weights.append(scheme.weights())
        scheme.finish()
        return losses, [*weights, replica.weights()]

    def replica_of(self, executor: Executor) -> Replica:
        """Return a replica in its initial state."""
        workload = self.workload
        workload.restore(executor)
        if executor is workload.executor:
            workload.trainer.load_state(workload.trainer.initial_state())
            return self.replica
        return workload.backend.replica(workload.backend.trainer(executor, workload.optimizer))

    def check(self) -> Iterable[Check]:
        """Check that all ranks end with equal parameters and the timed scheme follows its rule."""
        if not self.serving:
            self.scheme.finish()
        yield self.check_parameters()
        if not self._is_opaque:
            yield check_messages(self.communicator, self.traffic)
            yield from check_scheme(self)
            yield from check_replica(self.workload, self.replica)
        yield from self._check_losses(" after the timed ones")

    def check_parameters(self) -> Check:
        """Check that all ranks have equal parameters."""
        digest = hashlib.sha256()
        held = self.workload.executor.parameters()
        for name in self.workload.network.parameters:
            digest.update(np.ascontiguousarray(held[name]).tobytes())
        found = gather(self.communicator, digest.hexdigest())
        differ = [rank for rank, each in enumerate(found) if each != found[0]]
        what = f"ranks {', '.join(map(str, differ))} differ from rank 0" if differ else "all ranks"
        return Check("parameters after the timed steps, bit by bit", float(len(differ)), 0.0, what)

    # Record.

    def record(self, samples: Samples) -> dict[str, Any]:
        communicator = self.communicator
        each = {
            name: None if self._is_opaque else value / max(self._counted, 1) for name, value in self.traffic.items()
        }
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        own = {"host": communicator.hosts[communicator.rank], "cpus": cpus, "parts": self._parts or None, **each}
        found = gather(communicator, {**own, "peak_memory_bytes": self.memory.get("peak_bytes")})
        medians = {rank: statistics.median(self.times[rank]) for rank in self.trainers}
        ranks = [{"rank": rank, **facts, "median_s": medians.get(rank)} for rank, facts in enumerate(found)]
        parts = [found[rank]["parts"] for rank in self.trainers]
        return {
            "distributed": {
                **self.facts(),
                "straggler_ratio": None if self._is_opaque else straggler_ratio([p["computing_s"] for p in parts]),
                "spread": spread([self.times[rank] for rank in self.trainers]).to_dict(),
                "parts": None
                if self._is_opaque
                else {
                    name: None if parts[0][name] is None else statistics.fmean(each[name] for each in parts)
                    for name in parts[0]
                },
                "ranks": ranks,
            }
        }

    def facts(self) -> dict[str, Any]:
        """Return how the ranks train together, and the traffic."""
        communicator, how = self.communicator, self.how
        weights = list(self.replica.weights().values())
        elements, itemsize = sum(each.size for each in weights), weights[0].itemsize
        return {
            "scheme": how.scheme,
            "settings": self.scheme.settings.to_dict(),
            "native": how.native,
            "synchronous": self.scheme.synchronous,
            "communicator": self._transport(),
            "algorithm": communicator.algorithm,
            "launcher": how.launcher,
            "oversubscribed": how.oversubscribe,
            "trainers": len(self.trainers),
            "bytes_per_step": self.scheme.bytes_per_step(elements, itemsize),
        }

    def _transport(self) -> str:
        """Return the transport of gradients: the communicator, or the framework's own."""
        if not self._is_opaque:
            return self.communicator.name
        return self.workload.backend.schemes[self.how.scheme].transports[self.workload.job.device]

    def series(self) -> dict[str, list[float]]:
        return {f"rank{rank}_s": times for rank, times in enumerate(self.times) if times}

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition(gradients=True, optimizer=True)


class DistributedTraining(MeasurementOfRanks):
    """Forward, backward, communication and update, on all ranks."""

    name = "distributed_step"
    level = 3
    ranks_of = "training_step"
    takes_turns = False
    needs = ("gradient", "level 2", "level 3")
    takes_memory = True
    table = STEPS
    plot = "steps"
    schema: ClassVar[dict[str, Any]] = {
        "required": ["distributed"],
        "properties": {
            "distributed": {
                "type": "object",
                "required": [
                    *("scheme", "settings", "communicator", "algorithm", "launcher", "trainers", "straggler_ratio"),
                    *("spread", "parts", "bytes_per_step", "ranks"),
                ],
                "properties": {
                    **FACTS,
                    "straggler_ratio": {
                        "type": ["number", "null"], "minimum": 1,
                        "description": "computing of the slowest rank over that of the median rank; null of a "
                        "framework's own scheme, whose parts are not known",
                    },
                    "spread": {
                        "type": "object",
                        "description": "over_steps: 5th to 95th percentile over the median; over_ranks: fastest to "
                        "slowest rank of a step over their median",
                        "additionalProperties": {"type": "number", "minimum": 0},
                    },
                    "parts": {
                        "anyOf": [PARTS, {"type": "null"}],
                        "description": "mean of the ranks that train; null of a framework's own scheme",
                    },
                    "ranks": {
                        "type": "array", "minItems": 1,
                        "description": "by rank; traffic is per step, and what a transport does by itself is not "
                        "counted as bytes and messages, but as opaque calls; null of a framework's own scheme",
                        "items": {
                            "type": "object",
                            "required": ["rank", "host", "median_s", *TRAFFIC],
                            "properties": {
                                "rank": {"type": "integer", "minimum": 0},
                                "host": {"type": "string"},
                                "cpus": {"type": "array", "items": {"type": "integer"}},
                                "median_s": {"type": ["number", "null"], "description": "null of a rank that serves"},
                                "peak_memory_bytes": {"type": ["integer", "null"]},
                                "parts": {"anyOf": [PARTS, {"type": "null"}]},
                                **{name: {"type": ["number", "null"], "minimum": 0} for name in TRAFFIC},
                            },
                        },
                    },
                },
            },
            "scaling": SCALING,
        },
    }  # fmt: skip

    def prepare(self, workload: NetworkWorkload) -> Step:
        return DistributedStep(workload)

    def prove(self, workload: NetworkWorkload, step: DistributedStep) -> Iterable[Check]:
        """Prove every rank's executor and trainer, then the scheme."""
        yield from prove_training(workload)
        yield from workload.once("distributed", step.proof)
