"""The pictures of a page: those that measurements declare, and an overview of each case.

Imports matplotlib (late) and its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from d5suite.errors import D5Error, describe_error
from d5suite.measurements import discover
from d5suite.report.colours import PALETTE
from d5suite.report.formats import figure as digits
from d5suite.report.formats import needed_bytes, times
from d5suite.report.page.facts import distinct, shortened
from d5suite.report.page.gather import Page, Row, RowGroup, Section
from d5suite.report.page.svg import drawing
from d5suite.report.plots import PLOTS, Plotted, draw_plot
from d5suite.report.series import read_series
from d5suite.report.tooltips import set_bar_tooltips, set_tooltips

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 48
"""Most rows of one picture."""

LONGEST_BAR = 2.0
"""Speed at which the intervals of speeds are cut; the fastest has 1."""

LONGEST_NAME = 34
"""Most characters of a name in a picture."""


class Picture(NamedTuple):
    """One picture.

    Attributes
    ----------
    name : str
        Name of its file without suffix.
    section : Section or None
        None for a picture of the history.
    label : str
        What it shows.
    draw : callable
        Returns the figure.
    """

    name: str
    section: Section | None
    label: str
    draw: Callable[[], Figure]


def pictures(page: Page, failed: list[str]) -> Iterator[Picture]:
    """Yield every picture of a page in order; it is drawn only when its ``draw`` is called.

    Parameters
    ----------
    page : Page
    failed : list of str
        Collects what cannot be drawn, with reasons.
    """
    series = _all_series(page, failed)
    taken: set[str] = set()

    name_of = partial(file_name, taken=taken)

    for section in page.sections:
        title = _short(section.title)
        groups = [group for shown in section.tables for group in shown.groups]
        rows = [row for group in groups for row in group.rows if not row.failed and not row.reduced]
        if section.level in (1, 2) and rows:
            label = f"{title}: speed with its interval, memory measured and by definition, first call"
            for start in range(0, len(rows), MOST_BARS):
                own = rows[start : start + MOST_BARS]
                number = [str(start // MOST_BARS + 1)] if start else []
                span = f"; rows {start + 1} to {start + len(own)} of {len(rows)}" * (len(rows) > MOST_BARS)
                yield Picture(
                    name_of(title, "overview", *number), section, label + span,
                    partial(_overview, title, own),
                )  # fmt: skip
        together: dict[str, list[RowGroup]] = {}
        for group in groups:
            kind = _kind(page, group)
            if kind is None:
                continue
            if PLOTS[kind].of_section:
                together.setdefault(kind, []).append(group)
            elif plotted := _plotted(page, kind, group, series):
                label = f"{title}: {PLOTS[kind].title or _short(group.measurement)}"
                yield Picture(
                    name_of(title, group.measurement), section, label,
                    partial(draw_plot, kind, f"{title}/{_short(group.measurement)}", plotted),
                )  # fmt: skip
        for kind, several in together.items():
            every = [each for group in several if (each := _plotted(page, kind, group, series))]
            for start in range(0, len(every), MOST_BARS):
                part = [each for plotted in every[start : start + MOST_BARS] for each in plotted]
                number = [str(start // MOST_BARS + 1)] if start else []
                yield Picture(
                    name_of(title, kind, *number), section, f"{title}: {PLOTS[kind].title}",
                    partial(draw_plot, kind, title, part),
                )  # fmt: skip


def file_name(*parts: str, taken: set[str]) -> str:
    """Return a new name for a file, without suffix, and add it to ``taken``."""
    base = re.sub(r"[^A-Za-z0-9_.-]+", "-", ".".join(parts)).strip("-.")[:80] or "picture"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


def draw(picture: Picture, failed: list[str]) -> Figure | None:
    """Draw a picture; return None if that fails, and note why."""
    try:
        with drawing():
            return picture.draw()
    except Exception as error:  # a record from a plug-in's measurement may be anything
        failed.append(f"no picture of {picture.label}: {describe_error(error)}")
        return None


def _plotted(
    page: Page, kind: str, group: RowGroup, series: Mapping[tuple[str, str], dict[str, list[float]]]
) -> list[Plotted]:
    """Return the results of a group that a plot shows, in the page's order of backends."""
    plot, measurement = PLOTS[kind], _short(group.measurement)
    rows = [row for row in group.rows if not row.failed and not (plot.of_one_size and row.reduced)]
    if plot.of_section:
        rows.sort(key=lambda row: page.backends[row.record["backend"]["name"]])
    names = distinct([row.backend for row in rows], LONGEST_NAME)
    plotted = [
        Plotted(names[row.backend], row.record, series.get((row.file, row.record["fullname"]), {}), measurement)
        for row in rows
    ]
    return [each for each in plotted if each.series] if plot.of_series else plotted


def _short(name: str) -> str:
    return shortened(name, LONGEST_NAME)


def _kind(page: Page, group: RowGroup) -> str | None:
    """Return the plot that a measurement declares, in its class or in a file."""
    name = group.rows[0].record["measurement"]
    if name in discover():
        kind = discover()[name].plot
    else:
        described = [source.ours.get("measurements", {}).get(name, {}) for source in page.sources]
        kind = next((each["plot"] for each in described if each.get("plot")), None)
    return kind if isinstance(kind, str) and kind in PLOTS else None


def with_curves(page: Page) -> set[tuple[str, str]]:
    """Return the mark of the file and the name of each benchmark whose series are drawn."""
    return {
        (row.file, row.record["fullname"])
        for _, group in page.groups
        if (kind := _kind(page, group)) is not None and PLOTS[kind].of_series
        for row in group.rows
    }


def _all_series(page: Page, failed: list[str]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return the series that curves are drawn from, by file and benchmark."""
    wanted = with_curves(page)
    series: dict[tuple[str, str], dict[str, list[float]]] = {}
    for source in page.sources:
        names = [name for mark, name in wanted if mark == source.mark]
        if names and source.beside is not None:
            try:
                series |= {(source.mark, name): each for name, each in read_series(source.beside, names).items()}
            except D5Error as error:
                failed.append(str(error))
    return series


def _bars(
    axes: Axes, rows: Sequence[Row], values: Sequence[float], title: str, tips: Sequence[str], errors: Any = None
) -> None:
    colours = [PALETTE[row.colour % len(PALETTE)] for row in rows]
    bars = axes.barh(range(len(rows)), values, 0.62, color=colours, xerr=errors, ecolor="#000000", label=title)
    set_bar_tooltips(bars, [f"{name}: {tip}" for name, tip in zip(_named(rows), tips, strict=True)])
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#cccccc", linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _named(rows: Sequence[Row]) -> list[str]:
    """Return the names of rows: measurement and backend."""
    names = distinct([row.backend for row in rows], LONGEST_NAME)
    return [f"{_short(row.measurement)}, {names[row.backend]}" for row in rows]


def _throughput(row: Row) -> str:
    info, found = row.record, row.to_fastest
    value, unit = info["throughput"]["value"], _short(info["throughput"]["unit"])
    high, low = (digits(value * info["median_s"] / bound) for bound in info["median_ci95"])
    sure = f"{info['median_ci_confidence']:.0%}"
    share = f", {times(found.value)} times the fastest one's time" if found.value else ""
    return f"{digits(value)} {unit} ({low} to {high}, {sure}){share}"


def _speed(row: Row) -> tuple[float, float, float]:
    """Return a row's speed as a part of the fastest one's, with the interval of their ratio."""
    ratio = row.to_fastest.ratio
    return (1.0, 1.0, 1.0) if ratio is None else (1 / ratio.value, 1 / ratio.high, 1 / max(ratio.low, 1e-9))


def _peak(row: Row) -> str:
    peak = row.record["peak_memory_bytes"]
    return "peak memory not taken" if peak is None else f"peak memory {digits(peak / 2**20)} MiB"


def _overview(title: str, rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.9 + 0.2 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    speeds = [_speed(row) for row in rows]
    rates = [speed for speed, _, _ in speeds]
    less = [max(speed - low, 0) for speed, low, _ in speeds]
    more = [max(min(high, LONGEST_BAR) - speed, 0) for speed, _, high in speeds]
    tips = [_throughput(row) for row in rows]
    _bars(panels[0], rows, rates, "speed; fastest of each measurement: 1", tips, [less, more])
    _bars(
        panels[1],
        rows,
        [(row.record["peak_memory_bytes"] or 0) / 2**20 for row in rows],
        "peak memory in MiB; ◆ by definition",
        [_peak(row) for row in rows],
    )
    needed = [needed_bytes(row.record.get("memory", {})) / 2**20 for row in rows]
    marked = [place for place, value in enumerate(needed) if value]
    (points,) = panels[1].plot(
        [needed[place] for place in marked], marked, linestyle="", marker="D", markersize=4, color="#000000",
        label="MiB by definition",
    )  # fmt: skip
    names = _named(rows)
    set_tooltips(points, [f"{names[place]}: {digits(needed[place])} MiB by definition" for place in marked])
    calls = [row.record["first_call_s"] for row in rows]
    tooltips = [f"first call {digits(call)} s, compilation included" for call in calls]
    _bars(panels[2], rows, calls, "first call in s, compilation included", tooltips)
    panels[0].set_yticks(range(len(rows)), names, fontsize=8)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", weight="bold")
    return figure
