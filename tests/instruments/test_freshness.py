"""A step that remembers its answers is told from one that computes, on a machine with any noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from d5suite.instruments.freshness import MOST, ROUNDS, Durations, compare_durations, timed


def test_what_is_known_to_compute_is_not_called_again() -> None:
    def never(*number: int) -> Any:
        raise AssertionError(number)

    assert compare_durations(never, never, Durations(1.0, 1.9)).computes


@pytest.mark.parametrize("disturbed", [0.1, 0.3, 0.5])
def test_noise_accuses_nobody(disturbed: float) -> None:
    """However many calls take three times as long."""
    draw = random.Random(0)

    def call() -> float:
        return draw.uniform(1.0, 1.3) * (3.0 if draw.random() < disturbed else 1.0)

    accused = sum(not compare_durations(call, lambda _: call, Durations(1.0, 3.0)).computes for _ in range(1000))
    assert accused <= 1000 * disturbed**ROUNDS


def test_threads_that_sleep_while_input_is_made_accuse_nobody() -> None:
    """A call takes three times as long if anything but another call came before it."""
    awake = False

    def call() -> float:
        nonlocal awake
        took = 1.0 if awake else 3.0
        awake = True
        return took

    def fresh(number: int) -> Callable[[], float]:
        nonlocal awake
        awake = False
        return call

    assert compare_durations(call, fresh, Durations(1.0, 3.0)).computes


def test_one_that_remembers_is_found_however_its_machine_is_disturbed() -> None:
    draw = random.Random(0)
    fed: list[int] = []

    def call(usual: float) -> float:
        return usual * (100.0 if draw.random() < 0.2 else 1.0)

    def fresh(number: int) -> Callable[[], float]:
        fed.append(number)
        return lambda: call(1.0)

    assert not compare_durations(lambda: call(0.01), fresh, Durations(0.01, 1.0)).computes
    assert fed == list(range(ROUNDS))


def test_a_program_that_disturbs_ten_calls_in_a_row_accuses_nobody() -> None:
    """Ten calls of 4 ms on new input fit into one turn of another program."""
    made = []

    def fresh(number: int) -> Callable[[], float]:
        made.append(number)
        return lambda: 0.012 if number < 10 else 0.004

    assert compare_durations(lambda: 0.004, fresh, Durations(0.004, 0.012)).computes
    assert len(made) == 16  # of eight calls, one is fast
    assert not compare_durations(lambda: 0.004, fresh, Durations(0.004, 0.012), most=9).computes


def test_one_that_remembers_short_answers_is_found() -> None:
    made: list[int] = []

    def fresh(number: int) -> Callable[[], float]:
        made.append(number)
        return lambda: 3e-6

    assert not compare_durations(lambda: 1e-6, fresh, Durations(1e-6, 3e-6)).computes
    assert len(made) == MOST


def test_a_call_is_timed_from_end_to_end() -> None:
    """Earlier work is waited for before the clock starts, and the call's own before it stops."""
    told: list[object] = []

    def clock() -> float:
        told.append("clock")
        return float(len(told))

    def call() -> str:
        told.append("call")
        return "answer"

    answer, took = timed(call, lambda *of: told.append(("wait", *of)), clock, hand_over=True)
    assert told == [("wait",), "clock", "call", ("wait", "answer"), "clock"]
    assert (answer, took) == ("answer", 3.0)
