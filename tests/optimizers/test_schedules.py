"""Learning-rate schedules: their formulas, warm-up, and bad settings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d5suite.errors import ConfigurationError
from d5suite.optimizers.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    Polynomial,
    Schedule,
    StepDecay,
    schedule_from_dict,
)


@given(
    st.sampled_from([Constant, StepDecay, Cosine, Polynomial]),
    st.floats(0, 5),
    st.floats(0, 1),
    st.integers(1, 50),
)
def test_schedules_warm_up_in_equal_parts_and_never_leave_0_to_1(
    kind: type[Schedule], warmup: float, start: float, per_epoch: int
) -> None:
    schedule = kind(warmup_epochs=warmup, warmup_start=start)
    steps = round(warmup * per_epoch)
    factors = [schedule.factor(step, per_epoch) for step in range(90 * per_epoch)]
    assert all(0 < factor <= 1 for factor in factors), (min(factors), max(factors))
    if steps:
        assert factors[steps - 1] == pytest.approx(1)
        np.testing.assert_allclose(np.diff([start, *factors[:steps]]), (1 - start) / steps, atol=1e-12)
    after = factors[steps:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert schedule_from_dict(schedule.to_dict()) == schedule


def test_schedules_follow_their_formulas() -> None:
    step = StepDecay(milestones=(2, 4), factor_each=0.1)
    assert [step.factor(i, 2) for i in (3, 4, 7, 8)] == pytest.approx([1, 0.1, 0.1, 0.01])
    cosine = Cosine(epochs=10, warmup_epochs=2, final=0.2)
    assert cosine.factor(6 * 4, 4) == pytest.approx(0.2 + 0.8 * 0.5)  # half of what is left after the warm-up
    assert cosine.factor(10 * 4, 4) == pytest.approx(0.2)
    assert Polynomial(epochs=10, power=2).factor(5, 1) == pytest.approx(0.25)
    assert set(SCHEDULES) == {"constant", "step", "cosine", "polynomial"}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"name": "cosin"}, "unknown schedule"),
        ({"name": "step", "gamma": 1}, "no setting 'gamma'"),
        ({"name": "step", "milestones": [3, 2]}, "milestones"),
        ({"name": "cosine", "epochs": 2, "warmup_epochs": 2}, "fall"),
        ({"name": "constant", "warmup_start": 2}, "warmup_start"),
    ],
)
def test_bad_schedules_are_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        schedule_from_dict(settings)
