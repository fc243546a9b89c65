"""By how much a median changed between two runs, and how sure that is.

Two launches of one program on one machine differ by more than their samples show: memory layout,
placement of threads, neighbours (Kalibera and Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013). An interval from the samples of two runs alone is therefore too narrow, and here the
variation between runs is a part of it.

Imports NumPy and, lazily, SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_Z_99 = 2.5758293035489004
"""The normal distribution's quantile of 0.995."""


class Series(NamedTuple):
    """Statistics of a run's samples.

    Attributes
    ----------
    median : float
        Positive.
    log_error : float
        Standard error of the median's logarithm, within the run; infinite if it is not known.
    rounds : int
        Number of samples.
    samples : tuple of float
        Empty if only their summary is known.
    """

    median: float
    log_error: float
    rounds: int
    samples: tuple[float, ...] = ()


class Change(NamedTuple):
    """A ratio of medians, new over base, with an interval."""

    ratio: float
    low: float
    high: float


def series_of(samples: Sequence[float]) -> Series:
    """Summarise positive samples, shape (n,), n >= 1.

    The standard error is McKean and Schrader's ("A comparison of methods for studentizing the
    sample median", Communications in Statistics B 13, 1984): the distance of two order statistics
    over its normal quantile. It holds for few samples and heavy tails. One sample has none.
    """
    logs = np.sort(np.log(np.asarray(samples, np.float64)))
    n = len(logs)
    rank = max(1, round((n + 1) / 2 - _Z_99 * math.sqrt(n / 4)))
    error = float(logs[n - rank] - logs[rank - 1]) / (2 * _Z_99) if n > 1 else math.inf
    return Series(float(np.median(samples)), error, n, tuple(map(float, samples)))


def change(base: Series, new: Series, *, between_runs: float, confidence: float) -> Change:
    """Return the ratio of two runs' medians with an interval.

    Parameters
    ----------
    base, new : Series
    between_runs : float
        Standard deviation of the logarithm of a median from run to run.
    confidence : float
        Coverage of the interval, in (0, 1).

    Notes
    -----
    The interval is symmetric in logarithms. Student's t has the degrees of freedom of Welch and
    Satterthwaite; the variation between runs counts as known.
    """
    from scipy.stats import t

    shift = math.log(new.median) - math.log(base.median)
    within = [(each.log_error**2, each.rounds - 1) for each in (base, new)]
    variance = sum(square for square, _ in within) + 2 * between_runs**2
    if not math.isfinite(variance):
        return Change(exp(shift), 0.0, math.inf)
    doubt = sum(square**2 / freedom for square, freedom in within if square)
    freedom = variance**2 / doubt if doubt else math.inf
    half = float(t.ppf((1 + confidence) / 2, freedom)) * math.sqrt(variance) if variance else 0.0
    return Change(exp(shift), exp(shift - half), exp(shift + half))


def exp(value: float) -> float:
    """Return the exponential; infinite where a float overflows."""
    return math.exp(value) if value < 700 else math.inf


def rank_test(base: Series, new: Series) -> float | None:
    """Return the two-sided p-value of Mann and Whitney's rank test; None without samples."""
    if not base.samples or not new.samples:
        return None
    from scipy.stats import mannwhitneyu

    if len({*base.samples, *new.samples}) == 1:
        return 1.0
    return float(mannwhitneyu(base.samples, new.samples).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number: Holm, Scandinavian Journal of Statistics 6 (1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def separated(base: Series, new: Series) -> bool:
    """Return whether all samples of one series lie above all of the other."""
    return max(base.samples) < min(new.samples) or max(new.samples) < min(base.samples)


def fewest_p(base: Series, new: Series) -> float:
    """Return the smallest p-value that the rank test can give for these numbers of samples."""
    return 2 / math.comb(base.rounds + new.rounds, base.rounds)
