"""The picture of rooflines: roofs by level and threads, nodes, steps, and trajectories.

Imports matplotlib (late) and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from d5suite.models.ceilings import Roof
from d5suite.models.roofline import Work
from d5suite.report.colours import Style, styles
from d5suite.report.page.svg import drawing
from d5suite.report.roofline import COUNTED, Roofline, Spot, paths
from d5suite.report.tooltips import set_tooltips

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STROKES = {"strong": "-", "weak": "--", "size": ":"}
"""Lines of trajectories by kind."""

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
    spots = [spot for each in own for spot in (each.step, *each.nodes[:MOST_NODES]) if _is_drawn(spot.placed.work)]
    lowest = min((spot.placed.work.intensity for spot in spots), default=0.1) / 2
    highest = max((spot.placed.work.intensity for spot in spots), default=10.0) * 2
    roofs = {each.threads: each.roof for each in own}
    for threads, roof in sorted(roofs.items()):
        _draw_roof(axes, roof, threads, lowest, highest, faint=threads != max(roofs))
    names = list(dict.fromkeys(each.backend for each in own))
    known = dict(zip(names, styles(names), strict=True))
    one_setting = len({(each.threads, each.batch) for each in own}) == 1
    for each in own:
        style = known[each.backend]
        if one_setting:  # the nodes of several settings would hide each other
            _draw_spots(axes, each.nodes[:MOST_NODES], style, each, size=4, alpha=0.45)
        _draw_spots(axes, [each.step], style, each, size=11, alpha=1.0, label=each.backend)
    for (_, backend, _), lines in paths(own).items():
        for line in lines:
            points = [line[0].first, *(segment.second for segment in line)]
            axes.plot(
                [step.work.intensity for step in points], [step.work.flops_per_s for step in points],
                linestyle=STROKES[line[0].kind], color=known[backend].colour, linewidth=1.2,
            )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", title=f"{title} ({own[0].setting if one_setting else 'several settings'})",
        xlabel=f"FLOP per byte ({COUNTED})", ylabel="FLOP/s",
    )  # fmt: skip
    axes.grid(alpha=0.25, which="both")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, loc="lower right")


def _is_drawn(work: Work) -> bool:
    return work.flops > 0 and 0 < work.intensity < math.inf


def _draw_roof(axes: Axes, roof: Roof, threads: int, lowest: float, highest: float, *, faint: bool) -> None:
    for level in roof.levels:
        ridge = roof.flops_per_s / level.bytes_per_s
        ends = sorted({lowest, min(max(ridge, lowest), highest), highest})
        heights = [min(roof.flops_per_s, each * level.bytes_per_s) for each in ends]
        axes.plot(ends, heights, color="#262626", linewidth=0.6 if faint else 1.2, alpha=0.4 if faint else 1.0)
        if not faint:
            text = f"{level.name} {level.bytes_per_s / 1e9:.3g} GB/s"
            axes.annotate(text, (ends[0], heights[0]), fontsize=8, va="bottom", color="#262626")
    text = f"{roof.flops_per_s / 1e9:.4g} GFLOP/s, {threads} thread{'s' * (threads != 1)}"
    axes.annotate(text, (highest, roof.flops_per_s), fontsize=8, ha="right", va="bottom", color="#262626")


def _draw_spots(
    axes: Axes, spots: Sequence[Spot], style: Style, result: Roofline, *, size: float, alpha: float, label: str = ""
) -> None:
    drawn = [spot for spot in spots if _is_drawn(spot.placed.work)]
    for above in (False, True):
        chosen = [spot for spot in drawn if spot.placed.above == above]
        if chosen:
            (points,) = axes.plot(
                [spot.placed.work.intensity for spot in chosen], [spot.placed.work.flops_per_s for spot in chosen],
                linestyle="none", marker="X" if above else style.marker, markersize=size, alpha=alpha,
                color=style.colour, label=label if label and not above else f"{label} above its roof".strip(),
            )  # fmt: skip
            if not label and not above:
                points.set_label("_nodes")
            set_tooltips(points, [_tip(spot, result) for spot in chosen])


def _tip(spot: Spot, result: Roofline) -> str:
    placed = spot.placed
    text = f"{result.backend}, {spot.name or 'step'} {spot.direction}".strip()
    text += f": {placed.work.seconds * 1e3:.3g} ms, {placed.share:.0%} of its roof ({placed.bound}), {result.setting}"
    return f"{text}; {spot.finding}" if spot.finding else text
