"""Traces made by hand: each rank is a list of calls, and nothing has to be recorded."""

from __future__ import annotations

from collections.abc import Sequence

from d5suite.traces.events import CollectiveOp, Comm, Events, Kind, Location, Region, Trace

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
]
NUMBER = {region.name: index for index, region in enumerate(REGIONS)}

Row = tuple[int, ...]


def call(name: str, enter: int, leave: int, *inside: Row) -> list[Row]:
    """A call with what happens inside."""
    entry = (enter, Kind.ENTER, NUMBER[name], -1, -1, -1, 0, 0, -1)
    return [entry, *inside, (leave, Kind.LEAVE, NUMBER[name], -1, -1, -1, 0, 0, -1)]


def send(time: int, to: int, *, tag: int = 0, size: int = 8) -> Row:
    return (time, Kind.SEND, -1, 0, to, tag, size, 0, -1)


def recv(time: int, of: int, *, tag: int = 0, size: int = 8) -> Row:
    return (time, Kind.RECV, -1, 0, of, tag, 0, size, -1)


def isend(time: int, to: int, request: int, *, tag: int = 0) -> Row:
    return (time, Kind.ISEND, -1, 0, to, tag, 8, 0, request)


def isend_complete(time: int, request: int) -> Row:
    return (time, Kind.ISEND_COMPLETE, -1, -1, -1, -1, 0, 0, request)


def irecv_request(time: int, request: int) -> Row:
    return (time, Kind.IRECV_REQUEST, -1, -1, -1, -1, 0, 0, request)


def irecv(time: int, of: int, request: int, *, tag: int = 0) -> Row:
    return (time, Kind.IRECV, -1, 0, of, tag, 0, 8, request)


def collective(
    name: str, operation: CollectiveOp, enter: int, leave: int, *, root: int = -1, sent: int = 8, received: int = 8
) -> list[Row]:
    return call(name, enter, leave, (leave, Kind.COLLECTIVE, operation, 0, root, -1, sent, received, -1))


def trace_of(*ranks: Sequence[Row]) -> Trace:
    """A trace of ranks in one communicator, on a host each."""
    return Trace(
        [Location("main", f"rank {rank}", f"host{rank}") for rank in range(len(ranks))],
        REGIONS,
        [Comm("MPI_COMM_WORLD", tuple(range(len(ranks))))],
        [Events.from_rows(rows) for rows in ranks],
    )
