"""A trace in memory: locations, regions, communicators, and events in columns.

The vocabulary is OTF2's: a *location* is a thread or process that has a stream of events; a
*region* is a piece of code that is entered and left; a *communicator* orders locations by rank.
Imports NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class EventKind(IntEnum):
    """The kind of an event; the names are those of OTF2's records."""

    ENTER = 0
    LEAVE = 1
    SEND = 2
    RECV = 3
    ISEND = 4
    ISEND_COMPLETE = 5
    IRECV_REQUEST = 6
    IRECV = 7
    COLLECTIVE = 8
    """The end of a collective operation (``MpiCollectiveEnd``)."""


COLUMNS = {
    "time": np.int64,
    "kind": np.int8,
    "region": np.int32,
    "communicator": np.int32,
    "peer": np.int64,
    "tag": np.int64,
    "sent": np.int64,
    "received": np.int64,
    "request": np.int64,
}
"""Names and types of the columns of `Events`. An unused column holds -1; unused bytes are 0."""


@dataclass(frozen=True)
class Events:
    """The events of one location, in the order in which they happened.

    Attributes
    ----------
    time : numpy.ndarray of int64
        Ticks of the trace's clock; never decreasing.
    kind : numpy.ndarray of int8
        `EventKind`.
    region : numpy.ndarray of int32
        For ENTER and LEAVE: index into `Trace.regions`. For COLLECTIVE: a `CollectiveOp`.
    communicator : numpy.ndarray of int32
        For messages and collectives: index into `Trace.communicators`.
    peer : numpy.ndarray of int64
        For messages: the other rank in the communicator. For COLLECTIVE: the root's rank, or -1.
    tag : numpy.ndarray of int64
        For messages.
    sent, received : numpy.ndarray of int64
        Bytes.
    request : numpy.ndarray of int64
        For non-blocking messages: the number that joins the request to the completion.
    """

    time: np.ndarray
    kind: np.ndarray
    region: np.ndarray
    communicator: np.ndarray
    peer: np.ndarray
    tag: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    request: np.ndarray

    def __len__(self) -> int:
        return len(self.time)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, ...]]) -> Events:
        """Make events from rows of values in the order of `COLUMNS`."""
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(COLUMNS)
        return cls(*(np.array(each, kind) for each, kind in zip(columns, COLUMNS.values(), strict=True)))


class CollectiveOp(IntEnum):
    """Collective operations; the values are OTF2's ``OTF2_CollectiveOp``."""

    BARRIER = 0
    BCAST = 1
    GATHER = 2
    GATHERV = 3
    SCATTER = 4
    SCATTERV = 5
    ALLGATHER = 6
    ALLGATHERV = 7
    ALLTOALL = 8
    ALLTOALLV = 9
    ALLTOALLW = 10
    ALLREDUCE = 11
    REDUCE = 12
    REDUCE_SCATTER = 13
    SCAN = 14
    EXSCAN = 15
    REDUCE_SCATTER_BLOCK = 16


COLLECTIVES = {
    "broadcast": ("MPI_Bcast", CollectiveOp.BCAST, "coll_one2all"),
    "reduce": ("MPI_Reduce", CollectiveOp.REDUCE, "coll_all2one"),
    "all_reduce": ("MPI_Allreduce", CollectiveOp.ALLREDUCE, "coll_all2all"),
    "reduce_scatter": ("MPI_Reduce_scatter", CollectiveOp.REDUCE_SCATTER, "coll_all2all"),
    "all_gather": ("MPI_Allgather", CollectiveOp.ALLGATHER, "coll_all2all"),
    "all_to_all": ("MPI_Alltoall", CollectiveOp.ALLTOALL, "coll_all2all"),
    "barrier": ("MPI_Barrier", CollectiveOp.BARRIER, "barrier"),
}
"""By the communicator's name: MPI's name, OTF2's operation and the region's role."""

N_TO_N = frozenset({
    CollectiveOp.ALLGATHER, CollectiveOp.ALLGATHERV, CollectiveOp.ALLTOALL, CollectiveOp.ALLTOALLV,
    CollectiveOp.ALLTOALLW, CollectiveOp.ALLREDUCE, CollectiveOp.REDUCE_SCATTER, CollectiveOp.REDUCE_SCATTER_BLOCK,
})  # fmt: skip
"""Operations in which every rank needs data of all others."""

ONE_TO_N = frozenset({CollectiveOp.BCAST, CollectiveOp.SCATTER, CollectiveOp.SCATTERV})
N_TO_ONE = frozenset({CollectiveOp.REDUCE, CollectiveOp.GATHER, CollectiveOp.GATHERV})
PREFIX = frozenset({CollectiveOp.SCAN, CollectiveOp.EXSCAN})
"""Operations in which a rank needs data of the ranks below."""


@dataclass(frozen=True)
class Location:
    """A thread or process with events of its own.

    Attributes
    ----------
    name : str
    process : str
        The process that it belongs to, such as ``rank 0``.
    host : str
    is_main : bool
        Whether it is the process's main thread: ranks of communicators are main threads.
    is_stream : bool
        Whether it is a stream of an accelerator, and no thread.
    """

    name: str
    process: str
    host: str = ""
    is_main: bool = True
    is_stream: bool = False


@dataclass(frozen=True)
class Region:
    """A piece of code.

    Attributes
    ----------
    name : str
    role : str
        OTF2's region role in lower case, such as ``function``, ``barrier``, ``coll_all2all``,
        ``point2point``.
    is_mpi : bool
        Whether it is a call of MPI, or plays the part of one.
    file : str
        The source file.
    line : int
    """

    name: str
    role: str = "function"
    is_mpi: bool = False
    file: str = ""
    line: int = 0

    @property
    def communicates(self) -> bool:
        """Whether the time in it is communicating: MPI, or waiting for another thread that does."""
        return self.is_mpi or self.role == "task_wait"

    @property
    def waits(self) -> bool:
        """Whether a region outside of MPI is waiting time: for another program, or a thread."""
        return self.role == "thread_wait" and not self.is_mpi


@dataclass(frozen=True)
class Comm:
    """An ordered group of locations.

    Attributes
    ----------
    name : str
    members : tuple of int
        Indices into `Trace.locations`, by rank.
    """

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class MetricSeries:
    """A quantity that was read now and then, such as used memory.

    Attributes
    ----------
    name, unit : str
    location : int
        Index into `Trace.locations`: whose quantity it is.
    time : numpy.ndarray of int64
        Ticks; never decreasing.
    value : numpy.ndarray of float64
    """

    name: str
    unit: str
    location: int
    time: np.ndarray
    value: np.ndarray


@dataclass
class Trace:
    """A whole trace.

    Attributes
    ----------
    locations : sequence of Location
    regions : sequence of Region
    communicators : sequence of Comm
    events : sequence of Events
        By location.
    ticks_per_second : int
    metrics : sequence of MetricSeries
    skipped : mapping
        How many records of each kind were read and left out, because nothing here uses them.
    notes : sequence of str
        What a reader of the trace must know, such as dropped events.
    properties : mapping of str to str
        Facts of the trace, such as the error of its clocks.
    """

    locations: Sequence[Location]
    regions: Sequence[Region]
    communicators: Sequence[Comm]
    events: Sequence[Events]
    ticks_per_second: int = 1_000_000_000
    metrics: Sequence[MetricSeries] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """The time of the first event, in ticks; 0 of an empty trace."""
        return min((int(each.time[0]) for each in self.events if len(each)), default=0)

    @property
    def end(self) -> int:
        """The time of the last event, in ticks; 0 of an empty trace."""
        return max((int(each.time[-1]) for each in self.events if len(each)), default=0)

    @property
    def homes(self) -> list[int]:
        """The main location of each location's process: its own index if that has none."""
        mains: dict[tuple[str, str], int] = {}
        for index, each in enumerate(self.locations):
            if each.is_main:
                mains.setdefault((each.process, each.host), index)
        return [
            index if each.is_main else mains.get((each.process, each.host), index)
            for index, each in enumerate(self.locations)
        ]

    def seconds(self, ticks: float) -> float:
        """Convert ticks."""
        return ticks / self.ticks_per_second

    def __len__(self) -> int:
        return sum(map(len, self.events))
