"""Which findings of an earlier run of a study held in a later one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from d5suite.report.contests import Contest
from d5suite.report.page.gather import Row, RowGroup, Section
from d5suite.report.study.claims import Heading, ReportTable, interval_cell, words
from d5suite.report.study.gathered import Gathered

OUTCOMES = ("held", "reversed", "undecided now", "decided now", "undecided in both")
"""What became of a comparison."""


class ContestOfTwoStudies(NamedTuple):
    """A comparison that both runs have.

    Attributes
    ----------
    title, measurement : str
    old, new : str
        The fastest backend; ``undecided`` if that is not clear.
    outcome : str
        One of `OUTCOMES`.
    contest : Contest
        The contest of the later run.
    """

    title: str
    measurement: str
    old: str
    new: str
    outcome: str
    contest: Contest[Row]


def compare_studies(old: Gathered, new: Gathered) -> tuple[list[ContestOfTwoStudies], list[str]]:
    """Return the comparisons that both runs have, and those that only the earlier one has."""
    later = dict(_contests(new))
    held, gone = [], []
    for key, (section, group, contest) in _contests(old):
        if key not in later:
            gone.append(f"{section.title} {group.measurement}")
            continue
        again = later[key][2]
        names = _verdict(contest), _verdict(again)
        held.append(ContestOfTwoStudies(section.title, group.measurement, *names, _outcome(*names), again))
    return held, list(dict.fromkeys(gone))


def _contests(found: Gathered) -> Iterator[tuple[Any, tuple[Section, RowGroup, Contest[Row]]]]:
    for section, group in found.groups:
        for contest in group.contests:
            if len(contest.results) > 1:
                conditions = tuple(sorted(section.conditions.items()))
                backends = frozenset(row.backend for row in contest.results)
                run = found.run_of(contest.results[0]).name
                yield (
                    (section.title, group.measurement, contest.ranks, conditions, backends, run),
                    (section, group, contest),
                )


def _verdict(contest: Contest[Row]) -> str:
    return "undecided" if contest.rivals else contest.leaders[0].backend


def _outcome(old: str, new: str) -> str:
    if old == "undecided":
        return "undecided in both" if new == "undecided" else "decided now"
    return "undecided now" if new == "undecided" else "held" if old == new else "reversed"


def sentence(held: list[ContestOfTwoStudies], gone: list[str]) -> str:
    """Say how many findings held."""
    counts = Counter(each.outcome for each in held)
    findings = sum(counts[name] for name in OUTCOMES[:3])
    parts = [f"{counts[name]} {name}" for name in OUTCOMES[:3] if counts[name]]
    text = f"Of {findings} findings of the earlier run: {', '.join(parts) or 'none can be compared'}."
    if others := [f"{counts[name]} {name}" for name in OUTCOMES[3:] if counts[name]]:
        text += f" Of the comparisons that it left undecided: {', '.join(others)}."
    return text + (f" Not compared, because only the earlier run has them: {len(gone)}." if gone else "")


def table(found: Gathered, held: list[ContestOfTwoStudies]) -> ReportTable:
    """Return the comparisons as a table; leads are those of the later run."""
    lead = Heading("lead now (95% interval)", ("lead", "lead low", "lead high"))
    headings = [*words("case", "measurement", "then", "now"), lead, *words("finding")]
    lines: list[list[Any]] = []
    for each in sorted(held, key=lambda one: OUTCOMES.index(one.outcome)):
        first, second = (row for row, _ in each.contest.standing[:2])
        ratio = interval_cell(found.ratio(first, second))
        lines.append([each.title, each.measurement, each.old, each.new, ratio, each.outcome])
    return ReportTable.of("held", "Findings of the earlier run, and what became of them", headings, lines)
