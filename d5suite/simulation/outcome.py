"""Where the time of a simulated step goes: shares of ranks, and the path that decides it.

Imports NumPy and its neighbours.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from d5suite.simulation.engine import Played
from d5suite.simulation.programs import LAST, OpKind
from d5suite.traces.spans import common, merged

PARTS = ("computing", "latency", "bytes", "sharing")
"""Parts of the critical path: computing; α and n · β of messages; links and cores that several
share."""


@dataclass(frozen=True)
class SimulatedStep:
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
        """Return the outcome as JSON values: seconds and shares."""
        names = ("step_s", "computing", "communicating", "waiting", "ranks", "kinds", "messages", "steps")
        return {**{name: getattr(self, name) for name in names}, "path": dict(self.path), "bound": self.bound}


def outcome(played: Played) -> SimulatedStep:
    """Sum up what was played."""
    programs = played.programs
    ends = np.array([
        [times[0]["end"][mark - 1] for mark in marks]
        for times, marks in zip(played.times, programs.marks, strict=True) if marks
    ])  # fmt: skip
    last = ends.max(axis=0)
    step_s = float((last[-1] - last[0]) / (len(last) - 1)) if len(last) > 1 else float(last[0])
    shares = _seconds(played, float(last[-1]))
    weights = np.array([count if marks else 0 for count, marks in zip(programs.ranks, programs.marks, strict=True)])
    computing, communicating, waiting = (shares @ weights / (weights.sum() * last[-1] or 1)).tolist()
    return SimulatedStep(
        step_s, computing, communicating, waiting, critical_path(played), sum(programs.ranks), len(programs.streams),
        programs.messages, len(last), programs.lengthened, played,
    )  # fmt: skip


def _seconds(played: Played, until: float) -> np.ndarray:
    """Return the seconds for which each rank computes, communicates and waits, (3, ranks)."""
    ranks = len(played.ops)
    counts = np.array([sum(map(len, own)) for own in played.ops])
    main = np.concatenate([np.arange(count) < len(own[0]) for own, count in zip(played.ops, counts, strict=True)])
    owner = np.repeat(np.arange(ranks), counts)
    kind, when = _flat(played.ops)["kind"], _flat(played.times)
    computes = main & (kind == OpKind.COMPUTE)
    computing = np.bincount(owner[computes], (when["end"] - when["begin"])[computes], ranks)
    # One rank's times lie behind the other's, so that all are merged at once.
    span = 1 + float(max(when["end"].max(), when["finished"].max()))
    shift = (owner * span)[:, None]
    own, moving = (np.stack([when[begin], when[end]], axis=1) + shift
                   for begin, end in (("begin", "end"), ("started", "finished")))  # fmt: skip
    idle, active = merged(own[main & (kind != OpKind.COMPUTE)]), merged(moving[kind == OpKind.WAIT])
    communicating = np.bincount((idle[:, 0] / span).astype(np.int64), common(idle, active), ranks)
    return np.stack([computing, communicating, np.maximum(0.0, until - computing - communicating)])


def _flat(lists: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Return the rows of all ranks' streams, one after the other."""
    return np.concatenate([each for own in lists for each in own])


def _partners(played: Played) -> np.ndarray:
    """Return the other end of each message, by the operation that began it; else -1.

    Operations are numbered as in `_flat`. Ends of a mailbox meet in the order in which they came.
    """
    ops, begin = _flat(played.ops), _flat(played.times)["begin"]
    found = np.full(len(ops), -1)
    ends = []
    for kind in (OpKind.ISEND, OpKind.IRECV):
        at = np.flatnonzero((ops["kind"] == kind) & (ops["peer"] != LAST))
        at = at[np.lexsort((at, begin[at], ops["mailbox"][at]))]
        boxes = ops["mailbox"][at]
        turn = np.arange(len(at)) - np.searchsorted(boxes, boxes)
        ends.append((at, boxes * (len(ops) + 1) + turn))
    (sends, key), (receives, other) = ends
    _, one, two = np.intersect1d(key, other, assume_unique=True, return_indices=True)
    found[sends[one]], found[receives[two]] = receives[two], sends[one]
    return found


def critical_path(played: Played) -> dict[str, float]:
    """Return the shares of `PARTS` on the path that ends last.

    The path is walked back. Where a rank waited for a message, the message is on it, and the path
    goes on at the end that began the message later; where it waited for another of its streams, at
    what that one did. So it contains no waiting.
    """
    partners = _partners(played)
    where = [(rank, stream) for rank, own in enumerate(played.ops) for stream in range(len(own))]
    starts = np.cumsum([0, *(len(each) for own in played.ops for each in own)]).tolist()
    first = dict(zip(where, starts, strict=False))
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
        if kind == OpKind.COMPUTE:
            parts["computing"] += end - begin
        elif kind == OpKind.AFTER and end > begin:
            place = rank, peer, ref
        elif kind == OpKind.WAIT and end > begin:
            took, nbytes = finished - started, ops[ref][3]
            latency = min(took, network.latency_s)
            moving = min(took - latency, nbytes / network.bytes_per_s)
            parts["latency"] += latency
            parts["bytes"] += moving
            parts["sharing"] += took - latency - moving
            own = times[ref][0]
            other = int(partners[first[rank, stream] + ref])
            if other < 0 or own >= started:
                place = rank, stream, ref
            else:
                number = bisect.bisect_right(starts, other) - 1
                place = *where[number], other - starts[number]
    total = sum(parts.values()) or 1.0
    return {name: value / total for name, value in parts.items()}
