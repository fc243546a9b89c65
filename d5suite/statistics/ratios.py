"""How many times as long one thing takes as another: the one type of a ratio with its interval.

Estimates are made here (samples taken in turn), in `d5suite.statistics.medians` (two runs),
`d5suite.statistics.rounds` (rounds of launches), `d5suite.statistics.decisions` (pairs) and
`d5suite.statistics.history` (a run and earlier ones). Imports `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from d5suite.errors import ConfigurationError
from d5suite.statistics.intervals import interval_ranks, median_interval

LARGEST_LOG = 709.0
"""Logarithm of about the largest float."""


class Ratio(NamedTuple):
    """How many times as long the second of two things takes as the first.

    Attributes
    ----------
    value : float
    low, high : float
        Interval of the ratio; 0 and infinity if there are too few samples for one.
    confidence : float
        Probability that the interval covers the true ratio, or for the methods "rounds", "launches"
        and "level" the ratio of a repeat run.
    method : {"samples", "rounds", "launches", "medians", "pairs", "level", "exact"}
        How it was estimated.
    n : int
        Number of items of the kind that ``method`` names; for "medians" the samples of both sides,
        for "level" the runs.
    """

    value: float
    low: float
    high: float
    confidence: float
    method: str
    n: int

    @classmethod
    def from_logs(cls, value: float, low: float, high: float, confidence: float, method: str, n: int) -> Ratio:
        """Return a ratio from the logarithms of its value and of its interval."""
        return cls(exp(value), exp(low), exp(high), confidence, method, n)

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high."""
        return self.low, self.high

    @property
    def includes_one(self) -> bool:
        """Whether the opposite order is plausible, too."""
        return self.low <= 1 <= self.high

    def against(self, limit: float) -> str:
        """Return "kept" or "exceeded", or "undecided" if the interval contains the limit."""
        return "exceeded" if self.low > limit else "undecided" if self.high > limit else "kept"


def exp(value: float) -> float:
    """Return the exponential; infinite on overflow, as for absurd times in a file."""
    return math.exp(value) if value < LARGEST_LOG else math.inf


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
    confidence = interval_ranks(len(ratios)).confidence
    return Ratio(statistics.median(ratios), *median_interval(ratios), confidence, "samples", len(ratios))


def ratios_of(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return a[i] / b[i], infinite where b[i] is not positive."""
    return [x / y if y > 0 else float("inf") for x, y in zip(a, b, strict=True)]
