"""Operations that every adapter with level 0 must compute, forward and backward.

Imports ONNX, NumPy and `d5suite.network`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto
from onnx.defs import onnx_opset_version

from d5suite.network.operation import OPERATION_OPSET, STATIC_INPUTS, Operation, Tensor
from d5suite.network.operators import MORE_OPERATORS
from d5suite.testing.cases import CASES, i64


def _indices(*shape: int, below: int) -> Tensor:
    return Tensor(shape, "int64", 0, below)


def _positive(*shape: int) -> Tensor:
    return Tensor(shape, low=0.5, high=2.0)


def _from_cases() -> list[Operation]:
    """Turn the cases of level 1 into operations that draw floating-point inputs at random."""
    made = []
    for case in CASES:
        if case.operator in MORE_OPERATORS:
            continue  # listed below
        inputs: dict[str, Any] = {"x": case.shape}
        for index, (name, value) in enumerate(case.inputs.items(), start=1):
            if value is None or index in STATIC_INPUTS.get(case.operator, ()) or value.ndim == 0:
                inputs[name] = value
            else:
                special = (case.operator == "Div" or name == "v") and value.dtype.kind == "f"
                inputs[name] = _positive(*value.shape) if special else value.shape
        made.append(Operation(case.operator, inputs, case.attributes, name=str(case)))
    return made


_BN = {"s": (4,), "b": (4,), "m": (4,), "v": _positive(4)}
_LSTM = {"X": (5, 2, 8), "W": (1, 64, 8), "R": (1, 64, 16), "B": (1, 128)}
_GRU = {"X": (5, 2, 8), "W": (1, 48, 8), "R": (1, 48, 16), "B": (1, 96)}
_STATES = {"h": (1, 2, 16), "c": (1, 2, 16)}


def _operation(
    case: str, operator: str, inputs: dict[str, Any], attributes: dict[str, Any] | None = None, outputs: int = 1
) -> Operation:
    # ONNX has these for bfloat16 in its newest operator sets only.
    opset = onnx_opset_version() if operator in ("Einsum", "OneHot", "TopK") else OPERATION_OPSET
    return Operation(operator, inputs, attributes, name=f"{operator}-{case}", outputs=[True] * outputs, opset=opset)


OPERATIONS = [
    *_from_cases(),
    _operation("depthwise", "Conv", {"X": (2, 4, 8, 8), "W": (4, 1, 3, 3), "B": (4,)},
               {"pads": [1, 1, 1, 1], "group": 4, "strides": [2, 2]}),
    _operation("grouped", "Conv", {"X": (2, 4, 8, 8), "W": (6, 2, 3, 3)}, {"pads": [1, 1, 1, 1], "group": 2}),
    _operation("1d", "ConvTranspose", {"X": (2, 4, 7), "W": (4, 3, 4)}, {"strides": [2], "pads": [1, 1]}),
    _operation("2d", "ConvTranspose", {"X": (2, 4, 5, 6), "W": (4, 6, 3, 3), "B": (6,)},
               {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    _operation("uneven", "ConvTranspose", {"X": (2, 4, 5, 6), "W": (4, 6, 3, 3)},
               {"strides": [3, 2], "pads": [0, 1, 2, 1]}),
    _operation("grouped", "ConvTranspose", {"X": (2, 4, 5, 6), "W": (4, 3, 3, 3)},
               {"group": 2, "dilations": [2, 1]}),
    _operation("3d", "ConvTranspose", {"X": (1, 2, 3, 4, 3), "W": (2, 3, 2, 2, 2)}, {"strides": [2, 2, 2]}),
    _operation("batched", "MatMul", {"A": (3, 2, 5, 7), "B": (3, 2, 7, 4)}),
    _operation("broadcast", "MatMul", {"A": (3, 5, 7), "B": (7, 4)}),
    _operation("repeated", "MatMul", {"A": (2, 1, 5, 7), "B": (3, 7, 4)}),
    _operation("training", "BatchNormalization", {"X": (4, 4, 6, 5), **_BN}, {"training_mode": 1}),
    _operation("training-statistics", "BatchNormalization", {"X": (4, 4, 6, 5), **_BN},
               {"training_mode": 1, "momentum": 0.75}, 3),
    _operation("vectors", "BatchNormalization", {"X": (16, 4), **_BN}, {"training_mode": 1}),
    _operation("image", "InstanceNormalization", {"X": (3, 4, 6, 5), "s": (4,), "b": (4,)}),
    _operation("1d", "InstanceNormalization", {"X": (3, 4, 16), "s": (4,), "b": (4,)}, {"epsilon": 1e-3}),
    _operation("last", "LayerNormalization", {"X": (4, 3, 16), "s": (16,), "b": (16,)}),
    _operation("image", "LayerNormalization", {"X": (4, 3, 5, 6), "s": (4, 3, 5, 6)}, {"axis": 0}),
    _operation("two-axes", "LayerNormalization", {"X": (4, 3, 16), "s": (3, 16)}, {"axis": 1, "epsilon": 1e-3}),
    _operation("image", "GroupNormalization", {"X": (3, 6, 5, 4), "s": (6,), "b": (6,)}, {"num_groups": 3}),
    _operation("sequence", "GroupNormalization", {"X": (3, 4, 7), "s": (4,), "b": (4,)},
               {"num_groups": 2, "epsilon": 1e-3}),
    _operation("euclidean", "LpNormalization", {"X": (3, 4, 6)}, {"axis": 1}),
    _operation("sum", "LpNormalization", {"X": (4, 7)}, {"p": 1}),
    _operation("last", "RMSNormalization", {"X": (4, 3, 16), "s": (16,)}),
    _operation("image", "RMSNormalization", {"X": (4, 3, 5, 6), "s": (3, 5, 6)}, {"axis": 1}),
    _operation("broadcast", "RMSNormalization", {"X": (4, 3, 16), "s": (3, 1)}, {"axis": 1, "epsilon": 1e-3}),
    _operation("exact", "Gelu", {"X": (4, 50)}),
    _operation("tanh", "Gelu", {"X": (4, 50)}, {"approximate": "tanh"}),
    _operation("alpha", "Elu", {"X": (4, 50)}, {"alpha": 0.7}),
    _operation("plain", "HardSwish", {"X": Tensor((4, 50), scale=3.0)}),
    _operation("plain", "Exp", {"X": (4, 50)}),
    _operation("plain", "Sqrt", {"X": _positive(4, 50)}),
    *[_operation("plain", name, {"X": (4, 50)})
      for name in ("Abs", "Erf", "Mish", "Neg", "Selu", "Softplus")],
    *[_operation("plain", name, {"X": _positive(4, 50)}) for name in ("Log", "Reciprocal")],
    _operation("plain", "HardSigmoid", {"X": Tensor((4, 50), low=-2.0, high=2.0)}),
    _operation("settings", "HardSigmoid", {"X": (4, 50)}, {"alpha": 0.3, "beta": 0.4}),
    _operation("both", "Pow", {"A": _positive(4, 1, 3), "B": (5, 1)}),
    *[_operation("plain", name, {"X": Tensor((4, 50), low=-0.9, high=0.9)})
      for name in ("Acos", "Asin", "Atanh", "Tan")],
    *[_operation("plain", name, {"X": (4, 50)}) for name in ("Asinh", "Atan", "Cosh", "Sinh")],
    _operation("plain", "Acosh", {"X": Tensor((4, 50), low=1.5, high=4.0)}),
    _operation("truncated", "Mod", {"A": (4, 1, 3), "B": Tensor((5, 1), low=0.5, high=2.0)}, {"fmod": 1}),
    _operation("whole", "Mod", {"A": Tensor((4, 1, 3), "int64", -9, 9), "B": Tensor((5, 1), "int64", 1, 5)}),
    _operation("plain", "IsInf", {"X": np.array([0, np.nan, np.inf, -np.inf], np.float32)}),
    _operation("negative", "IsInf", {"X": np.array([0, np.nan, np.inf, -np.inf], np.float32)}, {"detect_positive": 0}),
    *[_operation("plain", name, {"X": (4, 50)})
      for name in ("Ceil", "Cos", "Floor", "Round", "Sign", "Sin", "Softsign", "ThresholdedRelu")],
    _operation("channels", "PRelu", {"X": (2, 4, 6, 5), "s": (4, 1, 1)}),
    _operation("last", "PRelu", {"X": (2, 4, 6, 5), "s": (5,)}),
    *[_operation("both", name, {"A": Tensor((4, 1, 3), "int64", 0, 3), "B": Tensor((5, 1), "int64", 0, 3)})
      for name in ("Equal", "GreaterOrEqual", "LessOrEqual")],
    *[_operation("both", name, {"A": (4, 1, 3), "B": (5, 1)}) for name in ("Greater", "Less")],
    *[_operation("both", name, {"A": Tensor((4, 1, 3), "bool"), "B": Tensor((5, 1), "bool")})
      for name in ("And", "Or", "Xor")],
    _operation("plain", "Not", {"X": Tensor((4, 50), "bool")}),
    _operation("plain", "IsNaN", {"X": np.array([0, np.nan, np.inf, -1], np.float32)}),
    _operation("both", "Where", {"c": Tensor((4, 1, 3), "bool"), "A": (4, 5, 1), "B": (5, 1)}),
    _operation("same", "Where", {"c": Tensor((4, 50), "bool"), "A": (4, 50), "B": (4, 50)}),
    *[_operation("three", name, {"A": (4, 1, 3), "B": (5, 1), "C": (3,)}) for name in ("Max", "Mean", "Min")],
    _operation("double", "Cast", {"X": (4, 50)}, {"to": TensorProto.DOUBLE}),
    _operation("whole", "Cast", {"X": Tensor((4, 50), scale=10.0)}, {"to": TensorProto.INT64}),
    _operation("bool", "Cast", {"X": Tensor((4, 50), "int64", 0, 3)}, {"to": TensorProto.BOOL}),
    _operation("both", "Expand", {"X": (4, 1, 3), "s": i64(2, 1, 5, 1)}),
    _operation("plain", "Tile", {"X": (4, 5, 3), "r": i64(2, 1, 3)}),
    _operation("parts", "Split", {"X": (4, 9, 3), "s": i64(2, 3, 4)}, {"axis": 1}, 3),
    *[_operation(mode, "DepthToSpace", {"X": (2, 8, 3, 5)}, {"blocksize": 2, "mode": mode}) for mode in ("DCR", "CRD")],
    _operation("plain", "SpaceToDepth", {"X": (2, 3, 4, 6)}, {"blocksize": 2}),
    _operation("linear", "Resize", {"X": (2, 4, 5, 6), "r": None, "s": None, "n": i64(2, 4, 10, 9)},
               {"mode": "linear"}),
    _operation("corners", "Resize", {"X": (2, 4, 5, 6), "r": None, "s": None, "n": i64(2, 4, 8, 9)},
               {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    _operation("cubic", "Resize", {"X": (2, 4, 5, 6), "r": None, "s": None, "n": i64(2, 4, 10, 3)}, {"mode": "cubic"}),
    _operation("repeat", "Resize", {"X": (2, 4, 5, 6), "r": None, "s": None, "n": i64(2, 4, 10, 18)},
               {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    _operation("nearest", "Resize", {"X": (2, 4, 5, 6), "r": None, "s": None, "n": i64(2, 4, 8, 4)}),
    *[_operation(f"{mode}-{padding}-{'corners' if aligned else 'edges'}", "GridSample",
                 {"X": (2, 2, 4, 3), "g": (2, 3, 2, 2)},
                 {"mode": mode, "padding_mode": padding, "align_corners": aligned})
      for i, mode in enumerate(("linear", "cubic", "nearest"))
      for j, padding in enumerate(("zeros", "border", "reflection"))
      for aligned in ((i + j) % 2,)],  # each two settings meet; all three would be 18 cases, slow to compile
    _operation("volume", "GridSample", {"X": (1, 2, 3, 4, 3), "g": (1, 2, 1, 3, 3)}),
    _operation("upper", "Trilu", {"X": (2, 5, 6), "k": np.array(1)}),
    _operation("lower", "Trilu", {"X": (2, 6, 5)}, {"upper": 0}),
    _operation("labels", "SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": _indices(6, below=5)}),
    _operation("none", "SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": _indices(6, below=5)}, {"reduction": "none"}),
    _operation("segmentation", "SoftmaxCrossEntropyLoss", {"X": (2, 5, 3, 4), "l": _indices(2, 3, 4, below=5)}),
    _operation("both", "Add", {"A": (4, 1, 3), "B": (5, 1)}),
    _operation("same", "Add", {"A": (4, 5), "B": (4, 5)}),
    _operation("both", "Mul", {"A": (4, 1, 3), "B": (5, 1)}),
    _operation("axes", "ReduceSum", {"X": (4, 5, 3), "a": i64(0, 2)}),
    _operation("drop", "ReduceMean", {"X": (4, 5, 3), "a": i64(-2)}, {"keepdims": 0}),
    _operation("all", "ReduceMean", {"X": (4, 5, 3)}),
    _operation("axis", "ReduceMax", {"X": (4, 5, 3), "a": i64(1)}),
    _operation("all", "ReduceMax", {"X": (4, 5, 3)}, {"keepdims": 0}),
    _operation("axis", "ReduceMin", {"X": (4, 5, 3), "a": i64(1)}),
    _operation("axes", "ReduceProd", {"X": _positive(4, 5, 3), "a": i64(0, -1)}),
    _operation("axes", "ReduceL1", {"X": (4, 5, 3), "a": i64(0, 2)}, {"keepdims": 0}),
    _operation("axes", "ReduceLogSumExp", {"X": (4, 5, 3), "a": i64(0, 2)}, {"keepdims": 0}),
    _operation("axes", "ReduceL2", {"X": (4, 5, 3), "a": i64(0, 2)}, {"keepdims": 0}),
    _operation("all", "ReduceSumSquare", {"X": (4, 5, 3)}),
    _operation("steps", "Slice", {"X": (4, 9, 6), "s": i64(7, 1), "e": i64(-100, 5), "a": i64(1, 2), "t": i64(-2, 3)}),
    _operation("three", "Concat", {"A": (4, 5, 3), "B": (4, 2, 3), "C": (4, 1, 3)}, {"axis": 1}),
    _operation("embedding", "Gather", {"data": (40, 5), "i": _indices(6, 7, below=40)}),
    _operation("axis", "Gather", {"data": (4, 9, 3), "i": _indices(6, below=9)}, {"axis": 1}),
    _operation("negative", "Gather", {"data": (9, 3), "i": np.array([[0, -1], [-9, 4]])}),
    _operation("rows", "GatherElements", {"X": (4, 5, 3), "i": _indices(2, 7, 3, below=5)}, {"axis": 1}),
    _operation("negative", "GatherElements", {"X": (4, 5), "i": np.array([[0, -4, 2, 1, -1]])}),
    _operation("add", "ScatterElements", {"X": (4, 5), "i": _indices(3, 5, below=4), "u": (3, 5)},
               {"reduction": "add"}),
    _operation("none", "ScatterElements", {"X": (4, 5), "i": np.array([[0, 2, -1]]), "u": (1, 3)}, {"axis": 1}),
    _operation("batch", "GatherND", {"X": (3, 5, 4, 2), "i": _indices(3, 7, 2, below=4)}, {"batch_dims": 1}),
    _operation("negative", "GatherND", {"X": (4, 5), "i": np.array([[[0, -5]], [[-1, 4]]])}),
    _operation("add", "ScatterND", {"X": (4, 5, 2), "i": _indices(7, 2, below=4), "u": (7, 2)}, {"reduction": "add"}),
    _operation("none", "ScatterND", {"X": (4, 5), "i": np.array([[0], [-2]]), "u": (2, 5)}),
    _operation("product", "Einsum", {"A": (3, 4, 5), "B": (3, 5, 2)}, {"equation": "bij, bjk -> bik"}),
    _operation("implicit", "Einsum", {"A": (2, 3, 4), "B": (4, 5)}, {"equation": "...i,ij"}),
    _operation("sums", "Einsum", {"A": (3, 4, 5), "B": (4,)}, {"equation": "abc,b->b"}),
    _operation("trace", "Einsum", {"A": (3, 4, 4)}, {"equation": "aii->a"}),
    _operation("three", "Einsum", {"A": (3, 4), "B": (4, 5), "C": (5, 2)}, {"equation": "ab,bc,cd->ad"}),
    _operation("plain", "CumSum", {"X": (4, 5, 3), "a": np.array(1)}),
    _operation("reverse", "CumSum", {"X": (4, 5, 3), "a": np.array(-1)}, {"reverse": 1, "exclusive": 1}),
    _operation("largest", "TopK", {"X": (4, 9, 3), "k": i64(4)}, {"axis": 1}, 2),
    _operation("smallest", "TopK", {"X": (4, 9), "k": i64(1)}, {"largest": 0}, 2),
    _operation("middle", "ArgMax", {"X": (4, 9, 3)}, {"axis": 1, "keepdims": 0}),
    _operation("last", "ArgMin", {"X": (4, 9, 3)}, {"axis": -1, "select_last_index": 1}),
    _operation("middle", "OneHot", {"i": _indices(4, 5, below=7), "d": np.array(7), "v": (2,)}, {"axis": 1}),
    _operation("integers", "Range", {"a": np.array(3), "b": np.array(20), "c": np.array(4)}),
    _operation("zeros", "ConstantOfShape", {"s": i64(3, 4)}),
    _operation("left", "BitShift", {"A": Tensor((4, 1, 3), "uint8", 0, 255), "B": Tensor((5, 1), "uint8", 0, 8)},
               {"direction": "LEFT"}),
    _operation("right", "BitShift", {"A": Tensor((4, 5), "uint8", 0, 255), "B": Tensor((4, 5), "uint8", 0, 8)},
               {"direction": "RIGHT"}),
    *[_operation("both", name, {"A": Tensor((4, 1, 3), "int32", -99, 99), "B": Tensor((5, 1), "int32", -99, 99)})
      for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")],
    _operation("plain", "BitwiseNot", {"X": Tensor((4, 50), "int32", -99, 99)}),
    _operation("overlap", "Col2Im", {"X": (2, 18, 20), "s": i64(6, 7), "b": i64(3, 3)}),
    _operation("uneven", "Col2Im", {"X": (2, 12, 9), "s": i64(5, 6), "b": i64(2, 3)},
               {"pads": [0, 1, 2, 1], "strides": [2, 2], "dilations": [2, 1]}),
    _operation("1d", "Col2Im", {"X": (2, 6, 4), "s": i64(9), "b": i64(3)}, {"strides": [2]}),
    _operation("complex", "DFT", {"X": (3, 4, 6, 2)}),
    _operation("real", "DFT", {"X": (3, 6, 4, 1), "n": None, "a": np.array(1)}),
    _operation("half", "DFT", {"X": (3, 5, 1)}, {"onesided": 1}),
    _operation("longer", "DFT", {"X": (3, 5, 1), "n": np.array(8)}, {"onesided": 1}),
    _operation("shorter", "DFT", {"X": (7, 3, 2), "n": np.array(4), "a": np.array(0)}),
    _operation("inverse", "DFT", {"X": (3, 5, 2), "n": np.array(6), "a": np.array(-2)}, {"inverse": 1}),
    _operation("to-real", "DFT", {"X": (3, 4, 2)}, {"inverse": 1, "onesided": 1}),
    _operation("to-odd", "DFT", {"X": (3, 6, 2), "n": np.array(7)}, {"inverse": 1, "onesided": 1}),
    _operation("matrix", "Det", {"X": (3, 4, 4)}),
    _operation("right", "EyeLike", {"X": (4, 6)}, {"k": 1}),
    _operation("middle", "Hardmax", {"X": (4, 9, 3)}, {"axis": 1}),
    _operation("integers", "ReverseSequence", {"X": Tensor((4, 2), "int64", 0, 9), "l": np.array([4, 3])}),
    _operation("time", "ReverseSequence", {"X": (6, 3, 2), "l": np.array([6, 1, 4])}),
    _operation("batch", "ReverseSequence", {"X": (3, 6), "l": np.array([0, 5, 3])},
               {"time_axis": 1, "batch_axis": 0}),
    _operation("frames", "STFT", {"X": (2, 20, 1), "s": np.array(4), "w": (8,)}),
    _operation("complex", "STFT", {"X": (2, 11, 2), "s": np.array(3), "w": None, "n": np.array(5)}, {"onesided": 0}),
    _operation("squares", "LpPool", {"X": (2, 3, 7, 6)},
               {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]}),
    _operation("cubes", "LpPool", {"X": (2, 3, 9)}, {"kernel_shape": [3], "p": 3, "dilations": [2]}),
    _operation("ceiling", "LpPool", {"X": (2, 3, 6, 6)},
               {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "p": 1}),
    _operation("squares", "GlobalLpPool", {"X": (2, 3, 5, 4)}),
    _operation("cubes", "GlobalLpPool", {"X": (2, 3, 7)}, {"p": 3}),
    _operation("places", "MaxUnpool", {"X": (1, 2, 2, 2), "i": np.array([[[[0, 3], [9, 14]], [[21, 18], [24, 30]]]])},
               {"kernel_shape": [2, 2], "strides": [2, 2]}),
    _operation("larger", "MaxUnpool", {"X": (1, 1, 3), "i": np.array([[[1, 2, 5]]]), "s": i64(1, 1, 8)},
               {"kernel_shape": [2], "strides": [2]}),
    _operation("indices", "MaxPool", {"X": (2, 3, 7, 6)},
               {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}, 2),
    _operation("part", "Shape", {"X": (4, 5, 3)}, {"start": 1}),
    _operation("plain", "LSTM", _LSTM, {"hidden_size": 16}),
    _operation("states", "LSTM", {**_LSTM, "lengths": None, **_STATES}, {"hidden_size": 16}, 3),
    _operation("reverse", "LSTM", _LSTM, {"hidden_size": 16, "direction": "reverse"}, 3),
    _operation("both", "LSTM", {"X": (5, 2, 8), "W": (2, 64, 8), "R": (2, 64, 16), "B": (2, 128)},
               {"hidden_size": 16, "direction": "bidirectional"}, 3),
    _operation("batch-first", "LSTM", {"X": (2, 5, 8), "W": (1, 64, 8), "R": (1, 64, 16)},
               {"hidden_size": 16, "layout": 1}, 3),
    _operation("plain", "GRU", _GRU, {"hidden_size": 16, "linear_before_reset": 1}),
    _operation("reset-first", "GRU", _GRU, {"hidden_size": 16}, 2),
    _operation("both", "GRU", {"X": (5, 2, 8), "W": (2, 48, 8), "R": (2, 48, 16)},
               {"hidden_size": 16, "direction": "bidirectional", "linear_before_reset": 1}, 2),
    _operation("cross", "Attention", {"Q": (2, 4, 6, 8), "K": (2, 4, 9, 8), "V": (2, 4, 9, 8)}),
    _operation("causal", "Attention", {"Q": (2, 4, 6, 8), "K": (2, 4, 6, 8), "V": (2, 4, 6, 8)}, {"is_causal": 1}),
    _operation("grouped", "Attention", {"Q": (2, 6, 32), "K": (2, 9, 16), "V": (2, 9, 16)},
               {"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.25}),
    _operation("mask", "Attention", {"Q": (2, 4, 6, 8), "K": (2, 4, 9, 8), "V": (2, 4, 9, 8), "mask": (6, 9)},
               {"softcap": 2.0}),
]  # fmt: skip
"""The operations; `Operation.name` names the case."""

REPRESENTATIVE = ("Add", "Attention", "BatchNormalization", "Conv", "Gemm", "LSTM", "MaxPool", "Softmax")
"""One operator of each family. The kit's short form runs them in every precision, and one of ONNX's
node tests for each."""
