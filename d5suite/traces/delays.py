"""Delays: what made ranks late, and how much waiting that cost.

The definitions are those of Böhme et al., "Identifying the root causes of wait states in
large-scale parallel applications" (ACM Transactions on Parallel Computing 3, 2016), as in Scalasca.
A rank waits for another since both met last. What the late rank did since then and the waiting one
did not is the delay, by region; the late rank's own waiting in that time is a wait that propagates.
The cost of a wait is divided among both in proportion; what falls on a wait that propagates is
handed on to what caused that one. Imports NumPy and its neighbours.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from d5suite.traces.calls import Calls
from d5suite.traces.events import Trace
from d5suite.traces.waits import SYNCHRONIZING, Wait, WaitStates


class Delay(NamedTuple):
    """What a region on one rank cost others.

    Attributes
    ----------
    location : int
    region : int
        Index into `Trace.regions`; -1 outside of any.
    direct : float
        Ticks of waiting for this rank.
    indirect : float
        Ticks of later waiting, for ranks that had themselves waited for this one.
    """

    location: int
    region: int
    direct: float
    indirect: float


class Caused(NamedTuple):
    """The causes of one wait state, in ticks.

    Attributes
    ----------
    wait : Wait
    direct : float
        Caused by delays of the rank that was waited for.
    indirect : float
        Caused by waiting of that rank.
    propagates : bool
        Whether it made a third rank wait; otherwise it is terminal.
    """

    wait: Wait
    direct: float
    indirect: float
    propagates: bool


class Delays(NamedTuple):
    """All delays of a trace, the most expensive first, and the causes of each wait state."""

    delays: Sequence[Delay]
    waits: Sequence[Caused]

    @property
    def unexplained(self) -> float:
        """Ticks of waiting without a delay behind it, as of a message that was long under way."""
        return sum(each.wait.ticks - each.direct - each.indirect for each in self.waits)


def delays_of(
    trace: Trace, states: WaitStates, waits: Sequence[Wait], pieces: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Delays:
    """Find the delays behind wait states.

    Parameters
    ----------
    trace : Trace
    states : WaitStates
    waits : sequence of Wait
        Those on main locations.
    pieces : sequence of tuple of numpy.ndarray
        By location: `d5suite.traces.calls.exclusive`.
    """
    meetings = _Meetings(trace, states)
    times = _Times(states.calls, waits, pieces)
    costs: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    later: dict[int, float] = defaultdict(float)  # by wait: the cost that waits of others hand on
    found = []
    known = [index for index, wait in enumerate(waits) if wait.pattern in SYNCHRONIZING and wait.cause >= 0]
    for index in sorted(known, key=lambda index: (-waits[index].end, -waits[index].begin)):
        wait = waits[index]
        since_late, since_own = meetings.before(wait.cause, wait.location, wait.end, wait.begin)
        own = times.by_region(wait.location, since_own, wait.begin)
        late = times.by_region(wait.cause, since_late, wait.end)
        excess = {region: more for region, ticks in late.items() if (more := ticks - max(own.get(region, 0), 0)) > 0}
        handed = times.waits(wait.cause, since_late, wait.end)
        delayed = sum(excess.values())
        total = delayed + sum(ticks for _, ticks in handed)
        scale = min(wait.ticks / total, 1.0) if total else 0.0
        for region, ticks in excess.items():
            part = scale * ticks
            cost = costs[wait.cause, region]
            cost[0] += part
            cost[1] += later[index] * part / wait.ticks
        indirect = 0.0
        for other, ticks in handed:
            part = scale * ticks
            indirect += part
            later[other] += part + later[index] * part / wait.ticks
        found.append(Caused(wait, scale * delayed, indirect, later[index] > 0))
    delays = [Delay(location, region, *cost) for (location, region), cost in costs.items()]
    return Delays(sorted(delays, key=lambda each: -each.direct - each.indirect), found)


class _Times:
    """What locations did in a span of time, without their waiting."""

    def __init__(
        self,
        calls: Sequence[Calls],
        waits: Sequence[Wait],
        pieces: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._calls, self._waits = calls, waits
        self._pieces = []
        for (times, call), own in zip(pieces, calls, strict=True):
            self._pieces.append((times.tolist(), np.append(own.region, -1)[call].tolist()))
        by_location: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, wait in enumerate(waits):
            if wait.pattern in SYNCHRONIZING:
                by_location[wait.location].append((wait.end, index))
        self._of = {location: sorted(each) for location, each in by_location.items()}

    def by_region(self, location: int, begin: int, end: int) -> dict[int, int]:
        """Return the ticks in each region; -1 is outside of any."""
        times, regions = self._pieces[location]
        found: dict[int, int] = defaultdict(int)
        place = bisect.bisect_right(times, begin)
        now, region = begin, regions[place - 1] if place else -1
        while now < end:
            then = min(times[place], end) if place < len(times) else end
            found[region] += then - now
            now, region = then, regions[place] if place < len(times) else -1
            place += 1
        for index, ticks in self.waits(location, begin, end):
            own = self._waits[index].call
            found[int(self._calls[location].region[own]) if own >= 0 else -1] -= ticks
        return found

    def waits(self, location: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the waits in a span, each with its ticks there."""
        known = self._of.get(location, [])
        found = []
        for place in range(bisect.bisect_right(known, (begin, len(self._waits))), len(known)):
            stop, index = known[place]
            wait = self._waits[index]
            if stop > end:
                break
            found.append((index, stop - max(wait.begin, begin)))
        return found


class _Meetings:
    """When two locations last exchanged a message or took part in a collective operation."""

    def __init__(self, trace: Trace, states: WaitStates) -> None:
        self._begin = [int(each.time[0]) if len(each) else trace.begin for each in trace.events]
        self._messages: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for one, left, other, there in states.meetings:
            self._messages[one, other].append((left, there))
            self._messages[other, one].append((there, left))
        for each in self._messages.values():
            each.sort()
        self._together = [
            ({member: rank for rank, member in enumerate(comm.members)}, leaves)
            for comm, leaves in zip(trace.communicators, states.leaves, strict=True)
        ]

    def before(self, late: int, waiting: int, late_end: int, waiting_end: int) -> tuple[int, int]:
        """Return when both left their last common operation; else when their events begin."""
        best = self._begin[late], self._begin[waiting]
        ends = self._messages.get((waiting, late), [])
        for place in range(bisect.bisect_right(ends, (waiting_end, late_end)) - 1, -1, -1):
            own, other = ends[place]
            if other <= late_end:
                best = max(best, (other, own), key=lambda each: each[1])
                break
        for ranks, leaves in self._together:
            if late in ranks and waiting in ranks and len(leaves):
                column = leaves[:, ranks[waiting]]
                place = int(np.searchsorted(column, waiting_end, "right")) - 1
                if place >= 0 and leaves[place, ranks[late]] <= late_end:
                    best = max(best, (int(leaves[place, ranks[late]]), int(column[place])), key=lambda each: each[1])
        return best
