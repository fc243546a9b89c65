"""Results of other commands in a study: searches for settings, simulations, and crossovers.

A reader takes what is gathered and returns sentences and tables; nothing if there is no such file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from d5suite.errors import D5Error
from d5suite.models.algorithms import SERVERS
from d5suite.report.crossover import AllReduceStudy, draw, studies
from d5suite.report.reading import load_results
from d5suite.report.study.claims import Claim, Heading, ReportTable, interval, interval_cell, noun, said, say, words
from d5suite.report.study.figures import StatedFigure, pointer
from d5suite.report.study.gathered import Gathered, StudyRun
from d5suite.report.tuning import SCHEMA

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

OVER = (("versus_default", "d5suite's default"), ("versus_stock", "the framework as it comes"))


def tuned(found: Gathered) -> tuple[list[Claim], list[ReportTable]]:
    """Return what tuned settings gain over the default and over the framework as it comes."""
    claims: list[Claim | None] = []
    lines: list[Any] = []
    for file, number, course in _courses(found):
        name = f"{course.get('case')} {str(course.get('measurement')).replace('_', ' ')} on {course.get('backend')}"
        decision = course.get("decision") or {"taken": False, "reason": "the search was interrupted"}
        trials = found.raw.figure("length", [f"{file}#{pointer('courses', number, 'trials')}"], "count")
        if not decision.get("taken"):
            claims.append(say(f"{name}: after ", trials, f" trials the default is kept: {decision.get('reason')}."))
        for key, what in OVER if decision.get("taken") else ():
            ratio = [_confirmed(found, file, number, key, place) for place in range(3)]
            claims.append(say(
                f"{name}: tuned settings take ", *interval(ratio, f" times as long as {what}"),
                ", confirmed in fresh launches after ", trials, " trials.",
            ))  # fmt: skip
            if ratio[0] is not None:
                lines.append([name, what, interval_cell(ratio), trials])
    times = Heading("times as long (95% interval)", ("ratio", "ratio low", "ratio high"))
    headings = [*words("case", "over"), times, Heading("trials")]
    return said(claims), [ReportTable.of("tuned", "Tuned settings over stock", headings, lines)] if lines else []


def _courses(found: Gathered) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    for file, (_, content) in found.files.items():
        if content.get("schema") == SCHEMA and isinstance(content.get("courses"), list):
            yield from (
                (file, number, each) for number, each in enumerate(content["courses"]) if isinstance(each, dict)
            )


def _confirmed(found: Gathered, file: str, number: int, key: str, place: int) -> StatedFigure | None:
    return found.raw.figure("value", [f"{file}#{pointer('courses', number, 'confirmed', key, place)}"], "times")


def simulated(found: Gathered) -> tuple[list[Claim], list[ReportTable]]:
    """Return simulated steps beside the measured one, and the effect of changes."""
    claims: list[Claim | None] = []
    for file, (_, content) in found.files.items():
        if "step_s" not in content or "what_if" not in content:
            continue
        step = found.raw.figure("value", [f"{file}#/step_s"], "time")
        ranks = found.raw.figure("value", [f"{file}#/ranks"], "count")
        claims.append(say(f"{content.get('title')}: a simulated step of ", ranks, " ranks takes ", step, "."))
        measured = found.raw.figure("quotient", [f"{file}#/step_s", f"{file}#/measured_s"], "times")
        claims.append(say(f"{content.get('title')}: that is ", measured, " times the step measured on one rank."))
        for number, each in enumerate(content["what_if"] if isinstance(content["what_if"], list) else ()):
            changed = [f"{file}#{pointer('what_if', number, 'step_s')}", f"{file}#/step_s"]
            gain = found.raw.figure("quotient", changed, "times")
            claims.append(say(f"{content.get('title')}: with {each.get('change')} it takes ", gain, " times as long."))
    return said(claims), []


def crossed(found: Gathered) -> tuple[list[Claim], list[ReportTable]]:
    """Return the ranks from which on an all-reduce is predicted to be faster than servers."""
    claims: list[Claim | None] = []
    lines: list[Any] = []
    for file, _, content in _crossings(found):
        most = found.figure("value", [f"{file}#/most"])
        groups: dict[
            tuple[Any, ...], dict[str, tuple[StatedFigure | None, StatedFigure | None, StatedFigure | None]]
        ] = {}
        for number, each in enumerate(content["crossovers"]):
            place = f"{file}#{pointer('crossovers', number)}"
            size = found.figure("value", [f"{place}/bytes"], "size")
            tensors, ranks = (found.figure("value", [f"{place}/{name}"]) for name in ("tensors", "crossover_ranks"))
            key = tuple(each.get(name) for name in ("communicator", "bytes", "tensors", "against"))
            groups.setdefault(key, {})[str(each.get("servers"))] = size, tensors, ranks
        for (communicator, _, _, against), own in groups.items():
            size, tensors, ranks = next(iter(own.values()))
            what = "some all-reduce" if against == "any" else f"all-reduce by {against}"
            if against == "any" and SERVERS[0] in own:
                size, tensors, ranks = own[SERVERS[0]]
                start = f"On {communicator}, ", size, " in ", tensors, noun(tensors, "tensor: ", "tensors: ")
                claims.append(
                    say(*start, f"{what} is predicted to be faster than one parameter server from ", ranks,
                        " ranks on.")
                    or say(*start, "no all-reduce is predicted to be faster than one parameter server with up to ",
                           most, " ranks.")
                )  # fmt: skip
            servers = [own[name][2] if name in own else None for name in SERVERS]
            lines.append([str(communicator), size, tensors, what, *servers])
        for number, each in enumerate(content["off"] if isinstance(content.get("off"), list) else ()):
            place = f"{file}#{pointer('off', number, 'measured_over_predicted')}"
            length = found.figure("length", [place])
            ratios = [f"{place}/{one}" for one in range(int(length.value))] if length else []
            median, least, largest = (found.figure(rule, ratios, "times") for rule in ("median", "least", "most"))
            claims.append(say(
                f"On {each.get('communicator')}, measured sums by {str(each.get('algorithm')).replace('_', ' ')} take ",
                median, " times as long as predicted (median of ", length, noun(length, "size", "sizes"), "; from ",
                least, " to ", largest, ").",
            ))  # fmt: skip
    counts = [name.removeprefix("parameter_server").removeprefix("_") or "1" for name in SERVERS]
    headings = [
        *words("communicator"), Heading("bytes"), Heading("tensors"), *words("all-reduce"),
        *(Heading(f"ranks, {count} server{'s' * (count != '1')}") for count in counts),
    ]  # fmt: skip
    caption = "Ranks from which on an all-reduce is predicted to be faster than servers; empty: at none looked at"
    return said(claims), [ReportTable.of("crossover", caption, headings, lines)] if lines else []


def _crossings(found: Gathered) -> Iterator[tuple[str, StudyRun, Mapping[str, Any]]]:
    for file, (run, content) in found.files.items():
        rows = content.get("crossovers")
        if isinstance(rows, list) and all(isinstance(each, dict) for each in rows):
            yield file, run, content


class CrossingPicture(NamedTuple):
    """A picture of measured and predicted times over ranks."""

    name: str
    label: str
    runs: list[StudyRun]
    draw: Callable[[], Drawing]


def crossing_pictures(found: Gathered) -> Iterator[CrossingPicture]:
    """Yield the pictures of crossovers, from the collectives that they were predicted from."""
    for _, run, content in _crossings(found):
        for other in found.runs:
            if other.machine == run.machine and other.name in run.state.inputs and other.file:
                try:
                    measured = studies(load_results(found.folder / other.file))
                except D5Error:  # the threats say why it cannot be read
                    continue
                for each in measured:
                    label = f"Parameter servers and all-reduce on {each.communicator}, measured and predicted"
                    made = functools.partial(_draw, each, content)
                    yield CrossingPicture(f"crossover-{each.communicator}", label, [run, other], made)


def _draw(study: AllReduceStudy, content: Mapping[str, Any]) -> Drawing:
    rows = [each for each in content["crossovers"] if each.get("communicator") == study.communicator]
    sizes, tensors = (sorted({each[name] for each in rows}) for name in ("bytes", "tensors"))
    return draw(study, sizes, tensors, content["most"])
