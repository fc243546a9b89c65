"""What level 0 adds to a native call: a kernel's reported time over the same call in a bare loop, in turn.

``pytest benchmarks/bench_operators.py`` prints the figures; ``--benchmark-json`` keeps them, in ``extra_info``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.measure.sampling import SamplingSettings, sample_kernel
from d5suite.measure.threads import allowed_cpus
from d5suite.network.operation import Operation

ROUNDS = 15
LONG = Operation("Gemm", {"A": (512, 512), "B": (512, 512)}, name="a product of more than 100 µs")
SHORT = Operation("Relu", {"X": (1000,)}, name="1000 values")
SETTINGS = SamplingSettings(max_time_s=0.05, relative_precision=0.0)
BACKENDS = [backend for backend in discover()[0].values() if 0 in backend.levels]


def bare(call: Callable[..., Any], arguments: Any, synchronize: Callable[[], None], count: int) -> float:
    """Median time of a call in a loop, with nothing of d5suite around it."""
    times = []
    end = time.perf_counter() + SETTINGS.max_time_s
    while time.perf_counter() < end:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call(*arguments)
        synchronize()
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def alternate(operation: Operation, name: str) -> tuple[float, float]:
    """Median ratio and difference (in seconds) of the two over rounds that take both, in changing order."""
    backend = discover()[0][name]
    backend.load("runtime").configure(threads=len(allowed_cpus()), seed=0, device="cpu")
    operator = backend.operator(operation)
    feed = tuple(operator.feed(operation.draw(0)))
    operator.forward(*feed)
    ratios, differences = [], []
    for index in range(ROUNDS):
        found = {}
        for which in ("ours", "bare") if index % 2 else ("bare", "ours"):
            if which == "ours":
                samples, count = sample_kernel(operator.forward, feed, operator.synchronize, SETTINGS)
                found[which] = samples.median_s
            else:
                count = 1 if operation is LONG else 100
                found[which] = bare(operator.forward, feed, operator.synchronize, count)
        ratios.append(found["ours"] / found["bare"])
        differences.append(found["ours"] - found["bare"])
    return statistics.median(ratios), statistics.median(differences)


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS])
def test_a_kernel_is_timed_as_a_bare_loop_times_it(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    problem = discover()[0][name].problem()
    if problem:
        pytest.skip(problem)
    found: dict[str, tuple[float, float]] = {}

    def run() -> None:
        found.update({operation.name: alternate(operation, name) for operation in (LONG, SHORT)})

    benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update(found)
    (ratio, _), (_, added) = found[LONG.name], found[SHORT.name]
    with capsys.disabled():
        print(f"\n{name}: {ratio:.4f} times the bare loop (limit 1.02); {added * 1e9:+.0f} ns per short call (1000)")
    assert ratio <= 1.02
    assert added <= 1e-6
