"""Spread of step times over steps and over ranks. Imports NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class RankSpread(NamedTuple):
    """Relative spreads of the times of steps.

    Attributes
    ----------
    over_steps : float
        Distance from the 5th to the 95th percentile of all times, over their median.
    over_ranks : float
        Distance from the fastest to the slowest rank of a step, over the median of its ranks; the
        median over all steps.
    """

    over_steps: float
    over_ranks: float

    def to_dict(self) -> dict[str, Any]:
        """Return the spreads as JSON-able values."""
        return self._asdict()


def spread(seconds: Sequence[Sequence[float]]) -> RankSpread:
    """Return the spreads of times given by rank and step; all ranks have equally many steps."""
    times = np.asarray(seconds, np.float64)
    low, middle, high = np.percentile(times, [5, 50, 95])
    of_steps = np.ptp(times, axis=0) / np.median(times, axis=0)
    return RankSpread(float((high - low) / middle), float(np.median(of_steps)))


def straggler_ratio(seconds: Sequence[float]) -> float:
    """Return the ratio of the slowest rank's time to the mean of the others'; 1 for one rank."""
    others = sorted(seconds)[:-1] or list(seconds)
    return max(1.0, float(np.max(seconds) / np.mean(others)))
