"""The analysis of a trace: where the time of all ranks went, and who made whom wait.

The time of a rank, from the trace's first event to its last, is divided into computing, waiting,
communicating and being outside: the four add up to ranks × time, to the tick. Imports NumPy and its
neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from d5suite.traces.calls import Calls, exclusive
from d5suite.traces.delays import Delays, delays_of
from d5suite.traces.events import EventKind, Trace
from d5suite.traces.path import Piece, critical_path
from d5suite.traces.spans import common, merged
from d5suite.traces.waits import PATTERNS, SYNCHRONIZING, Wait, WaitStates, wait_states

OUTSIDE = "(outside of any region)"
"""What a path or a wait belongs to where no region is open."""


@dataclass(frozen=True)
class Rank:
    """The time of one rank, in ticks.

    Attributes
    ----------
    location : int
        Its main location.
    computing : int
        Inside its events, outside of MPI and of regions that wait.
    waiting : int
        Inside of MPI, in wait states that another rank caused; and in regions that wait for another
        program or thread, such as the other end of a coupling.
    communicating : int
        The rest of the time inside of MPI.
    outside : int
        Before its first event and after its last.
    overlapped : int
        The part of `computing` during which a message was under way: a non-blocking one, or a call
        of MPI on another thread of the process.
    caused : int
        How long others waited for it, all of them together.
    critical : int
        Its part of the critical path.
    """

    location: int
    computing: int
    waiting: int
    communicating: int
    outside: int
    overlapped: int
    caused: int
    critical: int


@dataclass(frozen=True)
class Analysis:
    """What a trace says.

    Attributes
    ----------
    trace : Trace
    states : WaitStates
    ranks : sequence of Rank
    patterns : mapping of str to tuple of int
        By pattern: how often, and ticks altogether.
    regions : mapping of str to tuple of int
        By region outside of MPI: its own ticks on all ranks; its ticks on the critical path, and
        its ticks of waiting, both in calls of MPI that it makes, too.
    steps : sequence of tuple of int
        By step: the ticks of the slowest rank, of the fastest, and of waiting on all ranks.
    path : sequence of Piece
    delays : Delays
    """

    trace: Trace
    states: WaitStates
    ranks: Sequence[Rank]
    patterns: Mapping[str, tuple[int, int]]
    regions: Mapping[str, tuple[int, int, int]]
    steps: Sequence[tuple[int, int, int]]
    path: Sequence[Piece]
    delays: Delays

    def to_dict(self) -> dict[str, Any]:
        """Return the analysis in seconds, JSON-able."""
        trace, seconds = self.trace, self.trace.seconds
        names = [f"{each.process}" for each in trace.locations]
        return {
            "seconds": seconds(trace.end - trace.begin),
            "events": len(trace),
            "messages": self.states.messages,
            "collectives": self.states.collectives,
            "unmatched": self.states.unmatched,
            "incomplete": self.states.incomplete,
            "unfinished": sum(each.unfinished for each in self.states.calls),
            "skipped": dict(trace.skipped),
            "ranks": [
                {
                    "rank": names[each.location],
                    "host": trace.locations[each.location].host,
                    **{f"{name}_s": seconds(ticks) for name, ticks in asdict(each).items() if name != "location"},
                }
                for each in self.ranks
            ],
            "wait_states": {
                name: {"count": count, "seconds": seconds(ticks)} for name, (count, ticks) in self.patterns.items()
            },
            "regions": {
                name: {"seconds": seconds(own), "critical_s": seconds(critical), "waiting_s": seconds(waiting)}
                for name, (own, critical, waiting) in self.regions.items()
            },
            "delays": [
                {
                    "rank": names[each.location],
                    "region": trace.regions[each.region].name if each.region >= 0 else OUTSIDE,
                    "direct_s": seconds(each.direct),
                    "indirect_s": seconds(each.indirect),
                }
                for each in self.delays.delays
            ],
            "waiting_s": self._waiting(),
            "steps": [
                {"slowest_s": seconds(slow), "fastest_s": seconds(fast), "waiting_s": seconds(waiting)}
                for slow, fast, waiting in self.steps
            ],
        }

    def _waiting(self) -> dict[str, float]:
        """Return the waiting by its causes and by what it causes; see `d5suite.traces.delays`."""
        seconds, waits = self.trace.seconds, self.delays.waits
        return {
            "direct": seconds(sum(each.direct for each in waits)),
            "indirect": seconds(sum(each.indirect for each in waits)),
            "unexplained": seconds(self.delays.unexplained),
            "propagating": seconds(sum(each.wait.ticks for each in waits if each.propagates)),
            "terminal": seconds(sum(each.wait.ticks for each in waits if not each.propagates)),
        }


def analyse(trace: Trace, *, step: str = "step") -> Analysis:
    """Analyse a trace.

    Parameters
    ----------
    trace : Trace
    step : str
        The region that is one step; its n-th call on each rank is step n.
    """
    states = wait_states(trace)
    calls = states.calls
    is_mpi = np.array([each.communicates for each in trace.regions] + [False])
    is_wait = np.array([each.waits for each in trace.regions] + [False])
    exposed = _exposed(trace, states, is_mpi)
    pieces = [exclusive(events, each) for events, each in zip(trace.events, calls, strict=True)]
    path = critical_path(trace, exposed)
    waiting = _ticks_of_waits(trace, exposed)
    caused: dict[int, int] = defaultdict(int)
    critical: dict[int, int] = defaultdict(int)
    for wait in exposed:
        if wait.cause >= 0:
            caused[wait.cause] += wait.ticks
    for piece in path:
        critical[piece.location] += piece.end - piece.begin
    mains = [index for index, each in enumerate(trace.locations) if each.is_main]
    ranks = []
    for location in mains:
        times, call = pieces[location]
        computing, communicating, held = _inside(times, call, calls[location], is_mpi, is_wait)
        whole = trace.end - trace.begin
        waited = min(waiting[location], communicating)
        ranks.append(
            Rank(
                location,
                computing,
                waited + held,
                communicating - waited,
                whole - computing - communicating - held,
                _overlap(trace, calls, location, is_mpi, is_wait),
                caused[location],
                critical[location],
            )
        )
    return Analysis(
        trace, states, ranks, _patterns(states.waits), _regions(trace, states, pieces, path, is_mpi),
        _steps(trace, calls, exposed, mains, step), path,
        delays_of(trace, states, exposed, pieces),
    )  # fmt: skip


def _exposed(trace: Trace, states: WaitStates, is_mpi: np.ndarray) -> list[Wait]:
    """Return the waits as the processes' main locations see them.

    A wait of another thread counts while the main one waits for that thread.
    """
    homes = trace.homes
    blocked: dict[int, np.ndarray] = {}
    found = []
    for wait in states.waits:
        home = homes[wait.location]
        if home == wait.location:
            found.append(wait._replace(cause=homes[wait.cause] if wait.cause >= 0 else -1))
            continue
        if home not in blocked:
            blocked[home] = merged(_spans(states.calls[home], is_mpi))
        cause = homes[wait.cause] if wait.cause >= 0 else -1
        spans = blocked[home]
        first, last = np.searchsorted(spans[:, 1], wait.begin, "right"), np.searchsorted(spans[:, 0], wait.end)
        for begin, end in spans[first:last].clip(wait.begin, wait.end).tolist():
            found.append(wait._replace(location=home, call=-1, begin=begin, end=end, cause=cause))
    return found


def _ticks_of_waits(trace: Trace, waits: Sequence[Wait]) -> list[int]:
    """Return how long each location waited; wait states of one call may overlap, and count once."""
    spans: list[list[tuple[int, int]]] = [[] for _ in trace.locations]
    for wait in waits:
        if wait.pattern in SYNCHRONIZING:
            spans[wait.location].append((wait.begin, wait.end))
    return [int(np.diff(merged(_rows(each))).sum()) for each in spans]


def _inside(
    times: np.ndarray, call: np.ndarray, calls: Calls, is_mpi: np.ndarray, is_wait: np.ndarray
) -> tuple[int, int, int]:
    """Return the ticks of computing, in MPI, and in waiting regions, from first to last event."""
    if not len(times):
        return 0, 0, 0
    lengths = np.diff(times)
    region = np.append(calls.region, -1)[call[:-1]]
    inside, held = int(lengths[is_mpi[region]].sum()), int(lengths[is_wait[region]].sum())
    return int(lengths.sum()) - inside - held, inside, held


def _overlap(trace: Trace, calls: Sequence[Calls], location: int, is_mpi: np.ndarray, is_wait: np.ndarray) -> int:
    """Return for how long a rank computed while a message of its was under way."""
    events, own = trace.events[location], calls[location]
    if not len(events):
        return 0
    process = trace.locations[location].process, trace.locations[location].host
    others = [
        _spans(calls[other], is_mpi)
        for other, each in enumerate(trace.locations)
        if other != location and (each.process, each.host) == process
    ]
    under_way: list[tuple[int, int]] = []
    posted: dict[int, int] = {}
    for index in np.flatnonzero((events.kind >= EventKind.ISEND) & (events.kind <= EventKind.IRECV)).tolist():
        kind, request, time = int(events.kind[index]), int(events.request[index]), int(events.time[index])
        if kind in (EventKind.ISEND, EventKind.IRECV_REQUEST):
            posted[request] = time
        elif request in posted:
            under_way.append((posted.pop(request), time))
    busy = merged(_spans(own, is_mpi | is_wait))
    computing = np.concatenate([events.time[:1], busy.ravel(), events.time[-1:]]).reshape(-1, 2)
    return int(common(merged(computing), merged(np.concatenate([*others, _rows(under_way)]))).sum())


def _spans(calls: Calls, is_mpi: np.ndarray) -> np.ndarray:
    """Return begin and end of a location's calls of MPI, (n, 2)."""
    return np.stack([calls.enter, calls.leave], axis=1)[is_mpi[calls.region]]


def _rows(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(spans, np.int64).reshape(-1, 2)


def _patterns(waits: Sequence[Wait]) -> dict[str, tuple[int, int]]:
    found = {}
    for name in PATTERNS:
        ticks = [wait.ticks for wait in waits if wait.pattern == name]
        if ticks:
            found[name] = len(ticks), sum(ticks)
    return found


def _regions(
    trace: Trace,
    states: WaitStates,
    pieces: Sequence[tuple[np.ndarray, np.ndarray]],
    path: Sequence[Piece],
    is_mpi: np.ndarray,
) -> dict[str, tuple[int, int, int]]:
    """Return by region outside of MPI: its own time, its part of the critical path, its waiting."""
    names = [*(each.name for each in trace.regions), OUTSIDE]
    totals = np.zeros((len(names), 3), np.int64)
    users = [_users(calls, is_mpi) for calls in states.calls]
    for location, (times, call) in enumerate(pieces):
        if len(times) > 1:
            region = np.append(states.calls[location].region, -1)[call[:-1]]
            np.add.at(totals[:, 0], region, np.where(is_mpi[region], 0, np.diff(times)))
    by_location: dict[int, list[Piece]] = defaultdict(list)
    for piece in path:
        by_location[piece.location].append(piece)
    for location, found in by_location.items():
        times, call = pieces[location]
        for piece in found:
            first, last = np.searchsorted(times, piece.begin, "right"), np.searchsorted(times, piece.end, "left")
            edges = np.concatenate([[piece.begin], times[first:last], [piece.end]])
            at = np.searchsorted(times, edges[:-1], "right") - 1
            region = np.where(at >= 0, users[location][call[np.maximum(at, 0)]], -1)
            np.add.at(totals[:, 1], region, np.diff(edges))
    for wait in states.waits:
        if wait.pattern in SYNCHRONIZING:
            totals[users[wait.location][wait.call], 2] += wait.ticks
    found_names: dict[str, tuple[int, int, int]] = {}
    for name, row in sorted(zip(names, totals.tolist(), strict=True), key=lambda each: -each[1][0]):
        if any(row):
            old = found_names.get(name, (0, 0, 0))
            found_names[name] = old[0] + row[0], old[1] + row[1], old[2] + row[2]
    return found_names


def _users(calls: Calls, is_mpi: np.ndarray) -> np.ndarray:
    """Return by call the innermost region around it that is not MPI's; the last item is -1."""
    found = np.append(calls.region.astype(np.int64), -1)
    parents = calls.parent.tolist()
    for call in np.flatnonzero(is_mpi[calls.region]).tolist() if len(calls) else []:
        found[call] = found[parents[call]]  # a call's parent comes before it
    return found


def _steps(
    trace: Trace, calls: Sequence[Calls], waits: Sequence[Wait], mains: Sequence[int], step: str
) -> list[tuple[int, int, int]]:
    wanted = {index for index, each in enumerate(trace.regions) if each.name == step}
    spans = {}
    for location in mains:
        chosen = np.flatnonzero(np.isin(calls[location].region, list(wanted)))
        if len(chosen):
            spans[location] = calls[location].enter[chosen], calls[location].leave[chosen]
    if not spans:
        return []
    count = min(len(enter) for enter, _ in spans.values())
    waiting = np.zeros(count, np.int64)
    for wait in waits:
        if wait.location in spans and wait.pattern in SYNCHRONIZING:
            number = int(np.searchsorted(spans[wait.location][0], wait.begin, "right")) - 1
            if 0 <= number < count and wait.begin < spans[wait.location][1][number]:
                waiting[number] += wait.ticks
    lengths = np.array([(leave - enter)[:count] for enter, leave in spans.values()])
    rows = zip(lengths.max(0).tolist(), lengths.min(0).tolist(), waiting.tolist(), strict=True)
    return list(rows)
