"""How quiet is this machine now? A probe of about a second, for ``d5suite doctor`` and before a long run.

Imports the standard library and its neighbours in ``d5suite.measure``.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from d5suite.measure.clock import Clock, now
from d5suite.measure.machine import disturbance, snapshot

PROBE_LOOPS = 20_000
"""Turns of the busy loop in one sample: about a millisecond, long against the clock and short against a time slice."""

QUIET_SPREAD = 1.10
"""95th percentile over median that an idle machine stays below, a virtual one too (7% was seen on one). A median of
samples moves much less than their 95th percentile."""


@dataclass(frozen=True)
class Noise:
    """What the probe saw.

    Attributes
    ----------
    quiet : bool
        Whether timings taken now can be trusted.
    verdict : str
        One line for a person.
    spread : float
        95th percentile over median of the time of a fixed busy loop on one thread.
    median_s : float
        Median time of that loop in seconds.
    samples : int
        Number of loops timed.
    reasons : list of str
        What disturbed the machine meanwhile (see `d5suite.measure.machine.disturbance`).
    details : dict
        The figures behind the reasons: CPUs used by others, pressure, steal, competitors.
    """

    quiet: bool
    verdict: str
    spread: float
    median_s: float
    samples: int
    reasons: list[str]
    details: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-able values."""
        return asdict(self)


def probe_noise(duration_s: float = 1.0, *, clock: Clock = now) -> Noise:
    """Run a fixed busy loop again and again on one thread and see how its time varies.

    Parameters
    ----------
    duration_s : float
        How long to look, in seconds. Busy time is counted in ticks of 10 ms, so below half a second other processes are
        seen poorly.
    clock : callable
        Seconds, monotonic.
    """
    before = snapshot()
    times: list[float] = []
    end = clock() + duration_s
    while len(times) < 2 or clock() < end:
        start = clock()
        for _ in range(PROBE_LOOPS):
            pass
        times.append(clock() - start)
    found = disturbance(before, snapshot())
    median = statistics.median(times)
    spread = statistics.quantiles(times, n=20, method="inclusive")[-1] / median if median > 0 else 1.0
    causes = list(found.reasons)
    if spread > QUIET_SPREAD:
        causes.append(f"a fixed loop took {spread - 1:.0%} longer than its median in its slowest twentieth")
    verdict = f"noisy: {'; '.join(causes)}" if causes else f"quiet: a fixed loop varied by {spread - 1:.1%}"
    return Noise(not causes, verdict, spread, median, len(times), found.reasons, found.details)
