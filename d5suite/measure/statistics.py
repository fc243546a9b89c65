"""The statistics of timings: small, pure functions of a series of samples.

Why medians and order statistics: times are skewed and have rare large outliers (an interrupt, another process), so a
mean and its standard error describe neither the typical time nor its uncertainty. The interval of the median from
order statistics needs no assumption about the distribution, which is what Hoefler and Belli, "Scientific Benchmarking
of Parallel Computing Systems" (SC 2015, rules 5 to 7), ask for. asv does the same at 99% and falls back on a model of
the noise (Laplace) when the samples are few; here few samples give their range, and the coverage that it has is told.

Imports NumPy, and SciPy late. Every function takes a sequence of finite floats of shape (n,), n >= 1, in any one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from d5suite.errors import ConfigurationError

OUTLIER_MADS = 5.0
"""A sample this many scaled median absolute deviations from the median counts as an outlier: beyond it a normal
distribution has 6e-7 of its mass, so that what is counted is disturbance and not spread."""

NORMAL_MAD_SCALE = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution, 1 / Phi^-1(3/4)."""


class IntervalRanks(NamedTuple):
    """Which order statistics bound the median: 0-based ranks into the sorted samples, and the coverage they give."""

    low: int
    high: int
    confidence: float


class Drift(NamedTuple):
    """How a series changes from its beginning to its end.

    Attributes
    ----------
    relative_change : float
        Theil-Sen slope times the length of the series, over the median: -0.1 means the last sample is 10% lower than
        the first, as far as a straight line says.
    p_value : float
        Of Kendall's test that there is no monotone trend (Mann-Kendall). n samples cannot give less than 2 / n!.
    """

    relative_change: float
    p_value: float


class Outliers(NamedTuple):
    """Samples far from the median, counted and never dropped."""

    low: int
    high: int


@lru_cache(maxsize=4096)
def interval_ranks(n: int, confidence: float = 0.95) -> IntervalRanks:
    """Ranks of the order statistics that bound the median of a continuous distribution.

    The number of n independent samples below the median is binomial(n, 1/2). With k the largest count for which
    P(X <= k) <= (1 - confidence) / 2, the interval from the (k+1)-th smallest to the (k+1)-th largest sample covers the
    median with probability 1 - 2 P(X <= k) >= confidence. (David and Nagaraja, Order Statistics, section 7.1.)

    For few samples there is no such k: the range of 5 samples covers the median with probability 0.9375 only. Then the
    ranks are those of the range, and the returned ``confidence``, which is always the one reached, is below the one
    asked for.

    Parameters
    ----------
    n : int
        Number of samples, at least 1.
    confidence : float
        The least coverage wanted, in (0, 1).

    Raises
    ------
    ConfigurationError
        If n or confidence is outside its bounds.
    """
    if n < 1 or not 0 < confidence < 1:
        raise ConfigurationError(
            f"no interval of the median for {n} samples at confidence {confidence}",
            hint="Give at least one sample and a confidence between 0 and 1, such as 0.95.",
        )
    from scipy.special import bdtr

    cumulative = bdtr(np.arange((n + 1) // 2, dtype=np.float64), n, 0.5)
    k = max(int(np.searchsorted(cumulative, (1 - confidence) / 2, side="right")) - 1, 0)
    return IntervalRanks(k, n - 1 - k, max(0.0, 1 - 2 * float(cumulative[k])))


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free interval of the median.

    For n < 6 (at 95%) order statistics give no interval: the range of the samples is returned, and
    ``interval_ranks(n, confidence).confidence`` tells the coverage it has (93.75% for n = 5, 0 for n = 1).

    Parameters
    ----------
    samples : sequence of float, shape (n,)
        Independent samples.
    confidence : float
        The coverage wanted, in (0, 1).

    Returns
    -------
    (low, high) : tuple of float
        Two of the samples, in their unit; the sample median lies between them.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    ranks = interval_ranks(len(ordered), confidence)
    return float(ordered[ranks.low]), float(ordered[ranks.high])


def relative_half_width(samples: Sequence[float], confidence: float = 0.95) -> float:
    """Return the larger distance from the median to an end of its interval, over the median: 0.02 is "within 2%".

    Infinite when the interval does not reach the confidence (too few samples), and where the median is not positive.
    """
    median = float(np.median(samples))
    if interval_ranks(len(samples), confidence).confidence < confidence or median <= 0:
        return float("inf")
    low, high = median_interval(samples, confidence)
    return max(high - median, median - low) / median


def drift(samples: Sequence[float]) -> Drift:
    """Trend over a series in the order it was taken: size by Theil and Sen's slope, significance by Mann and Kendall.

    Long series are thinned to at most 500 block medians, because the slope looks at all pairs.
    """
    values = np.asarray(samples, dtype=np.float64)
    if len(values) > 500:
        values = np.array([np.median(block) for block in np.array_split(values, 500)])
    median = float(np.median(values))
    if len(values) < 3 or median <= 0 or np.all(values == values[0]):
        return Drift(0.0, 1.0)
    from scipy.stats import kendalltau, theilslopes

    position = np.arange(len(values))
    slope = float(theilslopes(values, position).slope)
    return Drift(slope * (len(values) - 1) / median, float(kendalltau(position, values).pvalue))


def count_outliers(samples: Sequence[float]) -> Outliers:
    """Count the samples more than `OUTLIER_MADS` scaled median absolute deviations below and above the median.

    Where more than half of the samples are equal the deviation is 0 and every other sample counts.
    """
    values = np.asarray(samples, dtype=np.float64)
    distance = values - np.median(values)
    limit = OUTLIER_MADS * NORMAL_MAD_SCALE * float(np.median(np.abs(distance)))
    return Outliers(int(np.sum(distance < -limit)), int(np.sum(distance > limit)))
