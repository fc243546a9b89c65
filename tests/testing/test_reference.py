"""The recorded training runs: what they notice, and backends' other modes, which no kit runs."""

from __future__ import annotations

import numpy as np
import pytest

from d5suite.backends import select
from d5suite.testing import reference
from d5suite.testing.networks import TASKS
from d5suite.testing.reference import RecordedRun
from d5suite.validate.norms import FLOAT64
from d5suite.validate.training.trajectory import Trajectory
from tests.testing.test_kit import kit

OTHER_MODES = [name for name in ("keras:torch", "keras:jax", "mxnet:imperative")
               if select(name).backend.problem(select(name).mode) is None]  # fmt: skip
"""Backends' default modes are compared with the recorded runs by their kits."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_MODES)
def test_another_mode_agrees_with_the_recorded_runs(name: str) -> None:
    done = kit(name, "d5suite.testing.test_training", options=["-k", "recorded_run and fp64"])
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(TASKS)} passed" in done.stdout


@pytest.mark.parametrize("wrong", ["", "loss", "element", "swapped"])
def test_one_wrong_number_shows(wrong: str) -> None:
    """An element that is off by 1e-7 of the tensor, or two elements in each other's place."""
    random = np.random.default_rng(0)
    losses, tensor = random.standard_normal(20) + 3, random.standard_normal((20, 50))
    norm = float(np.linalg.norm(tensor))
    recorded = RecordedRun(losses.tolist(), {"tensor": [*reference._summary("tensor", tensor), norm]})
    if wrong == "loss":
        losses[7] *= 1 + 1e-7
    if wrong == "element":
        tensor[3, 4] += 1e-7 * norm
    if wrong == "swapped":
        tensor[0, :2] = tensor[0, 1::-1]
    checks = recorded.compare(Trajectory(losses, {"tensor": tensor}), FLOAT64, "fp64")
    assert [check.passed for check in checks] == [wrong != "loss", wrong in ("", "loss")]
