"""``d5suite bisect``: the revision of d5suite, or of a backend, that made a benchmark slower."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.commands.ab import add_paired, benchmark_selection, measure
from d5suite.files import given_path

if TYPE_CHECKING:
    from d5suite.report.verdicts import RunComparison


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "bisect", help="find the revision of d5suite, or of a backend, that made a benchmark slower",
        description="Measure revisions in turn with the good revision, as ab does. Further options of pytest follow "
        "after --.",
        epilog="exit codes: 0 found, 2 usage, 6 several revisions are left; those of ab if BAD is not slower",
    )  # fmt: skip
    command.add_argument("--good", required=True, metavar="REVISION")
    command.add_argument("--bad", required=True, metavar="REVISION", help="a later revision that is slower")
    command.add_argument(
        "--repository", type=given_path, metavar="PATH",
        help="Git repository of the backend whose revisions to install (default: d5suite's own)",
    )  # fmt: skip
    add_paired(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Search for the revision and print it; return the exit code."""
    from d5suite.pytest_plugin.bisect import find_culprit
    from d5suite.report.comparison_formats import show_comparison
    from d5suite.report.console import Console
    from d5suite.report.verdicts import Exit, RunComparison
    from d5suite.session.tools import installed_from, subject

    selection = benchmark_selection(options)
    repository: Path | None = options.repository

    @cache
    def spec(revision: str) -> str:
        return f"rev:{revision}" if repository is None else installed_from(repository, revision)

    def measured(good: str, revision: str, only: str | None) -> RunComparison:
        found = measure(options, (spec(good), spec(revision)), selection, only)
        if found.interrupted:
            raise KeyboardInterrupt
        return found.comparison

    found = find_culprit(options.good, options.bad, measured, _tell, repository)
    if isinstance(found, RunComparison):
        show_comparison(found, Console(markup=False))
        print(_without_culprit(found, options.good, options.bad))
        return int(found.exit or Exit.TOO_NOISY)
    several = len(found.revisions) > 1
    print(f"{found.benchmark} takes {found.ratio:.3f} times as long since{' one of' * several}")
    for each in found.revisions:
        print(f"  {subject(each, repository)}")
    return int(Exit.TOO_NOISY if several else Exit.NOTHING_WRONG)


def _without_culprit(found: RunComparison, good: str, bad: str) -> str:
    """Say what is known where no benchmark was found slower."""
    open_ = [each.name for each in found.verdicts if each.decision and each.decision.outcome == "uncertain"]
    lost = [each.name for each in found.verdicts if each.verdict in ("missing", "invalid")]
    worse = [each.name for each in found.verdicts if each.verdict == "worse"]
    lines = [f"slower only in something other than time: {', '.join(worse)}; bisect follows times"] * bool(worse)
    lines += [f"no time to follow: {', '.join(lost)}"] * bool(lost)
    if open_:
        lines.append(f"whether {bad} is slower than {good} is not decided: {', '.join(open_)}")
        lines.append(
            "allow more pairs and more time (--max-pairs, --max-time) on a quiet machine, or search for more (--effect)"
        )
    elif not lost and not found.refused:
        lines.append(f"no benchmark takes longer at {bad} than at {good}")
    return "\n".join(lines)


def _tell(what: str) -> None:
    print(f"d5suite bisect: {what}", flush=True)
