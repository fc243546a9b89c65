"""Latency and bus bandwidth of a collective by size, and a line fitted to its times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.distributed.placement import SCHEMA as PLACEMENT
from d5suite.measurements.distributed.placement import placements
from d5suite.measurements.schemas import array, by_name, integer, mapping, number, or_null, pair, record, text
from d5suite.measurements.tables import COLLECTIVES
from d5suite.statistics.intervals import median_interval
from d5suite.statistics.messages import fit_line
from d5suite.validate.check import Check
from d5suite.workloads.collective import CollectiveWorkload, Messages

LEAST_SHARE = 0.01
"""Smallest fraction of the largest size's time that the bandwidth term must explain; with less,
beta means nothing."""

_SIZE = mapping(
    {
        "bytes": integer("of the whole array, S of nccl-tests", minimum=1),
        "median_s": number("of a call, the slowest rank", exclusiveMinimum=0),
        "median_ci95": pair(),
        "samples": integer(minimum=1),
        "calls": integer("per sample, one after the other", minimum=1),
        "bus_bytes_per_s": number("as nccl-tests defines it", minimum=0),
        "ranks_s": by_name(number(minimum=0), "each rank's median of a call, over ranks: min, mean, max"),
        "overlap": or_null(
            number(
                "part of the time in which ranks can compute, as the OSU Micro-Benchmarks define it; null of a call "
                "that blocks",
                minimum=0,
                maximum=1,
            )
        ),
        "traffic": by_name(integer(), "of one call, on the rank that sends most; opaque_calls: not counted"),
    },
    optional=["ranks_s", "overlap"],
)

SCHEMA = record(
    {
        "communicator": text("what moves the data between ranks"),
        "algorithm": text("of the collective; native: the transport's own"),
        "hosts": array(text(), "by rank"),
        "placement": PLACEMENT,
        "sizes": array(_SIZE, "smallest first; the record's samples are those of the largest", minItems=2),
        "line": mapping(
            {
                "alpha_s": number(minimum=0),
                "beta_s_per_byte": number(minimum=0),
                "bytes_per_s": or_null(number("1 / beta; null if that is too small")),
                "residual": number("root mean square of relative errors", minimum=0),
            },
            description="time = alpha + beta * bytes, by robust least squares of relative errors",
        ),
        "latency_s": number("of the smallest size", exclusiveMinimum=0),
        "bus_bytes_per_s": number("of the best size", minimum=0),
    },
    optional=["placement"],
)


class CollectiveStep(Step):
    """All sizes of a collective; each is proved, timed and proved again."""

    def __init__(self, workload: CollectiveWorkload) -> None:
        self.workload = workload
        self.items = workload.sizes[-1]
        self._found: list[tuple[Messages, Samples, dict[str, int], float | None]] = []
        self.checks: list[Check] = []

    def call_first(self) -> None:
        """Do nothing: the proof makes the first call."""

    def make_one(self) -> None:
        for size in self.workload.sizes:
            messages = self.workload.messages(size)
            messages.fill()
            messages.run()

    def prove(self, size: int) -> Iterator[Check]:
        """Check one call against known sums."""
        messages = self.workload.messages(size)
        messages.fill()
        messages.run()
        yield _exact(f"{messages.name} of {messages.nbytes} bytes vs known numbers", messages.wrong())
        if messages.name == "all_reduce":
            name = f"all_reduce of {messages.nbytes} bytes of any numbers: ranks that differ from rank 0"
            yield _exact(name, messages.differing())

    def time(self, settings: SamplingSettings) -> Samples:
        tell = self.workload.tell
        for size in self.workload.sizes:
            messages = self.workload.messages(size)
            if self.workload.communicator.rank == 0:
                tell(f"{messages.nbytes} bytes", {"series": self.series()})
            messages.fill()
            traffic = messages.traffic()
            samples = messages.time(settings)
            name = f"{messages.name} of {messages.nbytes} bytes, timed, vs known numbers"
            self.checks.append(_exact(name, messages.wrong()))
            overlap = messages.overlap()
            messages.free()
            self._found.append((messages, samples, traffic, overlap))
        return self._found[-1][1]

    def record(self, samples: Samples) -> dict[str, Any]:
        communicator = self.workload.communicator
        sizes = [_size(*each) for each in self._found]
        line = fit_line([each["bytes"] for each in sizes], [each["median_s"] for each in sizes])
        beta = line.beta_s_per_byte
        meaningful = beta * sizes[-1]["bytes"] > LEAST_SHARE * sizes[-1]["median_s"]
        return {
            "communicator": communicator.name,
            "algorithm": communicator.algorithm,
            "hosts": list(communicator.hosts),
            "placement": placements(communicator, self.workload.job.device),
            "sizes": sizes,
            "line": {**line.to_dict(), "bytes_per_s": 1 / beta if meaningful else None},
            "latency_s": sizes[0]["median_s"],
            "bus_bytes_per_s": max(each["bus_bytes_per_s"] for each in sizes),
        }

    def series(self) -> dict[str, list[float]]:
        return {f"seconds_of_{messages.nbytes}_bytes": samples.samples_s for messages, samples, *_ in self._found}


def timed_sums(workload: CollectiveWorkload, step: CollectiveStep) -> Iterable[Check]:
    """Return the checks of all calls of each size's last sample: later calls may lose elements."""
    return step.checks


def _exact(name: str, error: float) -> Check:
    return Check(name, float(error), 0.0)


def _size(messages: Messages, samples: Samples, traffic: dict[str, int], overlap: float | None) -> dict[str, Any]:
    median, of_ranks = statistics.median(samples.samples_s), messages.rank_medians_s
    return {
        "bytes": messages.nbytes,
        "median_s": median,
        "median_ci95": list(median_interval(samples.samples_s)),
        "samples": len(samples.samples_s),
        "calls": messages.copies,
        "bus_bytes_per_s": messages.nbytes / median * messages.call.factor(messages.communicator.size),
        "ranks_s": {"min": min(of_ranks), "mean": statistics.fmean(of_ranks), "max": max(of_ranks)},
        "overlap": overlap,
        "traffic": traffic,
    }


class CollectiveTimes(Measurement):
    """A collective at several sizes, with one communicator and one algorithm."""

    name = "collectives"
    level = 3
    takes_turns = False
    unit = "bytes/s"
    runs_network = False
    without_memory = "not taken of collectives"
    table = COLLECTIVES
    plot = "collectives"
    schema = SCHEMA
    checks_after = (timed_sums,)

    def prepare(self, workload: CollectiveWorkload) -> Step:
        workload.require_memory()
        return CollectiveStep(workload)

    def prove(self, workload: CollectiveWorkload, step: CollectiveStep) -> Iterator[Check]:
        """Check all sizes against known sums; ranks must agree bit by bit."""
        for size in workload.sizes:
            yield from step.prove(size)
