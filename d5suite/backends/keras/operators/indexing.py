"""ONNX in Keras: operators that look up, sample, rank, count and generate values.

Imports Keras, `d5suite.errors`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from d5suite.backends.keras.operators.context import Context, Function, in_float32, in_onnx
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes import indexing as nodes
from d5suite.network.nodes.context import select
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps
from d5suite.network.nodes.shape import read_axis
from d5suite.network.operation import is_floating


@in_onnx
def gather_elements(node: Node, context: Context) -> Function:
    plan = nodes.read_elements(node, context)
    return lambda x, i: ops.take_along_axis(x[plan.crop], ops.where(i < 0, i + plan.size, i), plan.axis)


@in_onnx
def scatter_elements(node: Node, context: Context) -> Function:
    plan, reduction = nodes.read_elements(node, context), node.attributes["reduction"]
    name = None if reduction == "none" else reduction

    def run(x: Any, i: Any, updates: Any) -> Any:
        i = ops.where(i < 0, i + plan.size, i)
        cells = [ops.cast(places, i.dtype) for places in ops.meshgrid(*map(ops.arange, i.shape), indexing="ij")]
        cells[plan.axis] = i
        cells = [ops.reshape(places, (-1,)) for places in cells]
        return ops.scatter_update(x, ops.stack(cells, -1), ops.reshape(ops.cast(updates, x.dtype), (-1,)), name)

    return run


@in_onnx
def gather_nd(node: Node, context: Context) -> Function:
    plan = nodes.read_tuples(node, context)
    first, *others = context.shape(node.inputs[0])[: plan.batch + len(plan.sizes)]
    rest = context.shape(node.inputs[0])[plan.batch + len(plan.sizes) :]
    if None in (*others, *rest):
        raise NetworkError("GatherND of data of unknown size", where=node.name)

    def run(x: Any, i: Any) -> Any:
        """Look up cells by number, as Keras looks up rows along one axis only."""
        i = ops.cast(i, "int32")
        columns = [i[..., axis] for axis in range(len(plan.sizes))]
        places = [
            ops.reshape(ops.arange(i.shape[axis], dtype="int32"), (-1, *[1] * (len(i.shape) - 2 - axis)))
            for axis in range(plan.batch)
        ]
        rows: Any = 0
        for size, place in zip((first, *others), (*places, *_from_start(columns, plan)), strict=True):
            rows = rows * (size or 1) + place  # the first row is 0
        return ops.take(ops.reshape(x, (-1, *rest)), rows, axis=0)

    return run


@in_onnx
def scatter_nd(node: Node, context: Context) -> Function:
    plan, reduction = nodes.read_tuples(node, context), node.attributes["reduction"]
    name, count = None if reduction == "none" else reduction, len(plan.sizes)

    def run(x: Any, i: Any, updates: Any) -> Any:
        columns = _from_start([i[..., axis] for axis in range(count)], plan)
        cells = ops.stack([ops.reshape(column, (-1,)) for column in columns], -1)
        rows = ops.reshape(ops.cast(updates, x.dtype), (-1, *x.shape[count:]))
        return ops.scatter_update(x, cells, rows, name)

    return run


def _from_start(columns: Sequence[Any], plan: nodes.Tuples) -> list[Any]:
    """Convert each axis's negative indices, which count from the end, to indices from the start."""
    if not plan.wraps:
        return list(columns)
    return [ops.where(i < 0, i + size, i) for i, size in zip(columns, plan.sizes, strict=True)]


@in_onnx
def cum_sum(node: Node, context: Context) -> Function:
    axis, exclusive, reverse = nodes.read_cumulative(node, context)
    rank = context.rank(node.inputs[0])
    pads = [(int(exclusive), 0) if a == axis else (0, 0) for a in range(rank)]

    def run(x: Any, *_: Any) -> Any:
        y = ops.cumsum(ops.flip(x, axis) if reverse else x, axis, dtype=x.dtype)
        if exclusive:
            y = ops.pad(y, pads)[tuple(slice(-1) if a == axis else slice(None) for a in range(rank))]
        return ops.flip(y, axis) if reverse else y

    return run


@in_onnx
def top_k(node: Node, context: Context) -> Function:
    plan, wanted = nodes.read_extreme(node, context), context.wanted(node)
    axis, native = plan.axis, context.backend != "torch"  # PyTorch's picks any of equal values

    def run(x: Any, *_: Any) -> Any:
        x = ops.moveaxis(x, axis, -1)
        key = -x if plan.largest != native else x
        if native:
            _, indices = ops.top_k(key, plan.count)
        else:
            indices = ops.argsort(key, -1)[..., : plan.count]
        values = ops.take_along_axis(x, indices, -1)
        return select((ops.moveaxis(values, -1, axis), ops.moveaxis(ops.cast(indices, "int64"), -1, axis)), wanted)

    return run


@in_onnx
def extreme(node: Node, context: Context) -> Function:
    plan = nodes.read_extreme(node, context)
    axis, keep, function = plan.axis, plan.keep, ops.argmax if plan.largest else ops.argmin
    if plan.last:
        return lambda x: ops.cast(x.shape[axis] - 1 - function(ops.flip(x, axis), axis, keep), "int64")
    return lambda x: ops.cast(function(x, axis, keep), "int64")


@in_onnx
def hardmax(node: Node, context: Context) -> Function:
    axis = read_axis(node, context)
    return lambda x: ops.one_hot(ops.argmax(x, axis), x.shape[axis], axis, dtype=x.dtype)


@in_onnx
def reverse_sequence(node: Node, context: Context) -> Function:
    time, batch = nodes.read_reverse(node)

    def run(x: Any, lengths: Any) -> Any:
        lengths = ops.expand_dims(ops.cast(lengths, "int32"), time)  # the other of the first two axes is the batch
        steps = ops.expand_dims(ops.arange(x.shape[time], dtype="int32"), batch)
        rows = ops.where(steps < lengths, lengths - 1 - steps, steps)
        rows = ops.reshape(rows, (*ops.shape(rows), *[1] * (len(x.shape) - 2)))
        return ops.take_along_axis(x, rows, time)

    return run


@in_onnx
def one_hot(node: Node, context: Context) -> Function:
    axis, depth = nodes.read_one_hot(node, context)

    def run(i: Any, _: Any, values: Any) -> Any:
        hot = ops.one_hot(ops.cast(ops.where(i < 0, i + depth, i), "int32"), depth, axis, dtype="bool")
        return ops.where(hot, values[1], values[0])

    return run


def range_(node: Node, context: Context) -> Any:
    start, limit, delta, dtype = nodes.read_range(node, context)
    wide = "float32" if dtype.itemsize == 2 and is_floating(dtype) else dtype.name  # TensorFlow has none in 16 bits
    return context.calculate(node, lambda *_: ops.cast(ops.arange(start, limit, delta, dtype=wide), dtype.name))


def constant_of_shape(node: Node, context: Context) -> Any:
    sizes, value, dtype = nodes.read_constant_of_shape(node, context)
    return context.calculate(node, lambda *_: ops.full(sizes, value, dtype=dtype.name))


@in_onnx
def eye_like(node: Node, context: Context) -> Function:
    diagonal, dtype = nodes.read_eye(node, context)

    def run(x: Any) -> Any:  # `ops.eye` does not take sizes that are known when it runs
        rows, columns = (ops.arange(size, dtype="int32") for size in ops.shape(x))
        return ops.cast(columns - ops.expand_dims(rows, 1) == diagonal, dtype.name)

    return run


@in_onnx
def shape(node: Node, context: Context) -> Function:
    axes = nodes.read_shape(node, context)
    return lambda x: ops.convert_to_tensor([ops.shape(x)[axis] for axis in axes], dtype="int64")


arg_max = arg_min = extreme


_FUNCTIONS = SamplingFunctions(ops.floor, ops.round, ops.absolute, ops.clip, lambda x: ops.cast(x, "int32"))


@in_onnx
def grid_sample(node: Node, context: Context) -> Function:
    """Return a weighted sum over the cells near each point; Keras has no such operation."""
    plan = read_grid_sample(node, context)
    axes, last = len(plan.sizes), (0, *range(2, 2 + len(plan.sizes)), 1)

    def run(x: Any, grid: Any) -> Any:
        images = x.shape[0]
        rows = ops.reshape(ops.transpose(in_float32(x), last), (images, -1, plan.channels))
        points = ops.reshape(in_float32(grid), (images, -1, axes))
        y: Any = 0
        for tap in taps(plan, _FUNCTIONS, [points[..., axis] for axis in range(axes)]):
            found = ops.take_along_axis(rows, ops.expand_dims(tap.cell, -1), 1)
            y = y + found * ops.expand_dims(tap.weight, -1)
        y = ops.transpose(ops.reshape(y, (images, *plan.outputs, plan.channels)), (0, 1 + axes, *range(1, 1 + axes)))
        return ops.cast(y, x.dtype)

    return run
