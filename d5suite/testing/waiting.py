"""Check that `synchronize` waits for asynchronous work.

Imports pytest and the backend under test.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from d5suite.testing.subject import Subject

REPEATS = 7

FEWER = 3
"""Repetitions of work that takes at least `LONG_S`, in which noise hides nothing."""

LONG_S = 0.5

UNFINISHED = 0.2
"""Accepted fraction of the work's time that remains after `synchronize`."""

ENOUGH_S = 0.05
"""Target duration of the work, much longer than fetching the answer."""

LEAST_S = 0.02
"""Shortest work whose remainder can be distinguished from noise."""

MOST_TIMES = 1024
"""Most times that short work is issued."""


def lasting(seconds: Callable[[int], float], fewest: int, most: int, enough_s: float = ENOUGH_S) -> int:
    """Double a size from ``fewest`` until the work takes long enough, up to ``most``.

    Parameters
    ----------
    seconds : callable
        Measures the duration of work of a size.
    fewest, most : int
    enough_s : float
    """
    size = fewest
    while size < most and (taken := seconds(size)) < enough_s:
        size = min(most, size * 2 ** max(1, math.ceil(math.log2(enough_s / taken))))
    return size


def elapsed(work: Callable[[], Any]) -> float:
    """Return the seconds of the second call; the first may compile."""
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
    """Raise `ContractError` if reading the result after ``synchronize`` still takes long.

    Parameters
    ----------
    subject : Subject
    clause : str
        The clause that is broken.
    work : callable
        Issues the work, already compiled, and returns its result.
    synchronize : callable
        Waits for the result that it is given.
    read : callable
        Fetches the result to NumPy, waiting if necessary.
    """
    times = 1
    while (medians := _medians(work, synchronize, read, times))[0] < LEAST_S:
        if times == MOST_TIMES:
            pytest.skip(f"work of {medians[0] * 1e3:.1f} ms is too short to tell")
        # Repeat: a disturbed first call made the work look longer than it is.
        times = min(MOST_TIMES, math.ceil(times * ENOUGH_S / medians[0]))
    taken, remaining = medians
    figures = f"{remaining * 1e3:.1f} ms of {taken * 1e3:.1f} ms of work were still to do after synchronize"
    subject.hold(clause, remaining <= UNFINISHED * taken, figures)


def _medians(
    work: Callable[[], Any], synchronize: Callable[[Any], None], read: Callable[[Any], Any], times: int
) -> tuple[float, float]:
    """Return the seconds of the work, issued several times, and those after ``synchronize``."""
    whole: list[float] = []
    rest: list[float] = []
    while len(whole) < (FEWER if whole and min(whole) >= LONG_S else REPEATS):
        start = time.perf_counter()
        for _ in range(times):
            result = work()
        synchronize(result)
        middle = time.perf_counter()
        read(result)
        end = time.perf_counter()
        whole.append(end - start)
        rest.append(end - middle)
    return statistics.median(whole), statistics.median(rest)
