"""Pictures of steps of several ranks and of collectives.

Imports matplotlib (late) and its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from d5suite.report.colours import LINES, MARKERS, PALETTE, Style, styles
from d5suite.report.formats import figure as digits
from d5suite.report.tooltips import set_bar_tooltips, set_tooltips

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

UNITS = ("B", "KiB", "MiB", "GiB")

PARTS = ("computing", "both at once", "communicating", "waiting for others", "all of these")
"""Parts of a step; the last one is for frameworks that do not measure the parts."""

STYLES = [
    Style(colour, MARKERS[(turn + place) % len(MARKERS)], LINES[turn])
    for turn in range(len(LINES))
    for place, colour in enumerate(PALETTE)
]
"""Styles of schemes if each backend has a panel, so that colours need not tell backends apart."""

FEWEST_ROWS = 6
"""Rows for which every panel has room at least."""

PART_COLOURS = (PALETTE[0], "#56b4e9", PALETTE[1], "#e69f00", PALETTE[7])


def draw_steps(title: str, results: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    """Draw images/s by number of ranks, with the ideal, and the parts of a step.

    Parameters
    ----------
    title : str
    results : sequence of (str, mapping)
        A name without the number of ranks, and the record of `distributed_step`.
    """
    from matplotlib.figure import Figure

    ordered = sorted(results, key=lambda each: (each[0], each[1]["ranks"]))
    panels = _panels(ordered)
    heights = [max(len(own), FEWEST_ROWS) for own in panels.values()]
    figure = Figure(figsize=(12, 2 + 0.28 * sum(heights) + 0.5 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, height_ratios=heights)
    drawn = styles(_lines(ordered)) if len(panels) == 1 else STYLES
    known = dict(zip(_names(panels), itertools.cycle(drawn), strict=False))
    for (speeds, parts), (panel, own) in zip(grid, panels.items(), strict=True):
        _draw_speeds(speeds, own, known, panel)
        _draw_parts(parts, own, panel)
        speeds.set_ylabel(panel)
        speeds.set_xticks(sorted({info["ranks"] for _, info in ordered}))
    fastest = max(axes.get_ylim()[1] for axes in grid[:, 0])
    longest = max(axes.get_xlim()[1] for axes in grid[:, 1])
    for speeds, parts in grid:
        speeds.set_ylim(0, fastest)
        parts.set_xlim(0, 1.02 * longest)
    grid[0, 0].set_title("images/s in all; dotted: ideal")
    grid[0, 1].set_title("parts of a step in ms, mean of ranks")
    grid[-1, 0].set_xlabel("ranks")
    named = {label: line for axes in grid[:, 0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), fontsize=7, loc="outside lower left", ncols=3)
    figure.legend(*grid[0, 1].get_legend_handles_labels(), fontsize=7, loc="outside lower right", ncols=3)
    figure.suptitle(title)
    return figure


def _panels(ordered: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """Return one panel, or one per backend if a backend has several lines."""
    panels: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for name, info in ordered:
        backend, _, line = name.partition("-")
        panels.setdefault(backend, []).append((line or backend, info))
    if len(panels) == 1 or all(len(_lines(own)) == 1 for own in panels.values()):
        return {"": list(ordered)}
    return panels


def _names(panels: Mapping[str, list[tuple[str, Mapping[str, Any]]]]) -> list[str]:
    """Return the names of all lines, each once."""
    return list(dict.fromkeys(name for own in panels.values() for name in _lines(own)))


def _draw_speeds(axes: Axes, own: list[tuple[str, Mapping[str, Any]]], known: Mapping[str, Style], panel: str) -> None:
    most = max(info["ranks"] for _, info in own)
    for name, line in _lines(own).items():
        counts, values = [info["ranks"] for info in line], [info["throughput"]["value"] for info in line]
        style = known[name]
        (points,) = axes.plot(
            counts, values, marker=style.marker, markersize=4, color=style.colour, linestyle=style.line, label=name
        )
        set_tooltips(
            points, [f"{_row(panel, name, info)}: {digits(info['throughput']['value'])} images/s" for info in line]
        )
        axes.plot([counts[0], most], [values[0], values[0] * most / counts[0]], ":", linewidth=1, color=style.colour)
    axes.grid(alpha=0.3)


def _draw_parts(axes: Axes, own: list[tuple[str, Mapping[str, Any]]], panel: str) -> None:
    rows, left = range(len(own)), [0.0] * len(own)
    widths = [_parts(info) for _, info in own]
    for part, colour, width in zip(PARTS, PART_COLOURS, zip(*widths, strict=True), strict=True):
        bars = axes.barh(rows, width, 0.6, left=left, color=colour, label=part)
        named = zip(own, width, strict=True)
        set_bar_tooltips(bars, [f"{_row(panel, name, info)}: {part}, {digits(ms)} ms" for (name, info), ms in named])
        left = [start + each for start, each in zip(left, width, strict=True)]
    axes.set_yticks(rows, [f"{name}, {info['ranks']}" for name, info in own], fontsize=7)
    axes.set_ylim(max(len(own), FEWEST_ROWS) - 0.5, -0.5)


def _row(panel: str, name: str, info: Mapping[str, Any]) -> str:
    ranks = info["ranks"]
    return f"{panel} {name}, {ranks} rank{'s' * (ranks > 1)}".strip()


def _lines(results: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return results by name, each with the single-rank result of its backend, if there is one."""

    def kind(info: Mapping[str, Any]) -> tuple[Any, ...]:
        return info["backend"]["name"], info["backend"]["mode"]

    lines: dict[str, list[Mapping[str, Any]]] = {}
    for name, info in results:
        lines.setdefault(name, []).append(info)
    alone = {name: own[0] for name, own in lines.items() if [info["ranks"] for info in own] == [1]}
    complete = {}
    for name, own in lines.items():
        if name not in alone:
            complete[name] = [one for one in alone.values() if kind(one) == kind(own[0])][:1] + own
    drawn = [kind(own[0]) for own in complete.values()]
    return complete | {name: [one] for name, one in alone.items() if kind(one) not in drawn}


def _parts(info: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the milliseconds of `PARTS`, which add up to the step."""
    parts = info["distributed"]["parts"]
    if parts is None:
        return 0.0, 0.0, 0.0, 0.0, 1e3 * info["median_s"]
    computing, communicating, waiting, overlapped = (
        1e3 * (parts[f"{name}_s"] or 0.0) for name in ("computing", "communicating", "waiting", "overlapped")
    )
    hidden = min(communicating, overlapped)
    return computing - overlapped, overlapped, communicating - hidden, waiting - (overlapped - hidden), 0.0


def draw_sizes(title: str, results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw times with their fitted lines, and bus bandwidth, by size.

    Parameters
    ----------
    title : str
    results : mapping of str to mapping
        By communicator and algorithm: the record of `collectives`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(11, 5), layout="constrained")
    times, bandwidths = figure.subplots(1, 2)
    for number, (name, facts) in enumerate(results.items()):
        colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number // len(PALETTE) % len(MARKERS)]
        sizes = [each["bytes"] for each in facts["sizes"]]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3, "linewidth": 1.2}
        (calls,) = times.plot(sizes, [1e6 * each["median_s"] for each in facts["sizes"]], label=name, **style)
        set_tooltips(
            calls, [f"{name}: {digits(1e6 * e['median_s'])} µs for {size_text(e['bytes'])}" for e in facts["sizes"]]
        )
        line = facts["line"]
        grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 99) for i in range(100)]
        fitted = [1e6 * (line["alpha_s"] + line["beta_s_per_byte"] * size) for size in grid]
        times.plot(grid, fitted, color=colour, linestyle=":", linewidth=1)
        rates = [each["bus_bytes_per_s"] / 1e9 for each in facts["sizes"]]
        (bandwidth,) = bandwidths.plot(sizes, rates, label=name, **style)
        labelled = zip(rates, sizes, strict=True)
        set_tooltips(bandwidth, [f"{name}: {digits(rate)} GB/s for {size_text(size)}" for rate, size in labelled])
    times.set(title="time of a call, slowest rank; dotted: α + β·bytes", ylabel="µs", yscale="log")
    plain_ticks(times.yaxis)
    bandwidths.set(title="bus bandwidth, as nccl-tests defines it", ylabel="GB/s", ylim=(0, None))
    for axes in (times, bandwidths):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("size of the array")
        axes.xaxis.set_major_formatter(lambda size, _: size_text(size))
        axes.grid(alpha=0.3)
    times.legend()
    figure.suptitle(title.replace("_", "-"))
    return figure


def plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with numbers; matplotlib's default is a formula."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def size_text(size: float) -> str:
    """Format bytes with a binary unit, such as ``64 KiB``."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:g} {UNITS[unit]}"
