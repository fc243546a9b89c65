"""Views by strides of zero are noticed, and a ceiling counts only if its own answer is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from d5suite.backends import select
from d5suite.instruments.environment import last_level_cache
from d5suite.levels.operator import Operator
from d5suite.measurements.operator.forward import Forward
from d5suite.network.operation import Operation
from d5suite.workloads import operator as workloads


@pytest.mark.skipif(select("deep500").backend.problem() is not None, reason="measured with deep500")
def test_a_broadcast_of_a_new_array_is_a_view() -> None:
    """It has strides of zero: 836% of the memory ceiling, and it was not noticed."""
    operation = Operation("ReduceMean", {"X": (8, 6, 4), "axes": np.array([0])}, {"keepdims": 1})
    operator = select("deep500").backend.operator(operation)
    feed = operator.feed(operation.draw(1))
    backward = operator.backward(feed)
    head = operator.feed_gradients(operation.draw_gradients(1))
    gradients = backward(*head)
    assert operator.views(gradients, head, backward=True) == ["X"]
    assert operator.views(operator.forward(*feed), feed, backward=False) == []


@pytest.mark.skipif(select("torch").backend.problem() is not None, reason="measured with torch")
def test_an_expanded_tensor_is_a_view_and_a_whole_one_is_not() -> None:
    import torch

    operation = Operation("Expand", {"X": (1, 5), "shape": np.array([4, 5])})
    operator = select("torch").backend.operator(operation)
    computed = torch.ones(1, 5)
    assert operator.views(computed.expand(4, 5), (), backward=False) == ["Expand.0"]
    assert operator.views(computed.expand(4, 5).contiguous(), (), backward=False) == []


class _Product(Operator):
    """A matrix product in NumPy, as honest as ``forward`` is."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        operation = Operation("Gemm", {"A": (300, 300), "B": (300, 300)}, precision="fp32")
        super().__init__(operation, mode="", device="cpu")
        self.forward = forward

    def to_native(self, name: str, array: np.ndarray) -> Any:
        return array

    def to_neutral(self, name: str, value: Any) -> np.ndarray:
        found: np.ndarray = value() if callable(value) else value
        return found

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise NotImplementedError

    def synchronize(self, *results: Any) -> None:
        pass


class _Later:
    """A promise that is kept at its first fetch."""

    def __init__(self, a: np.ndarray, b: np.ndarray) -> None:
        self._factors = a, b
        self._product: np.ndarray | None = None

    def __call__(self) -> np.ndarray:
        if self._product is None:
            time.sleep(0.02)
            self._product = self._factors[0] @ self._factors[1]
        return self._product


@pytest.mark.parametrize(
    ("forward", "right"),
    [
        (lambda a, b: a @ b, True),
        (lambda a, b: a, False),
        (lambda a, b: (a @ b) * np.float32(1.01), False),
        (_Later, False),
    ],
    ids=["honest", "no product", "1% off", "late"],
)
def test_a_ceiling_counts_only_if_its_answer_is_right_and_there(forward: Callable[..., Any], right: bool) -> None:
    """An answer computed when fetched made a ceiling of which all others reached 0%."""
    operator = _Product(forward)
    arrays = operator.operation.draw(1)
    assert workloads._is_right(operator, arrays, tuple(operator.feed(arrays)), 1e-6) is right


def test_the_copy_of_a_ceiling_is_compared_with_its_halves() -> None:
    operation = Operation("Concat", {"A": (4, 8), "B": (4, 8)}, {"axis": 0})
    arrays = operation.draw(1)
    for forward, right in (
        (lambda *halves: np.concatenate(halves), True),
        (lambda a, b: np.concatenate([a, a]), False),
    ):
        operator = SimpleNamespace(
            operation=operation, forward=forward, synchronize=lambda result: None, fetch=lambda result: [result]
        )
        assert workloads._is_right(operator, arrays, arrays, 1e-6) is right  # type: ignore[arg-type]


def test_an_unproved_ceiling_decides_nothing_and_is_told() -> None:
    def found(name: str, flops: float | None) -> dict[str, Any]:
        achieved = {"flops_per_s": 1e9, "bytes_per_s": None}
        return {"backend": {"name": name}, "achieved": achieved, "ceilings": {"flops_per_s": flops, "bytes_per_s": 1e9}}

    records = [found("torch", 2e9), found("liar", None)]
    Forward.derive(records)
    assert [each["ceiling"]["flops_per_s"] for each in records] == [{"value": 2e9, "backend": "torch"}] * 2
    assert [each["fraction_of_ceiling"]["flops_per_s"] for each in records] == [0.5, 0.5]
    assert "warnings" not in records[0]
    assert records[1]["warnings"] == ["its own ceiling of flops_per_s counts for none: the answer was wrong, or late"]


def test_the_last_caches_of_the_allowed_cpus_are_added_up(tmp_path: Path) -> None:
    for cpu, shared in enumerate(("0-1", "0-1", "2-3")):
        for index, (level, kind, size, own) in enumerate(
            (("1", "Data", "32K", str(cpu)), ("1", "Instruction", "32K", str(cpu)), ("3", "Unified", "16M", shared))
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", own)):
                (folder / name).write_text(f"{value}\n")
    assert last_level_cache([0, 1], tmp_path) == 16 << 20
    assert last_level_cache([0, 1, 2], tmp_path) == 32 << 20
    assert last_level_cache([7], tmp_path) is None
