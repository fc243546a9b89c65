"""Wait states: who waited for whom, and how long.

The definitions are Scalasca's (Geimer et al., "A scalable tool architecture for diagnosing wait
states in massively parallel applications", Parallel Computing 35, 2009; the pattern documentation
of Scalasca 2.5), to the tick. Imports NumPy and its neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from d5suite.traces.calls import Calls, calls_of
from d5suite.traces.events import N_TO_N, N_TO_ONE, ONE_TO_N, PREFIX, CollectiveOp, Comm, EventKind, Events, Trace

PATTERNS = {
    "late sender": "a receive was called before its message was sent",
    "late receiver": "a send was called before its receive, and did not end until then",
    "wait at N x N": "a rank entered an operation of all with all before the last rank with data",
    "N x N completion": "a rank left an operation of all with all after the first rank",
    "late broadcast": "a rank entered an operation of one with all before the root",
    "early reduce": "the root entered an operation of all with one before any other rank with data",
    "early scan": "a rank entered a prefix operation before a rank below it",
    "wait at barrier": "a rank entered a barrier before the last rank",
    "barrier completion": "a rank left a barrier after the first rank",
}
"""The wait states, each in a sentence."""

SYNCHRONIZING = frozenset(PATTERNS) - {"N x N completion", "barrier completion"}
"""Wait states that another rank's lateness causes; the others are time inside of the operation."""


class Wait(NamedTuple):
    """One wait state.

    Attributes
    ----------
    pattern : str
        A key of `PATTERNS`.
    location : int
        Who waited.
    call : int
        In which call, an index into the location's `Calls`.
    begin, end : int
        Ticks.
    cause : int
        The location that was waited for; -1 where it is no single one.
    """

    pattern: str
    location: int
    call: int
    begin: int
    end: int
    cause: int

    @property
    def ticks(self) -> int:
        """How long it took."""
        return self.end - self.begin


@dataclass
class WaitStates:
    """All wait states of a trace.

    Attributes
    ----------
    waits : list of Wait
    calls : sequence of Calls
        By location.
    messages : int
        Messages whose sending and receiving were both recorded.
    collectives : int
        Collective operations of which every rank was recorded.
    unmatched : int
        Sends and receives whose other end was not recorded.
    incomplete : int
        Collective operations that some rank did not end.
    arrows : list of tuple of int
        By message: when it was sent, the sender, when it was received, and the receiver.
    meetings : list of tuple of int
        By message: the sender's main location and when it left the call, and the receiver's.
    leaves : list of numpy.ndarray
        By communicator: when each rank left each operation, int64 (operations, ranks).
    """

    waits: list[Wait]
    calls: Sequence[Calls]
    messages: int = 0
    collectives: int = 0
    unmatched: int = 0
    incomplete: int = 0
    arrows: list[tuple[int, int, int, int]] = field(default_factory=list)
    meetings: list[tuple[int, int, int, int]] = field(default_factory=list)
    leaves: list[np.ndarray] = field(default_factory=list)


def wait_states(trace: Trace) -> WaitStates:
    """Find all wait states of a trace."""
    calls = [calls_of(events) for events in trace.events]
    found = WaitStates([], calls)
    _messages(trace, calls, found)
    _collectives(trace, calls, found)
    found.waits.sort(key=lambda wait: (wait.location, wait.begin, wait.end))
    return found


# Messages.


class _End(NamedTuple):
    """One end of a message.

    Attributes
    ----------
    location : int
    post : int
        The call that posts it: of a blocking operation the call itself.
    completion : int
        The call that completes it; -1 if none was recorded.
    """

    location: int
    post: int
    completion: int


class _Channel:
    """Messages of one communicator, sender, receiver and tag; they do not overtake each other."""

    def __init__(self) -> None:
        self.sends: list[tuple[int, int, _End]] = []
        self.receives: list[tuple[int, int, _End]] = []


def _messages(trace: Trace, calls: Sequence[Calls], found: WaitStates) -> None:
    channels: dict[tuple[int, int, int, int], _Channel] = defaultdict(_Channel)
    homes = trace.homes
    for location, events in enumerate(trace.events):
        _ends(trace.communicators, location, homes[location], events, calls[location], channels)
    late: dict[tuple[str, int, int], Wait] = {}
    names = [region.name for region in trace.regions]
    for channel in channels.values():
        sends, receives = (
            [end for *_, end in sorted(ends, key=lambda each: each[:2])] for ends in (channel.sends, channel.receives)
        )
        found.messages += min(len(sends), len(receives))
        found.unmatched += abs(len(sends) - len(receives))
        for send, receive in zip(sends, receives, strict=False):
            sent = int(calls[send.location].enter[send.post])
            received = int(calls[receive.location].leave[receive.completion])
            found.arrows.append((sent, send.location, received, receive.location))
            left = int(calls[send.location].leave[send.post])
            found.meetings.append((homes[send.location], left, homes[receive.location], received))
            for wait in _of_message(calls, names, send, receive):
                # A call that completes several messages waits for the latest of them only.
                key = wait.pattern, wait.location, wait.call
                if key not in late or wait.ticks > late[key].ticks:
                    late[key] = wait
    found.waits += late.values()


def _ends(
    communicators: Sequence[Comm],
    location: int,
    home: int,
    events: Events,
    calls: Calls,
    channels: dict[tuple[int, int, int, int], _Channel],
) -> None:
    """Sort a location's sends and receives into channels between main locations (``home``)."""
    chosen = np.flatnonzero((events.kind >= EventKind.SEND) & (events.kind <= EventKind.IRECV))
    completions: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in chosen[events.kind[chosen] == EventKind.ISEND_COMPLETE].tolist():
        completions[int(events.request[index])].append((index, int(calls.owner[index])))
    posted: dict[int, tuple[int, int]] = {}

    def time(index: int) -> int:
        return int(events.time[index])

    for index in chosen.tolist():
        kind, request, owner = int(events.kind[index]), int(events.request[index]), int(calls.owner[index])
        if kind == EventKind.IRECV_REQUEST:
            posted[request] = index, owner
        if kind not in (EventKind.SEND, EventKind.ISEND, EventKind.RECV, EventKind.IRECV) or owner < 0:
            continue
        members = communicators[int(events.communicator[index])].members if events.communicator[index] >= 0 else ()
        if not 0 <= events.peer[index] < len(members):
            continue
        peer, comm, tag = members[int(events.peer[index])], int(events.communicator[index]), int(events.tag[index])
        if kind == EventKind.SEND:
            channels[comm, home, peer, tag].sends.append((time(index), index, _End(location, owner, owner)))
        elif kind == EventKind.ISEND:
            later = next((call for at, call in completions[request] if at > index), -1)
            channels[comm, home, peer, tag].sends.append((time(index), index, _End(location, owner, later)))
        elif kind == EventKind.RECV:
            channels[comm, peer, home, tag].receives.append((time(index), index, _End(location, owner, owner)))
        else:
            order, post = posted.pop(request, (index, owner))
            channels[comm, peer, home, tag].receives.append((time(order), order, _End(location, post, owner)))


def _of_message(calls: Sequence[Calls], names: Sequence[str], send: _End, receive: _End) -> Iterator[Wait]:
    senders, receivers = calls[send.location], calls[receive.location]
    enter, leave = int(receivers.enter[receive.completion]), int(receivers.leave[receive.completion])
    sent = min(int(senders.enter[send.post]), leave)
    if sent > enter and not _tests(names, receivers, receive.completion):
        yield Wait("late sender", receive.location, receive.completion, enter, sent, send.location)
    if send.completion < 0 or _tests(names, senders, send.completion):
        return
    enter, leave = int(senders.enter[send.completion]), int(senders.leave[send.completion])
    received = int(receivers.enter[receive.post])
    if enter < received < leave:
        yield Wait("late receiver", send.location, send.completion, enter, received, receive.location)


def _tests(names: Sequence[str], calls: Calls, call: int) -> bool:
    """Return whether a call only asks whether a message has come."""
    return call >= 0 and names[int(calls.region[call])].startswith("MPI_Test")


# Collectives.


class _Instance(NamedTuple):
    """One collective operation, by rank."""

    operation: CollectiveOp
    root: int
    locations: Sequence[int]
    calls: np.ndarray
    enter: np.ndarray
    leave: np.ndarray
    sent: np.ndarray
    received: np.ndarray


def _collectives(trace: Trace, calls: Sequence[Calls], found: WaitStates) -> None:
    by_member: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for location, (events, home) in enumerate(zip(trace.events, trace.homes, strict=True)):
        ended = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (calls[location].owner >= 0))
        rows = zip(events.communicator[ended].tolist(), events.time[ended].tolist(), ended.tolist(), strict=True)
        for comm, time, index in rows:
            by_member[comm, home].append((time, location, index))
    for comm, communicator in enumerate(trace.communicators):
        ends = [by_member.get((comm, member), []) for member in communicator.members]
        for each in ends:
            each.sort()  # a process may communicate in several threads, one at a time
        whole = min(map(len, ends), default=0)
        found.collectives += whole
        found.incomplete += max(map(len, ends), default=0) - whole
        leaves = np.zeros((whole, len(ends)), np.int64)
        for number in range(whole):
            instance = _instance(trace, calls, [each[number][1:] for each in ends])
            leaves[number] = instance.leave
            found.waits += _of_collective(instance)
        found.leaves.append(leaves)


def _instance(trace: Trace, calls: Sequence[Calls], rows: Sequence[tuple[int, int]]) -> _Instance:
    """Return one operation, given the location and the index of its end on each rank."""
    location, index = rows[0]
    first = trace.events[location]
    owner = np.array([calls[location].owner[index] for location, index in rows])
    at = [(location, call) for (location, _), call in zip(rows, owner.tolist(), strict=True)]
    return _Instance(
        CollectiveOp(int(first.region[index])),
        int(first.peer[index]),
        [location for location, _ in rows],
        owner,
        np.array([calls[location].enter[call] for location, call in at]),
        np.array([calls[location].leave[call] for location, call in at]),
        np.array([trace.events[location].sent[index] for location, index in rows]),
        np.array([trace.events[location].received[index] for location, index in rows]),
    )


def _of_collective(each: _Instance) -> Iterator[Wait]:
    everybody = np.ones(len(each.locations), bool)
    if each.operation is CollectiveOp.BARRIER:
        yield from _until_latest(each, "wait at barrier", everybody, everybody)
        yield from _completion(each, "barrier completion", everybody, everybody)
    elif each.operation in N_TO_N:
        sends, receives = each.sent > 0, each.received > 0
        yield from _until_latest(each, "wait at N x N", receives, sends)
        yield from _completion(each, "N x N completion", sends & receives, sends)
    elif each.operation in ONE_TO_N and 0 <= each.root < len(each.locations):
        at_root = np.arange(len(each.locations)) == each.root
        yield from _until_latest(each, "late broadcast", ~at_root & (each.received > 0), at_root)
    elif each.operation in N_TO_ONE and 0 <= each.root < len(each.locations):
        others = (np.arange(len(each.locations)) != each.root) & (each.sent > 0)
        if others.any():
            first = int(np.flatnonzero(others)[np.argmin(each.enter[others])])
            yield from _wait(each, "early reduce", each.root, int(each.enter[first]), first)
    elif each.operation in PREFIX:
        for rank in range(1, len(each.locations)):
            latest = int(np.argmax(each.enter[: rank + 1]))
            yield from _wait(each, "early scan", rank, int(each.enter[latest]), latest)


def _until_latest(each: _Instance, pattern: str, waiting: np.ndarray, awaited: np.ndarray) -> Iterator[Wait]:
    """Yield the waits of some ranks for the last of others to enter."""
    if not awaited.any():
        return
    latest = int(np.flatnonzero(awaited)[np.argmax(each.enter[awaited])])
    for rank in np.flatnonzero(waiting).tolist():
        yield from _wait(each, pattern, rank, int(each.enter[latest]), latest)


def _wait(each: _Instance, pattern: str, rank: int, until: int, cause: int) -> Iterator[Wait]:
    begin, end = int(each.enter[rank]), min(until, int(each.leave[rank]))
    if end > begin:
        yield Wait(pattern, each.locations[rank], int(each.calls[rank]), begin, end, each.locations[cause])


def _completion(each: _Instance, pattern: str, taking_part: np.ndarray, awaited: np.ndarray) -> Iterator[Wait]:
    """Yield the time that ranks need to leave after the first one has."""
    if not taking_part.any():
        return
    latest, earliest = int(each.enter[awaited].max()), int(each.leave[taking_part].min())
    for rank in np.flatnonzero(taking_part).tolist():
        leave = int(each.leave[rank])
        begin = max(earliest, min(latest, leave))
        if leave > begin:
            yield Wait(pattern, each.locations[rank], int(each.calls[rank]), begin, leave, -1)
