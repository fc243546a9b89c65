"""ONNX on MXNet: operators that look up, sample, rank, count and generate values.

Imports `d5suite.errors`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

from d5suite.backends.mxnet.operators.context import Call, Context, places, rounded
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes import indexing as nodes
from d5suite.network.nodes.context import select
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps
from d5suite.network.nodes.shape import read_axis


def gather_elements(node: Node, context: Context) -> Call:
    plan, rank = nodes.read_elements(node, context), context.rank(node.inputs[0])

    def call(F: Any, x: Any, indices: Any) -> Any:
        rows = _from_start(F, F.cast(indices, dtype="int64"), plan.size)
        grid = [
            rows if axis == plan.axis else places(F, rows, axis, rank)
            for axis in range(rank)
        ]  # fmt: skip
        return F.gather_nd(x, F.stack(*grid, axis=0))

    return call


def gather_nd(node: Node, context: Context) -> Call:
    plan, rank, numbers = (
        nodes.read_tuples(node, context),
        context.rank(node.inputs[1]),
        context.numbers(node.inputs[0]),
    )
    return lambda F, x, indices: F.gather_nd(numbers(F, x), _cells(F, indices, plan, rank))


def scatter_elements(node: Node, context: Context) -> Call:
    plan, shape = nodes.read_elements(node, context), _whole(node, context)
    change = nodes.choose_reduction(node, _CHANGES)

    def call(F: Any, x: Any, indices: Any, updates: Any) -> Any:
        rows = _from_start(F, F.cast(indices, dtype="int64"), plan.size)
        grid = [rows if axis == plan.axis else places(F, rows, axis, len(shape)) for axis in range(len(shape))]
        return change(F, x, F.stack(*grid, axis=0), updates, shape)

    return call


def scatter_nd(node: Node, context: Context) -> Call:
    plan, rank, shape = nodes.read_tuples(node, context), context.rank(node.inputs[1]), _whole(node, context)
    change = nodes.choose_reduction(node, _CHANGES)
    return lambda F, x, indices, updates: change(F, x, _cells(F, indices, plan, rank), updates, shape)


def _whole(node: Node, context: Context) -> tuple[int, ...]:
    """Return the data's shape, which MXNet's scatter needs."""
    shape = tuple(n for n in context.shape(node.inputs[0]) if n is not None)
    if len(shape) < context.rank(node.inputs[0]):
        raise NetworkError(f"{node.op_type} into data of unknown size", where=node.name)
    return shape


def _added(F: Any, x: Any, cells: Any, updates: Any, shape: tuple[int, ...]) -> Any:
    # Not x + ..., whose gradient is wrong if x has none (docs/findings.md).
    return F.broadcast_add(x, _scattered(F, updates, cells, shape))


def _replaced(F: Any, x: Any, cells: Any, updates: Any, shape: tuple[int, ...]) -> Any:
    kept = _scattered(F, F.ones_like(updates), cells, shape) == 0
    return x * kept + _scattered(F, updates, cells, shape)


_CHANGES = {"add": _added, "none": _replaced}


def _scattered(F: Any, updates: Any, cells: Any, shape: tuple[int, ...]) -> Any:
    """Return zeros with updates added at some cells: MXNet has it as the gradient of a gather."""
    return F._internal._backward_gather_nd(updates, cells, shape=shape)


def _cells(F: Any, indices: Any, plan: nodes.Tuples, rank: int) -> Any:
    """Return an index of the cells named by tuples of indices, as MXNet takes it: axes first."""
    indices = F.cast(indices, dtype="int64")
    columns = [F.slice_axis(indices, axis=-1, begin=axis, end=axis + 1) for axis in range(len(plan.sizes))]
    if rank > 1:
        columns = [F.squeeze(column, axis=-1) for column in columns]
    if plan.wraps:
        columns = [_from_start(F, column, size or 0) for column, size in zip(columns, plan.sizes, strict=True)]
    shared = [places(F, columns[0], axis, rank - 1) for axis in range(plan.batch)]
    return F.stack(*shared, *columns, axis=0)


def _from_start(F: Any, indices: Any, size: int) -> Any:
    """Convert negative indices, which count from the end, to indices from the start."""
    return indices + F.cast(indices < 0, dtype="int64") * size


def cum_sum(node: Node, context: Context) -> Call:
    axis, exclusive, reverse = nodes.read_cumulative(node, context)

    def call(F: Any, x: Any, *_: Any) -> Any:
        y = F.cumsum(F.reverse(x, axis=axis) if reverse else x, axis=axis)
        if exclusive:
            first = F.zeros_like(F.slice_axis(y, axis=axis, begin=0, end=1))
            y = F.slice_axis(F.concat(first, y, dim=axis), axis=axis, begin=0, end=-1)
        return F.reverse(y, axis=axis) if reverse else y

    return call


def top_k(node: Node, context: Context) -> Call:
    plan, wanted = nodes.read_extreme(node, context), context.wanted(node)
    settings = {"axis": plan.axis, "k": plan.count, "is_ascend": not plan.largest, "dtype": "int64"}

    def call(F: Any, x: Any, *_: Any) -> Any:
        if any(wanted[1:]):
            return select(list(F.topk(x, ret_typ="both", **settings)), wanted)
        return F.topk(x, ret_typ="value", **settings)

    return call


def extreme(node: Node, context: Context) -> Call:
    plan = nodes.read_extreme(node, context)
    axis, name = plan.axis, "argmax" if plan.largest else "argmin"
    size = context.shape(node.inputs[0])[axis]

    def call(F: Any, x: Any) -> Any:
        found = getattr(F, name)(F.reverse(x, axis=axis) if plan.last else x, axis=axis, keepdims=plan.keep)
        return F.cast((size or 0) - 1 - found if plan.last else found, dtype="int64")

    return call


def hardmax(node: Node, context: Context) -> Call:
    axis, shape = read_axis(node, context), context.shape(node.inputs[0])
    size, dtype = shape[axis], context.type_of(node.outputs[0])
    if size is None:
        raise NetworkError("Hardmax along an axis of unknown size", where=node.name)
    order = [*range(axis), len(shape) - 1, *range(axis, len(shape) - 1)]
    return lambda F, x: F.transpose(F.one_hot(F.argmax(x, axis=axis), depth=size, dtype=dtype), axes=order)


def reverse_sequence(node: Node, context: Context) -> Call:
    time, _ = nodes.read_reverse(node)

    def call(F: Any, x: Any, lengths: Any) -> Any:
        y = F.swapaxes(x, dim1=0, dim2=1) if time == 1 else x
        y = F.SequenceReverse(y, F.cast(lengths, dtype=context.dtype), use_sequence_length=True)
        return F.swapaxes(y, dim1=0, dim2=1) if time == 1 else y

    return call


def one_hot(node: Node, context: Context) -> Call:
    axis, depth = nodes.read_one_hot(node, context)
    order = [*range(axis), context.rank(node.inputs[0]), *range(axis, context.rank(node.inputs[0]))]

    def call(F: Any, indices: Any, _: Any, values: Any) -> Any:
        rows = _from_start(F, F.cast(indices, dtype="int64"), depth)
        hot = F.transpose(F.one_hot(rows, depth=depth, dtype=context.dtypes[node.inputs[2]].name), axes=order)
        off, on = (F.reshape(F.slice_axis(values, axis=0, begin=n, end=n + 1), shape=[1] * len(order)) for n in (0, 1))
        return F.broadcast_add(F.broadcast_mul(hot, on), F.broadcast_mul(1 - hot, off))

    return call


def range_(node: Node, context: Context) -> Call:
    start, limit, delta, dtype = nodes.read_range(node, context)
    return lambda F, *_: F.arange(start, limit, delta, dtype=dtype.name)


def constant_of_shape(node: Node, context: Context) -> Call:
    sizes, value, dtype = nodes.read_constant_of_shape(node, context)
    return lambda F, *_: F.full(sizes, value, dtype=dtype.name)


def eye_like(node: Node, context: Context) -> Call:
    diagonal, _ = nodes.read_eye(node, context)
    dtype = context.type_of(node.outputs[0])

    def call(F: Any, x: Any) -> Any:
        return F.cast(places(F, x, 1, 2) - places(F, x, 0, 2) == diagonal, dtype=dtype)

    return call


def shape(node: Node, context: Context) -> Call:
    axes = nodes.read_shape(node, context)

    def call(F: Any, x: Any) -> Any:
        return F.slice_axis(F.shape_array(x), axis=0, begin=axes[0], end=axes[-1] + 1)

    return call


arg_max = arg_min = extreme


def grid_sample(node: Node, context: Context) -> Call:
    """Return a weighted sum over the cells near each point.

    MXNet's own kernel takes only bilinear samples of two-dimensional images, aligned and padded
    with zeros.
    """
    plan = read_grid_sample(node, context)
    axes = len(plan.sizes)

    def call(F: Any, x: Any, grid: Any) -> Any:
        functions = SamplingFunctions(
            F.floor, lambda t: rounded(F, t), F.abs, lambda t, low, high: F.clip(t, a_min=low, a_max=high),
            lambda t: F.cast(t, dtype="int64"),
        )  # fmt: skip
        rows = F.transpose(F.reshape(x, shape=(0, 0, -1)), axes=(0, 2, 1))
        points = F.reshape(grid, shape=(0, -1, axes))
        coordinates = [F.squeeze(F.slice_axis(points, axis=2, begin=n, end=n + 1), axis=2) for n in range(axes)]
        parts = []
        for tap in taps(plan, functions, coordinates):
            found = F.gather_nd(rows, F.stack(places(F, tap.cell, 0, 2), tap.cell, axis=0))
            parts.append(F.broadcast_mul(found, F.expand_dims(tap.weight, axis=2)))
        y = F.transpose(F.add_n(*parts), axes=(0, 2, 1))
        return F.reshape(y, shape=(0, 0, *plan.outputs))

    return call
