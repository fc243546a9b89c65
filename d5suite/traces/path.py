"""The critical path: the chain of work that sets how long a run takes.

The path is walked back from the last event (Böhme et al., "Scalable critical-path based performance
analysis", IPDPS 2012). Where a rank had waited, the path goes on at the rank that was waited for;
so it never contains waiting, and it is as long as the run. Imports NumPy and its neighbours.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from d5suite.traces.events import Trace
from d5suite.traces.waits import SYNCHRONIZING, Wait


class Piece(NamedTuple):
    """A piece of the critical path: a location, from one time to another, in ticks."""

    location: int
    begin: int
    end: int


def critical_path(trace: Trace, waits: Sequence[Wait]) -> list[Piece]:
    """Return the critical path, from the first event to the last.

    Parameters
    ----------
    trace : Trace
    waits : sequence of Wait
        As returned by `d5suite.traces.waits.wait_states`.
    """
    if not len(trace):
        return []
    by_location: list[list[Wait]] = [[] for _ in trace.locations]
    for each in waits:
        if each.pattern in SYNCHRONIZING and each.cause >= 0:
            by_location[each.location].append(each)
    ends: list[list[int]] = []
    for own in by_location:
        own.sort(key=lambda wait: wait.end)
        ends.append([wait.end for wait in own])
    begin, time = trace.begin, trace.end
    location = next(i for i, events in enumerate(trace.events) if len(events) and events.time[-1] == time)
    pieces: list[Piece] = []
    jumped: set[tuple[int, int]] = set()
    while time > begin:
        place = bisect.bisect_right(ends[location], time) - 1
        wait = by_location[location][place] if place >= 0 else None
        if wait is None or (location, wait.end) in jumped:
            pieces.append(Piece(location, begin, time))
            break
        jumped.add((location, wait.end))
        if time > wait.end:
            pieces.append(Piece(location, wait.end, time))
        location, time = wait.cause, wait.end
    return pieces[::-1]
