"""Pictures of training to accuracy: one line per run, all backends of a recipe over one clock.

Imports matplotlib (late) and the standard library; knows results, never adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from d5suite.files import atomic_path


class Curve(NamedTuple):
    """One backend's runs: for each, its training times in seconds and its metric there."""

    name: str
    runs: Sequence[tuple[Sequence[float], Sequence[float]]]


def save_curves(path: Path, title: str, metric: str, target: float, curves: Sequence[Curve]) -> None:
    """Draw them into a PNG file, atomically.

    Parameters
    ----------
    path : Path
    title, metric : str
        Of the picture and of its vertical axis.
    target : float
        Drawn as a line across.
    curves : sequence of Curve
        A colour each.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        for index, (seconds, values) in enumerate(curve.runs):
            axes.plot(
                [0.0, *seconds], [float("nan"), *values], marker="o", markersize=3, linewidth=1.2,
                color=f"C{number}", label=curve.name if index == 0 else None,
            )  # fmt: skip
    axes.axhline(target, color="black", linestyle="--", linewidth=0.8)
    axes.annotate(f"target {target:g}", (0.01, target), xycoords=("axes fraction", "data"), va="bottom")
    axes.set(title=title, xlabel="training time in s, evaluation not counted", ylabel=metric, xscale="log")
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis("{x:g}")
    axes.legend()
    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def curves_of(found: Mapping[str, Mapping[str, Sequence[float]]], metric: str) -> list[Curve]:
    """Curves from series as `d5suite.workload.Workload.measure_time_to_accuracy` leaves them, by backend."""
    curves = []
    for name, series in found.items():
        runs: list[tuple[Sequence[float], Sequence[float]]] = []
        while f"run_{len(runs)}_seconds" in series:
            prefix = f"run_{len(runs)}"
            runs.append((series[f"{prefix}_seconds"], series[f"{prefix}_{metric}"]))
        curves.append(Curve(name, runs))
    return curves
