"""What the measurement of collectives gives, takes and proves, on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.distributed.calls import CALLS, gathered
from d5suite.distributed.communicators.threads import run
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.distributed import Communicator, Request
from d5suite.network.operation import PRECISIONS
from d5suite.workloads import collective
from d5suite.workloads.collective import Messages, rounded

QUICK = SamplingSettings(min_rounds=5, max_time_s=0.01)


def _wrong(ranks: int, name: str, size: int, precision: str, break_it: Callable[[Communicator], None]) -> list[float]:
    def work(communicator: Communicator) -> float:
        break_it(communicator)
        dtype = np.dtype(PRECISIONS[precision])
        messages = Messages(communicator, name, rounded(name, size, dtype.itemsize, ranks), dtype, seed=3)
        messages.allocate(2)
        messages.fill()
        messages.run()
        return messages.wrong()

    return run(ranks, work)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.sampled_from(sorted(CALLS)), st.integers(1, 70_000), st.sampled_from(["fp32", "fp64"]))
def test_right_answers_are_right(ranks: int, name: str, size: int, precision: str) -> None:
    assert _wrong(ranks, name, size, precision, lambda communicator: None) == [0.0] * ranks


def _on_one_rank(call: str, spoil: Callable[..., object]) -> Callable[[Communicator], None]:
    """A communicator whose call is spoiled on the last rank, after it has been made."""

    def break_it(communicator: Communicator) -> None:
        if communicator.rank == communicator.size - 1:
            made = getattr(communicator, call)

            def wrong(array: np.ndarray, *more: Any) -> Any:
                found = made(array, *more)
                spoil(more[0] if more else array)
                return found

            setattr(communicator, call, wrong)

    return break_it


def _flip(array: np.ndarray) -> None:
    array[-1] += 1


def _swap(array: np.ndarray) -> None:
    half = len(array) // 2
    array[:half], array[half:] = array[half:].copy(), array[:half].copy()


@pytest.mark.parametrize("spoil", [_flip, _swap, lambda array: array.fill(0)], ids=["flip", "swap", "zero"])
@pytest.mark.parametrize("name", sorted(name for name, call in CALLS.items() if name != "reduce" and not call.source))
def test_a_wrong_answer_on_one_rank_is_seen_by_all(name: str, spoil: Callable[..., object]) -> None:
    found = _wrong(3, name, 3 * 4 * 1000, "fp32", _on_one_rank(name, spoil))
    assert len(set(found)) == 1 and found[0] > 0


@pytest.mark.parametrize("name", sorted(name for name, call in CALLS.items() if call.begin))
def test_a_wrong_message_to_one_rank_is_seen_by_all(name: str) -> None:
    def break_it(communicator: Communicator) -> None:
        isend = communicator.isend
        if communicator.rank == 0:
            communicator.isend = lambda array, *more: isend(array + 1, *more)  # type: ignore[method-assign]

    found = _wrong(4, name, 4000, "fp32", break_it)
    assert len(set(found)) == 1 and found[0] > 0


def test_ranks_that_add_in_another_order_are_seen() -> None:
    """Whole numbers hide it; numbers whose sums round do not."""

    def work(communicator: Communicator) -> tuple[float, int]:
        def in_own_order(array: np.ndarray) -> None:
            parts = np.zeros((communicator.size, array.size), array.dtype)
            parts[communicator.rank] = array
            for rank in range(communicator.size):
                communicator.broadcast(parts[rank], rank)
            array[:] = 0
            for step in range(communicator.size):
                array += parts[(communicator.rank + step) % communicator.size]

        communicator.all_reduce = in_own_order  # type: ignore[method-assign]
        messages = Messages(communicator, "all_reduce", 4000, np.dtype(np.float32), seed=1)
        messages.fill()
        messages.run()
        return messages.wrong(), messages.differing()

    assert run(3, work) == [(0.0, 2)] * 3


def test_all_ranks_take_the_same_samples_and_prove_the_last() -> None:
    def work(communicator: Communicator) -> tuple[list[float], int, float]:
        messages = Messages(communicator, "all_reduce", 64, np.dtype(np.float32), seed=1)
        messages.fill()
        samples = messages.time(QUICK)
        return samples.samples_s, messages.copies, messages.wrong()

    first, *others = run(3, work)
    assert len(first[0]) >= 5 and first[2] == 0 and all(other == first for other in others)


def test_values_of_all_ranks_are_gathered_in_order() -> None:
    found = run(4, lambda communicator: gathered(communicator, [communicator.rank, 7.0]).tolist())
    assert found == [[[rank, 7.0] for rank in range(4)]] * 4


def test_a_planted_slow_rank_has_the_greatest_median() -> None:
    def work(communicator: Communicator) -> tuple[list[float], float | None]:
        if communicator.rank == 1:
            made = communicator.all_gather

            def slow(array: np.ndarray) -> None:
                made(array)
                threading.Event().wait(5e-3)

            communicator.all_gather = slow  # type: ignore[method-assign]
        messages = Messages(communicator, "all_gather", 64, np.dtype(np.float32), seed=1)
        messages.fill()
        messages.time(QUICK)
        return messages.rank_medians_s, messages.overlap()

    found = run(3, work)
    assert all(each == found[0] for each in found)
    medians, overlap = found[0]
    assert max(medians) == medians[1] > 1e-3 and overlap is None


@pytest.mark.parametrize("hidden", [True, False])
def test_planted_overlap_is_found(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that takes 5 ms from when it begins, or from when a rank waits."""
    clock = [0.0]

    class Slow(Request):
        def __init__(self) -> None:
            self._began = clock[0]

        def _wait(self) -> int:
            clock[0] = max(clock[0], self._began + 5e-3) if hidden else clock[0] + 5e-3
            return 0

    def compute(block: np.ndarray) -> None:
        clock[0] += 1e-5

    def work(communicator: Communicator) -> float | None:
        messages = Messages(communicator, "send_receive", 64, np.dtype(np.float32), seed=1)
        messages.call = messages.call._replace(begin=lambda *_: [Slow()])
        return messages.overlap()

    monkeypatch.setattr(collective, "now", lambda: clock[0])
    monkeypatch.setattr(collective, "compute", compute)
    assert run(1, work) == [pytest.approx(float(hidden))]
