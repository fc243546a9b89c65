"""Latency and bandwidth are found again in times made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize  # noqa: F401  (loaded late by the module: not within Hypothesis's deadline)
from hypothesis import given
from hypothesis import strategies as st

from d5suite.errors import ConfigurationError
from d5suite.statistics.messages import fit_line

SIZES = [4.0**power for power in range(1, 15)]
alphas = st.floats(-8, -2).map(lambda power: 10**power)
betas = st.floats(-12, -6).map(lambda power: 10**power)


@given(alphas, betas, st.integers(0, 2**31), st.floats(0, 0.05))
def test_planted_latency_and_bandwidth_are_found(alpha: float, beta: float, seed: int, noise: float) -> None:
    factors = np.random.default_rng(seed).lognormal(0, noise, len(SIZES))
    found = fit_line(SIZES, [(alpha + beta * size) * each for size, each in zip(SIZES, factors, strict=True)])
    assert found.residual <= 3 * noise + 1e-6
    # Six standard errors of the fit, from the inverse of its normal equations.
    parts = np.array([[alpha / (alpha + beta * size), beta * size / (alpha + beta * size)] for size in SIZES])
    of_alpha, of_beta = 6 * noise * np.sqrt(np.diag(np.linalg.pinv(parts.T @ parts))) + 1e-5
    if beta * SIZES[0] < alpha:
        assert found.alpha_s == pytest.approx(alpha, rel=of_alpha)
    if beta * SIZES[-1] > alpha:
        assert found.beta_s_per_byte == pytest.approx(beta, rel=of_beta)


@given(alphas, betas, st.integers(0, len(SIZES) - 1), st.floats(2, 50))
def test_one_disturbed_size_moves_little(alpha: float, beta: float, place: int, factor: float) -> None:
    times = [alpha + beta * size for size in SIZES]
    times[place] *= factor
    found = fit_line(SIZES, times)
    others = [(size, time) for i, (size, time) in enumerate(zip(SIZES, times, strict=True)) if i != place]
    errors = sorted(abs(found.seconds(size) / time - 1) for size, time in others)
    assert errors[len(errors) // 2] < 0.1


@given(alphas, betas, st.floats(-3, 3))
def test_another_unit_of_time_changes_nothing_else(alpha: float, beta: float, power: float) -> None:
    times = [alpha + beta * size for size in SIZES]
    one, other = fit_line(SIZES, times), fit_line(SIZES, [10**power * time for time in times])
    assert other.alpha_s == pytest.approx(10**power * one.alpha_s, rel=1e-4, abs=1e-9 * alpha * 10**power)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [([], []), ([4], [1]), ([4, 4], [1, 2]), ([4, 8], [1]), ([4, 8], [0, 1]), ([4, 8], [1, math.nan]),
     ([-4, 8], [1, 2])],
)  # fmt: skip
def test_what_gives_no_line_is_refused(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="no latency and bandwidth"):
        fit_line(sizes, seconds)
