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
"""Most new inputs before a step counts as remembering. One fast call on new input clears it, so
that a busy machine causes no false alarm."""


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
    """Call a step alternately on old and on new input, until it is clear that it computes.

    New input is made before both calls, so that the call on old input wakes sleeping threads.

    Parameters
    ----------
    again : callable
        Calls the step on input that it was given before; returns the duration in seconds.
    fresh : callable
        Makes new input, given a number from 0; returns a function that does the same with it.
    first : Durations, optional
        Durations known already; if they show that the step computes, nothing is called.

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
