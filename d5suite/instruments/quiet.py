"""Whether the machine is quiet: a probe for ``d5suite doctor``, and a check before long runs.

Imports the standard library and its neighbours in ``d5suite.instruments``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from d5suite.instruments.clock import Clock, now
from d5suite.instruments.machine import Disturbance, MachineState, disturbance, snapshot

PROBE_LOOPS = 20_000
"""Iterations of the busy loop per sample: about 1 ms, long against the clock and short against a
time slice."""

QUIET_SPREAD = 1.10
"""95th percentile over median below which a machine is quiet; idle virtual machines reach 1.07. A
median of samples moves much less than their 95th percentile."""


WATCHED_S = 0.5
"""Seconds over which the use of CPUs is measured: 50 of the kernel's ticks of 10 ms."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe.

    Attributes
    ----------
    quiet : bool
        Whether timings can be trusted now.
    verdict : str
        One line of text.
    spread : float
        95th percentile over median of the time of a fixed busy loop in one thread.
    median_s : float
        Median time of the loop in seconds.
    samples : int
        Number of loops timed.
    reasons : list of str
        What disturbed the machine (see `d5suite.instruments.machine.disturbance`).
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


def probe_noise(duration_s: float = 1.0, *, clock: Clock = now) -> ProbeResult:
    """Repeat a fixed busy loop in one thread and measure how its time varies.

    Parameters
    ----------
    duration_s : float
        In seconds. The kernel counts busy time in ticks of 10 ms, so less than 0.5 s detects other
        processes poorly.
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
    return ProbeResult(not causes, verdict, spread, median, len(times), found.reasons, found.details)


def watch(threads: int | None = None, since: MachineState | None = None) -> Disturbance:
    """Measure what else uses the machine while this process rests.

    Parameters
    ----------
    threads : int, optional
        CPUs that the run will need; by default all that this process may use.
    since : MachineState, optional
        An earlier state, so that less time or none is spent resting.
    """
    before = snapshot() if since is None else since
    time.sleep(max(0.0, WATCHED_S - (now() - before.time_s)))
    return disturbance(before, snapshot(), threads=threads)


def taken_share(found: Disturbance, threads: int, cpus: int) -> float:
    """Return the share of the CPU time that a run needs, but that is not available to it.

    Parameters
    ----------
    found : Disturbance
        From `watch`.
    threads, cpus : int
        Number of CPUs that the run needs, and that it may use.
    """
    needed = max(1, min(threads, cpus))
    others = max(0.0, found.details.get("others_on_our_cpus", 0.0) - (cpus - needed)) / needed
    return float(max(others, *(found.details.get(name, 0.0) for name in ("steal_share", "throttled_share"))))


def await_quiet(
    limit_s: float,
    tell: Callable[[str], None] | None = None,
    *,
    threads: int | None = None,
    look: Callable[[int | None], Disturbance] = watch,
    clock: Clock = now,
) -> str:
    """Wait until the machine is quiet; return what still disturbs it after the limit.

    It sleeps meanwhile, so that several waiting runs do not disturb each other.

    Parameters
    ----------
    limit_s : float
        Longest wait in seconds; there is at least one check.
    tell : callable, optional
        Receives what is being waited for.
    threads : int, optional
        See `watch`.
    look : callable
        As `watch`.
    clock : callable
        Seconds, monotonic.
    """
    end = clock() + limit_s
    while True:
        reasons = look(threads).reasons
        if not reasons:
            return ""
        if (left := end - clock()) <= 0:
            return "; ".join(reasons)
        if tell is not None:
            tell(f"waiting for a quiet machine, {left:.0f} s more at most: {reasons[0]}")
