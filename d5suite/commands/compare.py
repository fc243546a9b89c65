"""``d5suite compare``: verdicts on two runs, or tables of result files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError
from d5suite.files import given_path

if TYPE_CHECKING:
    from d5suite.report.verdicts import RunComparison


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "compare", help="judge each benchmark of two runs, or show result files as tables",
        description="With two files: give a verdict on each benchmark. With one, or more than two: show tables.",
        epilog="exit codes: 0 nothing wrong, 1 regression, 2 usage, 3 wrong answer, 4 benchmark missing, "
        "5 not comparable, 6 too noisy to tell or nothing to judge (docs/compare.md)",
    )  # fmt: skip
    command.add_argument("results", type=given_path, nargs="+", metavar="RESULT.json", help="BASE.json NEW.json")
    command.add_argument("--tables", action="store_true", help="also show two files as tables side by side")
    command.add_argument(
        "--by-size", action="store_true", help="also show collectives by size, with the minimum and maximum over ranks"
    )
    command.add_argument("--force", action="store_true", help="also compare runs of different machines or settings")
    add_thresholds(command)
    command.add_argument(
        "--history", type=given_path, metavar="FOLDER", help="judge one file against the runs of a folder"
    )
    command.add_argument(
        "--between-runs", type=float, metavar="FRACTION",
        help="standard deviation of a median from run to run (default: 0.15)",
    )  # fmt: skip
    command.add_argument(
        "--measure-between-runs", action="store_true",
        help="the files are runs of one program: print how they vary, and the --between-runs to use",
    )  # fmt: skip
    add_formats(command)
    command.set_defaults(run=_run)


def add_formats(command: argparse.ArgumentParser) -> None:
    """Add the options that write a comparison in other formats."""
    for name, what in (("json", "JSON"), ("markdown", "a summary in Markdown"), ("junit", "JUnit XML")):
        command.add_argument(f"--{name}", type=given_path, metavar="FILE", help=f"write {what}; - prints it instead")


def add_thresholds(command: argparse.ArgumentParser) -> None:
    """Add the option that names a file of thresholds."""
    command.add_argument(
        "--thresholds", type=given_path, metavar="FILE.toml", help="what counts as a change, by benchmark"
    )


def _run(options: argparse.Namespace) -> int:
    from d5suite.report.compare import show
    from d5suite.report.console import Console

    check_formats(options, options.results)
    if options.measure_between_runs:
        return _measure_between_runs(options)
    if options.history or (len(options.results) == 2 and not (options.tables or options.by_size)):
        found = _judge(options)
        announce(found, options)
        return int(found.exit)
    given = [f"--{name.replace('_', '-')}" for name in _OF_TWO if getattr(options, name)]
    if given:
        raise ConfigurationError(f"{given[0]} is for two files: the second is compared with the first")
    show(options.results, Console(markup=False), by_size=options.by_size)
    return 0


_OF_TWO = ("force", "thresholds", "between_runs", "json", "markdown", "junit")
"""Options that only a comparison of two files has."""


def _measure_between_runs(options: argparse.Namespace) -> int:
    from d5suite.report.console import Console
    from d5suite.report.repeats import repeats_of, show_repeats
    from d5suite.report.runs import read_run

    others = (*_OF_TWO, "history", "tables", "by_size")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(options, name)]
    if given:
        raise ConfigurationError(f"{given[0]} makes no sense with --measure-between-runs, which compares nothing")
    show_repeats(repeats_of([read_run(path) for path in options.results]), Console(markup=False))
    return 0


def _judge(options: argparse.Namespace) -> RunComparison:
    from d5suite.report.history_verdicts import compare_with_history
    from d5suite.report.runs import read_run
    from d5suite.report.thresholds import read_thresholds
    from d5suite.report.verdicts import compare_runs

    others = options.tables or options.by_size or options.between_runs is not None
    if options.history and (others or len(options.results) != 1):
        raise ConfigurationError(
            "--history is for one file, without --tables, --by-size and --between-runs: a history shows how runs vary"
        )
    thresholds = read_thresholds(options.thresholds)
    if options.history:
        return compare_with_history(options.history, read_run(options.results[0]), thresholds, force=options.force)
    if options.between_runs is not None:
        if not 0 <= options.between_runs <= 10:
            raise ConfigurationError(f"--between-runs {options.between_runs:g}: give a number from 0 to 10")
        thresholds.default = replace(thresholds.default, between_runs=options.between_runs)
    base, new = map(read_run, options.results)
    return compare_runs(base, new, thresholds, force=options.force)


def check_formats(options: argparse.Namespace, results: Sequence[Path] = ()) -> None:
    """Raise `ConfigurationError` if an output would replace another, or a file that is read."""
    from d5suite.report.outputs import check_outputs

    history = getattr(options, "history", None)
    inputs = [*results, *filter(None, [options.thresholds]), *(history.glob("*.json") if history else ())]
    check_outputs({f"--{name}": getattr(options, name) for name in ("json", "markdown", "junit")}, inputs)


def announce(found: RunComparison, options: argparse.Namespace) -> None:
    """Show a comparison, or write it in the requested formats."""
    import json

    from d5suite.files import write_bytes
    from d5suite.report.comparison_formats import show_comparison, to_json, to_junit, to_markdown
    from d5suite.report.console import Console
    from d5suite.report.outputs import refused

    formats = {
        options.json: lambda: (json.dumps(to_json(found), indent=1, allow_nan=False) + "\n").encode(),
        options.markdown: lambda: to_markdown(found).encode(),
        options.junit: lambda: to_junit(found),
    }
    printed = formats.pop(Path("-"), None)
    for path, content in formats.items():
        if path is not None:
            with refused("the comparison cannot be written", path):
                write_bytes(path, content())
    if printed is not None:
        sys.stdout.write(printed().decode())
    else:
        show_comparison(found, Console(markup=False))
