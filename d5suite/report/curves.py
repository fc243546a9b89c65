"""Pictures of training to accuracy: one line per run, all backends of a recipe in one picture.

Imports matplotlib (late) and its neighbours; knows results, never adapters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from d5suite.files import atomic_path
from d5suite.report.colours import styles
from d5suite.report.formats import figure
from d5suite.report.tooltips import set_tooltips

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LEAST_DISTANCE = 0.1
"""Least distance of two tick labels as a fraction of the axis: eight characters at this size."""


class Curve(NamedTuple):
    """One backend's runs: training times in seconds, or bytes sent, and metric of each run."""

    name: str
    runs: Sequence[tuple[Sequence[float], Sequence[float]]]


def save_figure(path: Path, figure: Figure) -> None:
    """Write a picture into a PNG file, atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def draw_curves(
    title: str, metric: str, target: float, curves: Sequence[Curve], over_bytes: Sequence[Curve] = ()
) -> Figure:
    """Draw the runs of all backends.

    Parameters
    ----------
    title, metric : str
        Title of the picture, and label of the vertical axis.
    target : float
        Drawn as a horizontal line.
    curves : sequence of Curve
        Each gets a colour.
    over_bytes : sequence of Curve, optional
        The same runs over the bytes that all ranks sent, for a second picture.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(16, 5) if over_bytes else (8, 5), layout="constrained")
    drawn = [(curves, "training time in s, evaluation not counted", "s of training")]
    drawn += [(over_bytes, "bytes sent by all ranks", "bytes")] if over_bytes else []
    for place, (shown, what, unit) in enumerate(drawn, start=1):
        axes = picture.add_subplot(1, len(drawn), place)
        _draw(axes, target, shown, unit)
        axes.set(title=title, xlabel=what, ylabel=metric)
    return picture


def _draw(axes: Axes, target: float, curves: Sequence[Curve], unit: str) -> None:
    for curve, style in zip(curves, styles(curve.name for curve in curves), strict=True):
        for index, (places, values) in enumerate(curve.runs):
            (drawn,) = axes.plot(
                [0.0, *places], [float("nan"), *values], marker=style.marker, markersize=3, linewidth=1.2,
                color=style.colour, linestyle=style.line, label=curve.name if index == 0 else None,
            )  # fmt: skip
            pairs = zip(places, values, strict=True)
            tooltips = [f"{curve.name}, run {index + 1}: {figure(y)} after {figure(x)} {unit}" for x, y in pairs]
            set_tooltips(drawn, tooltips)
    axes.axhline(target, color="black", linestyle="--", linewidth=0.8)
    axes.annotate(f"target {target:g}", (0.01, target), xycoords=("axes fraction", "data"), va="bottom")
    if any(place > 0 for curve in curves for places, _ in curve.runs for place in places):
        axes.set_xscale("log")
        _label(axes)
    axes.legend()


def _label(axes: Axes) -> None:
    """Label as many ticks of the logarithmic axis as fit side by side."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_xlim()
    decades = math.log10(high / low)
    if decades > 1:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,)))
    else:  # as on a linear axis, without ticks that crowd at its end
        ticks = [tick for tick in MaxNLocator(8).tick_values(low, high) if low <= tick <= high]
        chosen: list[float] = []
        for tick in ticks:
            if not chosen or math.log10(tick / chosen[-1]) > decades * LEAST_DISTANCE:
                chosen.append(tick)
        axes.xaxis.set_major_locator(FixedLocator(chosen))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def curves_of(
    by_backend: Mapping[str, Mapping[str, Sequence[float]]], metric: str, over: str = "seconds"
) -> list[Curve]:
    """Return curves from the series that the measurement of time to accuracy wrote, by backend."""
    curves = []
    for name, series in by_backend.items():
        runs: list[tuple[Sequence[float], Sequence[float]]] = []
        while f"run_{len(runs)}_{over}" in series:
            prefix = f"run_{len(runs)}"
            runs.append((series[f"{prefix}_{over}"], series[f"{prefix}_{metric}"]))
        curves.append(Curve(name, runs))
    return curves
