"""Figures that a measurement or a pass asks to be judged, such as a 99th percentile.

Each run has one value of a figure, so its noise is unknown: only a worsening by a factor counts.
Imports the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Figure(NamedTuple):
    """One judged figure of a benchmark.

    Attributes
    ----------
    value : float
        Not negative.
    better : {"lower", "higher"}
        Which values are better.
    least : float
        Smallest difference that counts, in the figure's own unit.
    """

    value: float
    better: str
    least: float = 0.0


def worsening(base: Figure, new: Figure) -> float:
    """Return how many times worse a figure became; 1 if the difference is too small to count.

    Infinite if a figure rises from 0, or falls to 0 where higher is better.
    """
    if abs(new.value - base.value) <= new.least:
        return 1.0
    worse, than = (new.value, base.value) if new.better == "lower" else (base.value, new.value)
    return worse / than if than else math.inf


def worsened(base: Mapping[str, Figure], new: Mapping[str, Figure], times: float) -> dict[str, float]:
    """Return by how much figures of both runs became worse, where it is more than `times` times."""
    both = {name: worsening(base[name], figure) for name, figure in new.items() if name in base}
    return {name: factor for name, factor in both.items() if factor > times}
