"""``d5suite trace``: analyse a trace, or write it in another format."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError
from d5suite.files import given_path

if TYPE_CHECKING:
    from d5suite.report.console import Console
    from d5suite.traces.analysis import Analysis

WHERE = "an OTF2 archive, a recording, the folder of one, an HDF5 file, or a framework's profile (.json, .json.gz, .pb)"

WRITTEN = "FILE.json, which Perfetto opens; FILE.h5, columns in HDF5; or a new folder for an OTF2 archive"

ROWS = 12
"""Regions and steps that a table shows; the others are only counted."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``trace`` to the commands."""
    trace = commands.add_parser("trace", help="analyse a trace (wait states, critical path), convert or draw it")
    actions = trace.add_subparsers(required=True, metavar="ACTION")
    analyze = actions.add_parser("analyze", help="show where the time of all ranks went, and who waited for whom")
    analyze.add_argument("trace", type=given_path, metavar="ARCHIVE", help=WHERE)
    analyze.add_argument("--step", default="step", metavar="REGION", help="the region that is one step (%(default)s)")
    analyze.add_argument("--json", type=given_path, metavar="FILE", help="also write the analysis as JSON, in seconds")
    analyze.set_defaults(run=_analyze)
    convert = actions.add_parser("convert", help="write a trace in another format")
    convert.add_argument("trace", type=given_path, metavar="ARCHIVE", help=WHERE)
    convert.add_argument("-o", "--output", type=given_path, required=True, metavar="PATH", help=WRITTEN)
    convert.set_defaults(run=_convert)
    show = actions.add_parser("show", help="draw a timeline: a page to look around in, or one step as SVG")
    show.add_argument("trace", type=given_path, metavar="ARCHIVE", help=WHERE)
    show.add_argument("-o", "--output", type=given_path, required=True, metavar="FILE", help="FILE.html, or FILE.svg")
    show.add_argument("--step", default="step", metavar="REGION", help="the region that is one step (%(default)s)")
    show.add_argument("--number", type=int, default=1, metavar="N", help="for FILE.svg: the step to draw (%(default)s)")
    show.add_argument("--title", default="", help="the page's heading (default: the archive's name)")
    show.set_defaults(run=_show)


def _analyze(options: argparse.Namespace) -> int:
    from d5suite.files import check_targets, write_json
    from d5suite.report.console import Console
    from d5suite.traces.analysis import analyse
    from d5suite.traces.reading import read_trace

    check_targets(options.json)
    found = analyse(read_trace(options.trace), step=options.step)
    if options.json:
        write_json(options.json, found.to_dict())
    show(found, Console(markup=False, highlight=False))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from d5suite.files import check_targets
    from d5suite.report.outputs import refused
    from d5suite.traces.archive import write_archive
    from d5suite.traces.chrome import write_chrome
    from d5suite.traces.hdf5 import write_hdf5
    from d5suite.traces.reading import read_trace

    kind = options.output.suffix.lower()
    if kind not in ("", ".json", ".h5"):
        raise ConfigurationError(
            "ends neither with .json nor with .h5, and is no folder's name", where=f"--output {options.output}"
        )
    if kind:
        check_targets(options.output)
    trace = read_trace(options.trace)
    with refused("cannot be written", options.output):
        if kind == ".json":
            write_chrome(trace, options.output)
        elif kind == ".h5":
            write_hdf5(trace, options.output)
        else:
            write_archive(trace, options.output)
    print(f"{options.output}: {len(trace):,} events of {len(trace.locations)} locations")
    return 0


def _show(options: argparse.Namespace) -> int:
    from d5suite.files import check_targets, write_bytes
    from d5suite.report.outputs import refused
    from d5suite.report.timeline.picture import picture
    from d5suite.report.timeline.write import page
    from d5suite.traces.analysis import analyse
    from d5suite.traces.reading import read_trace

    kind = options.output.suffix.lower()
    if kind not in (".html", ".svg"):
        raise ConfigurationError("ends neither with .html nor with .svg", where=f"--output {options.output}")
    check_targets(options.output)
    found = analyse(read_trace(options.trace), step=options.step)
    if kind == ".svg":
        content = picture(found, number=options.number, step=options.step)
    else:
        content = page(found, title=options.title or f"Timeline of {options.trace.name}", step=options.step)
    with refused("cannot be written", options.output):
        write_bytes(options.output, content.encode())
    print(f"{options.output}: {len(content.encode()) / 1e6:.1f} MB")
    return 0


def show(found: Analysis, console: Console) -> None:
    """Print an analysis as tables."""
    import rich.table

    from d5suite.report.timeline.tables import headline, remarks, tables

    console.print(headline(found))
    for each in tables(found, rows=ROWS):
        table = rich.table.Table(box=None, pad_edge=False)
        for number, column in enumerate(each.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in each.rows:
            table.add_row(*row)
        console.print(table)
    for remark in remarks(found):
        console.print(remark)
