"""The answer to a batch never fed before is read before further calls overwrite it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from d5suite.measurements.network.checks import call_fresh
from d5suite.measurements.network.steps import NetworkStep
from d5suite.measurements.operator.kernel import KernelStep, unseen_answer

FRESH = np.arange(1.0, 10.0)


class Reusing:
    """An adapter that writes every answer into one array, as MXNet does with gradients."""

    def __init__(self) -> None:
        self.memory = np.zeros(9)
        self.calls = 0

    def call(self, fed: Any) -> np.ndarray:
        self.calls += 1
        self.memory[...] = fed
        return self.memory

    def synchronize(self, *_: Any) -> None:
        pass


def test_of_a_network() -> None:
    """The call seems slow at first, so that it is repeated with other values."""
    adapter = Reusing()
    executor = SimpleNamespace(
        feed=dict,
        fetch=lambda native: {name: value.copy() for name, value in native.items()},
        synchronize=adapter.synchronize,
    )
    workload: Any = SimpleNamespace(executor=executor, case=SimpleNamespace(batch_size=1), macs=0)
    step = NetworkStep(workload, lambda fed: {"y": adapter.call(fed["x"])}, [lambda: {"x": np.zeros(9)}], kept=["y"])
    answer, _ = call_fresh(step, {"x": FRESH}, executor.fetch)
    assert adapter.calls > 1 and (answer["y"] == FRESH).all()


def test_of_an_operator() -> None:
    adapter = Reusing()
    compared = {}
    operator = SimpleNamespace(synchronize=adapter.synchronize, fetch=lambda result: [result.copy()])
    workload: Any = SimpleNamespace(operator=operator)
    step = KernelStep(workload, backward=False)
    step.others = [SimpleNamespace(expected=None, feed=lambda: (adapter.call, [FRESH]))] * 2  # type: ignore[list-item]
    step.findings = SimpleNamespace(  # type: ignore[assignment]
        call=adapter.call,
        arguments=[np.zeros(9)],
        feed=lambda number: [np.full(9, -1.0 - number)],
        check_again=lambda name, found, _: compared.update({name: found[0]}),
    )
    list(unseen_answer(workload, step))
    assert adapter.calls > 1 and (compared["inputs never fed before"] == FRESH).all()
