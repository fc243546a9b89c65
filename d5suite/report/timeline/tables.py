"""The analysis of a trace as tables, for a terminal and for a page. Imports `d5suite.traces`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from d5suite.traces.analysis import OUTSIDE, Analysis


class TimelineTable(NamedTuple):
    """A table of texts; the first column is a name."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def headline(found: Analysis) -> str:
    """Return how much a trace holds."""
    trace = found.trace
    return (
        f"{len(trace):,} events of {len(found.ranks)} ranks in {trace.seconds(trace.end - trace.begin):.6g} s; "
        f"{found.states.messages:,} messages, {found.states.collectives:,} collective operations"
    )


def tables(found: Analysis, *, rows: int) -> list[TimelineTable]:
    """Return the analysis as tables; those without rows are left out.

    Parameters
    ----------
    found : Analysis
    rows : int
        Most regions and steps.
    """
    every = [_ranks(found), _waits(found), _delays(found, rows), _regions(found, rows), _steps(found, rows)]
    return [each for each in every if each.rows]


def remarks(found: Analysis) -> list[str]:
    """Return what a reader of the tables must know."""
    states, said = found.states, list(found.trace.notes)
    if states.unmatched:
        said.append(f"{states.unmatched:,} sends or receives have no other end in the trace and are left out")
    if states.incomplete:
        said.append(f"{states.incomplete:,} collective operations lack a rank and are left out")
    if unfinished := sum(each.unfinished for each in states.calls):
        said.append(f"{unfinished:,} regions were never left, as of a rank that was killed: they end with its events")
    if skipped := found.trace.skipped:
        most = ", ".join(
            f"{name} ({count:,})" for name, count in sorted(skipped.items(), key=lambda each: -each[1])[:5]
        )
        said.append(f"records that the analysis does not use: {most}")
    if not any(region.is_mpi for region in found.trace.regions):
        said.append("no region is a call of MPI (source file 'MPI', name 'MPI_…'), so no wait state can be found")
    error = found.trace.properties.get("clock error ns", "")
    if error.isdecimal() and int(error):
        said.append(f"times of different ranks may be off by {int(error) * 1e-3:.3g} µs")
    return said


def _share(ticks: int, whole: int) -> str:
    return f"{100 * ticks / whole:.1f}%" if whole else "–"


def _ranks(found: Analysis) -> TimelineTable:
    trace = found.trace
    whole = trace.end - trace.begin
    hosts = len({location.host for location in trace.locations}) > 1
    rows = []
    for each in found.ranks:
        location = trace.locations[each.location]
        figures = each.computing, each.waiting, each.communicating, each.outside, each.overlapped, each.caused
        shares = [_share(figure, whole) for figure in (*figures, each.critical)]
        rows.append((location.process, *[location.host] * hosts, *shares))
    return TimelineTable(
        "Ranks",
        "Computing, waiting, in MPI and outside add up to the whole time. Caused: for how long others waited for this "
        "rank, all of them together. Critical: its part of the critical path.",
        ("rank", *["host"] * hosts, "computing", "waiting", "in MPI", "outside", "overlap", "caused", "critical"),
        rows,
    )


def _waits(found: Analysis) -> TimelineTable:
    trace = found.trace
    whole = (trace.end - trace.begin) * len(found.ranks)
    rows = [
        (name, f"{count:,}", f"{trace.seconds(ticks):.4g}", _share(ticks, whole))
        for name, (count, ticks) in sorted(found.patterns.items(), key=lambda each: -each[1][1])
    ]
    return TimelineTable(
        "Wait states", "By Scalasca's definitions.", ("wait state", "times", "seconds", "of all ranks' time"), rows
    )


def _delays(found: Analysis, most: int) -> TimelineTable:
    trace = found.trace
    rows = []
    for each in found.delays.delays[:most]:
        region = trace.regions[each.region].name if each.region >= 0 else OUTSIDE
        costs = each.direct, each.indirect
        rows.append((trace.locations[each.location].process, region, *(f"{trace.seconds(one):.4g}" for one in costs)))
    return TimelineTable(
        "Delays",
        f"What made a rank late, and the seconds that others waited for it: directly, or because a rank that had "
        f"waited was late itself; the first {most}.",
        ("late rank", "in region", "direct", "indirect"),
        rows,
    )


def _regions(found: Analysis, most: int) -> TimelineTable:
    trace = found.trace
    rows = [
        (name, f"{trace.seconds(own):.4g}", _share(critical, trace.end - trace.begin), f"{trace.seconds(waiting):.4g}")
        for name, (own, critical, waiting) in list(found.regions.items())[:most]
    ]
    return TimelineTable(
        "Regions",
        f"Own time on all ranks, outside of MPI; the first {most}.",
        ("region", "seconds", "on the critical path", "waiting in its calls"),
        rows,
    )


def _steps(found: Analysis, most: int) -> TimelineTable:
    slowest = sorted(range(len(found.steps)), key=lambda number: -found.steps[number][0])[:most]
    rows = [
        (str(number + 1), *(f"{found.trace.seconds(each):.4g} s" for each in found.steps[number])) for number in slowest
    ]
    return TimelineTable(
        "Steps",
        f"The slowest of {len(found.steps):,}.",
        ("step", "slowest rank", "fastest rank", "waiting, all ranks"),
        rows,
    )
