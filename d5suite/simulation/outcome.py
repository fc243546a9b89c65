"""Where the time of a simulated step goes: shares of ranks, and the path that decides it.

Imports NumPy and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from d5suite.simulation.engine import Played
from d5suite.simulation.programs import Kind

PARTS = ("computing", "latency", "bytes", "sharing")
"""Parts of the critical path: computing; α and n · β of messages; links and cores that several
share."""


@dataclass(frozen=True)
class Outcome:
    """A simulated step.

    Attributes
    ----------
    step_s : float
        Seconds of a step, of all ranks.
    computing, communicating, waiting : float
        Shares of a rank's time, the mean of all ranks. Communicating: its messages are under way
        and it does not compute. Waiting: nothing is, because another rank is late.
    path : mapping of str to float
        Share of each of `PARTS` on the critical path.
    ranks, kinds : int
        Real ranks, and those that were simulated.
    messages : int
        Simulated ones.
    steps : int
    lengthened : bool
        Whether arrays were lengthened, so that segments are equal.
    played : Played
    """

    step_s: float
    computing: float
    communicating: float
    waiting: float
    path: Mapping[str, float]
    ranks: int
    kinds: int
    messages: int
    steps: int
    lengthened: bool
    played: Played = field(repr=False, compare=False)

    @property
    def bound(self) -> str:
        """The largest part of the critical path."""
        return max(self.path, key=lambda name: self.path[name])

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; seconds and shares."""
        names = ("step_s", "computing", "communicating", "waiting", "ranks", "kinds", "messages", "steps")
        return {**{name: getattr(self, name) for name in names}, "path": dict(self.path), "bound": self.bound}


def outcome(played: Played) -> Outcome:
    """Sum up what was played."""
    programs = played.programs
    ends = np.array([
        [times[0]["end"][mark - 1] for mark in marks]
        for times, marks in zip(played.times, programs.marks, strict=True) if marks
    ])  # fmt: skip
    last = ends.max(axis=0)
    step_s = float((last[-1] - last[0]) / (len(last) - 1)) if len(last) > 1 else float(last[0])
    shares = np.zeros(3)
    weight = 0
    for rank, marks in enumerate(programs.marks):
        if marks:
            shares += np.array(_shares(played, rank, float(last[-1]))) * programs.ranks[rank]
            weight += programs.ranks[rank]
    shares /= weight * last[-1] if last[-1] > 0 else 1
    computing, communicating, waiting = shares.tolist()
    return Outcome(
        step_s, computing, communicating, waiting, critical_path(played), sum(programs.ranks), len(programs.streams),
        programs.messages, len(last), programs.lengthened, played,
    )  # fmt: skip


def _shares(played: Played, rank: int, until: float) -> tuple[float, float, float]:
    """Return the seconds that a rank computes, communicates and waits."""
    ops, times = played.ops[rank], played.times[rank]
    main, when = ops[0], times[0]
    computes = main["kind"] == Kind.COMPUTE
    computing = float((when["end"] - when["begin"])[computes].sum())
    blocked = merged(when["begin"][~computes], when["end"][~computes])
    waits = [each[own["kind"] == Kind.WAIT] for own, each in zip(ops, times, strict=True)]
    active = merged(*(np.concatenate([each[name] for each in waits]) for name in ("started", "finished")))
    communicating = common(blocked, active)
    return computing, communicating, max(0.0, until - computing - communicating)


def merged(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the union of intervals, (n, 2), in order."""
    keep = end > begin
    begin, end = begin[keep], end[keep]
    if not len(begin):
        return np.empty((0, 2))
    order = np.argsort(begin, kind="stable")
    begin, until = begin[order], np.maximum.accumulate(end[order])
    new = np.concatenate([[True], begin[1:] > until[:-1]])
    first = np.flatnonzero(new)
    last = np.concatenate([first[1:] - 1, [len(begin) - 1]])
    return np.stack([begin[first], until[last]], axis=1)


def common(one: np.ndarray, other: np.ndarray) -> float:
    """Return the length of what two unions of intervals, from `merged`, have in common."""

    def covered(intervals: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return the length of a union before each time."""
        lengths = np.concatenate([[0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
        place = np.searchsorted(intervals[:, 0], at, side="right")
        inside = np.minimum(at, intervals[np.maximum(place - 1, 0), 1]) - intervals[np.maximum(place - 1, 0), 0]
        return np.where(place > 0, lengths[np.maximum(place - 1, 0)] + np.maximum(inside, 0), 0.0)

    if not len(one) or not len(other):
        return 0.0
    return float((covered(other, one[:, 1]) - covered(other, one[:, 0])).sum())


Place = tuple[int, int, int]
"""Rank, stream, operation."""


def _partners(played: Played) -> dict[Place, Place]:
    """Return the other end of each message, by the operation that began it."""
    columns: dict[int, list[np.ndarray]] = {Kind.ISEND: [], Kind.IRECV: []}
    for rank, (ops, times) in enumerate(zip(played.ops, played.times, strict=True)):
        for stream, (own, when) in enumerate(zip(ops, times, strict=True)):
            for kind, rows in columns.items():
                at = np.flatnonzero((own["kind"] == kind) & (own["peer"] != -2))
                rows.append(
                    np.stack([own["mailbox"][at], np.full(len(at), rank), np.full(len(at), stream), at], axis=1)
                )
                rows[-1] = np.concatenate([rows[-1], when["begin"][at].view(np.int64)[:, None]], axis=1)
    sends, receives = (np.concatenate(each) for each in columns.values())
    found: dict[Place, Place] = {}
    ends: list[dict[tuple[int, int], Place]] = []
    for table in (sends, receives):
        # Times are positive, so that their bits have their order.
        ordered = table[np.lexsort((table[:, 3], table[:, 4], table[:, 0]))]
        counts = np.arange(len(ordered)) - np.searchsorted(ordered[:, 0], ordered[:, 0])
        keys = zip(ordered[:, 0].tolist(), counts.tolist(), strict=True)
        ends.append(dict(zip(keys, map(tuple, ordered[:, 1:4].tolist()), strict=True)))
    for key, one in ends[0].items():
        if key in ends[1]:
            other = ends[1][key]
            found[one], found[other] = other, one
    return found


def critical_path(played: Played) -> dict[str, float]:
    """Return the shares of `PARTS` on the path that ends last.

    The path is walked back. Where a rank waited for a message, the message is on it, and the path
    goes on at the end that began the message later; where it waited for another of its streams, at
    what that one did. So it contains no waiting.
    """
    partners = _partners(played)
    network = played.network
    parts = dict.fromkeys(PARTS, 0.0)
    place = max(
        ((rank, 0, marks[-1] - 1) for rank, marks in enumerate(played.programs.marks) if marks),
        key=lambda each: played.times[each[0]][0]["end"][each[2]],
    )
    known: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}
    steps = sum(len(own) for ops in played.ops for own in ops) * 2
    while place[2] >= 0 and steps:
        steps -= 1
        rank, stream, at = place
        if (rank, stream) not in known:
            known[rank, stream] = played.ops[rank][stream].tolist(), played.times[rank][stream].tolist()
        ops, times = known[rank, stream]
        kind, peer, _, _, ref, _ = ops[at]
        begin, end, started, finished = times[at]
        place = rank, stream, at - 1
        if kind == Kind.COMPUTE:
            parts["computing"] += end - begin
        elif kind == Kind.AFTER and end > begin:
            place = rank, peer, ref
        elif kind == Kind.WAIT and end > begin:
            took, nbytes = finished - started, ops[ref][3]
            latency = min(took, network.latency_s)
            moving = min(took - latency, nbytes / network.bytes_per_s)
            parts["latency"] += latency
            parts["bytes"] += moving
            parts["sharing"] += took - latency - moving
            own = times[ref][0]
            other = partners.get((rank, stream, ref))
            place = (rank, stream, ref) if other is None or own >= started else other
    total = sum(parts.values()) or 1.0
    return {name: value / total for name, value in parts.items()}
