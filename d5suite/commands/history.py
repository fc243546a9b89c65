"""``d5suite history``: keep results over time and date their changes."""

from __future__ import annotations

import argparse

from d5suite.commands.compare import add_thresholds
from d5suite.files import given_path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``history`` and its actions to the commands."""
    history = commands.add_parser("history", help="keep a history of valid results, and date changes")
    actions = history.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = actions.add_parser(
        "add", help="add the valid results of result files",
        epilog="exit codes: 0 added, 3 wrong answer, 6 no valid result",
    )  # fmt: skip
    add.add_argument("folder", type=given_path, metavar="FOLDER")
    add.add_argument("results", type=given_path, nargs="+", metavar="RESULT.json")
    add.set_defaults(run=_history_add)
    show = actions.add_parser("show", help="list benchmarks with the latest level and every change, dated to a run")
    show.add_argument("folder", type=given_path, metavar="FOLDER")
    show.add_argument(
        "-k", dest="only", default="*", metavar="PATTERN", help="a name, or a shell pattern of names (default: all)"
    )
    add_thresholds(show)
    show.set_defaults(run=_history_show)
    retire = actions.add_parser("retire", help="stop expecting benchmarks in new runs; keep their history")
    retire.add_argument("folder", type=given_path, metavar="FOLDER")
    retire.add_argument("only", metavar="PATTERN", help="a name, or a shell pattern of names")
    retire.set_defaults(run=_history_retire)


def _history_add(options: argparse.Namespace) -> int:
    from d5suite.report.history import add
    from d5suite.report.reading import printable
    from d5suite.report.verdicts import Exit

    codes = []
    for result in options.results:
        kept = add(options.folder, result)
        if kept.path is None:
            print(printable(f"{result}: nothing kept"))
        else:
            how = "were kept before" if kept.known else "kept"
            print(printable(f"{result}: {kept.benchmarks} benchmarks {how} in {kept.path}"))
        for each in kept.left_out:
            print(printable(f"  left out: {each}"))
        for each in kept.noted:
            print(printable(f"  note: {each}"))
        if kept.wrong:
            codes.append(Exit.WRONG_ANSWER)
        elif kept.path is None:
            codes.append(Exit.TOO_NOISY)
    return int(min(codes, default=Exit.NOTHING_WRONG))


def _history_show(options: argparse.Namespace) -> int:
    from d5suite.report.console import Console
    from d5suite.report.history import read, show
    from d5suite.report.thresholds import read_thresholds

    show(read(options.folder), options.only, read_thresholds(options.thresholds), Console(markup=False))
    return 0


def _history_retire(options: argparse.Namespace) -> int:
    from d5suite.report.history import retire

    for name in retire(options.folder, options.only):
        print(f"retired: {name}")
    return 0
