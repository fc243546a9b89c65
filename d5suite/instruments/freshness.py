"""Detection of remembered answers: a step must not take far longer on new input.

Answers that are remembered by their input are right, so no comparison of answers finds them.
Imports its neighbours in ``d5suite.instruments``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from d5suite.instruments.clock import Clock, now

LONGER = 2.0
"""Largest accepted ratio of times on new and on fed input: caches are cold, threads asleep."""

LEAST = 3
"""Fewest rounds: one disturbed call on fed input must not hide a remembered answer."""

ROUNDS = 8
"""Most new inputs before a step counts as remembering. One fast call on new input clears it, so
that a busy machine causes no false alarm."""


def timed(
    step: Callable[[], Any], synchronize: Callable[..., None], clock: Clock = now, *, hand_over: bool = False
) -> tuple[Any, float]:
    """Call a step once, and return its result and how long it took in seconds.

    ``hand_over`` gives the result to ``synchronize``.
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
        The median.
    fresh_s : float
        The shortest.
    """

    again_s: float
    fresh_s: float

    @property
    def computes(self) -> bool:
        """Whether new input does not take far longer."""
        return self.fresh_s <= LONGER * self.again_s


def compare_durations(
    again: Callable[[], float], fresh: Callable[[int], Callable[[], float]], first: Durations | None = None
) -> Durations:
    """Call a step in turn on input that it was fed before and on new input, until it computes.

    New input is made before both calls: threads that fell asleep meanwhile are woken by the first.

    Parameters
    ----------
    again : callable
        Calls the step on input that was fed before, and returns how long it took, in seconds.
    fresh : callable
        Makes new input, given a number from 0, and returns the same call of the step on it.
    first : Durations, optional
        What is known; if it computes, nothing is called.

    Returns
    -------
    Durations
        After `ROUNDS` rounds at most.
    """
    if first is not None and first.computes:
        return first
    fed, new = [], []
    for number in range(ROUNDS):
        call = fresh(number)
        fed.append(again())
        new.append(call())
        found = Durations(statistics.median(fed), min(new))
        if found.computes and number + 1 >= LEAST:
            break
    return found
