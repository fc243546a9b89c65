"""Calls: each entry into a region joined to its exit, and what lies inside. Imports NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from d5suite.traces.events import EventKind, Events


@dataclass(frozen=True)
class Calls:
    """The calls of one location, in the order in which they were entered.

    Attributes
    ----------
    enter, leave : numpy.ndarray of int64
        Ticks. A call that was never left, as of a rank that was killed, ends with the location's
        last event.
    region : numpy.ndarray of int32
        Index into `d5suite.traces.events.Trace.regions`.
    parent : numpy.ndarray of int64
        The call around each, or -1.
    owner : numpy.ndarray of int64
        By event: the innermost call that it belongs to, or -1.
    unfinished : int
        Calls that were never left.
    """

    enter: np.ndarray
    leave: np.ndarray
    region: np.ndarray
    parent: np.ndarray
    owner: np.ndarray
    unfinished: int

    def __len__(self) -> int:
        return len(self.enter)

    @property
    def depth(self) -> np.ndarray:
        """How many calls lie around each call, int64."""
        depths = np.zeros(len(self), np.int64)
        for call, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                depths[call] = depths[parent] + 1
        return depths


def calls_of(events: Events) -> Calls:
    """Join entries and exits.

    An exit closes the innermost open call of its region, and all calls inside that one; an exit
    from a region that is not open is ignored.
    """
    times, kinds, regions = events.time.tolist(), events.kind.tolist(), events.region.tolist()
    enter: list[int] = []
    leave: list[int] = []
    region: list[int] = []
    parent: list[int] = []
    owner = [-1] * len(times)
    stack: list[int] = []
    for index, (time, kind) in enumerate(zip(times, kinds, strict=True)):
        if kind == EventKind.ENTER:
            parent.append(stack[-1] if stack else -1)
            stack.append(len(enter))
            enter.append(time)
            leave.append(-1)
            region.append(regions[index])
            owner[index] = stack[-1]
        elif kind == EventKind.LEAVE:
            if stack and region[stack[-1]] != regions[index] and regions[index] not in (region[call] for call in stack):
                continue
            while stack:
                call = stack.pop()
                leave[call] = time
                if region[call] == regions[index]:
                    owner[index] = call
                    break
        elif stack:
            owner[index] = stack[-1]
    for call in stack:
        leave[call] = times[-1]
    return Calls(
        np.array(enter, np.int64),
        np.array(leave, np.int64),
        np.array(region, np.int32),
        np.array(parent, np.int64),
        np.array(owner, np.int64),
        len(stack),
    )


def exclusive(events: Events, calls: Calls) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces of time between a location's events, and the call that each belongs to.

    Returns
    -------
    times : numpy.ndarray of int64, shape (n,)
        When each piece begins; a piece ends where the next one begins.
    call : numpy.ndarray of int64, shape (n,)
        The innermost call during the piece, or -1.
    """
    is_leave = events.kind == EventKind.LEAVE
    call = calls.owner.copy()
    known = is_leave & (call >= 0)
    call[known] = calls.parent[call[known]]
    lost = is_leave & (calls.owner < 0)  # an exit that closes nothing changes nothing
    for index in np.flatnonzero(lost).tolist():
        call[index] = call[index - 1] if index else -1
    return events.time, call
