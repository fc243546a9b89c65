"""Quantiles are those of `scipy.stats`, which takes longer to import."""

from __future__ import annotations

import math

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from d5suite.statistics.quantiles import chi_squared_limit, normal_half_width, student_half_width

CONFIDENCES = st.floats(0.01, 0.999999)


@given(CONFIDENCES)
def test_of_the_normal_distribution(confidence: float) -> None:
    assert normal_half_width(confidence) == pytest.approx(scipy.stats.norm.ppf((1 + confidence) / 2), rel=1e-9)


@given(CONFIDENCES, st.one_of(st.integers(1, 10**6), st.floats(0.5, 1e6), st.just(math.inf)))
def test_of_students_t(confidence: float, freedom: float) -> None:
    wanted = scipy.stats.t.ppf((1 + confidence) / 2, freedom)
    assert student_half_width(confidence, freedom) == pytest.approx(wanted, rel=1e-9)


@given(st.floats(1e-9, 0.999), st.integers(1, 1000))
def test_of_chi_squared(p_value: float, freedom: int) -> None:
    assert chi_squared_limit(p_value, freedom) == pytest.approx(scipy.stats.chi2.isf(p_value, freedom), rel=1e-9)
