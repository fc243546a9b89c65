"""Overhead of the sampling loop: an empty step, and a step of known length.

``pytest benchmarks/bench_harness.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.instruments.sampling import Samples, sample
from d5suite.instruments.settings import SamplingSettings

BUSY_S = 5e-3
SETTINGS = SamplingSettings(min_rounds=100, relative_precision=0.0)
REPEATS = 5


def busy_wait() -> None:
    """Return after 5 ms by a clock other than the harness's."""
    end = time.monotonic_ns() + int(BUSY_S * 1e9)
    while time.monotonic_ns() < end:
        pass


def measure(benchmark: BenchmarkFixture, step: Callable[[], None], name: str) -> float:
    """Return the median over repeats of the harness's median, in seconds."""
    runs: list[Samples] = []
    benchmark.pedantic(lambda: runs.append(sample(step, lambda: None, SETTINGS)), rounds=REPEATS)
    medians = [run.median_s for run in runs]
    benchmark.extra_info[name] = {"median_s": statistics.median(medians), "medians_s": medians}
    return statistics.median(medians)


def test_a_busy_wait_of_5_ms_is_reported_within_one_percent(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    error = measure(benchmark, busy_wait, "busy_wait") / BUSY_S - 1
    benchmark.extra_info["relative_error"] = error
    with capsys.disabled():
        print(f"\na step of 5 ms is reported {error:+.3%} off (limit 1%)")
    assert abs(error) <= 0.01


def test_an_empty_step_costs_under_two_microseconds(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = measure(benchmark, lambda: None, "empty_step")
    with capsys.disabled():
        print(f"\nan empty step is reported as {cost * 1e6:.3f} µs (limit 2 µs)")
    assert cost < 2e-6
