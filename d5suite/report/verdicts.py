"""Verdicts on two runs, by benchmark; `d5suite.statistics.decisions` decides about their times.

Imports its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from d5suite.report.figures import said_of
from d5suite.report.formats import figure
from d5suite.report.reading import printable
from d5suite.report.runs import BenchmarkRun, Entry, Failed
from d5suite.report.thresholds import Thresholds
from d5suite.statistics.decisions import (
    MEMORY,
    MEMORY_BYTES,
    Costs,
    Decision,
    Threshold,
    decide_exact,
    decide_runs,
    grown,
)
from d5suite.statistics.figures import worsened
from d5suite.statistics.ratios import Ratio


class Exit(IntEnum):
    """Exit codes of comparisons; the most serious one counts, in the order of `SERIOUS`."""

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
    """The verdict on one benchmark.

    Attributes
    ----------
    name : str
    verdict : {"faster", "slower", "worse", "same", "uncertain", "missing", "new", "invalid"}
        "worse": the time is not slower, but something else is a regression.
    reasons : list of str
        Why, for people.
    base, new : Entry or None
    decision : Decision or None
        About time, or memory if the benchmark measures memory; None if it was not compared.
    regressions : list of str
        Some of ``time``, ``memory``, ``first call``, ``accuracy``, and headings of judged figures.
    notes : list of str
        Differences that do not decide, such as versions.
    """

    name: str
    verdict: str
    reasons: list[str] = field(default_factory=list)
    base: Entry | None = None
    new: Entry | None = None
    decision: Decision | None = None
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def finds(self) -> float | None:
        """Smallest ratio that would have been called slower; infinite if none, None if unknown."""
        return self.decision.finds if self.decision else None

    @property
    def ratio(self) -> Ratio | None:
        """New over base, with its own 95% interval; None if there is none."""
        return self.decision.ratio if self.decision else None


@dataclass(frozen=True)
class RunComparison:
    """The verdicts on two runs.

    Attributes
    ----------
    base, new : BenchmarkRun
    verdicts : list of Verdict
        Only wrong answers if the runs cannot be compared.
    differences : dict of str to list of str
        Why the runs cannot be compared: each difference with the benchmarks it concerns.
    notes : list of str
        Notes on the whole comparison.
    forced : bool
        Whether the runs were compared although they differ.
    """

    base: BenchmarkRun
    new: BenchmarkRun
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
        """Whether any benchmark was compared, missing or wrong; new ones do not count."""
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


def _exit_of(verdict: Verdict) -> Exit:
    if verdict.verdict == "invalid":
        return Exit.WRONG_ANSWER
    if verdict.regressions:
        return Exit.REGRESSION
    return {"missing": Exit.MISSING, "uncertain": Exit.TOO_NOISY}.get(verdict.verdict, Exit.NOTHING_WRONG)


def compare_runs(
    base: BenchmarkRun, new: BenchmarkRun, thresholds: Thresholds, *, force: bool = False
) -> RunComparison:
    """Compare two runs benchmark by benchmark.

    Parameters
    ----------
    base, new : BenchmarkRun
    thresholds : Thresholds
    force : bool
        Also compare results with different conditions.
    """
    pairs, alone_base, alone_new = _pair(base.entries, new.entries)
    differences: dict[str, list[str]] = defaultdict(list)
    for one, other in pairs:
        for each in differ(one.conditions, other.conditions):
            differences[each].append(one.name)
    notes = _notes(base, new)
    if differences and not force:
        return RunComparison(base, new, wrong_answers(new), dict(differences), notes)
    verdicts = _verdicts(pairs, thresholds)
    verdicts += [missing(each, new.failed.get(each.name)) for each in alone_base]
    verdicts += unpaired(new, alone_new, verdicts, base.failed)
    counted = {each.name for each in verdicts if each.verdict in ("missing", "invalid")}
    both = [name for name in new.failed if name in base.failed and name not in counted]
    notes += [f"failed in both: {name}: {new.failed[name].message}" for name in both]
    known = {*new.failed, *(each.name for each in verdicts)}
    gone = [name for name in base.failed if name not in known]
    notes += [f"failed in BASE, and NEW has it not: {name}: {base.failed[name].message}" for name in gone]
    notes += [f"the threshold for {pattern!r} matches no benchmark" for pattern in thresholds.unmatched]
    return RunComparison(base, new, verdicts, dict(differences), notes, forced=force)


def _notes(base: BenchmarkRun, new: BenchmarkRun) -> list[str]:
    notes = [printable(f"{run.path}: left out: {each}") for run in (base, new) for each in run.left_out]
    if base.date and new.date and new.date < base.date:
        notes.append(f"NEW was measured before BASE: {new.date} and {base.date}")
    return notes


def _pair(base: Sequence[Entry], new: Sequence[Entry]) -> tuple[list[tuple[Entry, Entry]], list[Entry], list[Entry]]:
    """Pair benchmarks of equal names, those with the fewest differing conditions first.

    Returns
    -------
    pairs : list of (Entry, Entry)
    base, new : list of Entry
        Benchmarks without a partner.
    """
    by_name: dict[str, list[int]] = defaultdict(list)
    for number, entry in enumerate(new):
        by_name[entry.name].append(number)
    candidates = sorted(
        (len(differ(entry.conditions, new[number].conditions)), place, number)
        for place, entry in enumerate(base)
        for number in by_name[entry.name]
    )
    partners: dict[int, int] = {}
    taken: set[int] = set()
    for _, place, number in candidates:
        if place not in partners and number not in taken:
            partners[place] = number
            taken.add(number)
    return (
        [(base[place], new[number]) for place, number in sorted(partners.items())],
        [entry for place, entry in enumerate(base) if place not in partners],
        [entry for number, entry in enumerate(new) if number not in taken],
    )


def differ(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the facts in which two runs differ, with both values."""
    names = dict.fromkeys([*one, *other])
    return [f"{n}: {one.get(n, 'none')} ≠ {other.get(n, 'none')}" for n in names if one.get(n) != other.get(n)]


def unpaired(
    new: BenchmarkRun, alone: Sequence[Entry], verdicts: Sequence[Verdict], known: Collection[str] = ()
) -> list[Verdict]:
    """Return verdicts on benchmarks that only the new run has, and on those that failed in it."""
    named = {verdict.name for verdict in verdicts}
    failed = [
        _failed(name, failed)
        for name, failed in new.failed.items()
        if name not in named and (failed.wrong or name not in known)
    ]
    only = "NEW has it, BASE has not"
    return failed + [Verdict(e.name, "invalid" if e.wrong else "new", e.wrong or [only], new=e) for e in alone]


def wrong_answers(new: BenchmarkRun) -> list[Verdict]:
    """Return verdicts on wrong answers, which count whatever a run is compared with."""
    wrong = [Verdict(entry.name, "invalid", entry.wrong, new=entry) for entry in new.entries if entry.wrong]
    return wrong + [_failed(name, failed) for name, failed in new.failed.items() if failed.wrong]


def missing(entry: Entry, failed: Failed | None) -> Verdict:
    """Return the verdict on a benchmark of the base that has no time in the new run."""
    if failed is None:
        return Verdict(entry.name, "missing", ["BASE has it, NEW has not"], entry)
    return _failed(entry.name, failed, entry)


def _failed(name: str, failed: Failed, base: Entry | None = None) -> Verdict:
    return Verdict(name, "invalid" if failed.wrong else "missing", [f"it failed: {failed.message}"], base)


def _verdicts(pairs: Sequence[tuple[Entry, Entry]], thresholds: Thresholds) -> list[Verdict]:
    timed = [(base, new) for base, new in pairs if not (base.wrong or new.wrong or new.is_memory)]
    decisions = iter(
        decide_runs(
            [(base.summary, new.summary) for base, new in timed],
            [thresholds.of(base.name) for base, _ in timed],
            [disturbances(base, new) for base, new in timed],
            [bars(base, new) for base, new in timed],
        )
    )
    verdicts = []
    for base, new in pairs:
        notes = differ(base.facts, new.facts) + doubts(new)
        threshold = thresholds.of(base.name)
        if new.wrong:
            verdicts.append(Verdict(base.name, "invalid", new.wrong, base, new, notes=notes))
        elif base.wrong:
            reasons = ["the answer of BASE was wrong: no comparison"]
            verdicts.append(Verdict(base.name, "new", reasons, base, new, notes=notes))
        elif new.is_memory:
            sizes = base.summary.median, new.summary.median
            decision = decide_exact(*sizes, effect=threshold.memory, least=MEMORY_BYTES, measure=MEMORY)
            verdicts.append(verdict_of(decision, base, new, threshold, []))
        else:
            verdicts.append(verdict_of(next(decisions), base, new, threshold, notes))
    return verdicts


def verdict_of(
    decision: Decision, base: Entry, new: Entry, threshold: Threshold, notes: list[str],
    began: Callable[[str], str] = lambda cost: "",
) -> Verdict:  # fmt: skip
    """Return the verdict on two measurements.

    Parameters
    ----------
    decision : Decision
        About time, or about memory if the benchmark measures memory.
    base, new : Entry
    threshold : Threshold
    notes : list of str
    began : callable, optional
        Says with which run a regression of anything but time began.
    """
    what = "memory" if new.is_memory else "time"
    regressions = [what] if decision.outcome == "slower" else []
    disturbed = bool(base.disturbed or new.disturbed)
    costs = grown(base.costs, new.costs, threshold, disturbed=disturbed) if decision.ratio else []
    why = [_reason(cost, base.costs, new.costs) + began(cost) for cost in costs]
    worse = worsened(base.figures, new.figures, threshold.figure)
    said = [said_of(name, base.figures[name], new.figures[name], times) for name, times in worse.items()]
    doubtful = [f"NEW has no {name}, which is to be judged" for name in base.figures if name not in new.figures]
    if disturbed:
        doubtful += [f"{each}, but the machine was disturbed" for each in said]
    else:
        costs, why = [*costs, *worse], [*why, *said]
    regressions += costs
    verdict, reasons = decision.outcome, [*decision.reasons, *why]
    if costs and verdict != "slower":
        about = "memory" if new.is_memory else "time"
        reasons = [*why, *(f"{about} is {verdict}: {each}" for each in decision.reasons)]
        verdict = "worse"
    elif doubtful and verdict != "slower":
        verdict, reasons = "uncertain", [*doubtful, *reasons]
    return Verdict(new.name, verdict, reasons, base, new, decision, regressions, notes)


def _reason(cost: str, base: Costs, new: Costs) -> str:
    """Say how much a cost beside time grew."""
    if cost == "memory":
        before, after = base.memory_bytes or math.nan, new.memory_bytes or math.nan
        return f"peak memory grew by {after / before - 1:.0%}, from {before / 2**20:.0f} to {after / 2**20:.0f} MiB"
    if cost == "first call":
        before, after = base.first_call_s or math.nan, new.first_call_s or math.nan
        return f"the first call takes {after / before:.1f} times as long, {figure(after)} s"
    return f"the error grew from {base.error:.2g} to {new.error:.2g} of what is accepted"


def disturbances(base: Entry, new: Entry) -> list[str]:
    """Return the disturbances that forbid calling either run slower."""
    sides = (("BASE", base), ("NEW", new))
    return [f"{name} was disturbed: {reason}" for name, side in sides for reason in side.disturbed]


def bars(base: Entry, new: Entry) -> list[str]:
    """Return why nothing can be decided, not even that both are the same."""
    sides = (("BASE", base), ("NEW", new))
    return [f"{name} was disturbed: {side.undecidable}" for name, side in sides if side.undecidable]


def found_from(comparison: RunComparison) -> str:
    """Say which slowdowns would have been found, given the noise; empty if nothing was timed."""
    finds = {each.name: each.finds for each in comparison.verdicts if each.decision and not _is_memory(each)}
    able = sorted((limit, name) for name, limit in finds.items() if limit is not None and limit < math.inf)
    unable = [name for name in finds if name not in {name for _, name in able}]
    parts = []
    if able:
        (least, _), (most, where) = able[0], able[-1]
        several = f"{least:.2f} times as long"
        if most > 1.005 * least:
            several += f", but only from {most:.2f} in {where}"
        parts.append(f"slowdowns from {several}")
    if unable:
        more = f" and {len(unable) - 1} more" if len(unable) > 1 else ""
        parts.append(f"no slowdown could be found, however large: {unable[0]}{more}")
    return "; ".join(parts)


def _is_memory(verdict: Verdict) -> bool:
    return bool(verdict.new and verdict.new.is_memory)


def doubts(*entries: Entry) -> list[str]:
    """Return notes on reasons to doubt a result that do not decide."""
    return [f"reason to doubt it: {warning}" for warning in dict.fromkeys(w for each in entries for w in each.warnings)]


def summary(comparison: RunComparison) -> str:
    """Return one line that counts the verdicts, or says why there are none."""
    counts = Counter(each.verdict for each in comparison.verdicts)
    order = ("slower", "worse", "faster", "same", "uncertain", "missing", "new", "invalid")
    parts = [f"{counts[name]} {name}" for name in order if counts[name]]
    beside = Counter(what for each in comparison.verdicts for what in each.regressions if what != "time")
    parts += [f"{count} with {_MORE.get(what, f'a worse {what}')}" for what, count in beside.items()]
    if comparison.refused:
        parts.append("not comparable: " + "; ".join(comparison.differences))
    elif not comparison.judged:
        parts.append("no benchmark was judged")
    return ", ".join(parts)


_MORE = {"memory": "more memory", "first call": "a longer first call", "accuracy": "larger errors"}
