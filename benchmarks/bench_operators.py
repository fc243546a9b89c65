"""Overhead of level 0: a kernel's reported time against that of a call written by hand.

The two alternate. The bare loop runs `benchmarks.handwritten`, which shares no code with the
adapter, so anything that the adapter puts around its native call shows. A backend that has nothing
written by hand is compared with the call of its framework's own operator object.

``pytest benchmarks/bench_operators.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.handwritten import OperatorCall, handwritten
from d5suite.backends import discover
from d5suite.instruments.sampling import sample_kernel
from d5suite.instruments.settings import SamplingSettings
from d5suite.instruments.threads import allowed_cpus
from d5suite.levels.backend import Backend
from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation
from d5suite.statistics.intervals import median_interval

LIMIT, LONG_S, LIMIT_S = 1.02, 100e-6, 1e-6
"""A call of 100 µs or more may take `LIMIT` times as long; a shorter one, `LIMIT_S` longer."""

LEAST_ROUNDS = 15
MOST_ROUNDS = 60
"""Rounds at most, while the interval still includes the accepted overhead."""

LONG = Operation("Gemm", {"A": (512, 512), "B": (512, 512)}, name="512³ product")
SHORT = Operation("Relu", {"X": (1000,)}, name="ReLU of 1000 values")
SETTINGS = SamplingSettings(max_time_s=0.05, relative_precision=0.0)
BACKENDS = [backend.name for backend in discover()[0].values() if 0 in backend.levels]


def pair(backend: Backend, operation: Operation) -> tuple[Operator, tuple[Any, ...], OperatorCall]:
    """Return the operator, its feed and the hand-written call, whose answers agree."""
    operator = backend.operator(operation)
    arrays = operation.draw(0)
    feed = tuple(operator.feed(arrays))
    module = handwritten(backend)
    if module is None:
        return (
            operator,
            feed,
            OperatorCall(operator.forward, feed, operator.synchronize, lambda outputs: operator.fetch(outputs)[0]),
        )
    native: OperatorCall = module.operator_call(
        operation.node.op_type, arrays, mode=operator.mode, device=operator.device
    )
    (ours,), theirs = operator.fetch(operator.forward(*feed)), native.fetch(native.call(*native.arguments))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    return operator, feed, native


def bare(native: OperatorCall, count: int) -> float:
    """Return the median time of a call in a bare loop of ``count`` calls."""
    call, arguments = native.call, native.arguments
    times = []
    gc.collect()
    gc.disable()
    end = time.perf_counter() + SETTINGS.max_time_s
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(count - 1):
            call(*arguments)
        native.synchronize(call(*arguments))
        times.append((time.perf_counter() - start) / count)
    gc.enable()
    return statistics.median(times)


class Rounds(NamedTuple):
    """Seconds of one call by round: as level 0 reports them, and in the bare loop."""

    ours: list[float]
    bare: list[float]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(x / y for x, y in zip(self.ours, self.bare, strict=True))

    @property
    def added_s(self) -> float:
        """The median of the rounds' differences."""
        return statistics.median(x - y for x, y in zip(self.ours, self.bare, strict=True))

    @property
    def excess_s(self) -> list[float]:
        """Seconds above the limit, by round: 2% of a call from 100 µs on, 1 µs of a shorter one."""
        long = statistics.median(self.bare) >= LONG_S
        return [x - (LIMIT * y if long else y + LIMIT_S) for x, y in zip(self.ours, self.bare, strict=True)]

    @property
    def undecided(self) -> bool:
        """Whether the 95% interval of the excess includes 0."""
        low, high = median_interval(self.excess_s)
        return low <= 0 <= high

    @property
    def acceptable(self) -> bool:
        """Whether the overhead is within the limit."""
        return statistics.median(self.excess_s) <= 0


def alternate(operator: Operator, feed: tuple[Any, ...], native: OperatorCall, *, least: int = LEAST_ROUNDS) -> Rounds:
    """Take rounds of both, in alternating order."""
    _, count = sample_kernel(operator.forward, feed, operator.synchronize, SETTINGS)
    found = Rounds([], [])
    while len(found.ours) < least or (found.undecided and len(found.ours) < MOST_ROUNDS):
        for which in ("ours", "bare") if len(found.ours) % 2 else ("bare", "ours"):
            if which == "ours":
                samples, _ = sample_kernel(operator.forward, feed, operator.synchronize, SETTINGS)
                found.ours.append(samples.median_s)
            else:
                found.bare.append(bare(native, count))
    return found


@pytest.mark.parametrize("name", BACKENDS)
def test_a_kernel_is_timed_as_a_bare_loop_times_the_native_call(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    backend = discover()[0][name]
    problem = backend.problem()
    if problem:
        pytest.skip(problem)
    backend.load("runtime").configure(threads=len(allowed_cpus()), seed=0, device="cpu")
    found: dict[str, Rounds] = {}

    def run() -> None:
        found.update({operation.name: alternate(*pair(backend, operation)) for operation in (LONG, SHORT)})

    benchmark.pedantic(run, rounds=1)
    with capsys.disabled():
        print(f"\n{name} (limit {LIMIT} from {LONG_S * 1e6:g} µs upward, {LIMIT_S * 1e9:g} ns added below)")
        for operation, rounds in found.items():
            call = statistics.median(rounds.bare)
            noise = ", undecided" if rounds.undecided else ""
            print(
                f"  {operation}: {call * 1e6:.2f} µs, {rounds.ratio:.4f} times the bare loop, "
                f"{rounds.added_s * 1e9:+.0f} ns{noise} ({len(rounds.ours)} rounds)"
            )
            benchmark.extra_info[operation] = {
                "bare_s": call, "ratio": rounds.ratio, "added_s": rounds.added_s, "rounds": len(rounds.ours)
            }  # fmt: skip
    assert [operation for operation, rounds in found.items() if not rounds.acceptable] == []
