"""A record as a benchmark: the samples that a worker took, repeated to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from d5suite.errors import D5Error
from d5suite.pytest_plugin import stash

if TYPE_CHECKING:
    from d5suite.session import MeasurementResult


class ReplayTimer:
    """A timer for pytest-benchmark that repeats times taken elsewhere."""

    __name__ = "d5suite_replay"

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, samples_s: list[float]) -> None:
        """Replay these durations, in seconds, one per round."""
        self._readings = (reading for sample in samples_s for reading in (0.0, sample))

    def __call__(self) -> float:
        """Return the next reading: 0 at a round's start, the sample at its end."""
        return next(self._readings)


def replay(
    request: pytest.FixtureRequest,
    benchmark: Any,
    target: stash.BenchmarkTarget,
    timer: ReplayTimer,
    result: MeasurementResult,
) -> None:
    """Repeat the samples of a measurement in pytest-benchmark, or fail as the measurement did."""
    from d5suite.report.schema import check_record

    config = request.config
    if result.record is None:
        _fail(request, benchmark, target, result)
        return
    try:
        check_record(result.record, target.measurement)
    except D5Error as error:
        pytest.fail(str(error), pytrace=False)
    benchmark.extra_info["d5suite"] = result.record
    timer.load(result.samples_s)
    benchmark.pedantic(lambda: None, rounds=len(result.samples_s), iterations=1)
    config.stash[stash.RECORDS][request.node.nodeid] = result.series
    config.stash[stash.RESULTS].append({
        "group": benchmark.group, "param": str(target), "extra_info": {"d5suite": result.record},
        "stats": {"data": result.samples_s}, "measurement": target.measurement,
    })  # fmt: skip


def _fail(
    request: pytest.FixtureRequest, benchmark: Any, target: stash.BenchmarkTarget, result: MeasurementResult
) -> None:
    failure = result.failure or "no result"
    request.config.stash[stash.FAILURES].append(
        {"group": benchmark.group, "backend": target.wanted.runner, "wrong": result.wrong, "message": failure}
    )
    if result.kept:
        from d5suite.pytest_plugin.saving import where_kept

        kept = stash.Kept(target.measurement, benchmark.group, str(target), result.kept)
        request.config.stash[stash.KEPT][request.node.nodeid] = kept
        failure += where_kept(request.config, kept)
    pytest.fail(failure, pytrace=False)
