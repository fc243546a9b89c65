"""Traces made by hand: each rank is a list of calls, and nothing has to be recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from d5suite.traces.events import COLUMNS, CollectiveOp, Comm, EventKind, Events, Location, Region, Trace

REGIONS = [
    Region("step"),
    Region("conv1"),
    Region("MPI_Send", "point2point", True),
    Region("MPI_Recv", "point2point", True),
    Region("MPI_Isend", "point2point", True),
    Region("MPI_Irecv", "point2point", True),
    Region("MPI_Wait", "point2point", True),
    Region("MPI_Waitall", "point2point", True),
    Region("MPI_Test", "point2point", True),
    Region("MPI_Barrier", "barrier", True),
    Region("MPI_Allreduce", "coll_all2all", True),
    Region("MPI_Bcast", "coll_one2all", True),
    Region("MPI_Reduce", "coll_all2one", True),
    Region("MPI_Scan", "coll_other", True),
    Region("wait for writer: data", "thread_wait"),
]
NUMBER = {region.name: index for index, region in enumerate(REGIONS)}

Row = tuple[int, ...]


def call(name: str, enter: int, leave: int, *inside: Row) -> list[Row]:
    """A call with what happens inside."""
    entry = (enter, EventKind.ENTER, NUMBER[name], -1, -1, -1, 0, 0, -1)
    return [entry, *inside, (leave, EventKind.LEAVE, NUMBER[name], -1, -1, -1, 0, 0, -1)]


def send(time: int, to: int, *, tag: int = 0, size: int = 8) -> Row:
    return (time, EventKind.SEND, -1, 0, to, tag, size, 0, -1)


def recv(time: int, of: int, *, tag: int = 0, size: int = 8) -> Row:
    return (time, EventKind.RECV, -1, 0, of, tag, 0, size, -1)


def isend(time: int, to: int, request: int, *, tag: int = 0) -> Row:
    return (time, EventKind.ISEND, -1, 0, to, tag, 8, 0, request)


def isend_complete(time: int, request: int) -> Row:
    return (time, EventKind.ISEND_COMPLETE, -1, -1, -1, -1, 0, 0, request)


def irecv_request(time: int, request: int) -> Row:
    return (time, EventKind.IRECV_REQUEST, -1, -1, -1, -1, 0, 0, request)


def irecv(time: int, of: int, request: int, *, tag: int = 0) -> Row:
    return (time, EventKind.IRECV, -1, 0, of, tag, 0, 8, request)


def collective(
    name: str, operation: CollectiveOp, enter: int, leave: int, *, root: int = -1, sent: int = 8, received: int = 8
) -> list[Row]:
    return call(name, enter, leave, (leave, EventKind.COLLECTIVE, operation, 0, root, -1, sent, received, -1))


def trace_of(*ranks: Sequence[Row]) -> Trace:
    """A trace of ranks in one communicator, on a host each."""
    return Trace(
        [Location("main", f"rank {rank}", f"host{rank}") for rank in range(len(ranks))],
        REGIONS,
        [Comm("MPI_COMM_WORLD", tuple(range(len(ranks))))],
        [Events.from_rows(rows) for rows in ranks],
    )


def steps_of_ranks(events: int, *, ranks: int = 4, layers: int = 22) -> Trace:
    """About so many events: steps of layers, of random lengths, and an all-reduce.

    A step is ``layers`` regions of 1 to 9 µs; the rank that is last in it makes the others wait.
    """
    per_step = 2 + 2 * layers + 3
    steps = events // ranks // per_step
    took = np.random.default_rng(0).integers(1_000, 9_000, (ranks, steps, layers))
    ready = took.sum(axis=2) + 100 * layers
    begin = np.concatenate([[0], np.cumsum(ready.max(axis=0) + 20_000)[:-1]])
    last = begin + ready.max(axis=0) + 10_000
    of_rank = []
    for rank in range(ranks):
        columns = {name: np.full((steps, per_step), -1, kind) for name, kind in COLUMNS.items()}
        columns["sent"][:] = columns["received"][:] = 0
        time, kind, region = columns["time"], columns["kind"], columns["region"]
        inner = begin[:, None] + np.cumsum(took[rank] + 100, axis=1)
        time[:, 0], time[:, 1 : 1 + 2 * layers : 2], time[:, 2 : 2 + 2 * layers : 2] = begin, inner - took[rank], inner
        time[:, -4], time[:, -3:] = begin + ready[rank], last[:, None]
        kind[:], kind[:, 2 : 2 + 2 * layers : 2] = EventKind.ENTER, EventKind.LEAVE
        kind[:, -3:] = EventKind.COLLECTIVE, EventKind.LEAVE, EventKind.LEAVE
        region[:, 0], region[:, -4:] = 0, (1, CollectiveOp.ALLREDUCE, 1, 0)
        region[:, 1 : 1 + 2 * layers : 2] = region[:, 2 : 2 + 2 * layers : 2] = np.arange(2, 2 + layers)
        columns["communicator"][:, -3] = 0
        columns["sent"][:, -3] = columns["received"][:, -3] = 4096
        of_rank.append(Events(*(each.ravel() for each in columns.values())))
    regions = [Region("step"), Region("MPI_Allreduce", "coll_all2all", True)]
    return Trace(
        [Location("main", f"rank {rank}", "host") for rank in range(ranks)],
        [*regions, *(Region(f"layer {number}") for number in range(layers))],
        [Comm("world", tuple(range(ranks)))],
        of_rank,
    )
