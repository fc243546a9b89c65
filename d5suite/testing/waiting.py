"""Whether `synchronize` waits for asynchronous work. Imports pytest and the backend under test."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from d5suite.testing.subject import Subject

REPEATS = 7

UNFINISHED = 0.2
"""Part of the work's time that may remain after `synchronize`."""

ENOUGH_S = 0.05
"""The work is made to take this long, where it can be: beside it, bringing the answer back is short."""

LEAST_S = 0.02
"""Work must take this long, or what remains of it cannot be told from noise."""


def lasting(seconds: Callable[[int], float], fewest: int, most: int, enough_s: float = ENOUGH_S) -> int:
    """How much work takes long enough: ``fewest``, doubled until it does, or ``most``.

    Parameters
    ----------
    seconds : callable
        How long so much work takes.
    fewest, most : int
    enough_s : float
        Seconds.
    """
    size = fewest
    while size < most and (taken := seconds(size)) < enough_s:
        size = min(most, size * 2 ** max(1, math.ceil(math.log2(enough_s / taken))))
    return size


def elapsed(work: Callable[[], Any]) -> float:
    """Seconds that work takes the second time; the first time may compile."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def require_waiting(
    subject: Subject,
    clause: str,
    work: Callable[[], Any],
    synchronize: Callable[[Any], None],
    read: Callable[[Any], Any],
) -> None:
    """Fail unless, after work and synchronize, reading the result takes next to no time.

    Parameters
    ----------
    subject : Subject
    clause : str
        The one that is broken otherwise.
    work : callable
        Issues the work, which has run before, and gives its result.
    synchronize : callable
        Waits; it is given the result.
    read : callable
        Brings the result to NumPy, whether it is there yet or not.
    """
    whole, rest = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = work()
        synchronize(result)
        middle = time.perf_counter()
        read(result)
        end = time.perf_counter()
        whole.append(end - start)
        rest.append(end - middle)
    taken, remaining = statistics.median(whole), statistics.median(rest)
    if taken < LEAST_S:
        pytest.skip(f"work of {taken * 1e3:.1f} ms is too short to tell")
    figures = f"{remaining * 1e3:.1f} ms of {taken * 1e3:.1f} ms of work were still to do after synchronize"
    subject.hold(clause, remaining <= UNFINISHED * taken, figures)
