"""Small drawings in the cells of a table: samples on a common axis, a lead, a history.

A page has thousands of them with a few marks each, so they are written as SVG here; matplotlib
draws the plots (`d5suite.report.page.figures`). Imports NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 180, 16
"""Size of a drawing in pixels."""

MOST_TICKS = 40
"""Most ticks for samples; more samples are drawn as that many quantiles."""


def samples_strip(samples: Sequence[float], interval: Sequence[float], median: float, longest: float) -> str:
    """Draw the samples of a row as ticks over a bar from zero to their median.

    Parameters
    ----------
    samples : sequence of float
        In seconds.
    interval : sequence of float
        Lower and upper end of the median's interval.
    median : float
    longest : float
        End of the axis; longer samples are drawn there.

    Returns
    -------
    str
        The inside of an SVG of `WIDTH` by `HEIGHT`.
    """
    scale = (WIDTH - 2) / longest

    def at(value: float) -> float:
        return round(min(value * scale, WIDTH - 2), 1)

    chosen = np.asarray(samples, np.float64)
    if len(chosen) > MOST_TICKS:
        chosen = np.quantile(chosen, np.linspace(0, 1, MOST_TICKS))
    ticks = "".join(f"M{place:g} 2v12" for place in dict.fromkeys(at(float(each)) for each in chosen))
    low, high = at(interval[0]), at(interval[1])
    return (
        f'<rect class="bar" y="5" width="{at(median):g}" height="6"/><path class="ticks" d="{ticks}"/>'
        f'<rect class="ci" x="{low:g}" y="6.5" width="{max(high - low, 1):g}" height="3"/>'
        f'<path class="mid" d="M{at(median):g} 1v14"/>'
    )


def lead_strip(ratio: float, low: float, high: float, largest: float) -> str:
    """Draw a ratio with its interval on a logarithmic axis from below 1 to ``largest``."""
    start = math.log(1 / 1.6)
    scale = (WIDTH - 8) / (math.log(max(largest, 2.0)) - start)

    def at(value: float) -> float:
        return round(min(max((math.log(max(value, 1e-9)) - start) * scale, 0.0), WIDTH - 8) + 4, 1)

    return (
        f'<path class="one" d="M{at(1):g} 0v16"/><path class="span" d="M{at(low):g} 8H{at(high):g}"/>'
        f'<circle class="dot" cx="{at(ratio):g}" cy="8" r="3.5"/>'
    )


def history_strip(figures: Sequence[float], changes: Sequence[int]) -> str:
    """Draw one figure of many runs as a line over zero, with marks where its level changed."""
    longest = max(figures) * 1.05
    step = (WIDTH - 4) / max(len(figures) - 1, 1)
    points = [
        (round(2 + i * step, 1), round(HEIGHT - 1 - each / longest * (HEIGHT - 2), 1)) for i, each in enumerate(figures)
    ]
    line = " ".join(f"{x:g},{y:g}" for x, y in points)
    marks = "".join(f'<path class="changed" d="M{points[i][0]:g} 0v{HEIGHT}"/>' for i in changes)
    return f'{marks}<polyline class="line" points="{line}"/>'
