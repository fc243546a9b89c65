"""Quantiles of distributions, for intervals.

Imports `scipy.special` when one is first asked for: `scipy.stats`, which has them too, takes half a
second to import.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

# A page asks for these thousands of times, and SciPy is slow to answer.


@lru_cache
def normal_half_width(confidence: float) -> float:
    """Return the half width of a two-sided interval, in standard deviations."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


@lru_cache
def student_half_width(confidence: float, freedom: float) -> float:
    """Return the half width of a two-sided interval by Student's t, in standard errors.

    Parameters
    ----------
    confidence : float
        In (0, 1).
    freedom : float
        Degrees of freedom, above 0; may be infinite.
    """
    if math.isinf(freedom):
        return normal_half_width(confidence)
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


@lru_cache
def chi_squared_limit(p_value: float, freedom: int) -> float:
    """Return what a chi-squared variable exceeds with a probability of `p_value`."""
    from scipy.special import chdtri

    return float(chdtri(freedom, p_value))
