"""Spreads over steps and ranks, and stragglers, that are planted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d5suite.statistics.ranks import spread, straggler_ratio


@given(st.integers(2, 9), st.integers(1, 50), st.floats(1.0, 20.0), st.floats(1e-6, 10))
def test_a_planted_straggler_is_found(ranks: int, steps: int, factor: float, seconds: float) -> None:
    times = np.full((ranks, steps), seconds)
    times[-1] *= factor
    assert straggler_ratio(np.median(times, axis=1).tolist()) == pytest.approx(factor)
    middle = 1 if ranks > 2 else (1 + factor) / 2
    assert spread(times.tolist()).over_ranks == pytest.approx((factor - 1) / middle, abs=1e-9)


@given(st.integers(1, 5), st.lists(st.floats(1e-3, 10), min_size=1, max_size=50))
def test_ranks_alike_have_no_spread_between_them(ranks: int, steps: list[float]) -> None:
    found = spread([steps] * ranks)
    assert found.over_ranks == 0 and (found.over_steps > 0) == (np.ptp(np.percentile(steps, [5, 95])) > 0)
