"""The timed step of several ranks."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from d5suite.distributed.gathering import gather
from d5suite.distributed.schemes import make_scheme
from d5suite.distributed.schemes.all_reduce import AVERAGE
from d5suite.errors import JobError, ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples, quiet_interpreter
from d5suite.instruments.settings import SamplingSettings
from d5suite.instruments.sockets import moved, tcp_bytes
from d5suite.instruments.warmup import still_falls, warm_up
from d5suite.levels.distributed import Replica, Scheme, Traffic
from d5suite.levels.network import Arrays, Native
from d5suite.measurements.base import STEP, Phase, Step
from d5suite.measurements.distributed.ordering import ordering
from d5suite.measurements.distributed.parts import steps_of, take_parts
from d5suite.measurements.distributed.placement import placements
from d5suite.measurements.training.steps import WHOLE
from d5suite.statistics.ranks import spread, straggler_ratio
from d5suite.workloads.network import FEEDS, Batch, NetworkWorkload

CHUNK_S = 2.0
"""Seconds of steps after which losses are read, so that a rank that diverges is named soon."""

TRAFFIC = tuple(name for name in asdict(Traffic()) if name != "calls")
"""Counters of a rank's messages."""


class DistributedStep(Step):
    """One step of all ranks, each on batches of its own part of the data.

    Attributes
    ----------
    trainers : list of int
        Ranks that train; other ranks are servers.
    serving : bool
        Whether there is a server.
    times : list of list of float
        Seconds of the timed steps, by rank.
    first_losses : list of float
        This rank's losses of the first timed steps, one per batch that it takes in turn.
    feeds : list
        This rank's native batches, each made when it is first needed.
    traffic : dict of str to float
        This rank's messages of the timed steps, by `TRAFFIC`.
    tcp_bytes : int
        Bytes that a framework's own scheme has sent through this rank's TCP sockets in the timed
        steps, and received where servers of its own hold the parameters; 0 where that is unknown.
    random : mapping of str to numpy.ndarray
        State of Dropout's generator before the timed steps; empty without Dropout.
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
        self.built_s = workload.built_s(trainer=True)
        self.times: list[list[float]] = []
        self.serving = any(serving)
        self.first_losses: list[float] = []
        self.random: Arrays = {}
        self.feeds: list[Native] = []
        self._turn = 0
        self._losses: list[Native] = []
        self._parts: dict[str, float | None] = {}
        self.traffic = dict.fromkeys(TRAFFIC, 0.0)
        self.tcp_bytes = 0
        self._counted = 0

    def make_scheme(self, replica: Replica, **settings: Any) -> Scheme:
        """Make this rank's part of the job's scheme; ``settings`` override the job's."""
        chosen = {**self.how.settings, **settings}
        return make_scheme(self.how.scheme, replica, self.communicator, self.workload.backend, **chosen)

    @property
    def is_opaque(self) -> bool:
        """Whether the framework communicates by itself: d5suite cannot count or clock that."""
        return self.how.native and self.communicator.size > 1

    @property
    def _has_servers(self) -> bool:
        """Whether the framework's own servers send what its ranks receive."""
        schemes = self.workload.backend.schemes
        return self.how.scheme in schemes and schemes[self.how.scheme].servers

    @property
    def counted(self) -> int:
        """Timed steps in which traffic was counted."""
        return self._counted

    # Data.

    def batches(self, rank: int) -> list[Batch]:
        """Return the batches that a rank takes in turn; a server takes none."""
        if rank not in self.trainers:
            return []
        return self.workload.batches_of(self.trainers.index(rank), len(self.trainers))

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

    def make(self, count: int) -> None:
        self._steps(count)
        self._losses.clear()

    def phases(self) -> Iterable[Phase]:
        if self.scheme.serves:
            yield Phase(self.scheme, "serve", "serve")
            return
        yield Phase(self, "_step", STEP)
        yield Phase(self, "synchronize", "wait for the device")
        yield Phase(self.workload.executor, "feed", "feed", role="data_transfer")
        if self.is_opaque:
            yield Phase(self.scheme, "step", f"{WHOLE}, with messages of the framework")
            return
        yield Phase(self.workload.trainer, "step", WHOLE)
        yield Phase(self.replica, "gradients", "forward and backward")
        yield Phase(self.replica, "gradients_early", "forward and backward")
        yield Phase(self.replica, "gradients_across", "update, forward and backward")
        yield Phase(self.replica, "apply", "update")
        yield Phase(self.scheme, "exposed", "communicate", "context", "task_wait")
        yield Phase(self.scheme, "average", AVERAGE)

    def reset(self) -> None:
        self.workload.restart()
        self.scheme = self.make_scheme(self.replica)
        self._turn = 0
        self._losses.clear()
        self.first_losses = []

    def _steps(self, count: int) -> list[float]:
        """Make steps; return this rank's seconds per step, none on a server."""
        times = []
        before, sockets = self._sent(), tcp_bytes() if self.is_opaque else {}
        if self.scheme.serves:
            self.scheme.serve()
        else:
            times = [self._step() for _ in range(count)]
            start = now()
            self.scheme.settle()
            self.synchronize()
            if times:
                times[-1] += now() - start
        self._end_of_steps()
        if sockets:
            self.tcp_bytes += sum(moved(sockets, tcp_bytes())[: 1 + self._has_servers])
        for name, value in self._sent().items():
            self.traffic[name] += value - before[name]
        self._counted += count
        return times

    def _step(self) -> float:
        """Make a step on a rank that trains; return its seconds."""
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
        self.scheme.settle()
        if self.serving:  # a server returns when all others have finished
            self.scheme.finish()
            self.scheme = self.make_scheme(self.replica)

    def _beat(self) -> None:
        if self.workload.heartbeat is not None and self.workload.heartbeat.steps:
            self.workload.heartbeat.steps += 1

    def _sent(self) -> dict[str, float]:
        traffic = self.communicator.traffic.values()
        return {name: sum(getattr(each, name) for each in traffic) for name in TRAFFIC}

    def _together(self, count: int) -> list[list[float]]:
        """Make steps on all ranks; return every rank's seconds. Raise if a rank has diverged."""
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

    def begin(self) -> None:
        self.reset()
        self.random = self.workload.executor.random_state() if self.workload.executor.drops else {}

    def time(self, settings: SamplingSettings) -> Samples:
        """Take the samples. All ranks make the same number of steps, derived from all their times.

        A sample is the slowest rank's time where ranks wait for each other, else the mean.
        """
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
                self.traffic, self.tcp_bytes, self._counted = dict.fromkeys(TRAFFIC, 0.0), 0, 0
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
        """Make a few more steps and clock their parts."""
        if self.is_opaque:
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

    # Record.

    def record(self, samples: Samples) -> dict[str, Any]:
        communicator, opaque = self.communicator, self.is_opaque
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        own = {
            "host": communicator.hosts[communicator.rank],
            "cpus": cpus,
            "parts": self._parts or None,
            **{name: None if opaque else value / max(self._counted, 1) for name, value in self.traffic.items()},
            "peak_memory_bytes": self.memory.get("peak_bytes"),
        }
        found = gather(communicator, own)
        medians = {rank: statistics.median(self.times[rank]) for rank in self.trainers}
        straggler = slowest = parts = None
        if not opaque:
            trained = [found[rank]["parts"] for rank in self.trainers]
            computing = [each["computing_s"] for each in trained]
            straggler, slowest = straggler_ratio(computing), self.trainers[computing.index(max(computing))]
            parts = {
                name: None if value is None else statistics.fmean(each[name] for each in trained)
                for name, value in trained[0].items()
            }
        return {
            "distributed": {
                **self.facts(),
                "straggler_ratio": straggler,
                "slowest_rank": slowest,
                "spread": spread([self.times[rank] for rank in self.trainers]).to_dict(),
                **(
                    {}
                    if opaque or communicator.size == 1
                    else {"ordering": ordering(self.scheme, trained, samples.samples_s)}
                ),
                "parts": parts,
                "ranks": [{"rank": rank, **each, "median_s": medians.get(rank)} for rank, each in enumerate(found)],
            },
            "placement": placements(communicator, self.workload.job.device, self._transport() if opaque else ""),
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
        if not self.is_opaque:
            return self.communicator.name
        return self.workload.backend.schemes[self.how.scheme].transports[self.workload.job.device]

    def series(self) -> dict[str, list[float]]:
        return {f"rank{rank}_s": times for rank, times in enumerate(self.times) if times}

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition(gradients=True, optimizer=True)
