"""Variants of operators that a backend does not support, as data in its description.

A variant is a function of a node and its context that returns why the backend lacks the variant, or
``""``. It sees shapes, types and attributes, so `d5suite network` can report it before anything
runs. May import NumPy and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from d5suite.network.graph import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.recurrent import unsupported_variant
from d5suite.network.nodes.schedule import SEVERAL_OUTPUTS
from d5suite.network.operation import STATIC_INPUTS

Variant = Callable[[Node, NodeContext], str]
"""Returns why a backend lacks a node's variant, or ``""``."""


def with_attribute(operators: Collection[str], name: str, values: Collection[object], reason: str) -> Variant:
    """Return a variant: operators with one of these values of an attribute."""
    return lambda node, context: reason if node.op_type in operators and node.attributes.get(name) in values else ""


POOLS = ("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool")


def with_spatial_axes(operators: Collection[str], reason: str) -> Variant:
    """Return a variant: operators on images without one to three spatial axes."""

    def why(node: Node, context: NodeContext) -> str:
        shape = context.shapes.get(node.inputs[0]) if node.op_type in operators else None
        return "" if shape is None or 3 <= len(shape) <= 5 else reason

    return why


def with_types(types: Collection[str], reason: str, operators: Collection[str] = ()) -> Variant:
    """Return a variant: operators, by default all, that read or write one of these types."""

    def why(node: Node, context: NodeContext) -> str:
        if operators and node.op_type not in operators:
            return ""
        tensors = [name for name in (*node.inputs, *node.outputs) if name in context.dtypes]
        return reason if any(str(context.dtypes[name]) in types for name in tensors) else ""

    return why


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def without_kernels(types: Mapping[str, Collection[str]], reason: str) -> Variant:
    """Return a variant: operators whose first input has a type that they have no kernel for."""

    def why(node: Node, context: NodeContext) -> str:
        lacking = types.get(node.op_type, ())
        return reason if lacking and str(context.dtypes.get(node.inputs[0])) in lacking else ""

    return why


def with_large_integers(reason: str) -> Variant:
    """Return a variant: arithmetic with a constant integer of more than 32 bits."""

    def why(node: Node, context: NodeContext) -> str:
        fixed = [context.constants[name] for name in node.inputs if name in context.constants]
        large = any(
            each.dtype.kind in "iu" and (each.max(initial=0) > _LARGEST or each.min(initial=0) < ~_LARGEST)
            for each in fixed
        )
        return reason if large and node.op_type in _ARITHMETIC else ""

    return why


_LARGEST = int(np.iinfo(np.int32).max)

_ARITHMETIC = frozenset({
    "Add", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Clip", "Concat", "Div", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Pow", "Sub", "Sum", "Where",
})  # fmt: skip
"""Operators that compute with integers; others use them as sizes and indices."""


def with_empty_axes(reason: str) -> Variant:
    """Return a variant: any operator that reads or writes an axis of length zero.

    Constants do not count: an empty one stands for an omitted input.
    """

    def why(node: Node, context: NodeContext) -> str:
        tensors = [name for name in (*node.inputs, *node.outputs) if name not in context.constants]
        return reason if any(0 in context.shapes.get(name, ()) for name in tensors) else ""

    return why


def _static(node: Node, context: NodeContext) -> str:
    """Return which static input is computed; adapters need its value to build native code."""
    unknown = [
        node.inputs[index]
        for index in STATIC_INPUTS.get(node.op_type, ())
        if index < len(node.inputs) and node.inputs[index] and node.inputs[index] not in context.constants
    ]
    return f"its input {unknown[0]!r} is not known before the network runs" if unknown else ""


def _further(node: Node, context: NodeContext) -> str:
    """Return which output is read but not computed; most operators compute only the first."""
    read = [] if node.op_type in SEVERAL_OUTPUTS else [name for name in node.outputs[1:] if name in context.readers]
    return (
        f"its further output {read[0]!r} is read, but only the first output of this operator is computed"
        if read
        else ""
    )


def interpolated(node: Node, context: NodeContext) -> str:
    """Return why the interpolation of integers is not supported."""
    kind, mode = node.op_type, node.attributes.get("mode")
    whole = kind in ("GridSample", "Resize") and mode in ("linear", "cubic") and context.is_integer(node.inputs[0])
    return "ONNX does not say how an interpolated integer is rounded" if whole else ""


def _recurrent(node: Node, context: NodeContext) -> str:
    what = unsupported_variant(node, context) if node.op_type in ("GRU", "LSTM") else ""
    return f"no adapter has {what}" if what else ""


ON_NO_ADAPTER: tuple[Variant, ...] = (
    _static,
    _further,
    _recurrent,
    interpolated,
    without_kernels({"ReduceL2": INTEGERS}, "ONNX does not say how the root of an integer is rounded"),
    with_spatial_axes(("Conv", "ConvTranspose", *POOLS), "no adapter has other than 1 to 3 spatial axes"),
    with_attribute(
        ("Resize",),
        "coordinate_transformation_mode",
        ("tf_crop_and_resize",),
        "no exporter writes regions, and no adapter supports them",
    ),
)
"""Variants that none of d5suite's adapters supports."""
