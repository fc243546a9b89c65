"""The clock of every measurement: monotonic, in seconds, with its resolution and cost measured on this machine.

Imports the standard library only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

Clock = Callable[[], float]
"""Returns seconds since an arbitrary moment; never goes back."""

now: Clock = time.perf_counter
"""The clock everything uses: ``CLOCK_MONOTONIC`` on Linux. A float holds a year of uptime to 4 ns."""


@dataclass(frozen=True)
class ClockProperties:
    """What a clock can resolve and what reading it costs, as measured.

    Attributes
    ----------
    implementation : str
        The system call behind it.
    resolution_s : float
        Smallest step seen between two readings that differ, in seconds.
    read_cost_s : float
        Median duration of one reading, in seconds. Every sample holds about one of them.
    """

    implementation: str
    resolution_s: float
    read_cost_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the properties as JSON-able values."""
        return asdict(self)


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
