"""The clock of all measurements, and its resolution and read cost on this machine.

Imports the standard library only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

Clock = Callable[[], float]
"""Returns seconds since an arbitrary moment; monotonic."""

now: Clock = time.perf_counter
"""The clock: ``CLOCK_MONOTONIC`` on Linux. A float resolves 4 ns after a year of uptime."""


class AgreedClock:
    """A clock with the same reading on all ranks, so that all take the same decisions.

    It stands still until `advance` is called.

    Parameters
    ----------
    agree : callable
        Collective: returns the longest of the durations that all processes give.
    """

    def __init__(self, agree: Callable[[float], float]) -> None:
        self._agree, self._seconds = agree, 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Advance by the longest of the durations of all processes. Collective."""
        self._seconds += self._agree(seconds)


@dataclass(frozen=True)
class ClockProperties:
    """A clock's measured resolution and read cost.

    Attributes
    ----------
    implementation : str
        The system call behind it.
    resolution_s : float
        Smallest difference between unequal readings, in seconds.
    read_cost_s : float
        Median duration of one reading, in seconds; every sample includes about one.
    """

    implementation: str
    resolution_s: float
    read_cost_s: float


def measure_clock(clock: Clock = now, *, readings: int = 1000, repeats: int = 5) -> ClockProperties:
    """Measure resolution and read cost of a clock (a few milliseconds).

    Parameters
    ----------
    clock : callable
        The clock to measure.
    readings : int
        Readings per repeat.
    repeats : int
        The cost is the median over this many repeats, the resolution the minimum.
    """
    costs: list[float] = []
    steps: list[float] = []
    for _ in range(repeats):
        values = [clock() for _ in range(readings + 1)]
        costs.append((values[-1] - values[0]) / readings)
        steps += [later - earlier for earlier, later in pairwise(values) if later > earlier]
    return ClockProperties(
        implementation=time.get_clock_info("perf_counter").implementation if clock is now else "injected",
        resolution_s=min(steps, default=0.0),
        read_cost_s=statistics.median(costs),
    )
