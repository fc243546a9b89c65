"""Levels of a benchmark over many runs: where they changed, how runs vary, where the next one lies.

Candidates come from PELT (Killick, Fearnhead and Eckley, JASA 107, 2012) with the cost of ranks
(Lung-Yut-Fong, Lévy-Leduc and Cappé, 2011), by the library ruptures: it assumes no distribution,
and an outlier weighs as much as any other run. As in MongoDB's and Apache Otava's pipelines (Daly
et al., "The use of change point detection to identify software performance regressions in a
continuous integration system", ICPE 2020), a candidate must then pass a test of the runs before and
after it, and be large enough. A slow drift becomes steps.

Imports NumPy, its neighbours and, lazily, ruptures and SciPy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from d5suite.statistics.quantiles import student_half_width
from d5suite.statistics.ratios import Ratio

PENALTY = 3.0
"""Least gain of a change, in units of the logarithm of the number of runs."""

FEWEST = 4
"""Fewest runs between two changes: the Mann-Whitney test needs four, even against many."""

P_VALUE = 1e-3
"""Largest p-value of the rank test between the runs before and after a change."""


RESOLUTION = 0.002
"""Least run-to-run standard deviation of a figure: a few equal runs do not make it 0."""

OUTLIER = 7.5
"""Median absolute deviations beyond which a run is an outlier: 5 normal standard deviations."""


class LevelChange(NamedTuple):
    """A change of a benchmark's level.

    Attributes
    ----------
    place : int
        Index of the first run of the new level.
    ratio : float
        The median of the new level over that of the old one.
    """

    place: int
    ratio: float


class Level(NamedTuple):
    """Runs of one level.

    Attributes
    ----------
    median : float
    spread : float
        Standard deviation of the runs' logarithms; infinite for a single run.
    runs : int
    """

    median: float
    spread: float
    runs: int


def level_changes(values: Sequence[float], *, effect: float, alpha: float = P_VALUE) -> list[LevelChange]:
    """Return the changes of a benchmark's level, the oldest first.

    Parameters
    ----------
    values : sequence of float, shape (n,)
        One figure of each run, in order of time; positive.
    effect : float
        Least relative change of a median.
    alpha : float
        Largest p-value of a change; `P_VALUE` if that is smaller.
    """
    bounds = [0, *change_points(values, effect=effect, p_value=min(P_VALUE, alpha)), len(values)]
    medians = [statistics.median(values[start:end]) for start, end in pairwise(bounds) if end]
    return [LevelChange(place, new / old) for place, (old, new) in zip(bounds[1:-1], pairwise(medians), strict=True)]


def level_of(values: Sequence[float]) -> Level:
    """Return the median and the spread of runs of one level.

    Outliers hardly change either: runs farther from the median than `OUTLIER` times the median
    absolute deviation are left out of the standard deviation.
    """
    logs = [math.log(value) for value in values]
    middle = statistics.median(logs)
    farthest = OUTLIER * statistics.median(abs(log - middle) for log in logs)
    near = [log for log in logs if abs(log - middle) <= farthest]
    spread = max(statistics.stdev(near), RESOLUTION) if len(near) > 1 else math.inf
    return Level(math.exp(middle), spread, len(logs))


def next_run(level: Level, new: float, confidence: float) -> Ratio:
    """Return the ratio of one more run to a level, with its prediction interval.

    Student's t interval of a next observation: Hahn and Meeker, "Statistical Intervals", 1991, 4.7.
    """
    log = math.log(new / level.median)
    half = student_half_width(confidence, level.runs - 1) * level.spread * math.sqrt(1 + 1 / level.runs)
    return Ratio.from_logs(log, log - half, log + half, confidence, "level", level.runs)


def change_points(
    values: Sequence[float], *, effect: float, penalty: float = PENALTY, p_value: float = P_VALUE
) -> list[int]:
    """Return the indices of the runs with which a new level began.

    Parameters
    ----------
    values : sequence of float
        One figure of each run, in order of time; positive, shape (n,).
    effect : float
        The least relative change of a median.
    penalty, p_value : float
        See `PENALTY` and `P_VALUE`.
    """
    return list(_change_points(tuple(values), effect, penalty, p_value))


@lru_cache(maxsize=64)
def _change_points(values: tuple[float, ...], effect: float, penalty: float, p_value: float) -> list[int]:
    """Remember the answers: one verdict asks several times about the same runs."""
    from ruptures import Pelt
    from scipy.stats import mannwhitneyu

    logs = np.log(np.asarray(values, np.float64))
    if len(logs) < 2 * FEWEST or np.ptp(logs) == 0:
        return []
    candidates = Pelt(model="rank", min_size=FEWEST, jump=1).fit(logs[:, None])
    cuts = [0, *candidates.predict(penalty * math.log(len(logs)))]
    while len(cuts) > 2:
        p_values = []
        for first, middle, last in zip(cuts, cuts[1:], cuts[2:], strict=False):
            before, after = logs[first:middle], logs[middle:last]
            small = abs(np.median(after) - np.median(before)) < math.log1p(effect)
            p_values.append(1.0 if small else float(mannwhitneyu(before, after).pvalue))
        weakest = int(np.argmax(p_values))
        if p_values[weakest] < p_value:
            break
        del cuts[weakest + 1]
    return cuts[1:-1]
