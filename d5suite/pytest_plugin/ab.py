"""``d5suite ab``: two sides of the same benchmarks, measured in turn and decided by pairs."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.interrupts import Interrupts
from d5suite.pytest_plugin.output import discard_dead_output
from d5suite.pytest_plugin.selected_tests import BenchmarkSelection, SelectedTests, name_of
from d5suite.report.formats import figure
from d5suite.report.pair_verdicts import Paired, compare_pairs, side_of
from d5suite.report.reading import printable
from d5suite.report.runs import Entry, Failed
from d5suite.report.thresholds import Thresholds
from d5suite.report.verdicts import RunComparison
from d5suite.session.pairs import Criterion, InterruptedPairsError, Pair, PairedRun, StoppingRule
from d5suite.session.sides import Side, prepared_side
from d5suite.statistics.decisions import ALPHA

if TYPE_CHECKING:
    from d5suite.measurements.tables import Table
    from d5suite.session import MeasurementResult


@dataclass
class Compared:
    """The comparison of two sides.

    Attributes
    ----------
    comparison : RunComparison
    interrupted : bool
        Whether it covers only what was finished before an interrupt.
    """

    comparison: RunComparison
    interrupted: bool = False


def compare_sides(
    specs: tuple[str, str],
    selection: BenchmarkSelection,
    thresholds: Thresholds,
    budget: StoppingRule,
    *,
    force: bool = False,
    only: str | None = None,
) -> Compared:
    """Measure the selected benchmarks on both sides.

    Parameters
    ----------
    specs : (str, str)
        Specifications of A and B: see `d5suite.session.sides`.
    selection : BenchmarkSelection
        Selects what to measure, once both sides are made.
    thresholds : Thresholds
    budget : StoppingRule
        Budget for each benchmark.
    force : bool
        Judge what was measured under different conditions, too.
    only : str, optional
        The name of the one benchmark that is measured.

    Raises
    ------
    ConfigurationError
        If a side cannot be made, or there is nothing to measure.
    """
    with contextlib.ExitStack() as stack:
        interrupts = Interrupts()  # leave nothing behind, and show what is finished
        stack.callback(interrupts.restore)
        interrupts.install()
        sides = [
            stack.enter_context(prepared_side(spec, option)) for spec, option in zip(specs, ("--a", "--b"), strict=True)
        ]
        selected = selection.here
        assert selected.settings is not None
        if selected.settings.elsewhere is not None or selected.settings.ranks:
            raise ConfigurationError("two sides are measured here, without ranks",
                                     hint="Leave out --ranks, --write-jobs and --from-jobs.")  # fmt: skip
        lost = _lost((sides[0], sides[1]), selection) if only is None else {}
        targets, notes = _in_turns(selected, lost)
        targets = [each for each in targets if only in (None, name_of(each)) and name_of(each) not in lost]
        paired = PairedRun((sides[0], sides[1]), selected.settings, budget, _tell)
        stack.callback(paired.close)
        found = list(lost.values())
        interrupted = False
        try:
            jobs = list(_jobs(targets))
            for batch in jobs:
                wanted, alpha = [each.wanted for each in batch], ALPHA / len(targets)
                tests = {each.wanted.key: Criterion(thresholds.of(name_of(each)).effect, alpha) for each in batch}
                found += map(_paired, _measured(paired.run(wanted, tests, ALPHA / len(jobs))))
        except InterruptedPairsError as error:
            interrupted = True
            found += [_paired(each) for each in error.pairs if each.decision is not None]
        except KeyboardInterrupt:
            interrupted = True
        return Compared(compare_pairs(specs, found, thresholds, force=force, notes=notes), interrupted)


def _lost(sides: tuple[Side, Side], selection: BenchmarkSelection) -> dict[str, Paired]:
    """Return benchmarks to report as missing, by name: a side or a named backend lacks them."""
    selected = selection.here
    here = {name_of(each) for each in selected.targets}
    skipped = {name_of(each): f"it is skipped: {why}" for each, why in selected.skipped}
    a, b = (selection.names(side, option) for side, option in zip(sides, ("--a", "--b"), strict=True))
    found = {}
    for name in a:
        if name not in here or name not in b:
            absent = "the current folder has no such benchmark" if name in b else "it has no such benchmark"
            found[name] = Paired(name, Failed(False, ""), Failed(False, skipped.get(name, f"{absent}, side A has")))
    for target, _ in selected.lacking:
        name = name_of(target)
        found.setdefault(name, Paired(name, Failed(False, skipped[name]), Failed(False, skipped[name])))
    return found


def _in_turns(selected: SelectedTests, lost: Collection[str]) -> tuple[list[stash.BenchmarkTarget], list[str]]:
    """Return what can be measured in turns, and notes on what cannot."""
    targets = [each for each in selected.targets if each.measurement.takes_turns]
    left_out = dict.fromkeys(each.measurement.name for each in selected.targets if each not in targets)
    if not targets and not lost:
        raise ConfigurationError(f"{', '.join(left_out)}: samples of it cannot be taken in turn with another worker's")
    notes = [f"not measured in turns: {', '.join(left_out)}"] if left_out else []
    skipped: dict[tuple[str, str], list[str]] = {}
    for each, why in selected.skipped:
        if name_of(each) not in lost:
            skipped.setdefault((str(each.selection), why), []).append(each.wanted.key)
    return targets, notes + [f"skipped on {where}: {', '.join(keys)}: {why}" for (where, why), keys in skipped.items()]


def _jobs(targets: Sequence[stash.BenchmarkTarget]) -> Iterator[list[stash.BenchmarkTarget]]:
    """Group measurements by job."""
    jobs: dict[tuple[str, str], list[stash.BenchmarkTarget]] = {}
    for each in targets:
        jobs.setdefault(each.job, []).append(each)
    yield from jobs.values()


def _measured(pairs: list[Pair]) -> list[Pair]:
    """Print each pair's decision; return the pairs."""
    for each in pairs:
        if each.decision is None:
            _tell(f"{each.wanted.key}: no verdict")
        elif each.decision.ratio is not None:
            counts = f"{each.blocks} pairs, launches: {each.launches}"
            said = f"{each.decision.outcome}, {figure(each.decision.ratio.value)} times as long, {counts}"
            if each.decision.outcome == "uncertain":
                finds = each.decision.finds
                said += f"; finds slowdowns from {figure(finds)}" if finds < math.inf else "; finds no slowdown"
            _tell(f"{each.wanted.key}: {said}")
    return pairs


def _paired(pair: Pair) -> Paired:
    name = f"{pair.wanted.key} {pair.wanted.selection}"
    table = pair.wanted.measurement.table
    return Paired(name, _side(name, pair.a, table), _side(name, pair.b, table), pair.decision)


def _side(name: str, found: MeasurementResult, table: Table) -> Entry | Failed:
    if found.record is None:
        return Failed(found.wrong, str(printable((found.failure or "").partition("\n")[0])))
    return side_of(name, found.record, found.samples_s, table)


def _tell(what: str) -> None:
    discard_dead_output()
    print(f"d5suite ab: {printable(what)}", file=sys.stderr, flush=True)
