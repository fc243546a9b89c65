"""Operators one by one: the cases that every adapter must answer as ONNX's reference evaluator does.

Imports NumPy, ONNX and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from d5suite.network import Network


class Case(NamedTuple):
    """One operator on one input.

    Attributes
    ----------
    operator : str
        In ONNX's own domain, operator set 21.
    shape : tuple of int
        Of the first input, whose values are standard normal.
    inputs : dict of str to numpy.ndarray or None
        The further inputs, fixed; None for an omitted one.
    attributes : dict
        The operator's.
    """

    operator: str
    shape: tuple[int, ...]
    inputs: dict[str, Any]
    attributes: dict[str, Any]

    def __str__(self) -> str:
        text = "-".join([self.operator, *(f"{key}={value}" for key, value in self.attributes.items())])
        return text.replace(" ", "")


def one_operator(
    operator: str, shape: tuple[int, ...], inputs: Mapping[str, Any] | None = None, opset: int = 21, **attributes: Any
) -> Network:
    """A network of one node: an image input ``x``, then initializers; an omitted input is None."""
    arrays = {name: None if value is None else np.asarray(value) for name, value in (inputs or {}).items()}
    names = ["x", *("" if value is None else name for name, value in arrays.items())]
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], "node", **attributes)],
        operator,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *shape[1:]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in arrays.items() if value is not None],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return Network(onnx.shape_inference.infer_shapes(model))


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def i64(*numbers: int) -> np.ndarray:
    """An int64 vector."""
    return np.array(numbers, np.int64)


def f32(number: float) -> np.ndarray:
    """A float32 scalar."""
    return np.array(number, np.float32)


W = values(6, 4, 3, 3, seed=1)
BIAS = values(6, seed=2)
IMAGE = (2, 4, 9, 10)
BN = {"s": values(4, seed=3), "b": values(4, seed=4), "m": values(4, seed=5), "v": values(4, seed=6) ** 2 + 0.5}
_CASES: list[tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]] = [
    ("Conv", IMAGE, {"w": W, "b": BIAS}, {}),
    ("Conv", IMAGE, {"w": W}, {"pads": [1, 2, 1, 2], "strides": [2, 1], "dilations": [1, 2]}),
    ("Conv", IMAGE, {"w": W, "b": BIAS}, {"pads": [0, 1, 2, 3], "strides": [2, 2]}),
    ("Conv", IMAGE, {"w": W[:, :2]}, {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", IMAGE, {"w": W}, {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    ("Conv", (2, 4, 12), {"w": W[..., 0]}, {"pads": [2, 1], "strides": [2]}),
    ("Conv", (2, 4, 5, 6, 7), {"w": values(3, 4, 2, 3, 2)}, {"pads": [1, 0, 1, 0, 1, 0]}),
    ("BatchNormalization", IMAGE, BN, {"epsilon": 1e-3}),
    ("MaxPool", IMAGE, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", IMAGE, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("MaxPool", IMAGE, {}, {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [0, 0, 2, 1], "dilations": [2, 1]}),
    ("MaxPool", IMAGE, {}, {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("MaxPool", (2, 4, 12), {}, {"kernel_shape": [3], "strides": [2]}),
    ("AveragePool", IMAGE, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("AveragePool", IMAGE, {}, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("AveragePool", IMAGE, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 2, 0]}),
    ("AveragePool", IMAGE, {}, {"kernel_shape": [3, 3], "pads": [0, 1, 2, 0], "count_include_pad": 1}),
    ("AveragePool", IMAGE, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", IMAGE, {}, {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 0, 1, 1]}),
    ("AveragePool", IMAGE, {}, {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("GlobalAveragePool", IMAGE, {}, {}),
    ("GlobalMaxPool", IMAGE, {}, {}),
    ("Relu", IMAGE, {}, {}),
    ("LeakyRelu", IMAGE, {}, {"alpha": 0.2}),
    ("Sigmoid", IMAGE, {}, {}),
    ("Tanh", IMAGE, {}, {}),
    ("Identity", IMAGE, {}, {}),
    ("Clip", IMAGE, {"low": f32(-0.5), "high": f32(0.25)}, {}),
    ("Clip", IMAGE, {"low": None, "high": f32(0.25)}, {}),
    ("Clip", IMAGE, {}, {}),
    ("Add", IMAGE, {"y2": values(4, 1, 1)}, {}),
    ("Sub", IMAGE, {"y2": values(10)}, {}),
    ("Mul", IMAGE, {"y2": f32(1.5)}, {}),
    ("Div", IMAGE, {"y2": values(2, 4, 9, 10, seed=9) + 4}, {}),
    ("Sum", IMAGE, {"y2": values(4, 1, 1), "y3": values(10)}, {}),
    ("Sum", IMAGE, {}, {}),
    ("Concat", IMAGE, {"y2": values(2, 4, 9, 10, seed=9)}, {"axis": -3}),
    ("Flatten", IMAGE, {}, {"axis": 1}),
    ("Flatten", IMAGE, {}, {"axis": -2}),
    ("Flatten", IMAGE, {}, {"axis": 0}),
    ("Flatten", IMAGE, {}, {"axis": 4}),
    ("Reshape", IMAGE, {"shape": i64(0, -1, 5)}, {}),
    ("Reshape", IMAGE, {"shape": i64(2, 0, 3, 30)}, {}),
    ("Transpose", IMAGE, {}, {"perm": [0, 2, 3, 1]}),
    ("Transpose", IMAGE, {}, {}),
    ("Squeeze", (2, 1, 3, 1), {"axes": i64(-1, 1)}, {}),
    ("Unsqueeze", (2, 3), {"axes": i64(-1, 1)}, {}),
    ("Gemm", (2, 5), {"w": values(5, 3), "b": values(3)}, {}),
    ("Gemm", (2, 5), {"w": values(3, 5), "b": values(3)}, {"transB": 1}),
    ("Gemm", (2, 5), {"w": values(3, 5), "b": values(1)}, {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", (2, 5), {"w": values(3, 5), "b": values(1)}, {"transB": 1}),
    ("Gemm", (2, 5), {"w": values(3, 2), "b": values(5, 3)}, {"transA": 1, "transB": 1}),
    ("Gemm", (2, 5), {"w": values(5, 3)}, {"alpha": 3.0}),
    ("MatMul", (2, 4, 5), {"w": values(2, 5, 3)}, {}),
    ("Softmax", IMAGE, {}, {"axis": 1}),
    ("LogSoftmax", (2, 5), {}, {}),
    # As many images as channels: ONNX's evaluator (1.23) confuses the two.
    ("LRN", (6, 6, 3, 4), {}, {"size": 5, "alpha": 0.3, "beta": 0.6, "bias": 2.0}),
    ("LRN", (6, 6, 3, 4), {}, {"size": 4, "alpha": 0.3}),
    ("Dropout", IMAGE, {"ratio": f32(0.7)}, {}),
    ("Pad", IMAGE, {"pads": i64(0, 1, 2, 3, 0, 0, 1, 2), "value": f32(0.5)}, {}),
    ("Pad", IMAGE, {"pads": i64(1, 0, 0, 2), "value": None, "axes": i64(3, 2)}, {}),
    ("ConvTranspose", IMAGE, {"w": values(4, 6, 3, 3), "b": BIAS}, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("ConvTranspose", IMAGE, {"w": values(4, 3, 2, 3)}, {"group": 2, "strides": [3, 1], "pads": [0, 1, 1, 0]}),
    ("Elu", IMAGE, {}, {"alpha": 0.7}),
    ("Exp", IMAGE, {}, {}),
    ("Gelu", IMAGE, {}, {}),
    ("HardSwish", IMAGE, {}, {}),
    ("LayerNormalization", IMAGE, {"s": values(10), "b": values(10)}, {}),
    ("LayerNormalization", IMAGE, {"s": values(4, 9, 10)}, {"axis": 1}),
    ("ReduceMax", IMAGE, {"axes": i64(1)}, {}),
    ("ReduceMean", IMAGE, {"axes": i64(2, 3)}, {"keepdims": 0}),
    ("ReduceSum", IMAGE, {"axes": i64(-1)}, {}),
]  # fmt: skip

CASES = [Case(*case) for case in _CASES]
"""The cases; operators that appear in none have tests of their own."""
