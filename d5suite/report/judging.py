"""A run judged by a history: what stands out, what has changed, what is missing.

Imports its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from d5suite.report.history import (
    Key,
    Point,
    Step,
    changes,
    digest_of,
    level_of,
    read,
    retired,
    utc,
    with_levels_beside,
)
from d5suite.report.reading import printable
from d5suite.report.runs import Entry, Run
from d5suite.report.thresholds import Threshold, Thresholds
from d5suite.report.verdicts import (
    ALPHA,
    CONFIDENCE,
    MEMORY_BYTES,
    Comparison,
    Verdict,
    beside_time,
    differ,
    measure_of,
    missing,
    of_times,
    unpaired,
    wrong_answers,
)
from d5suite.statistics.changes import Change, Series, exp

LOOKED_BACK = 10
"""Latest runs whose benchmarks a new run must have: one failed run must not shrink the list."""

ENOUGH = 3
"""Fewest runs of a level needed to judge a new run."""


def compare_with_history(folder: Path, new: Run, thresholds: Thresholds, *, force: bool = False) -> Comparison:
    """Judge a run by many others.

    A benchmark is held to the runs since its level last changed: the interval in which the next run
    lies, as wide as those runs vary. A run beyond it is uncertain, until as many runs in a row
    agree as chance does not make. A change that this run makes visible, and that began with an
    earlier one, is a regression, too: so a slow drift is found.

    Raises
    ------
    JobError, ConfigurationError
        As `read` does.
    """
    history, notes = _others(read(folder), new)
    by_name: dict[str, list[Key]] = defaultdict(list)
    for key in history:
        by_name[key[0]].append(key)
    differences: dict[str, list[str]] = defaultdict(list)
    pairs: list[tuple[Key, Entry]] = []
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
    base = Run(folder, "history", [level_of(history[key])[0] for key, _ in pairs], {})
    notes += [printable(f"{new.path}: left out: {each}") for each in new.left_out]
    if differences and not force:
        return Comparison(base, new, wrong_answers(new), dict(differences), notes)
    judged = [judge(history[key], entry, thresholds.of(entry.name), new, max(len(pairs), 1)) for key, entry in pairs]
    judged += [missing(each, new.failed.get(each.name)) for each in _expected(history, pairs, retired(folder))]
    judged += unpaired(new, fresh, judged)
    notes += [f"the threshold for {pattern!r} matches no benchmark" for pattern in thresholds.unmatched]
    return Comparison(base, new, judged, dict(differences), notes, forced=force)


def _others(history: Mapping[Key, Sequence[Point]], new: Run) -> tuple[dict[Key, Sequence[Point]], list[str]]:
    """Return the points of other files than this run's, and what is odd about its place."""
    own = f"-{digest_of(new.path)}"
    left = {key: [point for point in points if not point.run.endswith(own)] for key, points in history.items()}
    latest = max((point.date for points in left.values() for point in points), default="")
    notes = []
    if any(len(left[key]) < len(points) for key, points in history.items()):
        notes.append("the history holds this run; it is judged by the others")
    if "" < utc(new) < latest:
        notes.append(f"this run, of {utc(new)}, is older than the history's latest, of {latest}")
    return {key: points for key, points in left.items() if points}, notes


def judge(points: Sequence[Point], new: Entry, threshold: Threshold, run: Run, tests: int) -> Verdict:
    """Judge a benchmark of a run, one of so many, by its points in the history."""
    before = changes(points, threshold, tests)
    since = next((i for i, point in enumerate(points) if before and point is before[-1].since), 0)
    base, spread = level_of(points, since)
    base = with_levels_beside(base, points, threshold)
    notes = differ(base.facts, new.facts) + [f"reason to doubt it: {each}" for each in new.warnings]
    if new.wrong:
        return Verdict(new.name, "invalid", new.wrong, base, new, notes=notes)
    level = f"{base.series.rounds} runs since {points[since].date[:10]}"
    if base.series.rounds < ENOUGH:
        reasons = [f"only {level} to compare with; {ENOUGH} are needed"]
        return Verdict(new.name, "uncertain", reasons, base, new, notes=notes)
    shown, sure = (_prediction(base.series, spread, new, c) for c in (CONFIDENCE, 1 - ALPHA / tests))
    if new.is_memory and abs(new.series.median - base.series.median) < MEMORY_BYTES:
        return Verdict(new.name, "same", [], base, new, shown, None, [], notes)
    verdict, reasons = of_times(base, new, threshold, shown, sure, None, tests)
    figures = [point.entry.series.median for point in points[since:]]
    agreed = None if new.doubts else _agreed([*figures, new.series.median], threshold, tests)
    if agreed:
        verdict, runs, ratio = agreed
        reasons = [f"{ratio:.2f} times {measure_of(new)}, as the latest {runs} runs agree"]
    if verdict in ("slower", "faster"):
        reasons.append(f"than {level}")
        if not (agreed or new.is_memory):
            verdict = "uncertain"
            reasons.append(_asked(len(figures), tests))
    kind = "memory" if new.is_memory else "time"
    regressions = [kind] if verdict == "slower" else []
    here = Point(utc(run) or datetime.now(timezone.utc).isoformat(), printable(run.path.name), new)
    fresh = [] if new.doubts else _visible(before, changes([*points, here], threshold, tests))
    if fresh and verdict != "slower":
        step = fresh[-1]
        when = f"{step.since.date[:10]} ({step.since.run})"
        reasons.append(f"{step.ratio:.2f} times {measure_of(new)} since {when}")
        verdict, regressions = ("slower", [kind]) if step.ratio > 1 else ("faster", [])
    for what, reason in beside_time(base, new, threshold):
        regressions.append(what)
        reasons.append(reason + _began(points, base, what, threshold))
    return Verdict(new.name, verdict, reasons, base, new, shown, None, regressions, notes)


def _began(points: Sequence[Point], base: Entry, what: str, threshold: Threshold) -> str:
    """Say with which run a change beside time began, if not with this one."""
    first = None
    for point in reversed(points):
        if what not in dict(beside_time(base, point.entry, threshold)):
            break
        first = point
    return f", since {first.date[:10]} ({first.run})" if first else ""


def _agreed(figures: Sequence[float], threshold: Threshold, tests: int) -> tuple[str, int, float] | None:
    """Return what the latest runs of a level agree on: a verdict, their number, their ratio.

    All of them lie above, or below, all earlier ones. Of n runs of one level, the latest k are the
    largest with a probability of 1 / C(n, k), whatever the noise.
    """
    for runs in range(1, len(figures) // 2 + 1):
        before, latest = figures[:-runs], figures[-runs:]
        ratio = statistics.median(latest) / statistics.median(before)
        apart = min(latest) > max(before) or max(latest) < min(before)
        if apart and max(ratio, 1 / ratio) >= 1 + threshold.effect and _sure(len(figures), runs, tests):
            return "slower" if ratio > 1 else "faster", runs, ratio
    return None


def _sure(count: int, runs: int, tests: int) -> bool:
    return ALPHA * math.comb(count, runs) >= tests


def _asked(earlier: int, tests: int) -> str:
    """Say how many runs in a row make sure that a run which stands out is no wild one."""
    needed = next((runs for runs in range(1, earlier + 1) if _sure(earlier + runs, runs, tests)), None)
    if needed is None:
        return f"one run may stand out by chance, and {earlier} earlier ones are too few to tell: measure again"
    return f"one run may stand out by chance: measure again; {needed} in a row, each added, decide"


def _visible(before: Sequence[Step], after: Sequence[Step]) -> list[Step]:
    """Return the changes that the latest run revealed; later runs may shift the others slightly."""
    return list(after[len(before) :])


def _prediction(level: Series, spread: float, new: Entry, confidence: float) -> Change:
    """Return the ratio of one more run to a level, with its prediction interval.

    Student's t interval of a next observation: Hahn and Meeker, "Statistical Intervals", 1991, 4.7.
    """
    from scipy.stats import t

    ratio = math.log(new.series.median / level.median)
    half = float(t.ppf((1 + confidence) / 2, level.rounds - 1)) * spread * math.sqrt(1 + 1 / level.rounds)
    return Change(exp(ratio), exp(ratio - half), exp(ratio + half))


def _expected(
    history: Mapping[Key, Sequence[Point]], pairs: Sequence[tuple[Key, Entry]], retired: Mapping[str, str]
) -> list[Entry]:
    """Return the benchmarks of the latest runs that this run lacks.

    Runs count that have a benchmark in common with this one, or all if none has: a folder may keep
    several machines and suites. Whatever was measured since under other conditions is not missing.
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
