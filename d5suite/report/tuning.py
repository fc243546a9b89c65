"""Courses of searches for faster settings: read, put into rows, and drawn.

Imports matplotlib (late) and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError
from d5suite.files import atomic_path, read_json
from d5suite.report.page.svg import drawing
from d5suite.report.reading import printable
from d5suite.report.scaling import plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = "d5suite-tune-1"
"""Schema of a file of courses."""

MARKS = {"measured": ("o", "measured"), "pruned": ("v", "ended early: slower than the best"),
         "wrong": ("X", "wrong answer"), "failed": ("x", "failed")}  # fmt: skip
"""By status of a trial: its mark, and what the legend says."""

BESIDE = {"p99_s": "99th percentile in s", "memory_bytes": "peak memory in MiB", "energy_j": "energy in J"}
"""Figures that a picture shows beside the time, and their names."""

FOR_GOAL = {"p99": "p99_s", "energy": "energy_j", "energy_delay": "energy_j"}
"""By goal: the figure that is shown beside the time; for other goals it is peak memory."""

MIB = 2**20


@dataclass(frozen=True)
class TrialRow:
    """A trial in words and numbers.

    Attributes
    ----------
    number : int
        From 1.
    knobs : str
        What differs from the default.
    status : str
    ratio : float or None
        The goal's figure over that of the default.
    interval : tuple of float, or None
    best : float
        Smallest ratio so far.
    reason : str
    figures : mapping of str to float
    """

    number: int
    knobs: str
    status: str
    ratio: float | None
    interval: tuple[float, float] | None
    best: float
    reason: str
    figures: Mapping[str, float]


@dataclass(frozen=True)
class CourseRows:
    """The course of a search, checked and in words.

    Attributes
    ----------
    title, goal, decision : str
    facts : list of str
        Speed-ups with their intervals, the size of the space, and what models have said.
    trials : list of TrialRow
    wrong : list of str
        Candidates whose answers were wrong.
    ablation : list of (str, str)
        A knob of the best candidate, and what its absence costs.
    """

    title: str
    goal: str
    decision: str
    facts: list[str]
    trials: list[TrialRow]
    wrong: list[str]
    ablation: list[tuple[str, str]]

    @property
    def beside(self) -> str:
        """The figure that the picture shows beside the time; empty unless two trials have it."""
        name = FOR_GOAL.get(self.goal, "memory_bytes")
        known = [each.figures.keys() for each in self.trials if each.status == "measured"]
        return name if sum({name, "time_s"} <= each for each in known) > 1 else ""


def read_courses(path: Path) -> list[CourseRows]:
    """Read a file that ``d5suite tune`` has written.

    Raises
    ------
    ConfigurationError
        If the file is not one, or is damaged.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ConfigurationError("not the course of a search", where=str(path), hint="d5suite tune writes one.")
    try:
        return [rows_of(each) for each in content["courses"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigurationError(f"a course is damaged: {error!r}", where=str(path)) from None


def rows_of(course: Mapping[str, Any]) -> CourseRows:
    """Return a course in words and rows."""
    goal, best, trials = _text(course["goal"]), 1.0, []
    for number, trial in enumerate(course["trials"], 1):
        ratio = None if trial["value"] is None else _exp(trial["value"])
        if trial["status"] == "measured" and ratio is not None:
            best = min(best, ratio)
        ends = [each for each in trial.get("interval") or () if each is not None]
        figures = {name: float(each) for name, each in trial["figures"].items() if name in ("time_s", *BESIDE)}
        trials.append(
            TrialRow(
                number, _knobs(trial["knobs"]) or "the default against itself", _text(trial["status"]), ratio,
                (_exp(ends[0]), _exp(ends[1])) if len(ends) == 2 and goal == "time" else None, best,
                _text(trial["reason"]), figures,
            )
        )  # fmt: skip
    decision = course.get("decision") or {"taken": False, "reason": "the search was interrupted"}
    confirmed = course.get("confirmed") or {}
    said = "the default is kept: " + _text(decision["reason"])
    if decision["taken"]:
        said = f"taken: {_knobs(confirmed['knobs'])}"
    wrong = [
        f"{_knobs(each['knobs'])}: "
        + ("" if each["time"] is None else f"{'faster but ' * (each['time'] < 1)}wrong, {each['time']:.3f} times: ")
        + _text(each["reason"])
        for each in course.get("wrong") or ()
    ]
    ablation = [
        (f"{_text(each['knob'])} = {_text(each['value'])}", _without(each)) for each in course.get("ablation") or ()
    ]
    title = " ".join(_text(course[name]) for name in ("case", "measurement", "backend", "mode"))
    return CourseRows(title, goal, said, _facts(course, confirmed), trials, wrong, ablation)


def _facts(course: Mapping[str, Any], confirmed: Mapping[str, Any]) -> list[str]:
    goal, found = course["goal"], []
    for name, text in (
        ("versus_stock", "times as long as the framework as it comes (stock)"),
        ("versus_default", "times as long as d5suite's default"),
        ("default_versus_stock", "times stock's time: d5suite's default"),
        (f"{goal}_versus_default", f"times the {_text(goal)} of d5suite's default"),
    ):
        if name in confirmed:
            value, *ends = map(float, confirmed[name])
            between = f" ({ends[0]:.3f} to {ends[1]:.3f}), from fresh launches" if len(ends) == 2 else ""
            faster = f": {1 / value:.2f} times as fast" if "long" in text and value > 0 else ""
            found.append(f"{value:.3f} {text}{between}{faster}")
    trials = course["trials"]
    found.append(
        f"{len(trials)} trials of {int(course['size']):,} candidates in {float(course.get('seconds') or 0):.0f} s"
    )
    found += [f"tried first: {_knobs(each['knobs'])}: {_text(each['reason'])}" for each in course.get("proposed") or ()]
    found += [
        f"left out: {_text(each['knob'])} = {_text(each['value'])}: {_text(each['reason'])}"
        for each in course.get("ruled_out") or ()
    ]
    return [*found, *map(_text, course.get("notes") or ())]


def _without(part: Mapping[str, Any]) -> str:
    if part["without"] is None:
        return _text(part.get("note") or "not measured")
    ends = list(part.get("interval") or [])
    between = f" ({float(ends[0]):.3f} to {float(ends[1]):.3f})" if len(ends) == 2 else ""
    kept = "" if part["stays"] else "; left out, because it gives nothing"
    return f"without it {float(part['without']):.3f} times as much{between}{kept}"


def _text(value: object) -> str:
    return printable(str(value))


def _knobs(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{_text(name)}={_text(value)}" for name, value in knobs.items())


def _exp(value: float) -> float:
    found = math.exp(value)
    if not math.isfinite(found):
        raise ValueError(f"{value} is no logarithm of a ratio")
    return found


def draw_courses(courses: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a row of panels for each course into a file, whose suffix says the format.

    Parameters
    ----------
    courses : sequence of mapping
        As ``d5suite tune`` writes them.
    path : Path
    """
    with drawing():
        figure = draw([rows_of(each) for each in courses])
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=path.suffix.lstrip(".") or "svg")


def draw(courses: Sequence[CourseRows]) -> Figure:
    """Draw two panels for each course: ratios of trials and the best so far; and two figures.

    The second panel joins the trials that no other trial beats in both figures (Pareto).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * max(1, len(courses))), layout="constrained")
    panels = figure.subplots(max(1, len(courses)), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), course in zip(panels, courses, strict=False):
        _course_panel(left, course)
        _pareto_panel(right, course)
    return figure


def _course_panel(axes: Axes, course: CourseRows) -> None:
    for status, (mark, said) in MARKS.items():
        points = [(each.number, each.ratio or 1.0) for each in course.trials if each.status == status]
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=said, markersize=5)
    numbers = [each.number for each in course.trials]
    axes.step(numbers, [each.best for each in course.trials], where="post", label="the best so far")
    axes.axhline(1.0, linestyle=":", linewidth=1)
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    axes.set_xlabel("trial")
    axes.set_ylabel(f"{course.goal}, times the default")
    axes.set_title(course.title, fontsize="medium")
    axes.legend(fontsize="small")


def _pareto_panel(axes: Axes, course: CourseRows) -> None:
    name = course.beside
    if not name:
        axes.set_axis_off()
        return
    scale = MIB if name == "memory_bytes" else 1
    points = [
        (each.figures["time_s"] * 1e3, each.figures[name] / scale) for each in course.trials
        if each.status == "measured" and {"time_s", name} <= each.figures.keys()
    ]  # fmt: skip
    axes.plot(*zip(*points, strict=True), "o", label="measured", markersize=5)
    axes.plot(*zip(*front(points), strict=True), marker="s", label="beaten by no other", markersize=4)
    axes.set_xlabel("time in ms")
    axes.set_ylabel(BESIDE[name])
    axes.set_title("two goals (Pareto)", fontsize="medium")
    axes.legend(fontsize="small")


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both figures, by ascending first figure."""
    found: list[tuple[float, float]] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found
