"""What the account of a workflow costs: runs with and without the clocks of its couplings, in turn.

Both sides are threads of this process, so that nothing but the couplings differs between turns. The
work between messages is a stencil of 64 × 64 points, ten steps a message. Without clocks, each end
of a channel calls directly what it otherwise counts. Turns alternate, so a disturbance that slows
both cancels. The mark is a ratio of at most 1.01.

``pytest benchmarks/bench_workflow.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.distributed.communicators.threads import run
from d5suite.levels.distributed import Communicator
from d5suite.statistics.ratios import paired_ratio
from d5suite.workflows.couplings.base import End, Field
from d5suite.workflows.heat import Stencil, drawn_modes
from d5suite.workflows.ports import Joint, close_ports, end_ports, open_ports

POINTS, STRIDE, MESSAGES, PAIRS, LIMIT = 64, 10, 60, 25, 1.01

FIELDS = {"temperature": Field((POINTS, POINTS), "float64", "K")}


@contextmanager
def without_clocks() -> Iterator[None]:
    """Let couplings count no time."""
    counted = End._await, End._move

    def directly(self: End, function: Callable[..., Any], *given: Any) -> Any:
        return function(*given)

    End._await = End._move = directly  # type: ignore[method-assign]
    try:
        yield
    finally:
        End._await, End._move = counted  # type: ignore[method-assign]


def processor_s(kind: str) -> float:
    """Return the seconds of the processor of one run."""
    joint = Joint("snapshots", "simulation", "learner", kind, capacity=MESSAGES)
    fields = {("snapshots", "simulation"): FIELDS, ("snapshots", "learner"): FIELDS}

    def work(of: Communicator) -> None:
        out, into = open_ports([joint], {"simulation": [0], "learner": [1]}, fields, of, {"": Path(folder)})
        if out:
            stencil = Stencil(POINTS)
            stencil.set(drawn_modes(0))
            for step in range(MESSAGES):
                stencil.advance(STRIDE)
                out["snapshots"].put(step, {"temperature": np.ascontiguousarray(stencil.field)})
            end_ports(out)
        of.barrier()  # the learner reads what lies there, and never polls
        while into and into["snapshots"].get() is not None:
            pass
        close_ports(out, into)

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        run(2, work)
        return time.process_time() - start


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_the_account_costs_little(benchmark: BenchmarkFixture, kind: str) -> None:
    counted: list[float] = []
    plain: list[float] = []

    def both() -> None:
        for number in range(PAIRS):
            for clocks in ((False, True), (True, False))[number % 2]:
                if clocks:
                    counted.append(processor_s(kind))
                else:
                    with without_clocks():
                        plain.append(processor_s(kind))

    processor_s(kind)
    benchmark.pedantic(both, rounds=1, iterations=1)
    ratio = paired_ratio(counted, plain)
    benchmark.extra_info["ratio"] = {"value": ratio.value, "ci95": list(ratio.interval), "pairs": ratio.n}
    print(f"{kind}: with clocks over without {ratio.value:.4f} ({ratio.interval[0]:.4f} to {ratio.interval[1]:.4f})")
    assert ratio.interval[0] <= LIMIT
