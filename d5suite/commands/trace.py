"""``d5suite trace``: analyse a trace, or write it in another format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from d5suite.traces.analysis import Analysis

ROWS = 12
"""Regions and steps of a table; the others are counted."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``trace`` to the commands."""
    trace = commands.add_parser("trace", help="analyse a trace: wait states, critical path; convert its format")
    actions = trace.add_subparsers(required=True, metavar="ACTION")
    analyze = actions.add_parser("analyze", help="show where the time of all ranks went, and who waited for whom")
    analyze.add_argument("trace", type=Path, metavar="ARCHIVE", help="an OTF2 archive: its folder or .otf2 file")
    analyze.add_argument("--step", default="step", metavar="REGION", help="the region that is one step (%(default)s)")
    analyze.add_argument("--json", type=Path, metavar="FILE", help="also write the analysis as JSON, in seconds")
    analyze.set_defaults(run=_analyze)
    convert = actions.add_parser("convert", help="write an OTF2 archive as a Chrome trace, which Perfetto opens")
    convert.add_argument("trace", type=Path, metavar="ARCHIVE", help="an OTF2 archive: its folder or .otf2 file")
    convert.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json", help="where the trace goes")
    convert.set_defaults(run=_convert)
    show = actions.add_parser("show", help="draw a timeline: a page to look around in, or one step as SVG")
    show.add_argument("trace", type=Path, metavar="ARCHIVE", help="an OTF2 archive: its folder or .otf2 file")
    show.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="FILE.html, or FILE.svg")
    show.add_argument("--step", default="step", metavar="REGION", help="the region that is one step (%(default)s)")
    show.add_argument("--number", type=int, default=1, metavar="N", help="of FILE.svg: the step to draw (%(default)s)")
    show.add_argument("--title", default="", help="the page's heading (default: the archive's name)")
    show.set_defaults(run=_show)


def _analyze(options: argparse.Namespace) -> int:
    from rich.console import Console

    from d5suite.files import check_writable, write_json
    from d5suite.traces.analysis import analyse
    from d5suite.traces.archive import read_archive

    if options.json:
        check_writable(options.json)
    found = analyse(read_archive(options.trace), step=options.step)
    if options.json:
        write_json(options.json, found.to_dict())
    show(found, Console())
    return 0


def _convert(options: argparse.Namespace) -> int:
    from d5suite.files import check_writable
    from d5suite.traces.archive import read_archive
    from d5suite.traces.chrome import write_chrome

    check_writable(options.output)
    trace = read_archive(options.trace)
    try:
        write_chrome(trace, options.output)
    except OSError as error:
        raise ConfigurationError(f"cannot be written: {error.strerror or error}", where=str(options.output)) from error
    print(f"{options.output}: {len(trace):,} events of {len(trace.locations)} locations")
    return 0


def _show(options: argparse.Namespace) -> int:
    from d5suite.files import check_writable, write_bytes
    from d5suite.report.timeline.picture import picture
    from d5suite.report.timeline.write import page
    from d5suite.traces.analysis import analyse
    from d5suite.traces.archive import read_archive

    kind = options.output.suffix.lower()
    if kind not in (".html", ".svg"):
        raise ConfigurationError("ends neither with .html nor with .svg", where=f"--output {options.output}")
    check_writable(options.output)
    found = analyse(read_archive(options.trace), step=options.step)
    if kind == ".svg":
        content = picture(found, number=options.number, step=options.step)
    else:
        content = page(found, title=options.title or f"Timeline of {options.trace.name}", step=options.step)
    try:
        write_bytes(options.output, content.encode())
    except OSError as error:
        raise ConfigurationError(f"cannot be written: {error.strerror or error}", where=str(options.output)) from error
    print(f"{options.output}: {len(content.encode()) / 1e6:.1f} MB")
    return 0


def show(found: Analysis, console: Console) -> None:
    """Print an analysis as tables."""
    from rich.markup import escape

    trace, seconds = found.trace, found.trace.seconds
    whole = trace.end - trace.begin
    console.print(
        f"{len(trace):,} events of {len(found.ranks)} ranks in {seconds(whole):.6g} s; "
        f"{found.states.messages:,} messages, {found.states.collectives:,} collective operations",
        highlight=False,
    )
    hosts = len({location.host for location in trace.locations}) > 1
    table = _table(
        "rank", *["host"] * hosts, *("computing", "waiting", "in MPI", "outside", "overlap", "caused", "critical")
    )
    for rank in found.ranks:
        location = trace.locations[rank.location]
        figures = rank.computing, rank.waiting, rank.communicating, rank.outside, rank.overlapped, rank.caused
        shares = [_share(each, whole) for each in (*figures, rank.critical)]
        table.add_row(escape(location.process), *[escape(location.host)] * hosts, *shares)
    console.print(table)
    if found.patterns:
        table = _table("wait state", "times", "seconds", "of all ranks' time")
        for name, (count, ticks) in sorted(found.patterns.items(), key=lambda each: -each[1][1]):
            table.add_row(name, f"{count:,}", f"{seconds(ticks):.4g}", _share(ticks, whole * len(found.ranks)))
        console.print(table)
    table = _table("region", "seconds", "on the critical path", "waiting in its calls")
    for name, (own, critical, waiting) in list(found.regions.items())[:ROWS]:
        table.add_row(escape(name), f"{seconds(own):.4g}", _share(critical, whole), f"{seconds(waiting):.4g}")
    console.print(table)
    if found.steps:
        table = _table("step", "slowest rank", "fastest rank", "waiting, all ranks")
        slowest = sorted(range(len(found.steps)), key=lambda number: -found.steps[number][0])[:ROWS]
        for number in slowest:
            table.add_row(str(number + 1), *(f"{seconds(each):.4g} s" for each in found.steps[number]))
        console.print(f"the slowest of {len(found.steps):,} steps:", highlight=False)
        console.print(table)
    for remark in _remarks(found):
        console.print(remark, highlight=False)


def _table(*columns: str):  # type: ignore[no-untyped-def]  # rich is imported late
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _share(ticks: int, whole: int) -> str:
    return f"{100 * ticks / whole:.1f}%" if whole else "–"


def _remarks(found: Analysis) -> list[str]:
    states, remarks = found.states, []
    if states.unmatched:
        remarks.append(f"{states.unmatched:,} sends or receives have no other end in the trace and are left out")
    if states.incomplete:
        remarks.append(f"{states.incomplete:,} collective operations lack a rank and are left out")
    if unfinished := sum(each.unfinished for each in states.calls):
        remarks.append(
            f"{unfinished:,} regions were never left, as of a rank that was killed: they end with its events"
        )
    if skipped := found.trace.skipped:
        most = ", ".join(
            f"{name} ({count:,})" for name, count in sorted(skipped.items(), key=lambda each: -each[1])[:5]
        )
        remarks.append(f"records that the analysis does not use: {most}")
    if not any(region.is_mpi for region in found.trace.regions):
        remarks.append("no region is a call of MPI (source file 'MPI', name 'MPI_…'), so no wait state can be found")
    return remarks
