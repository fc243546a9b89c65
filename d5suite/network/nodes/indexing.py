"""Nodes that look up, rank, count and generate values.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from d5suite.errors import NetworkError, UnsupportedOperatorError
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.shape import read_axis

T = TypeVar("T")


@dataclass(frozen=True)
class Elements:
    """A GatherElements or ScatterElements.

    Attributes
    ----------
    axis : int
        The axis that indices count along.
    size : int
        Size of the data on this axis; negative indices count back from it.
    crop : tuple of slice
        The part of the data that the indices cover: the whole of ``axis``, and of each other axis
        as much as the indices have.
    """

    axis: int
    size: int
    crop: tuple[slice, ...]


def read_elements(node: Node, context: NodeContext) -> Elements:
    """Read a GatherElements or ScatterElements.

    Raises
    ------
    NetworkError
        If the data's size on the axis is unknown.
    """
    axis, shape, indices = read_axis(node, context), *map(context.shape, node.inputs[:2])
    size = shape[axis]
    if size is None:
        raise NetworkError(f"{node.op_type} along an axis of unknown size", where=node.name)
    crop = tuple(
        slice(None) if a == axis or n == m else slice(m) for a, (n, m) in enumerate(zip(shape, indices, strict=True))
    )
    return Elements(axis, size, crop)


@dataclass(frozen=True)
class Tuples:
    """A GatherND or ScatterND: the last axis of the indices holds tuples that address cells.

    Attributes
    ----------
    batch : int
        Number of leading axes that data and indices share; tuples address the axes after these.
    sizes : tuple of int or None
        Sizes of the data on the addressed axes; negative indices count back from them.
    wraps : bool
        Whether indices may be negative.
    """

    batch: int
    sizes: tuple[int | None, ...]
    wraps: bool


def read_tuples(node: Node, context: NodeContext) -> Tuples:
    """Read a GatherND or ScatterND.

    Raises
    ------
    NetworkError
        If the length of a tuple is unknown, or a size needed for negative indices.
    """
    shape, batch = context.shape(node.inputs[0]), node.attributes.get("batch_dims", 0)
    count, wraps = context.shape(node.inputs[1])[-1], node.inputs[1] not in context.non_negative
    sizes = () if count is None else shape[batch : batch + count]
    if count is None or (wraps and None in sizes):
        raise NetworkError(f"{node.op_type} along axes of unknown number or size", where=node.name)
    return Tuples(batch, sizes, wraps)


def choose_reduction(node: Node, known: Mapping[str, T]) -> T:
    """Return a framework's entry for the reduction of a scatter.

    Raises
    ------
    UnsupportedOperatorError
        If the framework has no such reduction.
    """
    reduction = node.attributes["reduction"]
    if reduction not in known:
        raise UnsupportedOperatorError(
            f"the framework has no {node.op_type} with reduction {reduction!r} (node {node.name})", where=node.name
        )
    return known[reduction]


def read_cumulative(node: Node, context: NodeContext) -> tuple[int, bool, bool]:
    """Return a CumSum's axis, whether it is exclusive, and whether it sums from the end."""
    axis = context.constant(node, 1)
    assert axis is not None  # ONNX has no default
    return (
        int(axis.item()) % context.rank(node.inputs[0]),
        bool(node.attributes["exclusive"]),
        bool(node.attributes["reverse"]),
    )


@dataclass(frozen=True)
class Extreme:
    """An ArgMax, ArgMin or TopK.

    Attributes
    ----------
    axis : int
    largest : bool
    count : int
        Number of values along the axis; 1 for ArgMax and ArgMin.
    keep : bool
        Whether the axis is kept; always for TopK.
    last : bool
        Whether the last of equal values is chosen instead of the first.
    """

    axis: int
    largest: bool
    count: int = 1
    keep: bool = True
    last: bool = False


def read_extreme(node: Node, context: NodeContext) -> Extreme:
    """Read an ArgMax, ArgMin or TopK."""
    axis, a = read_axis(node, context), node.attributes
    if node.op_type == "TopK":
        count = context.constant(node, 1)
        assert count is not None  # ONNX has no default
        return Extreme(axis, bool(a["largest"]), int(count.item()))
    return Extreme(axis, node.op_type == "ArgMax", 1, bool(a["keepdims"]), bool(a["select_last_index"]))


def read_one_hot(node: Node, context: NodeContext) -> tuple[int, int]:
    """Return the axis of a OneHot's output, and the depth."""
    depth = context.constant(node, 1)
    assert depth is not None  # ONNX has no default
    return node.attributes["axis"] % (context.rank(node.inputs[0]) + 1), int(depth.item())


def read_range(node: Node, context: NodeContext) -> tuple[Any, Any, Any, np.dtype]:
    """Return a Range's start, limit and step as Python numbers, and its type."""
    start, limit, delta = (context.constant(node, index) for index in range(3))
    assert start is not None and limit is not None and delta is not None  # ONNX has no default
    return start.item(), limit.item(), delta.item(), context.dtypes[node.outputs[0]]


def read_eye(node: Node, context: NodeContext) -> tuple[int, np.dtype]:
    """Return an EyeLike's diagonal (positive: above the main one) and its type."""
    return node.attributes["k"], context.dtypes[node.outputs[0]]


def read_reverse(node: Node) -> tuple[int, int]:
    """Return a ReverseSequence's axes of time and batch."""
    return node.attributes["time_axis"], node.attributes["batch_axis"]


def read_constant_of_shape(node: Node, context: NodeContext) -> tuple[tuple[int, ...], Any, np.dtype]:
    """Return a ConstantOfShape's sizes, its value as a Python number, and its type."""
    sizes, value = context.constant(node, 0), np.asarray(node.attributes.get("value", np.zeros(1, np.float32)))
    assert sizes is not None  # ONNX has no default
    return tuple(int(size) for size in sizes), value.item(), context.dtypes[node.outputs[0]]


def read_shape(node: Node, context: NodeContext) -> tuple[int, ...]:
    """Return the axes whose sizes a Shape returns."""
    rank = context.rank(node.inputs[0])
    return tuple(range(rank)[slice(node.attributes.get("start", 0), node.attributes.get("end"))])
