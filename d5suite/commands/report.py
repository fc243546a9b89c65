"""``d5suite report``: result files as one page."""

from __future__ import annotations

import argparse
import sys

from d5suite.errors import ConfigurationError, escaped
from d5suite.files import given_path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` to the commands."""
    report = commands.add_parser(
        "report",
        help="write result files as one page: verdicts, every result with its proof, machines",
        epilog="exit codes: 0 written, 1 written, but a file, benchmark or picture was left out, 2 usage "
        "(docs/report.md)",
    )
    report.add_argument("results", type=given_path, nargs="+", metavar="RESULT.json")
    report.add_argument("-o", "--output", type=given_path, required=True, metavar="FILE.html", help="file for the page")
    report.add_argument("--title", default="", help="heading of the page (default: the cases' names)")
    report.add_argument("--embed", action="store_true", help="write an embeddable frame for a page or notebook")
    report.add_argument("--history", type=given_path, metavar="DIR", help="show trends from a d5suite history folder")
    report.add_argument(
        "--machine",
        type=given_path,
        metavar="FILE",
        help="draw rooflines under the ceilings of d5suite machine -o FILE",
    )
    report.add_argument(
        "--tuning", type=given_path, metavar="FILE.json", help="show the course of a search that d5suite tune has made"
    )
    for kind, what in (("csv", "its numbers as CSV files"), ("png", "its pictures as PNG"), ("svg", "as SVG")):
        report.add_argument(f"--{kind}", type=given_path, metavar="DIR", help=f"also write {what}")
    report.add_argument(
        "--between-runs",
        type=float,
        metavar="FRACTION",
        default=0.15,
        help="by how much a median varies from process to process (standard deviation; default: %(default)s)",
    )
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from d5suite.models.ceilings import read_ceilings
    from d5suite.report.outputs import check_outputs
    from d5suite.report.page.history import histories_of
    from d5suite.report.page.write import embedded, page_of, save, save_pictures, save_tables
    from d5suite.report.tuning import read_courses

    if not 0 <= options.between_runs <= 10:
        raise ConfigurationError(f"--between-runs {options.between_runs:g}: give a number from 0 to 10")
    history = options.history.glob("*.json") if options.history else ()
    folders = {f"--{kind}": (getattr(options, kind), f".{kind}") for kind in ("csv", "png", "svg")}
    check_outputs(
        {"-o": options.output},
        [*options.results, *history, *filter(None, (options.machine, options.tuning))],
        folders,
    )
    histories = histories_of(options.history) if options.history else []
    page, content = page_of(
        options.results,
        between_runs=options.between_runs,
        title=options.title,
        histories=histories,
        ceilings=read_ceilings(options.machine) if options.machine else None,
        courses=read_courses(options.tuning) if options.tuning else (),
    )
    save(options.output, embedded(content) if options.embed else content)
    if options.csv:
        save_tables(options.csv, page, histories)
    undrawn: list[str] = []
    for kind in ("png", "svg"):
        if folder := getattr(options, kind):
            undrawn = save_pictures(folder, page, kind, histories)
    left_out = [f"left out: {source.left_out}" for source in page.sources if source.left_out] + undrawn
    left_out += [f"left out: {source.name}, {each['message']}" for source in page.sources for each in source.refused]
    for each in left_out:
        print(escaped(each), file=sys.stderr)
    return int(bool(left_out))
