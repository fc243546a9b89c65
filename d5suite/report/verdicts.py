"""Verdicts on two runs, by benchmark: faster, slower, the same, or too noisy to tell.

Two runs differ by more than their samples tell, so intervals include the variation between runs
(`d5suite.report.thresholds.Threshold.between_runs`).

Imports its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from d5suite.report.formats import figure
from d5suite.report.reading import printable
from d5suite.report.runs import Entry, Failed, Run
from d5suite.report.thresholds import Threshold, Thresholds
from d5suite.statistics.changes import Change, change, fewest_p, holm, rank_test, separated

ALPHA = 0.01
"""Probability, over all benchmarks of a comparison, to call any slower or faster that is not."""

CONFIDENCE = 0.95
"""Confidence of each benchmark's interval."""

FIRST_CALL_S = 1.0
"""Seconds by which a first call must grow to count: shorter ones depend on the disk's cache."""

MEMORY_BYTES = 16 << 20
"""Bytes by which peak memory must grow to count: allocators ask for as much at once."""

ERROR = 0.1
"""Part of its tolerance that an error must reach to count as a loss of accuracy."""


class Exit(IntEnum):
    """Exit codes of comparisons; the most serious of all benchmarks counts, as `SERIOUS` says."""

    NOTHING_WRONG = 0
    REGRESSION = 1
    USAGE = 2
    WRONG_ANSWER = 3
    MISSING = 4
    NOT_COMPARABLE = 5
    TOO_NOISY = 6


SERIOUS = (Exit.WRONG_ANSWER, Exit.NOT_COMPARABLE, Exit.REGRESSION, Exit.MISSING, Exit.TOO_NOISY)
"""The most serious first."""


@dataclass(frozen=True)
class Verdict:
    """The finding on one benchmark.

    Attributes
    ----------
    name : str
    verdict : {"faster", "slower", "same", "uncertain", "missing", "new", "invalid"}
    reasons : list of str
        Why; for people.
    base, new : Entry or None
    change : Change or None
        New over base, with its own 95% interval.
    p_value : float or None
        Of the rank test, corrected for the number of benchmarks.
    regressions : list of str
        Of what: ``time``, ``memory``, ``first call``, ``accuracy``.
    notes : list of str
        Differences that do not decide, such as versions.
    pairs : int or None
        Pairs that it rests on, of two sides that ran in turn.
    """

    name: str
    verdict: str
    reasons: list[str] = field(default_factory=list)
    base: Entry | None = None
    new: Entry | None = None
    change: Change | None = None
    p_value: float | None = None
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pairs: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The verdicts on two runs.

    Attributes
    ----------
    base, new : Run
    verdicts : list of Verdict
        Only wrong answers if the runs cannot be compared.
    differences : dict of str to list of str
        Why they cannot be: what differs, with the benchmarks it concerns. With ``force`` they were
        compared all the same.
    notes : list of str
        Of the comparison as a whole.
    forced : bool
    """

    base: Run
    new: Run
    verdicts: list[Verdict]
    differences: dict[str, list[str]]
    notes: list[str]
    forced: bool = False

    @property
    def refused(self) -> bool:
        """Whether the runs cannot be compared."""
        return bool(self.differences) and not self.forced

    @property
    def judged(self) -> bool:
        """Whether anything was found out: of what is only new, nothing is."""
        return any(each.verdict != "new" for each in self.verdicts)

    @property
    def exit(self) -> Exit:
        """The comparison's exit code."""
        codes = set(map(_exit_of, self.verdicts))
        if self.refused:
            codes.add(Exit.NOT_COMPARABLE)
        if not self.judged:
            codes.add(Exit.TOO_NOISY)
        return next((code for code in SERIOUS if code in codes), Exit.NOTHING_WRONG)


def _exit_of(found: Verdict) -> Exit:
    if found.verdict == "invalid":
        return Exit.WRONG_ANSWER
    if found.regressions:
        return Exit.REGRESSION
    return {"missing": Exit.MISSING, "uncertain": Exit.TOO_NOISY}.get(found.verdict, Exit.NOTHING_WRONG)


def compare_runs(base: Run, new: Run, thresholds: Thresholds, *, force: bool = False) -> Comparison:
    """Compare two runs benchmark by benchmark.

    Parameters
    ----------
    base, new : Run
    thresholds : Thresholds
    force : bool
        Compare what was measured under other conditions, too.
    """
    pairs, alone_base, alone_new = _pair(base.entries, new.entries)
    differences: dict[str, list[str]] = defaultdict(list)
    for one, other in pairs:
        for each in differ(one.conditions, other.conditions):
            differences[each].append(one.name)
    notes = _notes(base, new)
    if differences and not force:
        return Comparison(base, new, wrong_answers(new), dict(differences), notes)
    verdicts = _judge(pairs, thresholds)
    verdicts += [missing(each, new.failed.get(each.name)) for each in alone_base]
    verdicts += unpaired(new, alone_new, verdicts, base.failed)
    told = {each.name for each in verdicts if each.verdict in ("missing", "invalid")}
    both = [name for name in new.failed if name in base.failed and name not in told]
    notes += [f"failed in both: {name}: {new.failed[name].message}" for name in both]
    known = {*new.failed, *(each.name for each in verdicts)}
    gone = [name for name in base.failed if name not in known]
    notes += [f"failed in BASE, and NEW has it not: {name}: {base.failed[name].message}" for name in gone]
    notes += [f"the threshold for {pattern!r} matches no benchmark" for pattern in thresholds.unmatched]
    return Comparison(base, new, verdicts, dict(differences), notes, forced=force)


def _notes(base: Run, new: Run) -> list[str]:
    notes = [printable(f"{run.path}: left out: {each}") for run in (base, new) for each in run.left_out]
    if base.date and new.date and new.date < base.date:
        notes.append(f"NEW was measured before BASE: {new.date} and {base.date}")
    return notes


def _pair(base: Sequence[Entry], new: Sequence[Entry]) -> tuple[list[tuple[Entry, Entry]], list[Entry], list[Entry]]:
    """Pair benchmarks of a name, those of the fewest differing conditions first."""
    pairs, rest = [], list(new)
    left = list(base)
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for each in rest:
        by_name[each.name].append(each)
    found = sorted(
        (
            (len(differ(one.conditions, other.conditions)), place, number)
            for place, one in enumerate(left)
            for number, other in enumerate(by_name[one.name])
        )
    )
    of_base: dict[int, Entry] = {}
    taken: set[tuple[str, int]] = set()
    for _, place, number in found:
        name = left[place].name
        if place not in of_base and (name, number) not in taken:
            of_base[place] = by_name[name][number]
            taken.add((name, number))
    pairs = [(left[place], of_base[place]) for place in sorted(of_base)]
    used = {id(each) for each in of_base.values()}
    return (
        pairs,
        [each for place, each in enumerate(left) if place not in of_base],
        [each for each in rest if id(each) not in used],
    )


def differ(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Say which facts of two runs differ, and how."""
    names = dict.fromkeys([*one, *other])
    return [f"{n}: {one.get(n, 'none')} ≠ {other.get(n, 'none')}" for n in names if one.get(n) != other.get(n)]


def unpaired(new: Run, alone: Sequence[Entry], judged: Sequence[Verdict], known: Collection[str] = ()) -> list[Verdict]:
    """Return verdicts on benchmarks that only the new run has, and on those that failed in it."""
    named = {each.name for each in judged}
    failed = [
        Verdict(name, "invalid" if each.wrong else "missing", [f"it failed: {each.message}"])
        for name, each in new.failed.items()
        if name not in named and (each.wrong or name not in known)
    ]
    return [*failed, *map(_new, alone)]


def wrong_answers(new: Run) -> list[Verdict]:
    """Say which answers of a run were wrong, whatever it is compared with."""
    found = [Verdict(each.name, "invalid", each.wrong, new=each) for each in new.entries if each.wrong]
    failed = [(name, each.message) for name, each in new.failed.items() if each.wrong]
    return found + [Verdict(name, "invalid", [f"it failed: {message}"]) for name, message in failed]


def missing(entry: Entry, failed: Failed | None) -> Verdict:
    """Say why a benchmark of the base has no time in the new run."""
    if failed is None:
        return Verdict(entry.name, "missing", ["BASE has it, NEW has not"], entry)
    reason = failed.message
    return Verdict(entry.name, "invalid" if failed.wrong else "missing", [f"it failed: {reason}"], entry)


def _new(entry: Entry) -> Verdict:
    if entry.wrong:
        return Verdict(entry.name, "invalid", entry.wrong, new=entry)
    return Verdict(entry.name, "new", ["NEW has it, BASE has not"], new=entry)


def _judge(pairs: Sequence[tuple[Entry, Entry]], thresholds: Thresholds) -> list[Verdict]:
    timed = [pair for pair in pairs if not (pair[0].wrong or pair[1].wrong or pair[1].is_memory)]
    p_values = [rank_test(base.series, new.series) for base, new in timed]
    known = [p for p in p_values if p is not None]
    corrected = iter(holm(known))
    of_pair = {id(pair[1]): None if p is None else next(corrected) for pair, p in zip(timed, p_values, strict=True)}
    return [_verdict(base, new, thresholds.of(base.name), of_pair.get(id(new)), len(timed)) for base, new in pairs]


def _verdict(base: Entry, new: Entry, threshold: Threshold, p_value: float | None, tests: int) -> Verdict:
    notes = differ(base.facts, new.facts) + [f"reason to doubt it: {each}" for each in new.warnings]
    if new.wrong:
        return Verdict(base.name, "invalid", new.wrong, base, new, notes=notes)
    if base.wrong:
        return Verdict(base.name, "new", ["the answer of BASE was wrong: no comparison"], base, new, notes=notes)
    if new.is_memory:
        return _verdict_of_memory(base, new, threshold)
    sides = base.series, new.series
    shown = change(*sides, between_runs=threshold.between_runs, confidence=CONFIDENCE)
    sure = change(*sides, between_runs=threshold.between_runs, confidence=1 - ALPHA / tests)
    verdict, reasons = of_times(base, new, threshold, shown, sure, p_value, tests)
    regressions = ["time"] if verdict == "slower" else []
    for what, reason in beside_time(base, new, threshold):
        regressions.append(what)
        reasons.append(reason)
    return Verdict(base.name, verdict, reasons, base, new, shown, p_value, regressions, notes)


def measure_of(entry: Entry) -> str:
    """Return what a ratio of medians compares, in words."""
    return "as much memory" if entry.is_memory else "as long"


def of_times(
    base: Entry, new: Entry, threshold: Threshold, shown: Change, sure: Change, p_value: float | None, tests: int
) -> tuple[str, list[str]]:
    """Decide from the intervals of a ratio, shown and corrected for the number of tests."""
    limit = 1 + threshold.effect
    if 1 / limit <= shown.low and shown.high <= limit:
        return "same", []
    verdict = None
    if sure.low > 1 and sure.ratio >= limit:
        verdict = "slower"
    elif sure.high < 1 and sure.ratio <= 1 / limit:
        verdict = "faster"
    disturbed = [
        f"{name} was disturbed: {each}" for name, side in (("BASE", base), ("NEW", new)) for each in side.doubts
    ]
    if verdict and disturbed:
        return "uncertain", disturbed
    if verdict and p_value is not None and p_value > ALPHA:
        # Few samples cannot reach the corrected level; then the two sides must lie apart.
        too_few = tests * fewest_p(base.series, new.series) > ALPHA
        if not (too_few and separated(base.series, new.series)):
            return "uncertain", [f"samples of both sides overlap (rank test, corrected: p = {p_value:.2g})"]
    if verdict:
        return verdict, [f"{shown.ratio:.2f} times {measure_of(base)}"]
    if not shown.low > 0:
        return "uncertain", ["one sample says nothing of its own noise"]
    return "uncertain", [f"two runs may differ by {max(shown.high / shown.ratio, 1) - 1:.0%} without cause"]


def beside_time(base: Entry, new: Entry, threshold: Threshold) -> list[tuple[str, str]]:
    """Return the regressions of anything but time: of what, and why."""
    found = []
    if base.memory_bytes and new.memory_bytes and new.memory_bytes - base.memory_bytes >= MEMORY_BYTES:
        grown = new.memory_bytes / base.memory_bytes - 1
        if grown > threshold.memory:
            sizes = f"{base.memory_bytes / 2**20:.0f} to {new.memory_bytes / 2**20:.0f} MiB"
            found.append(("memory", f"peak memory grew by {grown:.0%}, from {sizes}"))
    one, other = base.first_call_s, new.first_call_s
    quiet = not (base.doubts or new.doubts)
    if quiet and one and other and other - one >= FIRST_CALL_S and other / one > threshold.first_call:
        found.append(("first call", f"the first call takes {other / one:.1f} times as long, {figure(other)} s"))
    if base.error is not None and new.error is not None and new.error >= max(ERROR, threshold.accuracy * base.error):
        errors = f"from {base.error:.2g} to {new.error:.2g} of what is accepted"
        found.append(("accuracy", f"the error grew {errors}"))
    return found


def _verdict_of_memory(base: Entry, new: Entry, threshold: Threshold) -> Verdict:
    ratio = new.series.median / base.series.median
    limit = 1 + threshold.memory
    verdict = "slower" if ratio > limit else "faster" if ratio < 1 / limit else "same"
    if abs(new.series.median - base.series.median) < MEMORY_BYTES:
        verdict = "same"
    reasons = [] if verdict == "same" else [f"{ratio:.2f} times as much memory"]
    regressions = ["memory"] if verdict == "slower" else []
    return Verdict(base.name, verdict, reasons, base, new, Change(ratio, ratio, ratio), None, regressions)


def summary(comparison: Comparison) -> str:
    """Return one line that counts the verdicts, or says why there is none."""
    counts = Counter(each.verdict for each in comparison.verdicts)
    order = ("slower", "faster", "same", "uncertain", "missing", "new", "invalid")
    said = [f"{counts[name]} {name}" for name in order if counts[name]]
    beside = Counter(what for each in comparison.verdicts for what in each.regressions if what != "time")
    said += [f"{count} with more {_MORE[what]}" for what, count in beside.items()]
    if comparison.refused:
        said.append("not comparable: " + "; ".join(comparison.differences))
    elif not comparison.judged:
        said.append("no benchmark was judged")
    return ", ".join(said)


_MORE = {"memory": "memory", "first call": "time of the first call", "accuracy": "error"}


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON-able values; times in seconds, what is infinite as null."""

    def side(entry: Entry | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        return {
            "median_bytes" if entry.is_memory else "median_s": _finite(entry.series.median),
            "samples": entry.series.rounds,
            "peak_memory_bytes": _finite(entry.memory_bytes),
            "first_call_s": _finite(entry.first_call_s),
            "error": _finite(entry.error),
            "disturbed": entry.doubts,
        }

    return {
        "schema": "d5suite-comparison-1",
        "base": {"path": str(comparison.base.path), "kind": comparison.base.kind, "datetime": comparison.base.date},
        "new": {"path": str(comparison.new.path), "kind": comparison.new.kind, "datetime": comparison.new.date},
        "exit": int(comparison.exit),
        "summary": summary(comparison),
        "forced": comparison.forced,
        "differences": comparison.differences,
        "notes": comparison.notes,
        "benchmarks": [
            {
                "name": each.name,
                "verdict": each.verdict,
                "reasons": each.reasons,
                "regressions": each.regressions,
                "ratio": _finite(each.change and each.change.ratio),
                "interval": each.change and [_finite(each.change.low), _finite(each.change.high)],
                "p_value": _finite(each.p_value),
                "pairs": each.pairs,
                "base": side(each.base),
                "new": side(each.new),
                "differences": each.notes,
            }
            for each in comparison.verdicts
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
