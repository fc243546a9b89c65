"""What ONNX's checker and shape inference let pass in a single node, though it has no meaning or another one.

Shapes of weights, states, masks and labels that do not fit each other, windows larger than their image, indices out of
range, words that an attribute does not know. Meaning: ONNX operator specification, the operator of each rule. Imports
`d5suite.network.model` and `d5suite.network.windows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.model import Node
from d5suite.network.windows import window

_PADDING = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")

CHOICES: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "Attention": {"is_causal": (0, 1), "qk_matmul_output_mode": (0, 1, 2, 3)},
    "AveragePool": {"auto_pad": _PADDING},
    "Conv": {"auto_pad": _PADDING},
    "ConvTranspose": {"auto_pad": _PADDING},
    "GRU": {"direction": ("forward", "reverse", "bidirectional"), "layout": (0, 1), "linear_before_reset": (0, 1)},
    "Gelu": {"approximate": ("none", "tanh")},
    "LSTM": {"direction": ("forward", "reverse", "bidirectional"), "layout": (0, 1), "input_forget": (0, 1)},
    "MaxPool": {"auto_pad": _PADDING, "storage_order": (0, 1)},
    "Pad": {"mode": ("constant", "reflect", "edge", "wrap")},
    "SoftmaxCrossEntropyLoss": {"reduction": ("none", "sum", "mean")},
}
"""Values that attributes may have, which ONNX's checker does not look at."""

ACTIVATIONS = frozenset({
    "relu", "tanh", "sigmoid", "affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu", "softsign",
    "softplus",
})  # fmt: skip
"""Functions that a recurrence's gates may use; ONNX does not tell upper from lower case."""


@dataclass(frozen=True)
class _Case:
    """One node with all that is known before it runs."""

    node: Node
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, np.ndarray]
    bounds: Mapping[str, tuple[int, int]]

    def refuse(self, what: str) -> NoReturn:
        raise NetworkError(f"{self.node.op_type}: {what}", where=self.node.name)

    def given(self, index: int) -> str | None:
        """The name of an input, None where it is omitted."""
        names = self.node.inputs
        return names[index] if index < len(names) and names[index] else None

    def shape(self, index: int) -> tuple[int, ...]:
        return self.shapes[self.node.inputs[index]]

    def expect(self, index: int, *wanted: int) -> None:
        """Refuse an input of another shape; an omitted one is right."""
        name = self.given(index)
        if name is not None and self.shapes[name] != wanted:
            self.refuse(f"input {name!r} has shape {list(self.shapes[name])}, not {list(wanted)}")

    def expect_broadcast(self, index: int, *wanted: int) -> None:
        """Refuse an input that does not stretch to a shape."""
        name = self.given(index)
        if name is None:
            return
        shape = self.shapes[name]
        fits = len(shape) <= len(wanted) and all(
            n in (1, m) for n, m in zip(reversed(shape), reversed(wanted), strict=False)
        )
        if not fits:
            self.refuse(f"input {name!r} of shape {list(shape)} does not stretch to {list(wanted)}")

    def expect_within(self, index: int, low: int, high: int, *, ignored: int | None = None) -> None:
        """Refuse integers that are, or may be drawn, below ``low`` or above ``high``."""
        name = self.given(index)
        if name is None:
            return
        if name in self.values:
            values = self.values[name]
            values = values if ignored is None else values[values != ignored]
            least, most = (int(values.min()), int(values.max())) if values.size else (low, low)
        elif name in self.bounds:
            least, most = self.bounds[name]
            least = low if least == ignored else least
        else:
            return
        if least < low or most > high:
            self.refuse(f"values of input {name!r} from {least} to {most} leave the range from {low} to {high}")


def require_valid(
    node: Node,
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, np.ndarray],
    bounds: Mapping[str, tuple[int, int]],
) -> None:
    """Raise `NetworkError`, naming the node, if it cannot mean anything.

    Parameters
    ----------
    node : Node
        That ONNX's checker and shape inference have nothing against.
    shapes : mapping
        Of its inputs and wanted outputs.
    values : mapping
        Fixed inputs.
    bounds : mapping
        The least and the largest value that integer inputs can be drawn with.
    """
    case = _Case(node, shapes, values, bounds)
    for key, allowed in CHOICES.get(node.op_type, {}).items():
        value = node.attributes.get(key, allowed[0])
        if value not in allowed:
            case.refuse(f"{key} is {value!r}, not one of {', '.join(map(str, allowed))}")
    if node.op_type in _RULES:
        _RULES[node.op_type](case)
    for name in node.outputs:
        if name and min(shapes[name], default=0) < 0:
            case.refuse(f"output {name!r} would have shape {list(shapes[name])}")


def _convolution(case: _Case) -> None:
    node, image, weight = case.node, case.shape(0), case.shape(1)
    groups, transposed = node.attributes["group"], node.op_type == "ConvTranspose"
    if groups < 1:
        case.refuse(f"{groups} groups")
    expected = weight[0] if transposed else weight[1] * groups
    if image[1] != expected or weight[0] % groups:
        case.refuse(f"with {groups} group(s): the image has {image[1]} channels and the weight is for {expected}")
    kernel = list(node.attributes.get("kernel_shape") or weight[2:])
    if kernel != list(weight[2:]):
        case.refuse(f"kernel_shape is {kernel}, and the weight's is {list(weight[2:])}")
    if min(kernel, default=1) < 1:
        case.refuse(f"a window of {kernel}")
    case.expect(2, weight[1] * groups if transposed else weight[0])
    if not transposed:
        window(node, image[2:], weight[2:])
        return
    output = case.shapes[node.outputs[0]]
    if len(output) != len(image):
        case.refuse(f"output_shape {list(node.attributes.get('output_shape', ()))} is smaller than the image")
    if min(output[2:], default=1) < 1:
        case.refuse(f"output would have shape {list(output)}")
    rank = len(kernel)
    strides, dilations = (node.attributes.get(key) or [1] * rank for key in ("strides", "dilations"))
    added = node.attributes.get("output_padding") or [0] * rank
    if any(not 0 <= p < max(s, d) for p, s, d in zip(added, strides, dilations, strict=False)):
        case.refuse(f"output_padding {list(added)} is not below strides {list(strides)} or dilations {list(dilations)}")


def _pool(case: _Case) -> None:
    found = window(case.node, case.shape(0)[2:])
    spans = [(k - 1) * d + 1 for k, d in zip(found.kernel, found.dilations, strict=True)]
    pads = [max(both) for both in zip(found.pads_begin, found.pads_end, strict=True)]
    if any(pad >= span for pad, span in zip(pads, spans, strict=True)):
        case.refuse(f"a window of {spans} would see nothing but padding, of {pads}")


def _image(case: _Case) -> None:
    if len(case.shape(0)) < 3:
        case.refuse(f"input {case.node.inputs[0]!r} of shape {list(case.shape(0))} is no image: it has no space")
    if case.node.attributes.get("size", 1) < 1:
        case.refuse(f"size is {case.node.attributes['size']}")


def _layer_normalization(case: _Case) -> None:
    shape, axis = case.shape(0), case.node.attributes["axis"]
    if not -len(shape) <= axis < len(shape):
        case.refuse(f"axis {axis} of {len(shape)}")
    for index in (1, 2):
        case.expect_broadcast(index, *shape[axis % len(shape) :])


def _loss(case: _Case) -> None:
    scores = case.shape(0)
    if len(scores) < 2:
        case.refuse(f"scores of shape {list(scores)} are not (batch, classes, ...)")
    case.expect(1, scores[0], *scores[2:])
    case.expect(2, scores[1])
    case.expect_within(1, 0, scores[1] - 1, ignored=case.node.attributes.get("ignore_index"))


def _gather(case: _Case) -> None:
    shape = case.shape(0)
    rows = shape[case.node.attributes["axis"]]
    case.expect_within(1, -rows, rows - 1)


def _gemm(case: _Case) -> None:
    case.expect_broadcast(2, *case.shapes[case.node.outputs[0]])


def _transpose(case: _Case) -> None:
    rank, order = len(case.shape(0)), case.node.attributes.get("perm")
    if order is not None and sorted(order) != list(range(rank)):
        case.refuse(f"perm {list(order)} is no order of {rank} axes")


def _reduce(case: _Case) -> None:
    name, rank = case.given(1), len(case.shape(0))
    if name is not None:
        axes = [int(axis) % rank for axis in case.values[name].reshape(-1)] if rank else []
        if len(set(axes)) < len(axes):
            case.refuse(f"axes {case.values[name].tolist()} name one twice")


def _clip(case: _Case) -> None:
    for index in (1, 2):
        case.expect(index)


def _dropout(case: _Case) -> None:
    name = case.given(1)
    case.expect(1)
    if name is not None and not 0 <= float(case.values[name]) < 1:
        case.refuse(f"ratio {float(case.values[name])} is not from 0 to below 1")


def _reshape(case: _Case) -> None:
    before, after = case.shape(0), case.shapes[case.node.outputs[0]]
    if math.prod(before) != math.prod(after):
        case.refuse(f"{list(before)} has {math.prod(before)} values, and {list(after)} has {math.prod(after)}")


def _recurrent(case: _Case) -> None:
    node, attributes = case.node, case.node.attributes
    gates, functions = (4, 3) if node.op_type == "LSTM" else (3, 2)
    directions = 2 if attributes["direction"] == "bidirectional" else 1
    hidden, batch_first = attributes["hidden_size"], bool(attributes["layout"])
    first, second, features = case.shape(0)
    steps, batch = (second, first) if batch_first else (first, second)
    case.expect(1, directions, gates * hidden, features)
    case.expect(2, directions, gates * hidden, hidden)
    case.expect(3, directions, 2 * gates * hidden)
    case.expect(4, batch)
    case.expect_within(4, 0, steps)
    state = (batch, directions, hidden) if batch_first else (directions, batch, hidden)
    for index in (5, 6):
        case.expect(index, *state)
    case.expect(7, directions, 3 * hidden)
    named = attributes.get("activations") or []
    if len(named) not in (0, directions * functions) or {name.lower() for name in named} - ACTIVATIONS:
        case.refuse(f"activations {list(named)} are not {directions * functions} functions that ONNX knows")


def _attention(case: _Case) -> None:
    node = case.node
    query, key, value = case.shape(0), case.shape(1), case.shape(2)
    if not len(query) == len(key) == len(value) or len(query) not in (3, 4):
        case.refuse(f"Q, K and V have {len(query)}, {len(key)} and {len(value)} axes, not all 3 or all 4")
    if len(query) == 3:
        heads, kv_heads = node.attributes.get("q_num_heads", 0), node.attributes.get("kv_num_heads", 0)
        if heads < 1 or kv_heads < 1:
            case.refuse("inputs of 3 axes need q_num_heads and kv_num_heads")
        for index, count in ((0, heads), (1, kv_heads), (2, kv_heads)):
            if case.shape(index)[2] % count:
                case.refuse(f"input {node.inputs[index]!r}: {case.shape(index)[2]} values are not {count} heads")
        batch, queries, size = query[0], query[1], query[2] // heads
        keys, value_size = key[1], value[2] // kv_heads
        case.expect(1, batch, keys, kv_heads * size)
        case.expect(2, batch, keys, kv_heads * value_size)
    else:
        (batch, heads, queries, size), (_, kv_heads, keys, _), value_size = query, key, value[3]
        case.expect(1, batch, kv_heads, keys, size)
        case.expect(2, batch, kv_heads, keys, value_size)
    if heads % kv_heads:
        case.refuse(f"{heads} heads of queries cannot share {kv_heads} of keys evenly")
    past_key, past_value = case.given(4), case.given(5)
    if (past_key is None) != (past_value is None):
        case.refuse("past keys come with past values, or not at all")
    past = case.shapes[past_key][2] if past_key is not None and len(case.shapes[past_key]) == 4 else 0
    case.expect(4, batch, kv_heads, past, size)
    case.expect(5, batch, kv_heads, past, value_size)
    mask = case.given(3)
    if mask is not None:
        # A mask may name fewer keys than there are; those behind it are not attended to.
        shape = case.shapes[mask]
        if not shape or (shape[-1] > past + keys):
            case.refuse(f"mask {mask!r} of shape {list(shape)} is for more than {past + keys} keys")
        case.expect_broadcast(3, batch, heads, queries, shape[-1])
    case.expect(6, batch)
    case.expect_within(6, 0, past + keys)


_RULES: Mapping[str, Callable[[_Case], None]] = {
    "Attention": _attention,
    "AveragePool": _pool,
    "Clip": _clip,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "Dropout": _dropout,
    "GRU": _recurrent,
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": _image,
    "GlobalMaxPool": _image,
    "LRN": _image,
    "LSTM": _recurrent,
    "LayerNormalization": _layer_normalization,
    "MaxPool": _pool,
    "ReduceMax": _reduce,
    "ReduceMean": _reduce,
    "ReduceSum": _reduce,
    "Reshape": _reshape,
    "SoftmaxCrossEntropyLoss": _loss,
    "Transpose": _transpose,
}
