"""Pictures of the parts of a training step, and of the part of a ceiling that operators reach.

Imports matplotlib (late) and its neighbours; knows results, never adapters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from d5suite.report.ceilings import describe_share, share_of_ceiling
from d5suite.report.colours import PALETTE
from d5suite.report.formats import figure as digits
from d5suite.report.tooltips import set_bar_tooltips, set_tooltips

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#e69f00", "#56b4e9", PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[7])
"""Colours of the parts, in order. Backends are rows here and need no colours."""

PARTS = "parts of a training step"
CEILINGS = "part of the ceiling that each backend reaches"


def draw_parts(title: str, results: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    """Draw the parts of a step, stacked.

    Parameters
    ----------
    title : str
    results : sequence of (str, mapping)
        By backend: the record, with ``breakdown_s`` in seconds by part.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.3 + 0.24 * len(results)), layout="constrained")
    axes = figure.subplots()
    ends = {False: [0.0] * len(results), True: [0.0] * len(results)}
    parts = dict.fromkeys(part for _, facts in results for part in facts["breakdown_s"])
    for part, colour in zip(parts, itertools.cycle(COLOURS)):
        widths = [1e3 * facts["breakdown_s"].get(part, 0.0) for _, facts in results]
        label = part.replace("_", " ")
        left = [ends[width < 0][row] for row, width in enumerate(widths)]  # negative ones stand left of zero
        bars = axes.barh(range(len(results)), widths, 0.62, left=left, color=colour, label=label)
        tips = [f"{name}: {label}, {digits(width)} ms" for (name, _), width in zip(results, widths, strict=True)]
        set_bar_tooltips(bars, tips)
        for row, width in enumerate(widths):
            ends[width < 0][row] += width
    if any(ends[True]):
        axes.axvline(0, color="#000000", linewidth=0.8)
    axes.set_yticks(range(len(results)), [name for name, _ in results], fontsize=8)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlabel("ms of a step", fontsize=8)
    axes.legend(fontsize=8, ncols=6, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    figure.suptitle(f"{title}: {PARTS}", fontsize=10, x=0.01, ha="left", weight="bold")
    return figure


def negative_parts(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each negative part of a training step."""
    parts = record.get("breakdown_s") or {}
    return [
        f"{name.replace('_', ' ')} takes {digits(1e3 * value)} ms: it is the difference of two medians, of which the "
        "longer call was the faster one, so it is too short to be told from noise"
        for name, value in parts.items()
        if isinstance(value, int | float) and value < 0
    ]


def draw_ceilings(title: str, results: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Figure:
    """Draw each operator's larger part of a ceiling, of arithmetic or of memory traffic.

    Parameters
    ----------
    title : str
    results : sequence of (str, str, mapping)
        Measurement, backend and record, with ``fraction_of_ceiling``.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    lines = list(dict.fromkeys(measurement for measurement, _, _ in results))
    backends = list(dict.fromkeys(backend for _, backend, _ in results))
    table = np.full((len(lines), len(backends)), np.nan)
    tips = [[f"{line}, {backend}: no ceiling is known" for backend in backends] for line in lines]
    refused = set()
    for measurement, backend, facts in results:
        known = facts.get("fraction_of_ceiling") or {}
        shares = {rate: each for rate, each in known.items() if isinstance(each, int | float)}
        if shares:
            rate = max(shares, key=lambda each: shares[each])
            place = lines.index(measurement), backends.index(backend)
            table[place] = shares[rate]
            refused |= {place} if not share_of_ceiling(facts, rate).believed else set()
            tips[place[0]][place[1]] = f"{measurement}, {backend}: {describe_share(facts, rate)}"
    figure = Figure(figsize=(3.2 + 1.1 * len(backends), 1.0 + 0.24 * len(lines)), layout="constrained")
    axes = figure.subplots()
    cells = axes.pcolormesh(np.nan_to_num(table), cmap="cividis", vmin=0, vmax=1, edgecolors="#ffffff", linewidth=1)
    set_tooltips(cells, [tip for line in tips for tip in line])
    for (row_place, column), value in np.ndenumerate(table):
        dark = np.isnan(value) or sum(colormaps["cividis"](min(float(value), 1.0))[:3]) < 1.5
        label = _cell(value, refused=(row_place, column) in refused)
        text = axes.text(
            column + 0.5, row_place + 0.5, label, ha="center", va="center",
            fontsize=8, color="#fefefe" if dark else "#010101",
        )  # fmt: skip
        set_tooltips(text, [tips[row_place][column]])
    axes.set_xticks(np.arange(len(backends)) + 0.5, backends, fontsize=8)
    axes.set_yticks(np.arange(len(lines)) + 0.5, lines, fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(
        f"{title}: larger part of a ceiling, arithmetic or memory", fontsize=10, x=0.01, ha="left", weight="bold"
    )
    return figure


def _cell(value: float, *, refused: bool) -> str:
    return "–" if math.isnan(value) else "?" if refused else f"{100 * value:.0f}%"
