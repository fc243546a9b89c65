"""The picture of rooflines: roofs by level and threads, nodes, steps, and trajectories.

Imports matplotlib (late) and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from d5suite.models.ceilings import Roof
from d5suite.models.roofline import TimedWork
from d5suite.report.colours import Style, styles
from d5suite.report.page.svg import drawing
from d5suite.report.roofline import COUNTED, NAMED, Roofline, Spot, paths
from d5suite.report.tooltips import set_tooltips

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STROKES: dict[str, Any] = {"strong": "-", "weak": "--", "size": ":", "image": "-."}
"""Line styles of trajectories by kind."""

INK = "#262626"
"""Colour of roofs and words."""

MOST_NODES = 200
"""Nodes of a result that are drawn: the slowest."""

INCHES = 12, 5.5
"""Size of a panel."""


def draw_rooflines(found: Sequence[Roofline]) -> Figure:
    """Draw results under their roofs, a panel for each measurement."""
    from matplotlib.figure import Figure

    panels: dict[str, list[Roofline]] = {}
    for each in found:
        panels.setdefault(each.title, []).append(each)
    with drawing():
        figure = Figure(figsize=(INCHES[0], INCHES[1] * len(panels) + 0.5), layout="constrained")
        for axes, (title, own) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
            _panel(axes, title, own)
        figure.suptitle(f"{found[0].machine}; bytes are {COUNTED}: compulsory traffic")
    return figure


def _panel(axes: Axes, title: str, own: Sequence[Roofline]) -> None:
    places = {(each.backend, each.threads, each.batch, each.image) for each in own}
    one_setting = len({place[1:] for place in places}) == 1
    turned = len(places) > len({each.backend for each in own})
    most_nodes = 0 if turned else MOST_NODES  # the nodes of several settings would hide each other
    spots = [spot for each in own for spot in (each.step, *each.nodes[:most_nodes]) if _is_drawn(spot.placed.work)]
    roofs = {each.threads: each.roof for each in own}
    most = max(roofs)
    ridges = [roof.flops_per_s / level.bytes_per_s for roof in roofs.values() for level in roof.levels]
    intensities = [spot.placed.work.intensity for spot in spots] + ridges  # so that slopes are seen
    lowest, highest = min(intensities) / 2, max(intensities) * 2
    for threads, roof in sorted(roofs.items()):
        _draw_roof(axes, roof, threads, lowest, highest, faint=threads != most)
    names = list(dict.fromkeys(each.backend for each in own))
    known = dict(zip(names, styles(names), strict=True))
    for each in own:
        style = known[each.backend]
        _draw_spots(axes, each.nodes[:most_nodes], style, each, size=4, alpha=0.45)
        hollow = each.threads < most
        _draw_spots(axes, [each.step], style, each, size=9, alpha=1.0, label=each.backend, hollow=hollow)
    kinds = _draw_paths(axes, own, {name: style.colour for name, style in known.items()})
    axes.set(
        xscale="log", yscale="log", title=f"{title} ({own[0].setting if one_setting else 'several settings'})",
        xlabel=f"FLOP per byte ({COUNTED})", ylabel="GFLOP/s", xlim=(lowest, highest),
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(lambda value, _: "")  # powers of ten are enough
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g}")
    axes.grid(alpha=0.25, which="major")
    _legend(axes, kinds, hollow=len(roofs) > 1)


def _draw_paths(axes: Axes, own: Sequence[Roofline], colours: Mapping[str, str]) -> list[str]:
    """Draw an arrow from each setting to the next; return the kinds of trajectories."""
    kinds: dict[str, None] = {}
    for (_, backend, _), lines in paths(own).items():
        for segment in (segment for line in lines for segment in line):
            kinds[segment.kind] = None
            axes.annotate(
                "", xytext=(segment.first.work.intensity, segment.first.work.flops_per_s),
                xy=(segment.second.work.intensity, segment.second.work.flops_per_s),
                arrowprops={
                    "arrowstyle": "->", "linestyle": STROKES[segment.kind], "color": colours[backend], "linewidth": 1.1,
                    "shrinkA": 4, "shrinkB": 5,
                },
            )  # fmt: skip
    return list(kinds)


def _legend(axes: Axes, kinds: Sequence[str], *, hollow: bool) -> None:
    """Explain colours, strokes and hollow points in a legend beside the plot, to hide no points."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    unique = {label: handle for handle, label in zip(handles, labels, strict=True) if not label.startswith("_")}
    for kind in kinds:
        unique[NAMED[kind]] = Line2D([], [], color=INK, linestyle=STROKES[kind], linewidth=1.1)
    if hollow:
        unique["fewer threads"] = Line2D([], [], color=INK, linestyle="none", marker="o", markerfacecolor="none")
    axes.legend(unique.values(), unique.keys(), fontsize=8, loc="upper left", bbox_to_anchor=(1.005, 1.0))


def _is_drawn(work: TimedWork) -> bool:
    return work.flops > 0 and 0 < work.intensity < math.inf


def _draw_roof(axes: Axes, roof: Roof, threads: int, lowest: float, highest: float, *, faint: bool) -> None:
    levels: dict[float, list[str]] = {}
    for level in roof.levels:
        levels.setdefault(float(f"{level.bytes_per_s:.3g}"), []).append(level.name)
    for bandwidth, names in levels.items():
        ridge = roof.flops_per_s / bandwidth
        ends = sorted({lowest, min(max(ridge, lowest), highest), highest})
        heights = [min(roof.flops_per_s, each * bandwidth) for each in ends]
        axes.plot(ends, heights, color=INK, linewidth=0.6 if faint else 1.2, alpha=0.4 if faint else 1.0)
        if not faint:
            text = f"{', '.join(names)} {bandwidth / 1e9:.3g} GB/s"
            axes.annotate(text, (ends[0], heights[0]), fontsize=8, va="bottom", color=INK)
    text = f"{roof.flops_per_s / 1e9:.4g} GFLOP/s, {threads} thread{'s' * (threads != 1)}"
    axes.annotate(text, (highest, roof.flops_per_s), fontsize=8, ha="right", va="bottom", color=INK)


def _draw_spots(
    axes: Axes, spots: Sequence[Spot], style: Style, result: Roofline, *, size: float, alpha: float, label: str = "",
    hollow: bool = False,
) -> None:  # fmt: skip
    drawn = [spot for spot in spots if _is_drawn(spot.placed.work)]
    for above in (False, True):
        chosen = [spot for spot in drawn if spot.placed.above == above]
        if chosen:
            (points,) = axes.plot(
                [spot.placed.work.intensity for spot in chosen], [spot.placed.work.flops_per_s for spot in chosen],
                linestyle="none", marker="X" if above else style.marker, markersize=size, alpha=alpha,
                color=style.colour, label=label if label and not above else f"{label} above its roof".strip(),
                markerfacecolor="none" if hollow else style.colour,
            )  # fmt: skip
            if not label and not above:
                points.set_label("_nodes")
            set_tooltips(points, [_tip(spot, result) for spot in chosen])


def _tip(spot: Spot, result: Roofline) -> str:
    placed = spot.placed
    text = f"{result.backend}, {spot.name or 'step'} {spot.direction}".strip()
    text += f": {placed.work.seconds * 1e3:.3g} ms, {placed.share:.0%} of its roof ({placed.bound}), {result.setting}"
    return f"{text}; {spot.finding}" if spot.finding else text
