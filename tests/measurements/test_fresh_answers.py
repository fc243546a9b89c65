"""The answer to a batch never fed before is read before further calls overwrite it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from d5suite.measurements.network.checks import call_fresh
from d5suite.measurements.network.gradient import GradientStep
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
    workload: Any = SimpleNamespace(
        executor=executor,
        case=SimpleNamespace(batch_size=1),
        macs=0,
        built_s=float,
        network=SimpleNamespace(as_written=None),
    )
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


def test_images_of_timed_training_batches_all_differ_after_the_first_turn() -> None:
    """Images that repeat could be computed once; the first turn repeats those of the proof."""
    images = np.random.default_rng(0).standard_normal((4, 16, 3)).astype(np.float32)
    workload: Any = SimpleNamespace(
        case=SimpleNamespace(batch_size=16),
        oracle_batch=8,
        macs=0,
        built_s=float,
        executor=SimpleNamespace(forward_backward=None),
        network=SimpleNamespace(require_loss=lambda: ("label", "loss"), as_written=None),
        feed=lambda number: np.resize(images[number, :8], images[number].shape),
        feed_whole=lambda number: images[number],
    )
    step = GradientStep(workload)
    different = []
    for _ in range(8):
        step.next_input()
        fed: Any = step.feed
        different.append(len(np.unique(fed, axis=0)))
    assert different == [8, 8, 16, 16, 16, 16, 16, 16]
