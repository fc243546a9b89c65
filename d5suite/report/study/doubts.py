"""How the study measured, and what threatens its validity, as the data show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from d5suite.report.page.gather import Row
from d5suite.report.study.claims import Claim, say
from d5suite.report.study.explained import doubtful_ceilings, lacking_coverage
from d5suite.report.study.figures import ABOUT, place_in
from d5suite.report.study.gathered import Gathered
from d5suite.report.study.origins import mixed
from d5suite.statistics.rounds import least_lead
from d5suite.study.state import DONE

MOST_NAMED = 6
"""Most results that a sentence names."""


def method(found: Gathered) -> Iterator[Claim | None]:
    """Say what was proved, how it was sampled, and which launches there were."""
    rows = found.rows
    places = [found.place(row) for row in rows]
    checks = [place_in(place, "validation.checks") for place in places]
    yield say(
        "Every answer is checked against an independent reference, in the same process, before it is timed: ",
        found.figure("such:passed", places), " of ", found.figure("count", places), " results passed all of their ",
        found.figure("total length", checks), " checks.",
    )  # fmt: skip
    samples = [f"{place}/stats/data" for place in places]
    yield say(
        "All samples are kept; half of the results rest on at least ", found.figure("median length", samples),
        " samples, and each on at least ", found.figure("least length", samples),
        ". Medians have distribution-free 95% intervals.",
    )  # fmt: skip
    turns = [place for place, row in zip(places, rows, strict=True) if row.record.get("turns")]
    yield say(
        found.figure("such:in turn", turns), " results come from backends that took turns, round by round "
        "(median number of launches: ", found.figure("median length", [place_in(place, "turns") for place in turns]),
        "); the others are compared by their medians, with 15% from process to process.",
    )  # fmt: skip


def threats(found: Gathered) -> Iterator[Claim | str | None]:
    """Say what makes findings doubtful; a text has no figure."""
    places = {found.place(row): row for row in found.rows}
    for what, told in (
        ("disturbed", " results were disturbed while they were measured"),
        ("reduced", " results have a reduced size and compete with none"),
        ("unsteady", " results were still changing when sampling began"),
        ("doubtful", " results carry a warning"),
    ):
        count = found.figure(f"such:{what}", list(places))
        if count and count.value:
            such = [row for row in places.values() if ABOUT[what](row.record)]
            yield say(count, " of ", found.figure("count", list(places)), f"{told}: {_listed(map(_what, such))}.")
    contests = [
        found.contest(each) for _, group in found.groups for each in group.contests if len(each.results) > 1
    ]  # fmt: skip
    for rule, told in (
        ("undecided", " comparisons are undecided"),
        ("vetoed", " comparisons are not decided because the machine was disturbed"),
    ):
        count = found.figure(rule, contests)
        if count and count.value:
            yield say(count, " of ", found.figure("contests", contests), f"{told}.")
    if any(len(row.record.get("turns", ())) == 1 for row in found.rows):
        yield f"Some backends took turns in one launch only, which cannot decide leads below {least_lead():.2f}."
    yield from lacking_coverage(found)
    yield from doubtful_ceilings(found)
    failed = [row for row in found.rows if row.failed]
    if failed:
        yield f"The answer was wrong, so no time is stated, of {_listed(map(_what, failed))}."
    if found.page is not None and found.page.missed:
        names = [f"{each['group']} on {each['backend']}" for each in found.page.missed]
        yield f"There is no result of {_listed(names)}."
    for run in found.runs:
        if run.state.state != DONE or not run.file:
            yield f"The run {run.name} on {run.machine} is not whole: {run.state.why or 'its result is missing'}."
        elif not run.whole:
            yield f"The result of the run {run.name} on {run.machine} has changed since it was measured."
        elif not run.current:
            yield f"The run {run.name} on {run.machine} has read results that were measured again since."
        if run.state.again:
            yield f"The run {run.name} on {run.machine} was to be measured again, and that has not been finished."
    known = {run.name for run in found.runs}
    if lacking := [run.name for run in found.study.runs if run.name not in known]:
        yield f"Not run: {_listed(lacking)}."
    for file, why in found.left_out.items():
        yield f"{file} is left out: {why}."
    yield from mixed(found)


def _what(row: Row) -> str:
    return f"{row.case} {row.measurement} on {row.backend}"


def _listed(given: Iterable[str]) -> str:
    names = list(dict.fromkeys(given))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
