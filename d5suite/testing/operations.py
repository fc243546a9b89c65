"""Single operators: the operations that an adapter of level 0 must get right, forward and backward.

Imports NumPy and `d5suite.network`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.levels.backend import MORE_OPERATORS
from d5suite.network.operation import STATIC_INPUTS, Operation, Tensor
from d5suite.testing.cases import CASES, i64


def _indices(*shape: int, below: int) -> Tensor:
    return Tensor(shape, "int64", 0, below)


def _positive(*shape: int) -> Tensor:
    return Tensor(shape, low=0.5, high=2.0)


def _from_cases() -> list[Operation]:
    """The cases of level 1, their further floating-point inputs drawn."""
    made = []
    for case in CASES:
        if case.operator in MORE_OPERATORS:
            continue  # they have cases of their own below
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
    return Operation(operator, inputs, attributes, name=f"{operator}-{case}", outputs=[True] * outputs)


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
    _operation("last", "LayerNormalization", {"X": (4, 3, 16), "s": (16,), "b": (16,)}),
    _operation("two-axes", "LayerNormalization", {"X": (4, 3, 16), "s": (3, 16)}, {"axis": 1, "epsilon": 1e-3}),
    _operation("exact", "Gelu", {"X": (4, 50)}),
    _operation("tanh", "Gelu", {"X": (4, 50)}, {"approximate": "tanh"}),
    _operation("alpha", "Elu", {"X": (4, 50)}, {"alpha": 0.7}),
    _operation("plain", "HardSwish", {"X": Tensor((4, 50), scale=3.0)}),
    _operation("plain", "Exp", {"X": (4, 50)}),
    _operation("plain", "Sqrt", {"X": _positive(4, 50)}),
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
    _operation("three", "Concat", {"A": (4, 5, 3), "B": (4, 2, 3), "C": (4, 1, 3)}, {"axis": 1}),
    _operation("embedding", "Gather", {"data": (40, 5), "i": _indices(6, 7, below=40)}),
    _operation("axis", "Gather", {"data": (4, 9, 3), "i": _indices(6, below=9)}, {"axis": 1}),
    _operation("negative", "Gather", {"data": (9, 3), "i": np.array([[0, -1], [-9, 4]])}),
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
