"""Detection of remembered answers: a step must not take far longer on new input.

A step that looks its answers up by the input gives right answers, so comparing them finds nothing.
Imports its neighbours in ``d5suite.instruments``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from d5suite.instruments.clock import Clock, now

LONGER = 2.0
"""Largest accepted ratio of the times on new and on old input; on new input caches are cold."""

LEAST = 3
"""Fewest rounds: one disturbed call on old input must not hide a remembered answer."""

ROUNDS = 8
"""Fewest new inputs before a step counts as remembering. One fast call in so many on new input
clears it, so that a busy machine causes no false alarm."""

SPAN_S = 1.0
"""Shortest time of all calls together before a step counts as remembering, in seconds. Another
program can disturb all calls of a shorter time: the kernel lets it run for tens of milliseconds."""

MOST = 200
"""Most new inputs, for steps of microseconds."""


def timed(
    step: Callable[[], Any], synchronize: Callable[..., None], clock: Clock = now, *, hand_over: bool = False
) -> tuple[Any, float]:
    """Call a step once; return its result and its duration in seconds.

    With ``hand_over``, ``synchronize`` is given the result.
    """
    synchronize()
    start = clock()
    result = step()
    synchronize(*([result] if hand_over else []))
    return result, clock() - start


@dataclass(frozen=True)
class Durations:
    """Times of a step on input fed before and on new input, in seconds.

    Attributes
    ----------
    again_s : float
        The median on input fed before.
    fresh_s : float
        The shortest on new input; the second shortest of more than `ROUNDS`, and so on.
    """

    again_s: float
    fresh_s: float

    @property
    def computes(self) -> bool:
        """Whether new input does not take far longer."""
        return self.fresh_s <= LONGER * self.again_s


def compare_durations(
    again: Callable[[], float],
    fresh: Callable[[int], Callable[[], float]],
    first: Durations | None = None,
    most: int = MOST,
) -> Durations:
    """Call a step alternately on old and on new input, until it is clear that it computes.

    New input is made before both calls, so that the call on old input wakes sleeping threads.

    Parameters
    ----------
    again : callable
        Calls the step on input that it was given before; returns the duration in seconds.
    fresh : callable
        Makes new input, given a number from 0; returns a function that does with it what ``again``
        does with old input.
    first : Durations, optional
        Durations known already; if they show that the step computes, nothing is called.
    most : int
        How many different new inputs there are.

    Returns
    -------
    Durations
        After `ROUNDS` rounds, or more if these took less than `SPAN_S`.
    """
    if first is not None and first.computes:
        return first
    fed, new = [], []
    for number in range(max(most, ROUNDS)):
        call = fresh(number)
        fed.append(again())
        new.append(call())
        found = Durations(statistics.median(fed), sorted(new)[number // ROUNDS])
        rounds = len(new)
        # Looking after every later round would clear a remembering step by chance.
        if found.computes and rounds >= LEAST and (rounds <= ROUNDS or rounds.bit_count() == 1):
            break
        if rounds >= ROUNDS and sum(fed) + sum(new) >= SPAN_S:
            break
    return found
