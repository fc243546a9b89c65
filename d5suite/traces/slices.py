"""Slices of profilers, which have only names and times, made a trace with roles and ranks.

A profiler reports what ran on which thread, each framework with names of its own. Here they get
OTF2's vocabulary: collective operations have MPI's names and region roles, kernels and copies of a
GPU are on accelerator streams. Imports NumPy and its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from d5suite.traces.events import (
    COLLECTIVES,
    CollectiveOp,
    Comm,
    EventKind,
    Events,
    Location,
    MetricSeries,
    Region,
    Trace,
)

TOUCHING_NS = 2_000
"""By how much a slice may end after the one around it: profilers round times to microseconds."""

_COLLECTIVES = {
    **{name.replace("_", ""): call for name, call in COLLECTIVES.items()},
    "bcast": COLLECTIVES["broadcast"],
    "gather": ("MPI_Gather", CollectiveOp.GATHER, "coll_all2one"),
    "scatter": ("MPI_Scatter", CollectiveOp.SCATTER, "coll_one2all"),
}
"""`COLLECTIVES` and more, by a framework's name in lower case without separators."""

_TRANSPORT = re.compile(r"^(?:gloo|nccl|mpi|ucc|ccl|xla)[:_ ](?P<name>[a-z_]+?)(?:_base|_coalesced|_tensor)?$", re.I)
_KERNEL = re.compile(r"^(?:nccl|rccl)(?:Dev)?Kernel_?(?P<name>[A-Za-z]+?)(?:_|$|<|\()")

_ROLES = {"kernel": "kernel", "gpu_memcpy": "data_transfer", "gpu_memset": "data_transfer", "cuda_runtime": "wrapper"}
"""OTF2's region role by a profiler's category."""


class TimeSlice(NamedTuple):
    """One run of something: begin and end in nanoseconds, its name, and the profiler's category."""

    begin: int
    end: int
    name: str
    category: str = ""


@dataclass
class Track:
    """The slices of one thread or stream.

    Attributes
    ----------
    process : str
    name : str
    stream : bool
        Whether it is a GPU's stream.
    is_main : bool
    slices : list of TimeSlice
        In any order; of any two that overlap, one contains the other, or `trace_of` divides them
        among several locations.
    """

    process: str
    name: str
    stream: bool = False
    is_main: bool = False
    slices: list[TimeSlice] = field(default_factory=list)


class RankNames(NamedTuple):
    """Ranks of one run: names of their processes by rank."""

    name: str
    processes: tuple[str, ...]


def region_of(name: str, category: str = "", *, stream: bool = False) -> tuple[Region, CollectiveOp | None]:
    """Return the region of a profiler's slice, and the collective operation that it is.

    Parameters
    ----------
    name, category : str
        As the profiler writes them.
    stream : bool
        Whether the slice ran on a GPU's stream.
    """
    match = _TRANSPORT.match(name) or _KERNEL.match(name)
    if match:
        known = _COLLECTIVES.get(match["name"].lower().replace("_", ""))
        if known:
            mpi, operation, role = known
            return Region(mpi, role, True, "MPI"), operation
    default = "kernel" if stream else "function"
    return Region(name, _ROLES.get(category, default)), None


def trace_of(
    rows: Iterable[Track],
    *,
    groups: Sequence[RankNames] = (),
    metrics: Iterable[tuple[str, str, str, list[int], list[float]]] = (),
    skipped: dict[str, int] | None = None,
    notes: Iterable[str] = (),
) -> Trace:
    """Make a trace of slices.

    Parameters
    ----------
    rows : iterable of Track
    groups : sequence of RankNames
        The k-th collective operation of a process belongs to the k-th one of the others.
    metrics : iterable of tuple
        Process, name, unit, times in nanoseconds, values.
    skipped : dict of str to int, optional
        Records that were left out, by kind.
    notes : iterable of str
    """
    lanes = [lane for row in rows if row.slices or row.is_main for lane in _lanes(row)]
    begin = min((each.begin for row in lanes for each in row.slices), default=0)
    mains = {row.process: index for index, row in reversed(list(enumerate(lanes))) if row.is_main}
    for index, row in enumerate(lanes):
        mains.setdefault(row.process, index)
    locations = [
        Location(row.name, row.process, is_main=mains[row.process] == index, is_stream=row.stream)
        for index, row in enumerate(lanes)
    ]
    communicators = [Comm(each.name, tuple(mains[process] for process in each.processes)) for each in groups]
    group_of = {process: number for number, each in enumerate(groups) for process in each.processes}
    found = _Regions()
    events = [_events(row, found, group_of.get(row.process, -1), begin) for row in lanes]
    read = [
        MetricSeries(name, unit, mains[process], np.maximum(np.array(times, np.int64) - begin, 0), np.array(values))
        for process, name, unit, times, values in metrics
        if process in mains
    ]
    return Trace(
        locations, found.regions, communicators, events, metrics=read, skipped=skipped or {}, notes=tuple(notes)
    )


class _Regions:
    """The regions of a trace, numbered as they come."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._numbers: dict[Region, int] = {}
        self._known: dict[tuple[str, str, bool], tuple[int, CollectiveOp | None]] = {}

    def number(self, name: str, category: str, stream: bool) -> tuple[int, CollectiveOp | None]:
        key = name, category, stream
        if key not in self._known:
            region, operation = region_of(name, category, stream=stream)
            if region not in self._numbers:
                self._numbers[region] = len(self.regions)
                self.regions.append(region)
            self._known[key] = self._numbers[region], operation
        return self._known[key]


def _lanes(row: Track) -> list[Track]:
    """Divide the slices of a row such that those of a lane are nested or apart."""
    lanes: list[tuple[list[TimeSlice], list[int]]] = []  # with the ends of the slices that are open
    for each in sorted(row.slices, key=lambda one: (one.begin, -one.end)):
        for slices, open_until in lanes:
            while open_until and open_until[-1] <= each.begin:
                open_until.pop()
            if not open_until or each.end <= open_until[-1] + TOUCHING_NS:
                end = min(each.end, open_until[-1]) if open_until else each.end
                slices.append(each._replace(end=end))
                open_until.append(end)
                break
        else:
            lanes.append(([each], [each.end]))
    if not lanes:
        return [row]
    return [
        Track(row.process, f"{row.name} ({number + 1})" if number else row.name, row.stream, row.is_main, slices)
        for number, (slices, _) in enumerate(lanes)
    ]


def _events(row: Track, regions: _Regions, group: int, begin: int) -> Events:
    rows: list[tuple[int, ...]] = []
    stack: list[tuple[int, int, CollectiveOp | None]] = []

    def leave(until: int | None) -> None:
        while stack and (until is None or stack[-1][0] <= until):
            end, region, operation = stack.pop()
            if operation is not None and group >= 0:
                rows.append(
                    (end, EventKind.COLLECTIVE, operation, group, 0 if _rooted(operation) else -1, -1, 1, 1, -1)
                )
            rows.append((end, EventKind.LEAVE, region, -1, -1, -1, 0, 0, -1))

    for each in row.slices:
        leave(each.begin - begin)
        region, operation = regions.number(each.name, each.category, row.stream)
        rows.append((each.begin - begin, EventKind.ENTER, region, -1, -1, -1, 0, 0, -1))
        stack.append((each.end - begin, region, operation))
    leave(None)
    return Events.from_rows(rows)


def _rooted(operation: CollectiveOp) -> bool:
    return operation in (CollectiveOp.BCAST, CollectiveOp.REDUCE, CollectiveOp.GATHER, CollectiveOp.SCATTER)
