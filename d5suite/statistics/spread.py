"""How much medians differ from run to run of one program, measured from repeated runs.

Imports NumPy and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from d5suite.statistics.medians import Summary
from d5suite.statistics.quantiles import chi_squared_limit, normal_half_width, student_half_width

CONFIDENCE = 0.95
"""Confidence of the intervals for which a spread is inflated."""

NOISIER = 0.01
"""Probability, over all benchmarks, that any is called noisier than the others if none is."""


class Spread(NamedTuple):
    """How one benchmark's medians differ from run to run.

    Attributes
    ----------
    runs : int
    observed : float
        Standard deviation of the medians' logarithms.
    between_runs : float
        Standard deviation to assume between further runs, beside the noise within them. It is
        inflated, because few runs may be alike by chance.
    """

    runs: int
    observed: float
    between_runs: float


class Spreads(NamedTuple):
    """Spreads of several benchmarks.

    Attributes
    ----------
    each : list of Spread
        By benchmark.
    all : float
        ``between_runs`` of all of them together.
    noisier : list of int
        Places of the benchmarks that vary more than the others; they need their own value.
    """

    each: list[Spread]
    all: float
    noisier: list[int]


def spreads_of(benchmarks: Sequence[Sequence[Summary]]) -> Spreads:
    """Return how benchmarks vary from run to run.

    Parameters
    ----------
    benchmarks : sequence of sequences of Summary
        Summaries of the runs of one program, by benchmark; at least two runs each.

    Notes
    -----
    The variance between runs is that of the medians, less the mean variance within runs. A
    standard deviation from n runs is multiplied by the quantile of Student's t with n - 1 degrees
    of freedom over the normal one, so that intervals that take it as known have their confidence.
    A benchmark is noisier than the others by the chi-squared test against the pooled variance.
    """
    variances = np.asarray([np.var([math.log(run.median) for run in runs], ddof=1) for runs in benchmarks])
    within = np.asarray([_within(runs) for runs in benchmarks])
    freedoms = np.asarray([len(runs) - 1 for runs in benchmarks])
    quantiles = np.asarray([chi_squared_limit(NOISIER / len(benchmarks), int(each)) for each in freedoms])
    kept = np.full(len(benchmarks), True)
    while True:  # one noisy benchmark must not make all others look noisy, so the noisiest goes first
        pooled = float(np.average(variances[kept], weights=freedoms[kept]))
        limits = quantiles / freedoms * pooled
        beyond = np.flatnonzero(kept & (variances > limits) & (pooled > 0))
        if not len(beyond) or kept.sum() == 1:
            break
        kept[beyond[np.argmax(variances[beyond] / limits[beyond])]] = False
    return Spreads(
        [
            Spread(int(freedom) + 1, math.sqrt(variance), _assumed(variance, own, int(freedom)))
            for variance, own, freedom in zip(variances, within, freedoms, strict=True)
        ],
        _assumed(pooled, float(np.mean(within[kept])), int(min(freedoms[kept]))),
        [int(place) for place in np.flatnonzero(~kept)],
    )


def _within(runs: Sequence[Summary]) -> float:
    known = [run.log_error**2 for run in runs if math.isfinite(run.log_error)]
    return float(np.mean(known)) if known else 0.0


def _assumed(variance: float, within: float, freedom: int) -> float:
    inflation = (student_half_width(CONFIDENCE, freedom) / normal_half_width(CONFIDENCE)) ** 2
    return math.sqrt(max(inflation * variance - within, 0.0))
