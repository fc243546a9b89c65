"""Plots beside a result file, by the name that a measurement gives: `Measurement.plot`.

Imports matplotlib (late) and the standard library; knows results, never adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.report.curves import curves_of, save_curves, save_figure
from d5suite.report.scaling import draw_sizes, draw_steps


class Plotted(NamedTuple):
    """One backend's result in a plot.

    Attributes
    ----------
    name : str
    facts : mapping
        The measurement's own part of its record.
    series : mapping of str to sequence of float
    """

    name: str
    facts: Mapping[str, Any]
    series: Mapping[str, Sequence[float]]


def save_plot(kind: str, path: Path, group: str, results: Sequence[Plotted]) -> None:
    """Draw the results of a group into a PNG file, atomically.

    Parameters
    ----------
    kind : str
        A key of `PLOTS`.
    path : Path
    group : str
        ``case/measurement``.
    results : sequence of Plotted
    """
    PLOTS[kind](path, group, results)


def _curves(path: Path, group: str, results: Sequence[Plotted], *, over_bytes: bool = False) -> None:
    target = results[-1].facts["target"]
    case, _, measurement = group.partition("/")
    series, metric = {each.name: each.series for each in results}, target["metric"]
    shown = curves_of(series, metric), curves_of(series, metric, "bytes") if over_bytes else ()
    save_curves(path, f"{case}: {measurement.replace('_', ' ')}", metric, target["value"], *shown)


def _collectives(path: Path, group: str, results: Sequence[Plotted]) -> None:
    save_figure(path, draw_sizes(group.partition("/")[0], {each.name: each.facts for each in results}))


def _steps(path: Path, group: str, results: Sequence[Plotted]) -> None:
    named = [(each.name.removesuffix(f"-{each.facts['ranks']}"), each.facts) for each in results]
    save_figure(path, draw_steps(f"{group.partition('/')[0]}: steps of several ranks", named))


PLOTS: Mapping[str, Callable[[Path, str, Sequence[Plotted]], None]] = {
    "curves": _curves,
    "curves_and_bytes": functools.partial(_curves, over_bytes=True),
    "collectives": _collectives,
    "steps": _steps,
}
"""By name: draws the results of a group."""

PARTIAL = {"curves", "curves_and_bytes"}
"""Those that show partial results of a failure, too."""

BESIDE = {"curves_and_bytes": ".accuracy"}
"""By plot: what its file's name has beside the case's, which has another plot of its ranks."""
