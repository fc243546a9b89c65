"""Pictures of a history: the median of each run by its date, with gaps and dated changes.

Imports matplotlib (late) and its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from d5suite.report.colours import Style, styles
from d5suite.report.formats import figure as digits
from d5suite.report.page.facts import shortened
from d5suite.report.page.figures import LONGEST_NAME, MOST_BARS, Picture, file_name
from d5suite.report.page.history import BenchmarkHistory, after_gaps, when
from d5suite.report.tooltips import set_tooltips

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_RUNS = 3
"""Fewest runs of a benchmark that has a picture."""


class _Line(NamedTuple):
    """A benchmark's runs in a picture.

    Attributes
    ----------
    name : str
        The backend; empty if the benchmark has none.
    history : BenchmarkHistory
    runs : list of (datetime, int)
        Date and place of each point.
    """

    name: str
    history: BenchmarkHistory
    runs: list[tuple[datetime, int]]


def history_charts(histories: Sequence[BenchmarkHistory]) -> Iterator[Picture]:
    """Yield the pictures of a history, one per case and measurement, changed ones first."""
    groups: dict[tuple[str, bool], list[_Line]] = {}
    for each in histories:
        group, _, backend = each.name.rpartition(" ")
        title, name = (group, backend) if "/" in group else (each.name, "")
        runs = [(date, place) for place, point in enumerate(each.points) if (date := when(point.date))]
        if len(runs) >= FEWEST_RUNS:
            line = _Line(f"{name}, {each.conditions}" if each.conditions else name, each, runs)
            groups.setdefault((title, each.points[-1].entry.is_memory), []).append(line)
    taken: set[str] = set()
    for (title, memory), lines in groups.items():
        for start in range(0, len(lines), MOST_BARS):
            shown = lines[start : start + MOST_BARS]
            what = "memory" if memory else "median"
            label = f"{title[:300]}: {what} of each run, by date"
            yield Picture(file_name("history", title, taken=taken), None, label, partial(_drawn, title, memory, shown))


def _drawn(title: str, memory: bool, lines: Sequence[_Line]) -> Figure:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.add_subplot()
    unit, scale = ("MiB", 1 / 2**20) if memory else ("ms", 1e3)
    for line, style in zip(lines, styles(each.name or each.history.name for each in lines), strict=True):
        _draw(axes, line, style, unit, scale)
    locator = AutoDateLocator(minticks=3, maxticks=10)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    axes.set_title(shortened(title, 2 * LONGEST_NAME), fontsize=10, loc="left", weight="bold")
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#cccccc", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if any(line.name for line in lines):
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, line: _Line, style: Style, unit: str, scale: float) -> None:
    """Draw a benchmark's runs; leave gaps where runs are missing."""
    points = line.history.points
    figures = [points[place].entry.summary.median * scale for _, place in line.runs]
    dates = [date for date, _ in line.runs]
    named = shortened(line.name, 2 * LONGEST_NAME)
    for part, (start, end) in enumerate(itertools.pairwise([0, *after_gaps(dates), len(dates)])):
        (drawn,) = axes.plot(
            dates[start:end],  # type: ignore[arg-type]  # matplotlib takes dates
            figures[start:end], color=style.colour, marker=style.marker, linestyle=style.line, markersize=3,
            linewidth=1.2, label=named if named and not part else "_",
        )  # fmt: skip
        set_tooltips(
            drawn,
            [
                f"{named + ': ' if named else ''}{digits(figures[i])} {unit} on {dates[i]:%Y-%m-%d %H:%M}, "
                f"run {points[line.runs[i][1]].run}"
                for i in range(start, end)
            ],
        )
    at = {place: i for i, (_, place) in enumerate(line.runs)}
    for change in line.history.changes:
        if change.place in at:
            i = at[change.place]
            axes.annotate(
                f"×{change.ratio:.2f} since {dates[i]:%Y-%m-%d}", (dates[i], figures[i]),
                xytext=(0, 10), textcoords="offset points", fontsize=8, color=style.colour, ha="center",
                arrowprops={"arrowstyle": "-", "color": style.colour},
            )  # fmt: skip
