"""Single-operator networks that every adapter must compute as ONNX's reference evaluator does.

Imports NumPy, ONNX and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from d5suite.network import Network
from d5suite.network.graph_edits import copy_of, remove_items, replace_items
from d5suite.network.normalise import infer
from d5suite.network.operation import Operation


class OperatorCase(NamedTuple):
    """One operator on one input.

    Attributes
    ----------
    operator : str
        In ONNX's default domain, operator set 23.
    shape : tuple of int
        Shape of the first input, which is drawn from the standard normal distribution.
    inputs : dict of str to numpy.ndarray or None
        Further inputs, which are constant; None for an omitted one.
    attributes : dict
        Attributes of the node.
    """

    operator: str
    shape: tuple[int, ...]
    inputs: dict[str, Any]
    attributes: dict[str, Any]

    def __str__(self) -> str:
        text = "-".join([self.operator, *(f"{key}={value}" for key, value in self.attributes.items())])
        return text.replace(" ", "")


_OF_BOOLEANS = ("And", "Not", "Or", "Where", "Xor")
_TO_BOOLEANS = (
    "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or",
    "Xor",
)  # fmt: skip


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any]],
    outputs: Mapping[str, Sequence[Any] | None],
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 21,
) -> onnx.ModelProto:
    """Write a model from its nodes, the shapes of its inputs and outputs, and its weights.

    Inputs named ``tokens`` or ``labels`` are int64, all other inputs float32. An output without a
    shape has no type either; all other outputs are float32.
    """
    kinds = dict.fromkeys(("tokens", "labels"), TensorProto.INT64)
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), inputs[name]) for name in inputs],
        [
            helper.make_empty_tensor_value_info(name) if shape is None
            else helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in outputs.items()
        ],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def one_operator(
    operator: str, shape: tuple[int, ...], inputs: Mapping[str, Any] | None = None, opset: int = 23, **attributes: Any
) -> Network:
    """Build a network of one node with image input ``x``; further inputs are initializers.

    None omits an input. An operator on Booleans gets ``x > 0``, and a result that is not floating
    point is cast.
    """
    arrays = {name: None if value is None else np.asarray(value) for name, value in (inputs or {}).items()}
    names = ["x", *("" if value is None else name for name, value in arrays.items())]
    results = ["y", "indices"] if operator == "TopK" else ["y"]
    nodes = [helper.make_node(operator, names, results, "node", **attributes)]
    if operator in _OF_BOOLEANS:
        arrays["zero"] = f32(0)
        nodes.insert(0, helper.make_node("Greater", ["x", "zero"], ["x.true"], "true"))
        nodes[1].input[0] = "x.true"
    if operator in _TO_BOOLEANS or attributes.get("to", TensorProto.FLOAT) != TensorProto.FLOAT:
        nodes[-1].output[0] = "y.other"
        nodes.append(helper.make_node("Cast", ["y.other"], ["y"], "number", to=TensorProto.FLOAT))
    weights = {name: value for name, value in arrays.items() if value is not None}
    model = model_of(nodes, {"x": ["N", *shape[1:]]}, {"y": None}, weights, opset=opset)
    replace_items(model.graph.output, infer(copy_of(model)).graph.output)
    return Network(model, name=operator)


def all_fed(operation: Operation, drawn: Sequence[Any]) -> Network:
    """Build a network of one node that is fed all floating-point inputs."""
    model = copy_of(infer(operation.model))
    arrays = dict(zip(operation.node.inputs, drawn, strict=True))
    fed = fed_inputs(operation)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(arrays[value.name]), value.name)
        for value in model.graph.input
        if value.name not in fed
    )
    remove_items(model.graph.input, lambda value: value.name not in fed)
    return Network(model)


def fed_inputs(operation: Operation) -> list[str]:
    """Return the floating-point inputs of an operation that are not static."""
    return [
        name
        for name in operation.node.inputs
        if name and name not in operation.constants and operation.dtypes[name].kind == "f"
    ]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Draw standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def i64(*numbers: int) -> np.ndarray:
    """Return an int64 vector."""
    return np.array(numbers, np.int64)


def f32(number: float) -> np.ndarray:
    """Return a float32 scalar."""
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
    ("Add", (4, 4), {"y2": values(4, 1)}, {}),  # not a bias of the last axis
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
    ("Transpose", (2, 3, 2, 2, 2, 3, 2, 4), {}, {"perm": [0, 1, 3, 5, 2, 4, 6, 7]}),
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
    # As many images as channels, because ONNX's evaluator (1.23) confuses the two.
    ("LRN", (6, 6, 3, 4), {}, {"size": 5, "alpha": 0.3, "beta": 0.6, "bias": 2.0}),
    ("LRN", (6, 6, 3, 4), {}, {"size": 4, "alpha": 0.3}),
    ("Dropout", IMAGE, {"ratio": f32(0.7)}, {}),
    ("Pad", IMAGE, {"pads": i64(0, 1, 2, 3, 0, 0, 1, 2), "value": f32(0.5)}, {}),
    ("Pad", IMAGE, {"pads": i64(1, 0, 0, 2), "value": None, "axes": i64(3, 2)}, {}),
    ("ConvTranspose", IMAGE, {"w": values(4, 6, 3, 3), "b": BIAS}, {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("Pad", IMAGE, {"pads": i64(0, 0, -2, 1, 0, -1, 3, -4)}, {}),
    ("ConvTranspose", IMAGE, {"w": values(4, 3, 2, 3)}, {"group": 2, "strides": [3, 1], "pads": [0, 1, 1, 0]}),
    ("ConvTranspose", IMAGE, {"w": values(4, 3, 3, 3)},
     {"strides": [2, 2], "dilations": [2, 2], "pads": [2, 2, 2, 2], "output_padding": [1, 1]}),
    ("Elu", IMAGE, {}, {"alpha": 0.7}),
    ("Exp", IMAGE, {}, {}),
    ("Gelu", IMAGE, {}, {}),
    ("HardSwish", IMAGE, {}, {}),
    ("InstanceNormalization", IMAGE, {"s": values(4), "b": values(4, seed=1)}, {}),
    *[(name, IMAGE, {}, {}) for name in ("Abs", "Erf", "HardSigmoid", "Mish", "Neg", "Selu", "Softplus")],
    *[(name, IMAGE, {}, {})
      for name in ("Ceil", "Cos", "Floor", "IsNaN", "Not", "Round", "Sign", "Sin", "Softsign", "ThresholdedRelu")],
    *[(name, IMAGE, {}, {}) for name in ("Asinh", "Atan", "Cosh", "IsInf", "Sinh", "Tan")],
    ("IsInf", IMAGE, {}, {"detect_negative": 0}),
    ("Mod", IMAGE, {"y2": np.where(values(4, 1, 1) > 0, 0.7, -0.7).astype(np.float32)}, {"fmod": 1}),
    ("Pow", IMAGE, {"y2": f32(2)}, {}),
    ("PRelu", IMAGE, {"slope": values(4, 1, 1)}, {}),
    ("PRelu", IMAGE, {"slope": values(10)}, {}),
    ("Equal", IMAGE, {"y2": np.where(values(*IMAGE) > 0, values(*IMAGE, seed=7), 0)}, {}),
    ("Less", IMAGE, {"y2": values(4, 1, 1)}, {}),
    ("LessOrEqual", IMAGE, {"y2": f32(0.1)}, {}),
    ("Greater", IMAGE, {"y2": values(10)}, {}),
    ("GreaterOrEqual", IMAGE, {"y2": values(4, 1, 1)}, {}),
    *[(name, IMAGE, {"y2": values(4, 1, 1) > 0}, {}) for name in ("And", "Or", "Xor")],
    ("Where", IMAGE, {"y2": values(4, 1, 1), "y3": values(10)}, {}),
    ("Where", IMAGE, {"y2": f32(-1), "y3": values(*IMAGE)}, {}),
    ("Max", IMAGE, {"y2": values(4, 1, 1), "y3": values(10)}, {}),
    ("Min", IMAGE, {"y2": f32(0.1)}, {}),
    ("Min", IMAGE, {}, {}),
    ("Mean", IMAGE, {"y2": values(4, 1, 1), "y3": values(10)}, {}),
    *[("Cast", IMAGE, {}, {"to": kind}) for kind in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL)],
    ("Expand", IMAGE, {"shape": i64(3, 1, 4, 1, 1)}, {}),
    ("Expand", (2, 4, 1, 1), {"shape": i64(9, 10)}, {}),
    ("Tile", IMAGE, {"repeats": i64(1, 2, 1, 3)}, {}),
    *[("DepthToSpace", (2, 8, 3, 5), {}, {"blocksize": 2, "mode": mode}) for mode in ("DCR", "CRD")],
    ("SpaceToDepth", (2, 3, 4, 6), {}, {"blocksize": 2}),
    ("SpaceToDepth", (2, 3, 4, 6), {}, {"blocksize": 1}),
    *[("Resize", (2, 4, 5, 6), {"roi": None, "scales": np.array([1, 1, 2, 1.5], np.float32)},
       {"mode": mode, "coordinate_transformation_mode": coordinates})
      for mode in ("nearest", "linear", "cubic")
      for coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")],
    ("Resize", (2, 4, 5, 6), {"roi": None, "scales": np.array([1, 1, 2, 3], np.float32)},
     {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ("Resize", (2, 4, 5, 6), {"roi": None, "scales": None, "sizes": i64(3, 10)}, {"mode": "linear", "axes": [2, 3]}),
    ("Resize", (2, 4, 5, 6), {"roi": None, "scales": None, "sizes": i64(3, 4)},
     {"mode": "cubic", "axes": [2, 3], "antialias": 1}),
    ("Trilu", IMAGE, {}, {}),
    ("LpNormalization", IMAGE, {}, {"axis": 1}),
    ("LpNormalization", IMAGE, {}, {"p": 1}),
    ("Trilu", IMAGE, {"k": np.array(-1)}, {"upper": 0}),
    ("ReduceL1", IMAGE, {"axes": i64(1)}, {}),
    ("ReduceLogSumExp", IMAGE, {"axes": i64(1, 3)}, {"keepdims": 0}),
    ("ReduceL2", IMAGE, {"axes": i64(1)}, {}),
    ("ReduceMin", IMAGE, {"axes": i64(1, 3)}, {"keepdims": 0}),
    ("ReduceProd", IMAGE, {"axes": i64(2)}, {}),
    ("ReduceSumSquare", IMAGE, {"axes": i64(1)}, {}),
    ("Slice", IMAGE, {"s": i64(1, -1), "e": i64(3, -9), "a": i64(1, 3), "t": i64(1, -2)}, {}),
    ("Slice", IMAGE, {"s": i64(1), "e": i64(2**40), "a": i64(-2)}, {}),
    ("GroupNormalization", IMAGE, {"s": values(4), "b": values(4, seed=1)}, {"num_groups": 2}),
    ("GroupNormalization", (2, 6, 5), {"s": values(6), "b": values(6, seed=1)}, {"num_groups": 3, "epsilon": 1e-3}),
    ("ArgMax", IMAGE, {}, {"axis": 1}),
    ("ArgMin", IMAGE, {}, {"axis": -1, "keepdims": 0, "select_last_index": 1}),
    ("CumSum", IMAGE, {"axis": np.array(1)}, {"exclusive": 1}),
    ("Einsum", IMAGE, {"w": values(4, 6, seed=1)}, {"equation": "nchw,cd->nhwd"}),
    ("Gather", IMAGE, {"i": np.array([[2, -1], [0, 3]])}, {"axis": 1}),
    ("GatherElements", IMAGE, {"i": np.random.default_rng(0).integers(-9, 9, (2, 4, 3, 10))}, {"axis": 2}),
    ("ScatterElements", IMAGE, {"i": i64(3, 0, -1).reshape(1, 3, 1, 1), "u": values(1, 3, 1, 1)}, {"axis": 3}),
    ("GatherND", IMAGE, {"i": np.array([[[0, 3], [1, 1]]])}, {}),
    ("GatherND", (2, 5, 6), {"i": np.array([[1, 3, 0]])}, {}),
    ("ScatterND", IMAGE, {"i": np.array([[0, 3], [1, 1]]), "u": values(2, 9, 10)}, {}),
    ("ScatterND", IMAGE, {"i": np.array([[1, 2], [1, 2]]), "u": values(2, 9, 10)}, {"reduction": "add"}),
    ("Shape", IMAGE, {}, {}),
    ("Col2Im", (2, 12, 49), {"s": i64(8, 9), "b": i64(2, 3)}, {}),
    ("Col2Im", (2, 12, 9), {"s": i64(5, 6), "b": i64(2, 3)},
     {"pads": [0, 1, 2, 1], "strides": [2, 2], "dilations": [2, 1]}),
    ("DFT", (2, 4, 6, 2), {"n": None, "a": np.array(1)}, {}),
    ("DFT", (2, 9, 1), {"n": np.array(6)}, {"onesided": 1}),
    ("DFT", (2, 9, 2), {"n": np.array(11)}, {"inverse": 1}),
    ("DFT", (2, 5, 2), {}, {"inverse": 1, "onesided": 1}),
    ("Det", (2, 4, 3, 3), {}, {}),
    ("EyeLike", (4, 6), {}, {"k": -1}),
    ("GlobalLpPool", IMAGE, {}, {"p": 3}),
    ("Hardmax", IMAGE, {}, {"axis": 1}),
    ("LpPool", IMAGE, {}, {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
    ("LpPool", IMAGE, {}, {"kernel_shape": [3, 3], "dilations": [2, 1], "p": 3}),
    ("MaxUnpool", (1, 2, 2, 2), {"i": np.array([[[[0, 3], [9, 14]], [[21, 18], [24, 30]]]])},
     {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("ReverseSequence", (6, 3, 5), {"l": i64(6, 0, 4)}, {}),
    ("STFT", (2, 24, 1), {"s": np.array(4), "w": values(8)}, {}),
    ("STFT", (2, 11, 2), {"s": np.array(3), "w": None, "n": np.array(5)}, {"onesided": 0}),
    ("TopK", IMAGE, {"k": i64(3)}, {"axis": 1}),
    ("RMSNormalization", IMAGE, {"s": values(10)}, {}),
    ("RMSNormalization", IMAGE, {"s": values(9, 1)}, {"axis": 2, "epsilon": 1e-3}),
    ("Attention", (2, 6, 32), {"k": values(2, 9, 16), "v": values(2, 9, 16, seed=1)},
     {"q_num_heads": 4, "kv_num_heads": 2}),
    ("Attention", (2, 4, 6, 8), {"k": values(2, 4, 6, 8), "v": values(2, 4, 6, 8, seed=1)}, {"is_causal": 1}),
    ("Attention", (2, 4, 6, 8),
     {"k": values(2, 4, 9, 8), "v": values(2, 4, 9, 8, seed=1), "m": values(6, 9, seed=2)}, {"softcap": 2.0}),
    ("LayerNormalization", IMAGE, {"s": values(10), "b": values(10)}, {}),
    ("LayerNormalization", IMAGE, {"s": values(4, 9, 10)}, {"axis": 1}),
    ("ReduceMax", IMAGE, {"axes": i64(1)}, {}),
    ("ReduceMean", IMAGE, {"axes": i64(2, 3)}, {"keepdims": 0}),
    ("ReduceSum", IMAGE, {"axes": i64(-1)}, {}),
]  # fmt: skip

CASES = [OperatorCase(*case) for case in _CASES]
"""Operators without a case here have their own tests."""
