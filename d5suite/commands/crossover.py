"""``d5suite crossover``: parameter servers against all-reduce, measured and predicted."""

from __future__ import annotations

import argparse
from pathlib import Path

from d5suite.errors import ConfigurationError

MOST = 1024
"""Largest number of ranks that is predicted by default."""

MOST_ALLOWED = 2**20


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "crossover",
        help="compare parameter servers with all-reduce over ranks: measured, and predicted beyond",
        description="Compare parameter servers with all-reduce over ranks, bytes and tensors. Measured times come from "
        "collectives/test_all_reduce.py; more ranks are predicted from the messages of collectives/test_ping_pong.py "
        "and test_ping_burst.py. The crossover is the number of ranks from which on some all-reduce is faster.",
    )
    command.add_argument("result", type=Path, metavar="RESULT.json")
    command.add_argument(
        "--bytes", metavar="N[,…]", help="total bytes of all tensors (default: three of the measured sizes)"
    )
    command.add_argument(
        "--tensors", default="1,64", metavar="N[,…]", help="equal tensors, sent one by one (%(default)s)"
    )
    command.add_argument(
        "--most", type=int, default=MOST, metavar="RANKS", help="predict up to this number of ranks (%(default)s)"
    )
    command.add_argument("--svg", type=Path, metavar="FILE", help="also draw the crossovers")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the crossovers")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from d5suite.files import write_bytes, write_json
    from d5suite.report.console import Console
    from d5suite.report.crossover import ASSUMES, draw, studies, tables, to_dict
    from d5suite.report.outputs import check_outputs
    from d5suite.report.page.svg import to_svg
    from d5suite.report.reading import load_results

    if not 2 <= options.most <= MOST_ALLOWED:
        raise ConfigurationError(f"--most is {options.most}; it must be from 2 to {MOST_ALLOWED}")
    check_outputs({"--svg": options.svg, "--json": options.json}, [options.result])
    tensors = _numbers(options.tensors, "--tensors")
    sizes = _numbers(options.bytes, "--bytes") if options.bytes else []
    found = studies(load_results(options.result))
    console = Console(markup=False, highlight=False)
    for study in found:
        for table in tables(study, sizes or study.few_sizes, tensors, options.most):
            console.print(table)
    console.print(ASSUMES, style="dim")
    if options.svg:
        write_bytes(options.svg, to_svg(draw(found[0], sizes or found[0].few_sizes, tensors, options.most)))
    if options.json:
        write_json(options.json, to_dict(found, sizes, tensors, options.most))
    return 0


def _numbers(text: str, option: str) -> list[int]:
    values = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() and int(each) > 0 for each in values):
        raise ConfigurationError(f"{text!r} is no list of whole numbers above 0", where=option)
    return sorted({int(each) for each in values})
