"""Work that is left to fetching an answer, and fetches that are slow because caches are cold."""

import numpy as np
import pytest

from d5suite.instruments.outside import Fetches, time_fetches
from d5suite.measurements.base import check_fetches


@pytest.mark.parametrize(
    ("first_s", "call_s", "late"),
    [
        (4.83e-4, 0.067, False),  # Keras on a busy machine: 0.7% of the call
        (4.83e-4, 0.001, True),
        (2e-3, 0.067, True),  # 3% of the call
        (0.067, 0.0001, True),  # the whole call
        (1e-4, 0.0001, False),
    ],
)
def test_a_fetch_is_late_if_it_holds_more_than_a_hundredth_of_the_call(
    first_s: float, call_s: float, late: bool
) -> None:
    check = check_fetches(Fetches(first_s, 6.8e-5), call_s)
    assert check.passed is not late
    assert f"the first fetch took {first_s * 1e3:.3g} ms" in check.detail


@pytest.mark.parametrize(("first_s", "late"), [(4.9e-3, False), (0.05, True)])
def test_a_fetch_is_not_late_if_new_memory_is_slow(first_s: float, late: bool) -> None:
    check = check_fetches(Fetches(first_s, 2.9e-4, memory_s=3e-3), 4e-6)
    assert check.passed is not late


def test_new_memory_is_filled_before_a_fetch() -> None:
    assert time_fetches([lambda: [np.zeros(4), None]], "cpu", nbytes=1 << 24).memory_s > 1e-4
