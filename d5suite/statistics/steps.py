"""Where a benchmark's level changed over many runs.

Candidates come from PELT (Killick, Fearnhead and Eckley, JASA 107, 2012) with the cost of ranks
(Lung-Yut-Fong, Lévy-Leduc and Cappé, 2011), by the library ruptures: runs need no distribution, and
a wild run weighs as much as any other. As in MongoDB's and Apache Otava's pipelines (Daly et al.,
"The use of change point detection to identify software performance regressions in a continuous
integration system", ICPE 2020), a candidate must then pass a test of the runs before and after it,
and be large enough. A slow drift becomes steps.

Imports NumPy and, lazily, ruptures and SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PENALTY = 3.0
"""Least gain of a change, in units of the logarithm of the number of runs."""

FEWEST = 4
"""Runs between two changes; Mann and Whitney's test needs four beside many."""

P_VALUE = 1e-3
"""Largest p-value of the rank test between the runs before and after a change."""


def steps(values: Sequence[float], *, effect: float, penalty: float = PENALTY, p_value: float = P_VALUE) -> list[int]:
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
    from ruptures import Pelt
    from scipy.stats import mannwhitneyu

    logs = np.log(np.asarray(values, np.float64))
    if len(logs) < 2 * FEWEST or np.ptp(logs) == 0:
        return []
    found = Pelt(model="rank", min_size=FEWEST, jump=1).fit(logs[:, None]).predict(penalty * math.log(len(logs)))
    cuts = [0, *found]
    while len(cuts) > 2:
        doubts = []
        for first, middle, last in zip(cuts, cuts[1:], cuts[2:], strict=False):
            before, after = logs[first:middle], logs[middle:last]
            small = abs(np.median(after) - np.median(before)) < math.log1p(effect)
            doubts.append(1.0 if small else float(mannwhitneyu(before, after).pvalue))
        weakest = int(np.argmax(doubts))
        if doubts[weakest] < p_value:
            break
        del cuts[weakest + 1]
    return cuts[1:-1]
