"""The statistics of timings: rules that hold for all inputs, and coverage on simulated data."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import bdtr

from d5suite.errors import ConfigurationError
from d5suite.statistics.intervals import (
    count_outliers,
    drift,
    interpolated_interval,
    interval_ranks,
    launch_interval,
    median_interval,
    relative_half_width,
)

times = st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=60)
confidences = st.floats(0.01, 0.9999)


@given(times, confidences)
def test_the_interval_contains_the_median_and_consists_of_samples(samples: list[float], confidence: float) -> None:
    low, high = median_interval(samples, confidence)
    assert low <= np.median(samples) <= high
    assert {low, high} <= set(samples)


@given(times, confidences, confidences)
def test_more_confidence_never_narrows_the_interval(samples: list[float], one: float, other: float) -> None:
    less, more = sorted((one, other))
    (low, high), (lower, higher) = median_interval(samples, less), median_interval(samples, more)
    assert lower <= low <= high <= higher


@given(times, confidences)
@example([1.0] * 6 + [5.0] * 4, 0.875)
def test_an_interpolated_interval_lies_in_that_of_whole_samples(samples: list[float], confidence: float) -> None:
    (low, high), (lower, higher) = interpolated_interval(samples, confidence), median_interval(samples, confidence)
    around = np.median(samples) * np.array([1 - 1e-12, 1 + 1e-12])
    assert lower <= low <= around[1] and around[0] <= high <= higher


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 20])
@pytest.mark.parametrize("kind", ["normal", "laplace", "logistic"])
def test_an_interpolated_interval_has_the_confidence_that_was_wanted(n: int, kind: str) -> None:
    """The range of 8 samples has 99.2%, so an outlier widens it; between ranks lies 95%."""
    draw = np.random.default_rng(n)
    found = [interpolated_interval(getattr(draw, kind)(size=n).tolist()) for _ in range(4000)]
    assert np.mean([low <= 0 <= high for low, high in found]) == pytest.approx(0.95, abs=0.021)
    low, high = interpolated_interval([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 90])
    assert low < 1.1 and high < 10


@given(times, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(samples: list[float], random: Random) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)
    assert median_interval(shuffled) == median_interval(samples)


@given(st.integers(1, 2000), confidences)
def test_the_ranks_are_the_tightest_symmetric_ones_that_reach_the_confidence(n: int, confidence: float) -> None:
    def outside(k: int) -> float:  # probability that at most k of n samples lie below the median
        return math.fsum(math.comb(n, i) / 2**n for i in range(k + 1)) if n < 200 else float("nan")

    low, high, reached = interval_ranks(n, confidence)
    assert low + high == n - 1
    assert reached >= confidence or low == 0
    if n < 200:
        assert reached == pytest.approx(max(0.0, 1 - 2 * outside(low)))
        assert low >= (n - 1) // 2 or 1 - 2 * outside(low + 1) < confidence + 1e-12


@pytest.mark.parametrize(  # tables of the sign test, two-sided 5%
    ("n", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8), (50, 18), (100, 40)]
)
def test_the_ranks_are_those_of_published_tables(n: int, rank: int) -> None:
    assert interval_ranks(n).low == rank - 1


@pytest.mark.parametrize("n", [5, 53, 54, 999, 10_000])
def test_the_coverage_is_scipys(n: int) -> None:
    for confidence in (0.5, 0.9, 0.95, 0.99):
        low, _, reached = interval_ranks(n, confidence)
        assert reached == pytest.approx(max(0.0, 1 - 2 * bdtr(float(low), n, 0.5)), abs=1e-9)


def test_below_six_samples_there_is_only_the_range() -> None:
    for n in range(1, 6):
        assert median_interval(list(range(1, n + 1))) == (1, n)
        assert interval_ranks(n).confidence < 0.95
        assert relative_half_width([1.0] * n) == math.inf
    assert interval_ranks(5).confidence == pytest.approx(0.9375)


@pytest.mark.parametrize("n", [6, 10, 31, 100])
def test_the_interval_covers_the_true_median_as_often_as_it_says(n: int) -> None:
    random = np.random.default_rng(20)
    samples = random.lognormal(mean=-3, sigma=1, size=(4000, n))  # skewed, median exp(-3)
    ordered = np.sort(samples, axis=1)
    ranks = interval_ranks(n)
    covered = np.mean((ordered[:, ranks.low] <= np.exp(-3)) & (np.exp(-3) <= ordered[:, ranks.high]))
    assert covered == pytest.approx(ranks.confidence, abs=0.012)  # three standard errors


def test_the_relative_half_width_is_the_larger_side() -> None:
    samples = [9.0, 10.0, 10.0, 10.0, 10.0, 13.0]
    assert median_interval(samples) == (9.0, 13.0)
    assert relative_half_width(samples) == pytest.approx(0.3)


@pytest.mark.parametrize(("n", "confidence"), [(0, 0.95), (5, 0.0), (5, 1.0)])
def test_an_interval_of_nothing_is_refused(n: int, confidence: float) -> None:
    with pytest.raises(ConfigurationError):
        interval_ranks(n, confidence)


@pytest.mark.parametrize("n", [10, 100, 5000])
def test_drift_finds_a_trend_and_its_size(n: int) -> None:
    noise = np.random.default_rng(3).normal(0, 0.01, n)
    falling = drift(list(1.0 - 0.2 * np.arange(n) / (n - 1) + noise))
    assert falling.relative_change == pytest.approx(-0.2 / 0.9, abs=0.03)
    assert falling.p_value < 0.001
    level = drift(list(1.0 + noise))
    assert abs(level.relative_change) < 0.03
    assert level.p_value > 0.01


@given(
    st.one_of(
        st.lists(st.integers(1, 9).map(float), min_size=3, max_size=60),  # with equal values
        st.lists(st.floats(1e-9, 1e6), min_size=3, max_size=60, unique=True),
        st.integers(3, 60).map(lambda n: [float(2 * n - at) for at in range(n)]),
    )
)
def test_drift_is_that_of_scipy(samples: list[float]) -> None:
    if len(set(samples)) == 1:
        return
    position = np.arange(len(samples))
    slope = scipy.stats.theilslopes(samples, position).slope
    found = drift(samples)
    assert found.relative_change == pytest.approx(slope * (len(samples) - 1) / np.median(samples), rel=1e-9, abs=1e-12)
    assert found.p_value == pytest.approx(scipy.stats.kendalltau(position, samples).pvalue, rel=1e-9, abs=1e-9)


def test_drift_of_a_constant_or_very_short_series_is_none() -> None:
    assert drift([1.0] * 20) == drift([1.0]) == drift([1.0, 0.5]) == (0.0, 1.0)


def test_outliers_are_counted_on_either_side() -> None:
    samples = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
    assert count_outliers(samples) == (0, 0)
    assert count_outliers([*samples, 5.0, 9.0, 0.1]) == (1, 2)


def test_an_interval_over_launches_holds_the_median_of_the_next_one() -> None:
    """Launches differ by 3%, samples of one by 1%: all samples together say too little."""
    random = np.random.default_rng(1)
    held = {"launches": 0, "pooled": 0}
    for _ in range(400):
        launches = [list(np.exp(random.normal(random.normal(0, 0.03), 0.01, 20))) for _ in range(3)]
        (low, high), confidence = launch_interval(launches)
        assert confidence >= 0.95
        held["launches"] += low <= 1 <= high
        low, high = median_interval([sample for launch in launches for sample in launch])
        held["pooled"] += low <= 1 <= high
    assert held["launches"] >= 370 and held["pooled"] < 250


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_an_interval_over_one_launch_is_that_of_its_samples(samples: list[float]) -> None:
    found, confidence = launch_interval([samples])
    assert (found, confidence) == (median_interval(samples), interval_ranks(len(samples)).confidence)
    (low, high), _ = launch_interval([samples, samples])
    assert low <= np.median(samples) <= high
