"""Ranks that are not alike for once: stragglers, noise, failures and restarts.

Imports NumPy, `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from d5suite.errors import ConfigurationError, D5Error

DRAWS = 20
"""Steps that are drawn where each is simulated for itself."""

QUANTILES = (0.5, 0.95)
"""Of the slowest rank, where all ranks count as that one."""


@dataclass(frozen=True)
class ComputeNoise:
    """How long computing takes, in times of its median.

    Attributes
    ----------
    factors : numpy.ndarray
        Measured ones, or drawn ones; each is as likely.
    source : str
    """

    factors: np.ndarray
    source: str

    def draw(self, ranks: int, random: np.random.Generator) -> list[float]:
        """Return a factor for each rank."""
        return [float(each) for each in random.choice(self.factors, ranks)]

    def slowest(self, ranks: int, quantile: float) -> float:
        """Return a quantile of the largest of so many independent factors."""
        return float(np.quantile(self.factors, quantile ** (1 / ranks), method="inverted_cdf"))


def of_samples(samples: Sequence[float], source: str) -> ComputeNoise:
    """Return the noise of measured samples.

    Raises
    ------
    ConfigurationError
        If there are too few.
    """
    if len(samples) < 10:
        raise ConfigurationError(f"{len(samples)} samples are too few for a distribution: at least 10", where=source)
    values = np.sort(np.asarray(samples, float))
    return ComputeNoise(values / np.median(values), f"{len(values)} samples of {source}")


def lognormal(sigma: float) -> ComputeNoise:
    """Return log-normal noise with median 1, by 9,999 quantiles of it."""
    from scipy.special import ndtri

    return ComputeNoise(np.exp(sigma * ndtri((np.arange(9_999) + 0.5) / 9_999)), f"log-normal, σ = {sigma:g}")


@dataclass(frozen=True)
class Noisy:
    """Steps with noise.

    Attributes
    ----------
    median_s, high_s : float
        Median and 95% quantile of a step.
    steps : int
        That were drawn; 0 where all ranks count as slow as the slowest.
    source : str
    """

    median_s: float
    high_s: float
    steps: int
    source: str


def noisy(run: Callable[[Sequence[float] | float], float], noise: ComputeNoise, ranks: int, seed: int = 0) -> Noisy:
    """Return steps with noise.

    Where every rank can be simulated, each step has factors of its own. Where there are too many, a
    rank of the slowest kind stands for all: in a synchronous scheme all wait for the slowest one,
    so the step takes at most that long, and no rank that is late at any bucket is faster.

    Parameters
    ----------
    run : callable
        Returns the seconds of a step with these factors by rank, or with one for all; raises
        `D5Error` if there are too many messages for the first.
    noise : ComputeNoise
    ranks : int
    seed : int
    """
    random = np.random.default_rng(seed)
    try:
        found = [run(noise.draw(ranks, random)) for _ in range(DRAWS)]
    except ConfigurationError:
        raise
    except D5Error:
        median, high = (run(noise.slowest(ranks, each)) for each in QUANTILES)
        return Noisy(median, high, 0, noise.source)
    return Noisy(float(np.median(found)), float(np.quantile(found, 0.95)), DRAWS, noise.source)


@dataclass(frozen=True)
class Failures:
    """What failures cost.

    Attributes
    ----------
    mtbf_s : float
        Mean time between failures of all ranks together.
    interval_s : float
        Seconds of training between two checkpoints.
    best_interval_s, young_s, daly_s : float
        The interval that is best by the exact expectation, by Young's and by Daly's formula.
    efficiency : float
        Useful seconds in a second, expected.
    drawn : float
        The same, of drawn runs.
    """

    mtbf_s: float
    interval_s: float
    best_interval_s: float
    young_s: float
    daly_s: float
    efficiency: float
    drawn: float


def expected(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the seconds that an interval of training and its checkpoint are expected to take.

    Exact for independent failures, also during restarts and checkpoints: M e^(R/M) (e^((τ + δ)/M)
    - 1) (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006, equation 20).
    """
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)


def young(checkpoint_s: float, mtbf_s: float) -> float:
    """Return √(2 δ M) (Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17(9), 1974)."""  # noqa: D205, D209
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly(checkpoint_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order optimum (the same paper, equation 37)."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def failures(
    ranks: int, *, rank_mtbf_s: float, checkpoint_s: float, restart_s: float, interval_s: float | None = None,
    seed: int = 0, intervals: int = 2_000,
) -> Failures:  # fmt: skip
    """Return what failures cost a synchronous run: any rank's failure sends all to the checkpoint.

    Parameters
    ----------
    ranks : int
    rank_mtbf_s : float
        Mean time between failures of one rank; they are independent, and times exponential.
    checkpoint_s, restart_s : float
        Seconds to write a checkpoint, and to start again from one.
    interval_s : float, optional
        Training between checkpoints; the best by default.
    seed : int
    intervals : int
        Intervals of the drawn run.
    """
    from scipy.optimize import minimize_scalar

    mtbf = rank_mtbf_s / ranks

    def check(whole_s: float) -> None:
        if whole_s + restart_s > 500 * mtbf:
            raise ConfigurationError(
                f"{ranks} ranks fail every {mtbf:.3g} s: {whole_s + restart_s:.3g} s without one hardly ever pass",
                where="--failures", hint="Write checkpoints more often, or faster.",
            )  # fmt: skip

    check(checkpoint_s)

    def cost(log_interval: float) -> float:
        interval = math.exp(log_interval)
        return math.log(math.expm1((interval + checkpoint_s) / mtbf)) - math.log(interval)

    bounds = (math.log(mtbf * 1e-9), math.log(mtbf * 50))
    best = math.exp(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x)
    interval = interval_s or best
    random = np.random.default_rng(seed)
    work = interval + checkpoint_s
    check(work)
    return Failures(
        mtbf, interval, best, young(checkpoint_s, mtbf), daly(checkpoint_s, mtbf),
        interval / expected(interval, checkpoint_s, restart_s, mtbf),
        interval * intervals / _drawn(work, restart_s, mtbf, intervals, random),
    )  # fmt: skip


def _drawn(work_s: float, restart_s: float, mtbf_s: float, intervals: int, random: np.random.Generator) -> float:
    """Return the seconds of a drawn run: so many intervals, each repeated until no rank fails."""

    def lost(need: float, count: int) -> float:
        """Return the seconds lost before so many stretches pass, each after failures of its own."""
        return float(_failed(need, int(_tries(need, count).sum())).sum())

    def _tries(need: float, count: int) -> np.ndarray:
        return random.geometric(max(math.exp(-need / mtbf_s), 1e-300), count) - 1

    def _failed(need: float, count: int) -> np.ndarray:
        """Draw times to a failure, given that it comes before the stretch has passed."""
        return -mtbf_s * np.log1p(random.random(count) * math.expm1(-need / mtbf_s))

    tries = int(_tries(work_s, intervals).sum())
    total = intervals * work_s + float(_failed(work_s, tries).sum())
    return total + tries * restart_s + (lost(restart_s, tries) if restart_s and tries else 0.0)
