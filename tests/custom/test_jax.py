"""Tests of custom operators specific to JAX: modes, and exceptions that XLA cannot propagate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from d5suite.backends.jax import BACKEND
from d5suite.custom import CustomOperator
from d5suite.network.operation import Operation
from tests.conftest import require_installed

require_installed("jax")


@pytest.fixture(autouse=True, scope="module")
def _configured() -> None:
    BACKEND.load("runtime").configure(threads=2, seed=0, device="cpu")


def double(x: np.ndarray) -> np.ndarray:
    return 2 * x


def by_double(inputs: Any, outputs: Any, gradients: Any) -> tuple[np.ndarray, ...]:
    return (2 * gradients[0],)


def overwriting(x: np.ndarray) -> np.ndarray:
    x += 1
    return x


def operation(custom: CustomOperator) -> Operation:
    return Operation(custom.op_type, {"x": (3,)}, precision="fp64", custom=custom)


DOUBLE = CustomOperator("Double", ["x"], ["y"], [("Add", ["x", "x"], ["y"], {})], forward=double, backward=by_double)
OVERWRITING = CustomOperator("Overwriting", ["x"], ["y"], [("Relu", ["x"], ["y"], {})], forward=overwriting)


@pytest.mark.parametrize("mode", ["jit", "eager"])
def test_every_mode_runs_python_functions_in_float64(mode: str) -> None:
    operator = BACKEND.operator(operation(DOUBLE), mode=mode)
    fed = operator.feed([np.array([1, 2, 1 / 3])])
    backward = operator.backward(fed)
    np.testing.assert_array_equal(operator.fetch(operator.forward(*fed))[0], [2, 4, 2 / 3])
    gradients = backward(*operator.feed_gradients([np.full(3, 1 / 3)]))
    np.testing.assert_array_equal(operator.fetch_gradients(gradients)[0], np.full(3, 2 / 3))


def test_an_exception_of_a_python_function_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    operator = BACKEND.operator(operation(OVERWRITING))
    import jax

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Overwriting failed with code 3"):
        operator.fetch(operator.forward(*operator.feed([np.ones(3)])))
    assert "read-only" in capfd.readouterr().err


def test_no_gradient_of_an_operator_without_one() -> None:
    operator = BACKEND.operator(operation(OVERWRITING))
    with pytest.raises(ValueError, match=r"Overwriting.* cannot be differentiated"):
        operator.backward(operator.feed([np.ones(3)]))
