"""Ratio of the times of two steps, from rounds of one or several launches.

In a round all competitors take a turn, so a disturbance of the round affects all of them. Every
second round has the reverse order. So a drift in time moves the ratios of the two directions apart
by equal amounts, and half the distance of their medians is subtracted.

Rounds of one launch say nothing about another launch, whose processes have another memory layout
and thread placement. So the interval comes from the medians of launches: T. Kalibera and R.
Jones, "Rigorous benchmarking in reasonable time" (ISMM 2013), section 6: with n repetitions at the
highest level, whose means have the sample variance S², the mean is known to ± t(n - 1) S / √n;
lower levels count through these means. Here a launch is represented by the median of its rounds,
which a disturbed round does not move, and all is done with logarithms, so that the ratio of b to a
is the inverse of that of a to b. One launch has the interval of the median of its rounds, and
`LAUNCH_SD` between launches is assumed.

Launches of one run say nothing about what all of them share: the state of the machine's memory, its
neighbours, its clock. That differs from run to run by `RUN_SD`.

An order must hold in the next run, too. So intervals are √2 times as wide: the difference of two
runs' means has twice the variance of one, and the interval covers the ratio of a repeat run.

Imports NumPy, `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median  # faster than NumPy's for a dozen values

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.statistics.intervals import interpolated_interval, interval_ranks
from d5suite.statistics.quantiles import normal_half_width, student_half_width
from d5suite.statistics.ratios import Ratio

LAUNCH_SD = 0.055
"""Standard deviation of a ratio's logarithm from launch to launch, assumed if there was only one
launch. In 50 runs of LeNet on two cores (``results/history``) the ratio of two backends had 6%: in
a fifth of the runs both were slower, one by 44% and the other by 24%, for some 15 s. So the machine
moved the ratio, not the memory layout of one worker. With 5% in all, the interval of one run
covered another run's ratio in 79% of the pairs of runs; with 6.5%, in 96%. In 20 runs of ResNet-50
the ratio had 2 to 4%."""

RUN_SD = 0.04
"""Standard deviation of a ratio's logarithm from run to run, beside the one between launches. It is
always assumed: launches of one run do not show it, and a few launches are often alike by chance. In
a simulation of those LeNet runs, the interval of three launches covered another run's ratio in 96%
of the cases; with 3.5%, in 92%."""


OF_TWO_RUNS = math.sqrt(2)
"""Standard deviation of the difference of two runs over the standard deviation of one."""


def ratio_of_rounds(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    confidence: float = 0.95,
    launch_sd: float = LAUNCH_SD,
    run_sd: float = RUN_SD,
) -> Ratio:
    """Return how many times as long b takes as a, with an interval for a repeat run.

    Parameters
    ----------
    a, b : sequence of sequences of float
        By launch, the time of each round, positive; round i of a pairs with round i of b. Odd
        rounds have the reverse order of even ones.
    confidence : float
        Confidence of the interval, in (0, 1).
    launch_sd : float
        Standard deviation of the logarithm between launches, assumed if there is only one.
    run_sd : float
        Standard deviation of the logarithm between runs, beside that between launches.

    Returns
    -------
    Ratio
        By method "launches", or by method "rounds" if there is only one launch.

    Raises
    ------
    ConfigurationError
        If there is no round, or rounds or launches do not pair.
    """
    if not a or list(map(len, a)) != list(map(len, b)) or not all(map(len, a)):
        raise ConfigurationError("rounds of two series do not pair", hint="Compare what took turns in one run.")
    differences = [without_drift(np.log(b_times) - np.log(a_times)) for a_times, b_times in zip(a, b, strict=True)]
    launches = [median(launch.tolist()) for launch in differences]
    count, rounds = len(launches), len(differences[0])
    middle, normal = float(np.mean(launches)), normal_half_width(confidence)
    if count > 1:
        error = float(np.std(launches, ddof=1)) / math.sqrt(count)
        of_launches = student_half_width(confidence, count - 1) * error
        half = OF_TWO_RUNS * math.hypot(of_launches, normal * run_sd)
        return Ratio.from_logs(middle, middle - half, middle + half, confidence, "launches", count)
    if interval_ranks(rounds, confidence).confidence == 0:
        return Ratio.from_logs(middle, -math.inf, math.inf, confidence, "rounds", rounds)
    low, high = interpolated_interval(list(differences[0]), confidence)
    between = normal * math.hypot(launch_sd, run_sd)
    low = middle - OF_TWO_RUNS * math.hypot(middle - low, between)
    high = middle + OF_TWO_RUNS * math.hypot(high - middle, between)
    return Ratio.from_logs(middle, low, high, confidence, "rounds", rounds)


def least_lead(confidence: float = 0.95) -> float:
    """Return the ratio below which one launch decides nothing, however steady its rounds are."""
    return math.exp(OF_TWO_RUNS * normal_half_width(confidence) * math.hypot(LAUNCH_SD, RUN_SD))


def without_drift(differences: np.ndarray) -> np.ndarray:
    """Remove drift from the differences of rounds: it shifts odd and even rounds oppositely.

    Parameters
    ----------
    differences : ndarray of float, shape (n,)
        Odd rounds have the reverse order.
    """
    if len(differences) < 2:
        return differences
    shift = (median(differences[::2].tolist()) - median(differences[1::2].tolist())) / 2
    return differences - np.where(np.arange(len(differences)) % 2, -shift, shift)
