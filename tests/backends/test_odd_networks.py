"""Networks of a node or two as people and exporters write them at the edge of the standard.

One process per backend runs them all: it says what it lacks, or its answer is onnxruntime's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from d5suite.backends import discover, select
from d5suite.instruments.threads import thread_environment
from d5suite.network import Network
from tests.conftest import end_with_tests, plugin_environment

EVERY = (
    *("torch", "mxnet", "deep500", "onnxruntime"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorflow", "keras", "jax")),
)

LACKING: Mapping[str, set[str]] = {
    "mxnet": {"a product of int64", "a product of int32", "a scatter of Booleans"},
    **{name: {"arithmetic beyond 32 bits", "a sum beyond 32 bits"} for name in ("jax", "keras")},
}

_random = np.random.default_rng(0)


def _reals(*shape: int) -> np.ndarray:
    return _random.standard_normal(shape).astype(np.float32)


def _whole(*shape: int, dtype: str = "int64", least: int = 0) -> np.ndarray:
    return _random.integers(least, least + 5, shape).astype(dtype)


def _node(operator: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    """Make a node; names are separated by blanks, and ``-`` is an omitted one."""
    named = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(operator, named, outputs.split(), **attributes)


Case = tuple[list[onnx.NodeProto], dict[str, Any], dict[str, Any], int]

GIVEN: Mapping[str, Any] = {
    "a product of int64": ([_node("MatMul", "x z")], {"x": _whole(2, 3), "z": _whole(3, 4)}, {}),
    "a product of int32": (
        [_node("MatMul", "x z")], {"x": _whole(2, 3, dtype="int32"), "z": _whole(3, 4, dtype="int32")}, {},
    ),
    "a pad of Booleans": (
        [_node("Greater", "x z", "b"), _node("Pad", "b p", "c"), _node("Cast", "c", to=1)],
        {"x": _reals(2, 3), "z": _reals(2, 3)}, {"p": np.array([0, 1, 0, 1])},
    ),
    "a scatter of Booleans": (
        [_node("Greater", "x z", "b"), _node("ScatterND", "b i u", "c"), _node("Cast", "c", to=1)],
        {"x": _reals(2, 3), "z": _reals(2, 3)}, {"i": np.array([[0]]), "u": np.array([[True, False, True]])},
    ),
    "a slope that is a number": ([_node("PRelu", "x s")], {"x": _reals(2, 3)}, {"s": np.float32(0.25)}),
    "a reshape to a number": (
        [_node("ReduceSum", "x", "s"), _node("Reshape", "s e", "r"), _node("Mul", "x r")],
        {"x": _reals(2, 3)}, {"e": np.zeros(0, np.int64)},
    ),
    "a number as the output": (
        [_node("ReduceSum", "x", "s"), _node("Reshape", "s e")], {"x": _reals(2, 3)}, {"e": np.zeros(0, np.int64)},
    ),
    "a number that gets an axis": (
        [_node("ReduceSum", "x", "s", keepdims=0), _node("Unsqueeze", "s a")], {"x": _reals(2, 3)},
        {"a": np.array([0])},
    ),
    "groups of channels without an image": (
        [_node("GroupNormalization", "x s b", num_groups=2)], {"x": _reals(2, 4)},
        {"s": _reals(4), "b": _reals(4)}, 21,
    ),
    "a mean of int32": ([_node("ReduceMean", "x")], {"x": _whole(2, 3, dtype="int32", least=-4)}, {}),
    "a mean of int64": ([_node("ReduceMean", "x", axes=[1])], {"x": _whole(2, 3)}, {}),
    "edges, cropped": ([_node("Pad", "x p", mode="edge")], {"x": _reals(2, 5)}, {"p": np.array([0, -1, 0, 2])}),
    "a mirror, cropped": (
        [_node("Pad", "x p - a", mode="reflect")], {"x": _reals(2, 5)},
        {"p": np.array([-1, 2]), "a": np.array([1])}, 18,
    ),
    "a padded value of one": (
        [_node("Pad", "x p v")], {"x": _reals(2, 5)}, {"p": np.array([0, 1, 0, 2]), "v": np.ones(1, np.float32)},
    ),
    "log of a sum of nothing": (
        [_node("Log", "z", "l"), _node("Concat", "x l", "c", axis=0),
         _node("ReduceLogSumExp", "c", axes=[1], keepdims=0)],
        {"x": _reals(2, 3), "z": np.zeros((1, 3), np.float32)}, {},
    ),
    "a number as an input": ([_node("Mul", "x s")], {"x": _reals(2, 3), "s": np.float32(0.3)}, {}),
    "nothing but a number": ([_node("Mul", "s s")], {"s": np.float32(0.3)}, {}),
    "a whole number as an input": (
        [_node("Cast", "s", "c", to=1), _node("Mul", "x c")], {"x": _reals(2, 3), "s": np.int64(3)}, {},
    ),
    "a division of integers": (
        [_node("Div", "x z")], {"x": _whole(2, 3, least=-9), "z": _whole(2, 3, least=1)}, {},
    ),
    "a remainder of integers": (
        [_node("Mod", "x z")], {"x": _whole(2, 3, least=-9), "z": _whole(2, 3, least=1)}, {},
    ),
    "C's remainder of integers": (
        [_node("Mod", "x z", fmod=1)], {"x": _whole(2, 3, least=-9), "z": _whole(2, 3, least=1)}, {},
    ),
    "a scatter of integers": (
        [_node("ScatterND", "x i u")], {"x": _whole(4, 3)}, {"i": np.array([[1]]), "u": np.array([[7, 8, 9]])},
    ),
    "arithmetic beyond 32 bits": (
        [_node("Mul", "x k", "a"), _node("Div", "a d", "b"), _node("Cast", "b", to=1)], {"x": _whole(2, 3)},
        {"k": np.array(1 << 33), "d": np.array(1 << 31)},
    ),
    "a sum beyond 32 bits": ([_node("Add", "x k")], {"x": _whole(2, 3)}, {"k": np.array(1 << 40)}),
    "the last of equal ones": (
        [_node("ArgMin", "x", axis=-1, select_last_index=1)], {"x": np.round(_reals(2, 8))}, {},
    ),
    "a bias that is a number": (
        [_node("Gemm", "x w c", alpha=0.5, beta=2.0, transA=1)], {"x": _reals(3, 2)},
        {"w": _reals(3, 4), "c": np.float32(1.5)},
    ),
    "a product of vectors": ([_node("MatMul", "x w")], {"x": _reals(3)}, {"w": _reals(3)}),
    "one summand": ([_node("Sum", "x")], {"x": _reals(2, 3)}, {}),
    "backwards in steps": (
        [_node("Slice", "x s e a t")], {"x": _reals(2, 8)},
        {"s": np.array([-1]), "e": np.array([-9]), "a": np.array([1]), "t": np.array([-2])},
    ),
    "a trace": ([_node("Einsum", "x", equation="bii->b")], {"x": _reals(2, 4, 4)}, {}),
    "axes that are not named": (
        [_node("Einsum", "x w", equation="...ij,jk->...ik")], {"x": _reals(2, 3, 4, 5)}, {"w": _reals(5, 6)},
    ),
    "a sum over no axes": (
        [_node("ReduceSum", "x e", noop_with_empty_axes=1)], {"x": _reals(2, 3)}, {"e": np.zeros(0, np.int64)},
    ),
    "a power of integers": ([_node("Pow", "x k")], {"x": _whole(2, 3)}, {"k": np.array(3)}),
    "a clip of integers": (
        [_node("Clip", "x a b")], {"x": _whole(2, 3)}, {"a": np.array(1), "b": np.array(3)},
    ),
    "the largest integers": (
        [_node("TopK", "x k", "y i")], {"x": _random.permutation(12).reshape(2, 6)}, {"k": np.array([3])},
    ),
    "a table looked up by two inputs": (
        [_node("Concat", "x z", "c", axis=1), _node("Gather", "w c")], {"x": _whole(2, 3), "z": _whole(2, 3)},
        {"w": _reals(6, 4)},
    ),
    "rows without an image": (
        [_node("BatchNormalization", "x s b m v")], {"x": _reals(2, 4)},
        {"s": _reals(4), "b": _reals(4), "m": _reals(4), "v": np.abs(_reals(4))},
    ),
    "exclusive sums from the end": (
        [_node("CumSum", "x a", exclusive=1, reverse=1)], {"x": _reals(2, 8)}, {"a": np.array(1)},
    ),
    "values that are no numbers": (
        [_node("Log", "x", "l"), _node("IsNaN", "l", "b"), _node("Where", "b k l")], {"x": _reals(2, 5)},
        {"k": np.float32(0)},
    ),
    "nothing to do": ([_node("Identity", "x")], {"x": _reals(2, 3)}, {}),
    "sums of elements into zeros": (
        [_node("ScatterElements", "z i x", axis=1, reduction="add")], {"x": _reals(2, 4)},
        {"z": np.zeros((2, 3), np.float32), "i": np.array([[0, 2, 0, 1], [1, 1, -1, 1]])}, 18,
    ),
    "sums of rows into zeros": (
        [_node("ScatterND", "z i x", reduction="add")], {"x": _reals(4, 3)},
        {"z": np.zeros((3, 3), np.float32), "i": np.array([[0], [2], [0], [-2]])}, 18,
    ),
    "cells of a constant": (
        [_node("GatherND", "z x", "c"), _node("Cast", "c", to=1)], {"x": _random.integers(0, 2, (4, 2))},
        {"z": np.array([[3, 1], [4, 1]])},
    ),
    "a transposed convolution of a sequence, cropped": (
        [_node("ConvTranspose", "x w b", strides=[2], pads=[2, 1])], {"x": _reals(2, 3, 6)},
        {"w": _reals(3, 4, 5), "b": _reals(4)},
    ),
    "a transposed convolution of a sequence, with a longer output": (
        [_node("ConvTranspose", "x w", strides=[3], pads=[0, 2], output_padding=[1])], {"x": _reals(2, 3, 6)},
        {"w": _reals(3, 4, 5)},
    ),
    **{
        f"corners aligned by scales, {mode}": (
            [_node("Resize", "x - s", mode=mode, coordinate_transformation_mode="align_corners")],
            {"x": _reals(2, 3, 8, 9)}, {"s": np.array([1, 1, 1.7, 0.6], np.float32)},
        )
        for mode in ("linear", "cubic")
    },
    "the logarithm of a softmax far apart": (
        [_node("Mul", "x k", "a"), _node("LogSoftmax", "a", axis=1)], {"x": _reals(2, 5)}, {"k": np.float32(2048)},
    ),
    "the first cells of an image": (
        [_node("Resize", "x - s", mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        {"x": _reals(2, 3, 5, 4)}, {"s": np.array([1, 1, 0.7, 1], np.float32)},
    ),
    "an image as large as float32 has it": (
        [_node("Resize", "x - s", mode="linear")], {"x": _reals(2, 3, 9, 4)},
        {"s": np.array([1, 1, 13 / 9, 2], np.float32)},
    ),
    "cubic samples beyond the border": (
        [_node("GridSample", "x g", mode="cubic", padding_mode="border")],
        {"x": _reals(2, 3, 5, 4), "g": _reals(2, 6, 7, 2)}, {}, 20,
    ),
    "a volume pooled with padding on both sides": (
        [_node("MaxPool", "x", kernel_shape=[3, 3, 3], strides=[2, 2, 2], pads=[1] * 6)], {"x": _reals(2, 3, 5, 5, 5)},
        {},
    ),
    "a volume pooled with padding behind": (
        [_node("MaxPool", "x", kernel_shape=[2, 2, 2], pads=[0, 0, 0, 1, 1, 1])], {"x": _reals(2, 3, 4, 4, 3)}, {},
    ),
    **{
        f"windows that would start behind the image, {operator}": (
            [_node(operator, "x", "p", kernel_shape=[2, 3], strides=[3, 2], pads=[0, 0, 0, 2], ceil_mode=1, **more),
             _node("Reshape", "p s", "f"), _node("MatMul", "f w")],
            {"x": _reals(2, 3, 6, 10)}, {"s": np.array([0, -1]), "w": _reals(3 * 2 * 5, 4)}, 22,
        )
        for operator, more in (("MaxPool", {}), ("AveragePool", {}), ("LpPool", {"p": 3}))
    },
    **{
        f"nearest pixels halfway, {coordinates}, {rounding}": (
            [_node("Resize", "x - s", mode="nearest", coordinate_transformation_mode=coordinates,
                   nearest_mode=rounding)],
            {"x": _reals(2, 3, 20, 7)}, {"s": np.array([1, 1, 0.3, 0.7], np.float32)}, 19,
        )
        for coordinates in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric")
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    },
}  # fmt: skip
"""By name: nodes, inputs, constants, and the operator set if not 17."""

CASES: Mapping[str, Case] = {
    name: (nodes, inputs, constants, version[0] if version else 17)
    for name, (nodes, inputs, constants, *version) in GIVEN.items()
}


def _model(case: Case) -> onnx.ModelProto:
    nodes, inputs, constants, version = case
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), np.shape(value))
        for name, value in inputs.items()
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.UNDEFINED, None)
    graph = helper.make_graph(
        nodes, "odd", infos, [output], [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def _expected(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> Any:
    import onnxruntime
    from onnx.reference import ReferenceEvaluator

    if any(np.ndim(value) == 0 for value in inputs.values()) or model.opset_import[0].version > 20:
        answers: Any = ReferenceEvaluator(model).run(None, dict(inputs))  # numbers, and the newest normalization
        return answers[0]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(inputs))[0]


def run(backend: str) -> dict[str, str]:
    """Return what is wrong with each answer; of what the backend lacks, "lacking"."""
    chosen, found = select(backend), {}
    chosen.backend.load("runtime", chosen.mode).configure(threads=1, seed=0, device="cpu")
    for name, case in CASES.items():
        model, inputs = _model(case), case[1]
        network, expected = Network(model), _expected(model, case[1])
        if chosen.backend.lacks_of(network):
            found[name] = "lacking"
            continue
        real = any(np.asarray(value).dtype.kind == "f" for value in inputs.values())  # integers have no precision
        for precision in {"fp32", "fp64"}.intersection(chosen.backend.precisions) if real else ("fp32",):
            try:
                executor = chosen.backend.executor(network, mode=chosen.mode, device="cpu", precision=precision)
                answer = np.asarray(executor.fetch(executor.forward(executor.feed(inputs)))["y"], np.float64)
                np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)
            except Exception as error:  # an entry of the table
                found[name] = f"{precision}: {type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("backend", EVERY)
def test_odd_networks_are_right_or_lacking(backend: str) -> None:
    if (problem := discover()[0][backend].problem()) is not None:
        pytest.skip(problem)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.backends.test_odd_networks", backend],
        cwd=Path(__file__).parents[2], env={**plugin_environment(), **thread_environment(1)}, capture_output=True,
        text=True, preexec_fn=end_with_tests,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(LACKING.get(backend, ()), "lacking")


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
