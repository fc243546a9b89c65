"""Verdicts from pairs: two sides that ran in turn, in one session.

The session has decided about times (`d5suite.statistics.decisions.decide_pairs`). Memory, first
calls and errors count as in `d5suite.report.verdicts`.

Imports its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d5suite.measurements.tables import Table
from d5suite.report.compare import failures
from d5suite.report.reading import conditions, printable
from d5suite.report.runs import BenchmarkRun, Entry, Failed, entry_of
from d5suite.report.thresholds import Thresholds
from d5suite.report.verdicts import RunComparison, Verdict, differ, doubts, verdict_of
from d5suite.statistics.decisions import Decision, Threshold

SIDES = ("A", "B")


@dataclass(frozen=True)
class Paired:
    """One benchmark on both sides.

    Attributes
    ----------
    name : str
        As `compare` calls it: ``case/measurement backend``.
    base, new : Entry or Failed
    decision : Decision or None
        From the pairs; None if a side failed.
    """

    name: str
    base: Entry | Failed
    new: Entry | Failed
    decision: Decision | None = None


def side_of(name: str, record: Mapping[str, Any], samples_s: Sequence[float], table: Table) -> Entry:
    """Return a side's measurement as an entry of a run.

    Parameters
    ----------
    name : str
    record : mapping
        As ``extra_info["d5suite"]`` holds it.
    samples_s : sequence of float
        Seconds.
    table : Table
        The measurement's table.
    """
    shown = printable(dict(record))
    return entry_of(name, conditions(shown), {**shown, "data": list(samples_s), "table": table}, failures(shown))


def compare_pairs(
    specs: tuple[str, str], pairs: Sequence[Paired], thresholds: Thresholds, *, force: bool = False,
    notes: Sequence[str] = (),
) -> RunComparison:  # fmt: skip
    """Compare the benchmarks of both sides.

    Parameters
    ----------
    specs : (str, str)
        The sides, as the user named them.
    pairs : sequence of Paired
    thresholds : Thresholds
    force : bool
        Also compare results with different conditions.
    notes : sequence of str
        Notes on the comparison as a whole.
    """
    base, new = (BenchmarkRun(Path(spec), "side", [], {}) for spec in specs)
    differences: dict[str, list[str]] = {}
    for each in pairs:
        if isinstance(each.base, Entry) and isinstance(each.new, Entry):
            for what in differ(each.base.conditions, each.new.conditions):
                differences.setdefault(what, []).append(each.name)
    verdicts = [_verdict(each, thresholds.of(each.name)) for each in pairs]
    if differences and not force:
        verdicts = [each for each in verdicts if each.verdict == "invalid"]
    all_notes = [*notes, *(f"the threshold for {pattern!r} matches no benchmark" for pattern in thresholds.unmatched)]
    return RunComparison(base, new, verdicts, differences, all_notes, forced=force)


def _verdict(pair: Paired, threshold: Threshold) -> Verdict:
    sides = list(zip(SIDES, (pair.base, pair.new), strict=True))
    base, new = (None if isinstance(each, Failed) else each for _, each in sides)
    wrong = [f"side {side}: {each.message}" for side, each in sides if isinstance(each, Failed) and each.wrong]
    wrong += [f"side {side}: {why}" for side, each in sides if isinstance(each, Entry) for why in each.wrong]
    if wrong:
        return Verdict(pair.name, "invalid", wrong, base, new)
    if base is None or new is None or pair.decision is None:
        failed = [f"side {side}: {each.message}" for side, each in sides if isinstance(each, Failed) and each.message]
        return Verdict(pair.name, "missing", failed, base, new)
    notes = differ(base.facts, new.facts)
    if base.disturbed or new.disturbed:
        notes.append("machine disturbed during the run; both sides shared the disturbance in part")
    return verdict_of(pair.decision, base, new, threshold, notes + doubts(base, new))
