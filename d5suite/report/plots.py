"""Plots beside a result file and on pages, by `Measurement.plot`.

Imports matplotlib (late) and the standard library; knows results, never adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d5suite.report.curves import curves_of, draw_curves, save_figure
from d5suite.report.parts import CEILINGS, PARTS, draw_ceilings, draw_parts
from d5suite.report.scaling import draw_sizes, draw_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plotted(NamedTuple):
    """One backend's result in a plot.

    Attributes
    ----------
    name : str
    facts : mapping
        The measurement's own part of its record.
    series : mapping of str to sequence of float
    measurement : str
        Name of the measurement, if a plot shows several measurements.
    """

    name: str
    facts: Mapping[str, Any]
    series: Mapping[str, Sequence[float]]
    measurement: str = ""


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
    save_figure(path, draw_plot(kind, group, results))


def draw_plot(kind: str, group: str, results: Sequence[Plotted]) -> Figure:
    """Draw the results of a group; see `save_plot`."""
    return PLOTS[kind].draw(group, results)


def _curves(group: str, results: Sequence[Plotted], *, over_bytes: bool = False) -> Figure:
    target = results[-1].facts["target"]
    case, _, measurement = group.partition("/")
    series, metric = {each.name: each.series for each in results}, target["metric"]
    shown = curves_of(series, metric), curves_of(series, metric, "bytes") if over_bytes else ()
    return draw_curves(f"{case}: {measurement.replace('_', ' ')}", metric, target["value"], *shown)


def _collectives(group: str, results: Sequence[Plotted]) -> Figure:
    return draw_sizes(group.partition("/")[0], {each.name: each.facts for each in results})


def _steps(group: str, results: Sequence[Plotted]) -> Figure:
    named = [(each.name.removesuffix(f"-{each.facts['ranks']}"), each.facts) for each in results]
    return draw_steps(f"{group.partition('/')[0]}: steps of several ranks", named)


def _parts(group: str, results: Sequence[Plotted]) -> Figure:
    return draw_parts(group.partition("/")[0], [(each.name, each.facts) for each in results])


def _ceilings(title: str, results: Sequence[Plotted]) -> Figure:
    return draw_ceilings(title, [(each.measurement, each.name, each.facts) for each in results])


class Plot(NamedTuple):
    """A kind of plot.

    Attributes
    ----------
    draw : callable
        Draws the results of a group.
    of_series : bool
        Whether it draws series; then it also draws the partial results of a failure.
    suffix : str
        Added to the file's name if the case may have another plot.
    of_page : bool
        Whether only report pages show it.
    of_section : bool
        Whether one plot shows all measurements of a section that declare it.
    of_one_size : bool
        Whether results at a reduced size are left out.
    title : str
        By default the measurement's name.
    """

    draw: Callable[[str, Sequence[Plotted]], Figure]
    of_series: bool = False
    suffix: str = ""
    of_page: bool = False
    of_section: bool = False
    of_one_size: bool = False
    title: str = ""


PLOTS: dict[str, Plot] = {
    "curves": Plot(_curves, of_series=True),
    "curves_and_bytes": Plot(functools.partial(_curves, over_bytes=True), of_series=True, suffix=".accuracy"),
    "collectives": Plot(_collectives),
    "steps": Plot(_steps),
    "parts": Plot(_parts, of_page=True, of_one_size=True, title=PARTS),
    "ceilings": Plot(_ceilings, of_page=True, of_section=True, of_one_size=True, title=CEILINGS),
}
"""Plots by name."""
