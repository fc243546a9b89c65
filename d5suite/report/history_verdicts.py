"""Verdicts on a run from a history of earlier runs; `d5suite.statistics.decisions` decides.

Imports its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from d5suite.report.history import (
    HistoryKey,
    HistoryPoint,
    dated,
    digest_of,
    figures_of,
    latest_level,
    read,
    retired,
    utc,
)
from d5suite.report.reading import printable
from d5suite.report.runs import BenchmarkRun, Entry
from d5suite.report.thresholds import Thresholds
from d5suite.report.verdicts import (
    RunComparison,
    Verdict,
    bars,
    differ,
    disturbances,
    doubts,
    missing,
    unpaired,
    verdict_of,
    wrong_answers,
)
from d5suite.statistics.decisions import Threshold, decide_history, grown

LOOKED_BACK = 10
"""Number of latest runs whose benchmarks a new run must have. With several, one failed run does not
shrink the list."""


def compare_with_history(
    folder: Path, new: BenchmarkRun, thresholds: Thresholds, *, force: bool = False
) -> RunComparison:
    """Compare a run with many earlier ones; see `d5suite.statistics.decisions.decide_history`.

    Raises
    ------
    JobError, ConfigurationError
        As `read` does.
    """
    history, notes = _others(read(folder), new)
    by_name: dict[str, list[HistoryKey]] = defaultdict(list)
    for key in history:
        by_name[key[0]].append(key)
    differences: dict[str, list[str]] = defaultdict(list)
    pairs: list[tuple[HistoryKey, Entry]] = []
    fresh: list[Entry] = []
    for entry in new.entries:
        keys = by_name.get(entry.name)
        if not keys:
            fresh.append(entry)
            continue
        key = min(keys, key=lambda key: len(differ(dict(key[1]), entry.conditions)))
        for each in differ(dict(key[1]), entry.conditions):
            differences[each].append(entry.name)
        pairs.append((key, entry))
    base = BenchmarkRun(folder, "history", [], {})
    notes += [printable(f"{new.path}: left out: {each}") for each in new.left_out]
    if differences and not force:
        return RunComparison(base, new, wrong_answers(new), dict(differences), notes)
    verdicts = [verdict_on(history[key], entry, thresholds.of(entry.name), len(pairs)) for key, entry in pairs]
    verdicts += [missing(each, new.failed.get(each.name)) for each in _expected(history, pairs, retired(folder))]
    verdicts += unpaired(new, fresh, verdicts)
    notes += [f"the threshold for {pattern!r} matches no benchmark" for pattern in thresholds.unmatched]
    return RunComparison(base, new, verdicts, dict(differences), notes, forced=force)


def _others(
    history: Mapping[HistoryKey, Sequence[HistoryPoint]], new: BenchmarkRun
) -> tuple[dict[HistoryKey, Sequence[HistoryPoint]], list[str]]:
    """Return the points of other runs, and notes on the place of this run in the history."""
    own = f"-{digest_of(new.path)}"
    left = {key: [point for point in points if not point.run.endswith(own)] for key, points in history.items()}
    latest = max((point.date for points in left.values() for point in points), default="")
    notes = []
    if any(len(left[key]) < len(points) for key, points in history.items()):
        notes.append("the history holds this run; it is judged by the others")
    if "" < utc(new) < latest:
        notes.append(f"this run, of {utc(new)}, is older than the history's latest, of {latest}")
    return {key: points for key, points in left.items() if points}, notes


def verdict_on(points: Sequence[HistoryPoint], new: Entry, threshold: Threshold, tests: int) -> Verdict:
    """Return the verdict on one of ``tests`` benchmarks of a run, by its points in the history."""
    base, _ = latest_level(points, threshold, tests)
    notes = differ(base.facts, new.facts) + doubts(new)
    if new.wrong:
        return Verdict(new.name, "invalid", new.wrong, base, new, notes=notes)
    decision = decide_history(
        figures_of(points), new.summary.median, [dated(point) for point in points], threshold, tests=tests,
        vetoes=disturbances(base, new), bars=bars(base, new), memory=new.is_memory,
    )  # fmt: skip
    return verdict_of(decision, base, new, threshold, notes, lambda cost: _began(points, base, cost, threshold))


def _began(points: Sequence[HistoryPoint], base: Entry, what: str, threshold: Threshold) -> str:
    """Say with which earlier run a cost beside time grew; empty if with this one."""
    first = None
    for point in reversed(points):
        if what not in grown(base.costs, point.entry.costs, threshold, disturbed=bool(base.disturbed)):
            break
        first = point
    return f", since {dated(first)}" if first else ""


def _expected(
    history: Mapping[HistoryKey, Sequence[HistoryPoint]],
    pairs: Sequence[tuple[HistoryKey, Entry]],
    retired: Mapping[str, str],
) -> list[Entry]:
    """Return the benchmarks of the latest runs that this run lacks.

    Only runs that share a benchmark with this one count, or all if none does: a folder may keep
    several machines and suites. A benchmark that was measured later under other conditions is not
    missing.
    """
    paired = {key for key, _ in pairs}
    kin = {point.run: point.date for key in paired or history for point in history[key]}
    latest = sorted(kin, key=lambda run: kin[run])[-LOOKED_BACK:]
    since = {name: history[name, conditions][-1].date for name, conditions in paired}
    return [
        points[-1].entry
        for (name, conditions), points in history.items()
        if (name, conditions) not in paired
        and points[-1].run in latest
        and points[-1].date >= since.get(name, "")
        and points[-1].date > retired.get(name, "")
    ]
