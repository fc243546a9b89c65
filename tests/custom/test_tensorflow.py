"""Custom operators in TensorFlow: modes (XLA has none) and the memory of graphs."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from d5suite.backends.tensorflow import BACKEND
from d5suite.custom import CustomOperator
from d5suite.errors import NetworkError
from d5suite.network.operation import Operation
from tests.conftest import require_installed

require_installed("tensorflow")


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


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_every_mode_runs_python_functions_in_float64(mode: str) -> None:
    operator = BACKEND.operator(operation(DOUBLE), mode=mode)
    fed = operator.feed([np.array([1, 2, 1 / 3])])
    backward = operator.backward(fed)
    gc.collect()  # the graph that the two halves were cut from
    np.testing.assert_array_equal(operator.fetch(operator.forward(*fed))[0], [2, 4, 2 / 3])
    gradients = backward(*operator.feed_gradients([np.full(3, 1 / 3)]))
    np.testing.assert_array_equal(operator.fetch_gradients(gradients)[0], np.full(3, 2 / 3))


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_inputs_cannot_be_overwritten(mode: str) -> None:
    operator = BACKEND.operator(operation(OVERWRITING), mode=mode)
    import tensorflow as tf

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="read-only"):
        operator.forward(*operator.feed([np.ones(3)]))


def test_no_gradient_of_an_operator_without_one() -> None:
    operator = BACKEND.operator(operation(OVERWRITING))
    with pytest.raises(NetworkError, match="Overwriting: it has no backward pass"):
        operator.backward(operator.feed([np.ones(3)]))


def test_xla_is_refused_with_the_reason() -> None:
    with pytest.raises(NetworkError, match="XLA compiles only its own operators"):
        BACKEND.operator(operation(DOUBLE), mode="xla")
