"""``d5suite ab``: measure two sides in turn and judge each benchmark by its pairs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from d5suite.commands.compare import add_formats, add_thresholds, announce, check_formats
from d5suite.errors import ConfigurationError
from d5suite.launch.signals import uninterrupted

if TYPE_CHECKING:
    from d5suite.pytest_plugin.ab import Compared
    from d5suite.pytest_plugin.selected_tests import BenchmarkSelection


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "ab", help="measure two sides in turn and judge each benchmark by its pairs",
        description="A SPEC is one of: here, an interpreter, a virtual environment, env:NAME=VALUE, mode:NAME, "
        "rev:REVISION of d5suite, or install:REQUIREMENT. Further options of pytest follow after --.",
        epilog="exit codes: as for compare (docs/compare.md)",
    )  # fmt: skip
    command.add_argument("--a", required=True, metavar="SPEC", help="the base")
    command.add_argument("--b", required=True, metavar="SPEC", help="the side to compare with the base")
    add_paired(command)
    add_formats(command)
    command.set_defaults(run=_run)


def add_paired(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that measure two sides in turn."""
    add_selection(command)
    command.add_argument(
        "--max-pairs", type=int, default=60, metavar="N", help="limit per benchmark (default: %(default)s)"
    )
    command.add_argument(
        "--max-time", type=float, default=300.0, metavar="SECONDS", help="limit per benchmark (default: %(default)g)"
    )
    command.add_argument("--force", action="store_true", help="also judge measurements under different conditions")
    add_decide_disturbed(command)
    add_thresholds(command)
    command.add_argument("--effect", type=float, metavar="FRACTION", help="relative change to find (default: 0.02)")


def add_selection(command: argparse.ArgumentParser) -> None:
    """Add what `benchmark_selection` reads: recipes, and pytest's options that select."""
    command.add_argument("recipes", nargs="+", metavar="RECIPE", help="files, folders or FILE::TEST, as for pytest")
    command.add_argument("--backend", metavar="NAME[:MODE][,…]", help="as for pytest")
    command.add_argument("--preset", metavar="NAME", help="as for pytest")


def add_decide_disturbed(command: argparse.ArgumentParser) -> None:
    """Add the option that lets disturbed measurements decide."""
    command.add_argument(
        "--decide-disturbed", action="store_true",
        help="decide even if more than a tenth of the CPU time went elsewhere",
    )  # fmt: skip


def benchmark_selection(options: argparse.Namespace) -> BenchmarkSelection:
    """Return what a command's recipes and pytest options select; collect nothing yet."""
    from d5suite.pytest_plugin.selected_tests import BenchmarkSelection

    chosen = [f"--{name}={getattr(options, name)}" for name in ("backend", "preset") if getattr(options, name)]
    return BenchmarkSelection([*map(str, options.recipes)], [*chosen, *options.further])


def measure(
    options: argparse.Namespace,
    specs: tuple[str, str],
    selection: BenchmarkSelection,
    only: str | None = None,
) -> Compared:
    """Measure two sides as the options of ``ab`` or ``bisect`` say.

    Parameters
    ----------
    options : argparse.Namespace
    specs : (str, str)
    selection : BenchmarkSelection
    only : str, optional
        Measure this benchmark only.

    Raises
    ------
    ConfigurationError
        As `compare_sides`, or if an option makes no sense.
    """
    from d5suite.pytest_plugin.ab import compare_sides
    from d5suite.report.thresholds import PAIRED, read_thresholds
    from d5suite.session.pairs import StoppingRule

    thresholds = read_thresholds(options.thresholds, PAIRED)
    if options.effect is not None:
        if not 0 < options.effect <= 10:
            raise ConfigurationError(f"--effect {options.effect:g}: give a number above 0, to 10")
        thresholds.default = replace(thresholds.default, effect=options.effect)
    if options.max_pairs < 1 or not options.max_time > 0:
        raise ConfigurationError("--max-pairs and --max-time must be positive")
    budget = StoppingRule(options.max_pairs, options.max_time, options.decide_disturbed)
    return compare_sides(specs, selection, thresholds, budget, force=options.force, only=only)


def _run(options: argparse.Namespace) -> int:
    check_formats(options)
    found = measure(options, (options.a, options.b), benchmark_selection(options))
    if not found.interrupted or found.comparison.verdicts:
        with uninterrupted():
            announce(found.comparison, options)
    if found.interrupted:
        raise KeyboardInterrupt
    return int(found.comparison.exit)
