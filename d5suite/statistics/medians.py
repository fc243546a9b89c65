"""By how much a median changed between two runs, and how certain that is.

Two launches of one program on one machine differ by more than their samples show: memory layout,
placement of threads, neighbours (Kalibera and Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013). An interval from the samples of two runs alone is therefore too narrow, so the intervals
here include the variation between runs.

Imports NumPy, its neighbours and, lazily, SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from d5suite.statistics.quantiles import student_half_width
from d5suite.statistics.ratios import Ratio

_Z_99 = 2.5758293035489004
"""The normal distribution's quantile of 0.995."""


class Summary(NamedTuple):
    """Statistics of a run's samples.

    Attributes
    ----------
    median : float
        Positive.
    log_error : float
        Standard error of the median's logarithm, within the run; infinite if it is not known.
    n : int
        Number of samples.
    samples : tuple of float
        Empty if only their summary is known.
    """

    median: float
    log_error: float
    n: int
    samples: tuple[float, ...] = ()


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize positive samples, shape (n,), n >= 1.

    The standard error is McKean and Schrader's ("A comparison of methods for studentizing the
    sample median", Communications in Statistics B 13, 1984): the distance between two order
    statistics over that between the matching normal quantiles. It holds for few samples and heavy
    tails. For one sample it is infinite.
    """
    logs = np.sort(np.log(np.asarray(samples, np.float64)))
    n = len(logs)
    rank = max(1, round((n + 1) / 2 - _Z_99 * math.sqrt(n / 4)))
    error = float(logs[n - rank] - logs[rank - 1]) / (2 * _Z_99) if n > 1 else math.inf
    return Summary(float(np.median(samples)), error, n, tuple(map(float, samples)))


def ratio_of_medians(base: Summary, new: Summary, *, between_runs: float, confidence: float) -> Ratio:
    """Return the ratio of two runs' medians with an interval.

    Parameters
    ----------
    base, new : Summary
    between_runs : float
        Standard deviation of the logarithm of a median from run to run.
    confidence : float
        Coverage of the interval, in (0, 1).

    Notes
    -----
    The interval is symmetric in logarithms. Student's t has the degrees of freedom of Welch and
    Satterthwaite; the variation between runs counts as known.
    """
    shift = math.log(new.median) - math.log(base.median)
    within = [(side.log_error**2, side.n - 1) for side in (base, new)]
    variance = sum(square for square, _ in within) + 2 * between_runs**2
    how = confidence, "medians", base.n + new.n
    if not math.isfinite(variance):
        return Ratio.from_logs(shift, -math.inf, math.inf, *how)
    uncertainty = sum(square**2 / freedom for square, freedom in within if square)
    freedom = variance**2 / uncertainty if uncertainty else math.inf
    half = student_half_width(confidence, freedom) * math.sqrt(variance) if variance else 0.0
    return Ratio.from_logs(shift, shift - half, shift + half, *how)


def rank_test(base: Summary, new: Summary) -> float | None:
    """Return the two-sided p-value of Mann and Whitney's rank test; None without samples."""
    if not base.samples or not new.samples:
        return None
    from scipy.stats import mannwhitneyu

    if len({*base.samples, *new.samples}) == 1:
        return 1.0
    return float(mannwhitneyu(base.samples, new.samples).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests: Holm, Scandinavian Journal of Statistics 6 (1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def separated(base: Summary, new: Summary) -> bool:
    """Return whether all samples of one side lie above all samples of the other."""
    return max(base.samples) < min(new.samples) or max(new.samples) < min(base.samples)


def smallest_p(base: Summary, new: Summary) -> float:
    """Return the smallest p-value that the rank test can give for these numbers of samples."""
    return 2 / math.comb(base.n + new.n, base.n)
