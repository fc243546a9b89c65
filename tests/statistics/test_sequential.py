"""Decisions that may be looked at after each block: their error rate, and that nothing hides from
them."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from benchmarks import bench_verdicts
from d5suite.statistics.decisions import decide_pairs
from d5suite.statistics.sequential import block_difference, median_bounds


def test_bounds_are_rejected_bets() -> None:
    """Fourteen differences of one sign are the fewest that convince at 1% over 24 benchmarks."""
    alpha = 0.01 / 24
    for count in range(1, 30):
        low, high = median_bounds([0.01] * count, alpha)
        # The mixture bets by Krichevsky and Trofimov's estimate; its gain is the product of odds.
        gain = math.prod(2 * (heads + 0.5) / (heads + 1) for heads in range(count))
        assert (low > 0) == (gain >= 1 / alpha)
        assert (high < math.inf) == (low > -math.inf)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60), st.sampled_from([0.05, 1e-4]))
def test_to_exchange_the_sides_exchanges_the_verdict(differences: list[float], alpha: float) -> None:
    low, high = median_bounds(differences, alpha)
    assert median_bounds([-each for each in differences], alpha) == (-high, -low)
    assert low <= np.median(differences) <= high
    there = decide_pairs(differences, effect=0.01, alpha=alpha).outcome
    back = decide_pairs([-each for each in differences], effect=0.01, alpha=alpha).outcome
    assert back == {"slower": "faster", "faster": "slower"}.get(there, there)


def test_looking_after_every_block_keeps_the_error_rate() -> None:
    """A fixed-size test that is looked at as often fails, so the simulation could show it."""
    random, alpha, looks = np.random.default_rng(0), 0.05, 120
    signs = np.where(random.random((400, looks)) < 0.5, 1.0, -1.0)
    limits = [median_bounds(list(np.arange(1.0, n + 1)), alpha)[0] for n in range(1, looks + 1)]
    tails = np.cumsum(signs > 0, axis=1)
    fewest = np.minimum(tails, np.arange(1, looks + 1) - tails)
    ranks = np.array([0 if limit == -math.inf else int(limit) for limit in limits])
    wrong = np.any((fewest < ranks), axis=1).mean()
    naive = np.any(2 * binom.cdf(fewest, np.arange(1, looks + 1), 0.5) <= alpha, axis=1).mean()
    assert wrong <= alpha
    assert naive > 3 * alpha


def test_samples_of_two_modes_hardly_move_a_blocks_difference() -> None:
    assert block_difference([1, 1, 1, 1, 1.12, 1.12], [1.02, 1.02, 1.02, 1.02, 1.02, 1.1424]) == pytest.approx(
        math.log(1.02)
    )
    assert block_difference([1.0, 2.0], [3.0, 3.0]) == -block_difference([3.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize("kind", bench_verdicts.KINDS)
def test_verdicts_on_pairs_under_the_noise_of_machines(kind: str) -> None:
    """A short form of ``benchmarks/bench_verdicts.py``, of the same draws in every run."""
    random = np.random.default_rng(7)
    told = {
        slowdown: Counter(bench_verdicts.paired_verdicts(random, kind, [slowdown])[0][0] for _ in range(count))
        for slowdown, count in ((0.0, 24), (0.02, 20), (0.05, 20), (-0.05, 20))
    }
    assert told[0.0]["slower"] + told[0.0]["faster"] == 0
    assert told[0.02]["slower"] >= 16
    assert told[0.05]["slower"] >= 19
    assert told[-0.05]["faster"] >= 19
    assert sum(told[slowdown]["faster"] for slowdown in (0.02, 0.05)) == told[-0.05]["slower"] == 0


@pytest.mark.parametrize("kind", bench_verdicts.KINDS)
def test_verdicts_on_two_runs_convict_nobody_and_find_what_exceeds_the_noise(kind: str) -> None:
    random = np.random.default_rng(7)
    told = bench_verdicts.unpaired_verdicts(random, kind, 3, between_runs=0.1, assumed=0.15)
    assert told[0] == "slower"
    assert not {"slower", "faster"} & set(told[1:])


def test_runs_told_to_be_quieter_than_they_are_raise_false_alarms() -> None:
    """So the simulation can see what the variation between runs is for."""
    random = np.random.default_rng(7)
    told = bench_verdicts.unpaired_verdicts(random, "quiet", 0, between_runs=0.1, assumed=0.01)
    assert {"slower", "faster"} & set(told)
