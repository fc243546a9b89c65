"""Custom operators on every backend: C++ and Python against NumPy, integers, several outputs, failures, the cache."""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import erf

from d5suite.backends import Backend, discover
from d5suite.custom import CustomOperator, compile_library
from d5suite.errors import NetworkError
from d5suite.network.operation import Operation, Tensor

BACKENDS = ["deep500", "jax", "mxnet", "tensorflow", "torch"]

EXAMPLE = Path(__file__).parents[1] / "operators" / "test_bias_gelu.py"

PICK = """
#include "d5suite_operator.h"

extern "C" int d5_output_shape(const d5_call *call, int32_t output, int64_t *shape, int32_t *rank) {
    *rank = output == 0 ? 1 : 0;
    shape[0] = call->inputs[0].shape[0];
    return D5_OK;
}

extern "C" int d5_forward(const d5_call *call) {
    if (call->inputs[0].dtype != D5_FLOAT64 || call->inputs[1].dtype != D5_INT64) return D5_UNSUPPORTED_DTYPE;
    if (call->attribute_count != 2 || call->attributes[1].count != 2) return D5_FAILED;
    if (call->outputs[1].rank != 0 || call->outputs[1].dtype != D5_INT64) return D5_UNSUPPORTED_SHAPE;
    const double *x = static_cast<const double *>(call->inputs[0].data);
    const int64_t *index = static_cast<const int64_t *>(call->inputs[1].data);
    double *y = static_cast<double *>(call->outputs[0].data);
    int64_t *total = static_cast<int64_t *>(call->outputs[1].data);
    *total = 0;
    for (int64_t i = 0, n = call->inputs[0].shape[1]; i < call->inputs[0].shape[0]; ++i) {
        y[i] = x[i * n + index[i]] * call->attributes[0].values[0] + call->attributes[1].values[1];
        *total += index[i];
    }
    return D5_OK;
}

#ifdef BACKWARD
extern "C" int d5_backward(const d5_call *call) {
    if (call->input_gradients[1].data) return D5_FAILED;
    const int64_t *index = static_cast<const int64_t *>(call->inputs[1].data);
    const double *by_y = static_cast<const double *>(call->output_gradients[0].data);
    double *by_x = static_cast<double *>(call->input_gradients[0].data);
    for (int64_t i = 0; i < d5_size(&call->inputs[0]); ++i) by_x[i] = 0;
    for (int64_t i = 0, n = call->inputs[0].shape[1]; i < call->inputs[0].shape[0]; ++i) {
        by_x[i * n + index[i]] = by_y[i] * call->attributes[0].values[0];
    }
    return D5_OK;
}
#endif
"""

PICKED: list[tuple[str, list[str], list[str], dict[str, Any]]] = [
    ("Constant", [], ["one"], {"value_ints": [1]}),
    ("Unsqueeze", ["index", "one"], ["indices"], {}),
    ("GatherElements", ["x", "indices"], ["column"], {"axis": 1}),
    ("Squeeze", ["column", "one"], ["y"], {}),
    ("ReduceSum", ["index"], ["total"], {"keepdims": 0}),
]
"""Of the meaning only the shapes and types are asked for here."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = discover()[0][request.param]
    if found.problem():
        pytest.skip(found.problem() or "")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def compiler() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")


def picking(folder: Path, factor: float = 2.5, *, backward: bool = True) -> CustomOperator:
    compiler()
    (folder / "pick.cc").write_text(PICK)
    return CustomOperator(
        "Pick",
        inputs=["x", "index"],
        outputs=["y", "total"],
        meaning=PICKED,
        source="pick.cc",
        has_backward=backward,
        attributes={"factor": factor, "offsets": [0.0, 0.5]},
        flags=["-DBACKWARD"] if backward else [],
        file=folder / "describes.py",
    )


def picked(backend: Backend, custom: CustomOperator, precision: str = "fp64") -> tuple[Any, list[Any]]:
    inputs = {"x": (3, 4), "index": Tensor((3,), "int64", 0, 4)}
    operation = Operation(custom.op_type, inputs, outputs=[True, True], precision=precision, custom=custom)
    return backend.operator(operation), operation.draw(1)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("name", ["IN_CPP", "IN_PYTHON"])
def test_both_directions_equal_numpy(backend: Backend, name: str, precision: str) -> None:
    custom = runpy.run_path(str(EXAMPLE))[name]
    if custom.source is not None:
        compiler()
    operation = Operation(custom.op_type, {"x": (2, 3, 70), "bias": (70,)}, precision=precision, custom=custom)
    operator = backend.operator(operation)
    inputs, heads = operation.draw(0), operation.draw_gradients(0)
    fed = operator.feed(inputs)
    (y,) = operator.fetch(operator.forward(*fed))
    found = operator.fetch_gradients(operator.backward(fed)(*operator.feed_gradients(heads)))
    x, bias = (np.asarray(array, np.float64) for array in inputs)
    s = x + bias
    by_s = heads[0] * ((1 + erf(s / np.sqrt(2))) / 2 + s * np.exp(-(s**2) / 2) / np.sqrt(2 * np.pi))
    tolerance = 1e-14 if precision == "fp64" else 1e-6
    for answer, expected in zip((y, *found), (s / 2 * (1 + erf(s / np.sqrt(2))), by_s, by_s.sum((0, 1))), strict=True):
        assert answer.dtype == operation.dtypes["x"]
        np.testing.assert_allclose(answer, expected, rtol=tolerance, atol=10 * tolerance)


def test_two_operators_with_an_integer_input_and_two_outputs(backend: Backend, folder: Path) -> None:
    for factor in (2.5, -1.0):
        operator, inputs = picked(backend, picking(folder, factor))
        x, index = inputs
        fed = operator.feed(inputs)
        y, total = operator.fetch(operator.forward(*fed))
        np.testing.assert_array_equal(y, x[range(3), index] * factor + 0.5)
        assert total.shape == () and total.dtype == np.int64 and total == index.sum()
        (by_x,) = operator.fetch_gradients(operator.backward(fed)(*operator.feed_gradients([np.arange(3.0)])))
        expected = np.zeros((3, 4))
        expected[range(3), index] = np.arange(3.0) * factor
        np.testing.assert_array_equal(by_x, expected)


def test_python_functions_get_attributes_and_may_leave_out_a_gradient(backend: Backend) -> None:
    def forward(x: np.ndarray, index: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
        return x[range(len(x)), index] * factor, index.sum()

    def backward(inputs: Any, outputs: Any, gradients: Any, factor: float) -> tuple[Any, ...]:
        assert outputs[1] == inputs[1].sum() and not np.any(gradients[1])
        by_x = np.zeros_like(inputs[0])
        by_x[range(len(by_x)), inputs[1]] = gradients[0] * factor
        return by_x, None

    custom = CustomOperator(
        "PythonPick", ["x", "index"], ["y", "total"], PICKED, forward=forward, backward=backward,
        attributes={"factor": 3.0},
    )  # fmt: skip
    operator, inputs = picked(backend, custom, "fp32")
    x, index = inputs
    fed = operator.feed(inputs)
    y, total = operator.fetch(operator.forward(*fed))
    np.testing.assert_array_equal(y, x[range(3), index] * 3)
    assert total == index.sum()
    heads = operator.feed_gradients([np.ones(3, np.float32)])
    (by_x,) = operator.fetch_gradients(operator.backward(fed)(*heads))
    assert by_x.dtype == np.float32 and by_x.sum() == 9 and (by_x[range(3), index] == 3).all()


def test_a_code_is_an_error_with_the_operators_name(backend: Backend, folder: Path) -> None:
    operator, inputs = picked(backend, picking(folder), "fp32")
    with pytest.raises(Exception, match=r"Pick.* failed with code 1"):
        operator.fetch(operator.forward(*operator.feed(inputs)))


def test_an_operator_may_have_no_backward_pass(backend: Backend, folder: Path) -> None:
    operator, inputs = picked(backend, picking(folder, backward=False))
    fed = operator.feed(inputs)
    assert operator.fetch(operator.forward(*fed))[0].shape == (3,)
    assert picking(folder, backward=False).lacks("fp64", backward=True) == "custom::Pick has no backward pass"


def test_every_output_must_be_wanted(backend: Backend, folder: Path) -> None:
    custom = picking(folder)
    inputs = {"x": (3, 4), "index": Tensor((3,), "int64", 0, 4)}
    operation = Operation(custom.op_type, inputs, outputs=[True, False], custom=custom)
    with pytest.raises(NetworkError, match="output"):
        backend.operator(operation)


def test_nothing_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))

    def compiled(factor: float) -> dict[Path, tuple[int, int]]:
        custom = picking(tmp_path, factor)
        compile_library(
            custom.name, custom.code("cpu"), identifier=custom.identifier, attributes=custom.attributes,
            flags=custom.flags,
        )  # fmt: skip
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*.*")}

    before = compiled(2.5)
    assert compiled(2.5) == before
    further = compiled(7.0)
    assert sorted(path.suffix for path in further.keys() - before.keys()) == [".o", ".so"]  # the attributes'
    assert before.items() <= further.items()
