"""A simulated step as a trace.

Imports `d5suite.distributed`, `d5suite.traces` and its neighbours.
"""

from __future__ import annotations

from collections import Counter

from d5suite.distributed.schemes.all_reduce import AVERAGE
from d5suite.levels.distributed import ANY
from d5suite.simulation.engine import Played
from d5suite.simulation.programs import OpKind
from d5suite.traces.events import Comm, Events, Location, Region, Trace
from d5suite.traces.events import EventKind as Event

_CALLS = {OpKind.ISEND: "MPI_Isend", OpKind.IRECV: "MPI_Irecv", OpKind.WAIT: "MPI_Wait"}

NS = 1_000_000_000


def trace_of(played: Played, title: str) -> Trace:
    """Return the simulation as a trace, in which one rank stands for each kind of ranks.

    Messages of a kind of ranks to itself have no peer in the trace and are left out: their calls
    remain.
    """
    programs = played.programs
    regions: dict[Region, int] = {}

    def number(region: Region) -> int:
        return regions.setdefault(region, len(regions))

    calls = {kind: number(Region(name, "point2point", True, "MPI")) for kind, name in _CALLS.items()}
    join, step = number(Region("communicate", "task_wait")), number(Region("step"))
    locations: list[Location] = []
    events: list[Events] = []
    mains: list[int] = []
    folded = len(programs.streams) < sum(programs.ranks)
    counts = Counter(programs.members)
    requests = iter(range(1, 1 << 62))
    for rank, streams in enumerate(programs.streams):
        more = f", which stands for {counts[rank]:,}" if folded else ""
        for stream, ops in enumerate(streams):
            if stream == 0:
                mains.append(len(locations))
            locations.append(
                Location(f"stream {stream}" if stream else "main", f"rank {rank}{more}", is_main=stream == 0)
            )
            marks = set(programs.marks[rank]) if stream == 0 else set()
            rows: list[tuple[int, ...]] = []
            pending: dict[int, int] = {}
            if marks:
                rows.append((0, Event.ENTER, step, -1, -1, -1, 0, 0, -1))
            for index, (op, when) in enumerate(zip(ops, played.times[rank][stream].tolist(), strict=True)):
                begin, end = round(when[0] * NS), round(when[1] * NS)
                if op.kind == OpKind.COMPUTE or (op.kind == OpKind.AFTER and stream == 0):
                    label = AVERAGE if stream else op.label or "compute"
                    region = join if op.kind == OpKind.AFTER else number(Region(label))
                    if end > begin:
                        rows.append((begin, Event.ENTER, region, -1, -1, -1, 0, 0, -1))
                        rows.append((end, Event.LEAVE, region, -1, -1, -1, 0, 0, -1))
                elif op.kind in _CALLS:
                    rows.append((begin, Event.ENTER, calls[OpKind(op.kind)], -1, -1, -1, 0, 0, -1))
                    if op.kind in (OpKind.ISEND, OpKind.IRECV) and not folded and op.peer >= 0:
                        pending[index] = next(requests)
                        sends = op.kind == OpKind.ISEND
                        rows.append((begin, Event.ISEND if sends else Event.IRECV_REQUEST, -1, 0 if sends else -1,
                                     op.peer if sends else -1, op.tag if sends else -1, op.nbytes * sends, 0,
                                     pending[index]))  # fmt: skip
                    elif op.kind == OpKind.WAIT and op.ref in pending:
                        of, request = ops[op.ref], pending.pop(op.ref)
                        rows.append(
                            (end, Event.ISEND_COMPLETE, -1, -1, -1, -1, 0, 0, request) if of.kind == OpKind.ISEND else
                            (end, Event.IRECV, -1, 0, of.peer, of.tag, 0, of.nbytes, request)
                        )  # fmt: skip
                    rows.append((end, Event.LEAVE, calls[OpKind(op.kind)], -1, -1, -1, 0, 0, -1))
                if index + 1 in marks:
                    rows.append((end, Event.LEAVE, step, -1, -1, -1, 0, 0, -1))
                    if index + 1 < max(marks):
                        rows.append((end, Event.ENTER, step, -1, -1, -1, 0, 0, -1))
            events.append(Events.from_rows(rows))
    if any(op.peer == ANY for streams in programs.streams for ops in streams for op in ops if op.kind == OpKind.IRECV):
        note = ["Messages to whoever came first are left out."]
    else:
        note = ["Ranks that are alike are one rank; its messages are left out."] if folded else []
    return Trace(
        locations, list(regions), [Comm("simulated ranks", tuple(mains))], events, NS, notes=note,
        properties={"simulated": title},
    )  # fmt: skip
