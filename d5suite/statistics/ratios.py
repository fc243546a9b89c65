"""Ratios of two series that were sampled in turn. Imports `d5suite.errors` and its neighbours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from d5suite.errors import ConfigurationError
from d5suite.statistics.intervals import median_interval


class Ratio(NamedTuple):
    """The median of per-round ratios with its distribution-free 95% interval, over n rounds."""

    median: float
    ci95: tuple[float, float]
    n: int

    def against(self, limit: float) -> str:
        """Return whether a limit is "kept" or "exceeded", or "undecided" if it lies inside."""
        low, high = self.ci95
        return "exceeded" if low > limit else "undecided" if high > limit else "kept"


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return how many times as long a takes as b, from rounds that ran both.

    The median of the ratios a[i] / b[i]; a disturbance that slows a whole round cancels. The
    interval is `d5suite.statistics.intervals.median_interval` of the ratios; below 6 rounds it is
    their range.

    Raises
    ------
    ConfigurationError
        If the series differ in length or are empty, or a time is zero.
    """
    if len(a) != len(b) or not len(a) or min(b) <= 0:
        raise ConfigurationError(
            f"cannot compute a ratio from {len(a)} and {len(b)} samples",
            hint="Use the samples of one sample_alternating() run, of steps that take measurable time.",
        )
    ratios = ratios_of(a, b)
    return Ratio(statistics.median(ratios), median_interval(ratios), len(ratios))


def ratios_of(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return a[i] / b[i], infinite where b[i] is not positive."""
    return [x / y if y > 0 else float("inf") for x, y in zip(a, b, strict=True)]
