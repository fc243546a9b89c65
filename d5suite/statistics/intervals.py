"""Medians with distribution-free intervals, trends and outliers of a series of samples.

Times are skewed and have rare large outliers (an interrupt, another process), so a mean and its
standard error describe neither the typical time nor its uncertainty. The median's interval from
order statistics assumes no distribution, as Hoefler and Belli, "Scientific Benchmarking of Parallel
Computing Systems" (SC 2015, rules 5 to 7), recommend. asv uses it at 99%, and a Laplace model of
the noise for few samples; here few samples give their range and its actual coverage.

Every function takes a sequence of finite floats of shape (n,), n >= 1, in one unit. Imports NumPy,
`d5suite.errors` and its neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.statistics.quantiles import student_half_width

OUTLIER_MADS = 5.0
"""Scaled median absolute deviations from the median beyond which a sample is an outlier. A normal
distribution has 6e-7 of its mass there, so outliers are disturbance, not spread."""

EXACT_SAMPLES = 33
"""Samples up to which a trend's p-value is exact, as in SciPy."""

NORMAL_MAD_SCALE = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution, 1 / Phi^-1(3/4)."""


class IntervalRanks(NamedTuple):
    """0-based ranks of the sorted samples that bound the median, and the interval's coverage."""

    low: int
    high: int
    confidence: float


class Trend(NamedTuple):
    """The trend of a series.

    Attributes
    ----------
    relative_change : float
        Theil-Sen slope times the length of the series, over the median: -0.1 is a linear fall by
        10% from first to last sample.
    p_value : float
        From the Mann-Kendall test against a monotone trend; at least 2 / n! for n samples.
    """

    relative_change: float
    p_value: float


class Outliers(NamedTuple):
    """Numbers of samples far from the median, which are never dropped."""

    low: int
    high: int


@lru_cache(maxsize=4096)
def interval_ranks(n: int, confidence: float = 0.95) -> IntervalRanks:
    """Return the ranks of the order statistics that bound the median.

    The number of n independent samples below the median is binomial(n, 1/2). With k the largest
    count for which P(X <= k) <= (1 - confidence) / 2, the interval from the (k+1)-th smallest to
    the (k+1)-th largest sample covers the median with probability 1 - 2 P(X <= k) >= confidence.
    (David and Nagaraja, Order Statistics, section 7.1.)

    Few samples have no such k: the range of 5 covers the median with probability 0.9375 only. The
    ranks are then those of the range. The returned ``confidence`` is always the actual coverage.

    Parameters
    ----------
    n : int
        Number of samples, at least 1.
    confidence : float
        Least coverage wanted, in (0, 1).

    Raises
    ------
    ConfigurationError
        If n or confidence is out of bounds.
    """
    if n < 1 or not 0 < confidence < 1:
        raise ConfigurationError(
            f"no interval of the median for {n} samples at confidence {confidence}",
            hint="Give at least one sample and a confidence between 0 and 1, such as 0.95.",
        )
    cumulative = _heads(n)
    k = max(int(np.searchsorted(cumulative, (1 - confidence) / 2, side="right")) - 1, 0)
    return IntervalRanks(k, n - 1 - k, max(0.0, 1 - 2 * float(cumulative[k])))


def _heads(n: int) -> np.ndarray:
    """Return the probabilities of at most 0, 1, ..., (n - 1) // 2 heads in n tosses of a coin.

    Like SciPy's ``bdtr``, but faster, and without an import that takes a third of a second in each
    worker.
    """
    heads = np.arange((n + 1) // 2)
    if n <= 53:  # exact in float64: rounding must not miss a confidence
        return np.cumsum([float(math.comb(n, k)) for k in heads.tolist()]) / 2.0**n
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])  # their logarithms
    return np.cumsum(np.exp(factorials[n] - factorials[heads] - factorials[n - heads] - n * math.log(2)))


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the distribution-free interval of the median.

    For n < 6 (at 95%) it is the range of the samples, whose coverage is
    ``interval_ranks(n, confidence).confidence`` (93.75% for n = 5, 0 for n = 1).

    Parameters
    ----------
    samples : sequence of float, shape (n,)
        Independent samples.
    confidence : float
        Coverage wanted, in (0, 1).

    Returns
    -------
    (low, high) : tuple of float
        Two of the samples, around their median.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    ranks = interval_ranks(len(ordered), confidence)
    return float(ordered[ranks.low]), float(ordered[ranks.high])


def interpolated_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the median between order statistics, at the confidence wanted.

    `median_interval` of 8 samples is their range, which covers 99.2%, because the interval without
    the outermost samples covers only 93%; so one odd sample can widen it without limit. Ends
    interpolated between the two cover 95% (Hettmansperger and Sheather, "Confidence intervals based
    on interpolated order statistics", Statistics & Probability Letters 4, 1986). The coverage is
    nearly the same for all symmetric distributions, such as that of the logarithm of the ratio of
    two similar series.

    Parameters
    ----------
    samples : sequence of float, shape (n,)
        Independent samples. Of fewer than 6 (at 95%) the interval is their range.
    confidence : float
        Coverage wanted, in (0, 1).

    Returns
    -------
    (low, high) : tuple of float
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    outer = interval_ranks(n, confidence)
    k = outer.low + 1
    if outer.confidence <= confidence or 2 * k >= n:
        return float(ordered[outer.low]), float(ordered[outer.high])
    inner = max(0.0, 1 - 2 * float(_heads(n)[k])) if k < (n + 1) // 2 else 0.0
    part = (outer.confidence - confidence) / (outer.confidence - inner)
    inwards = (n - k) * part / (k + (n - 2 * k) * part)
    low = ordered[k - 1] + inwards * (ordered[k] - ordered[k - 1])
    high = ordered[n - k] - inwards * (ordered[n - k] - ordered[n - k - 1])
    return float(low), float(high)


def launch_interval(launches: Sequence[Sequence[float]], confidence: float = 0.95) -> tuple[tuple[float, float], float]:
    """Return an interval of the median of several launches of a program, and its confidence.

    Samples of one launch resemble each other, so all samples together say too little about the next
    launch. The interval is Student's t of the launches' medians, in logarithms (Kalibera and Jones,
    "Rigorous benchmarking in reasonable time", ISMM 2013), and at least as wide as the interval of
    all samples. For one launch it is the interval of its samples.

    Parameters
    ----------
    launches : sequence of sequences of float
        Samples by launch, positive, in one unit.
    confidence : float
        Least coverage wanted, in (0, 1).

    Returns
    -------
    (low, high) : tuple of float
        In the samples' unit.
    float
        The confidence.
    """
    every = [sample for launch in launches for sample in launch]
    low, high = median_interval(every, confidence)
    sure = interval_ranks(len(every), confidence).confidence
    if len(launches) < 2:
        return (low, high), sure
    levels = np.log([float(np.median(launch)) for launch in launches])
    half = student_half_width(confidence, len(levels) - 1) * float(np.std(levels, ddof=1) / math.sqrt(len(levels)))
    middle = float(np.mean(levels))
    return (min(low, math.exp(middle - half)), max(high, math.exp(middle + half))), max(sure, confidence)


def relative_half_width(samples: Sequence[float], confidence: float = 0.95) -> float:
    """Return the larger distance from the median to an end of its interval, over the median.

    Infinite if there are too few samples for the confidence, or the median is not positive.
    """
    median = float(np.median(samples))
    if interval_ranks(len(samples), confidence).confidence < confidence or median <= 0:
        return float("inf")
    low, high = median_interval(samples, confidence)
    return max(high - median, median - low) / median


def drift(samples: Sequence[float]) -> Trend:
    """Return the trend of a series: size by Theil and Sen, significance by Mann and Kendall.

    Series are reduced to at most 500 block medians, because the slope takes all pairs.
    """
    values = np.asarray(samples, dtype=np.float64)
    if len(values) > 500:
        values = np.array([np.median(block) for block in np.array_split(values, 500)])
    median = float(np.median(values))
    if len(values) < 3 or median <= 0 or np.all(values == values[0]):
        return Trend(0.0, 1.0)
    earlier, later = np.triu_indices(len(values), 1)
    rises = values[later] - values[earlier]
    slope = float(np.median(rises / (later - earlier)))
    return Trend(slope * (len(values) - 1) / median, _trend_p_value(values, int(np.sign(rises).sum())))


def _trend_p_value(values: np.ndarray, rising: int) -> float:
    """Return a trend's two-sided p-value from rising less falling pairs, as SciPy's `kendalltau`.

    Exact for up to `EXACT_SAMPLES` distinct values, by Kendall's recurrence for the number of
    orders with so many falling pairs; else by the normal approximation, with its correction for
    ties.
    `scipy.stats` is not imported for it: that takes more than a second, in each worker.
    """
    n = len(values)
    pairs = n * (n - 1) // 2
    equal = np.unique(values, return_counts=True)[1]
    if n <= EXACT_SAMPLES and len(equal) == n:
        fewer = (pairs - abs(rising)) // 2
        orders = [1]
        for size in range(2, n + 1):
            total = list(itertools.accumulate([*orders, *[0] * (size - 1)]))
            orders = [each - (total[at - size] if at >= size else 0) for at, each in enumerate(total)]
        return min(1.0, 2 * sum(orders[: fewer + 1]) / math.factorial(n))
    of_all, of_equal = ((t * (t - 1) * (2 * t + 5)).sum() for t in (np.array([n]), equal))
    variance = float(of_all - of_equal) / 18
    return math.erfc(abs(rising) / math.sqrt(2 * variance))


def count_outliers(samples: Sequence[float]) -> Outliers:
    """Count samples more than `OUTLIER_MADS` scaled deviations below and above the median.

    If more than half of the samples are equal, the deviation is 0 and every other sample counts.
    """
    values = np.asarray(samples, dtype=np.float64)
    distance = values - np.median(values)
    limit = OUTLIER_MADS * NORMAL_MAD_SCALE * float(np.median(np.abs(distance)))
    return Outliers(int(np.sum(distance < -limit)), int(np.sum(distance > limit)))
