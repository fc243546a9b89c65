"""Bounds of a median that hold however often one looks, for decisions after each pair.

Each block runs two sides in turn, in random order, and gives one difference. A hypothesis of the
form "the differences' median is m" makes the sign of each difference less m a fair coin,
whatever the noise: skewed, of several modes, or changing from block to block. So the mixture of
bets on that coin is a martingale, and exceeds 1 / alpha with probability at most alpha at any time,
however often one looks (Ville's inequality). The mixture is Krichevsky and Trofimov's; the values
of m not yet rejected are a confidence sequence of the median. Howard and Ramdas, "Sequential
estimation of quantiles with applications to A/B testing and best-arm identification", Bernoulli 28
(2022); Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B
86 (2024).

Imports NumPy and, lazily, SciPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4096)
def _rank(count: int, alpha: float) -> int:
    """Return the largest 1-based rank whose order statistic bounds the median; 0 if none does."""
    from scipy.special import betaln

    below = np.arange(count // 2 + 1)  # the gain is symmetric about the middle, and falls towards it
    gain = count * math.log(2) + betaln(below + 0.5, count - below + 0.5) - betaln(0.5, 0.5)
    return int(np.sum(gain >= math.log(1 / alpha)))


def fewest(alpha: float) -> int:
    """Return the fewest differences that bound the median with probability 1 - alpha."""
    return next(count for count in itertools.count(1) if _rank(count, alpha))


def median_bounds(differences: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return bounds of the median that hold at all times with probability 1 - alpha.

    Parameters
    ----------
    differences : sequence of float, shape (n,)
        In the order in which they were taken.
    alpha : float
        In (0, 1).
    """
    count = len(differences)
    rank = _rank(count, alpha)
    if not rank:
        return -math.inf, math.inf
    ordered = np.sort(np.asarray(differences, np.float64))
    return float(ordered[rank - 1]), float(ordered[count - rank])


def block_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the shift from a to b of the logarithms of one block's samples, which are positive.

    It is the median of all pairs' differences (Hodges and Lehmann, Annals of Mathematical
    Statistics 34, 1963). Samples of two modes move it much less than a difference of medians.
    Exchanging the sides changes its sign.
    """
    return float(np.median(np.subtract.outer(np.log(b), np.log(a))))
