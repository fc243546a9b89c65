"""ONNX in TensorFlow: operators that look up, sample, rank, count and generate values.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes import indexing as nodes
from d5suite.network.nodes.context import select
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps
from d5suite.network.nodes.shape import read_axis
from d5suite.network.operation import is_floating


@in_onnx
def gather_elements(node: Node, context: Context) -> Call:
    plan, rank = nodes.read_elements(node, context), context.rank(node.inputs[0])
    last = _swapped(plan.axis, rank)

    def run(x: Any, indices: Any) -> Any:
        indices = tf.transpose(_from_start(indices, plan.size), last)
        return tf.transpose(tf.gather(tf.transpose(x[plan.crop], last), indices, batch_dims=rank - 1), last)

    return run


_SCATTERS = {
    "none": tf.tensor_scatter_nd_update,
    "add": tf.tensor_scatter_nd_add,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
}


@in_onnx
def scatter_elements(node: Node, context: Context) -> Call:
    plan, function = nodes.read_elements(node, context), nodes.choose_reduction(node, _SCATTERS)

    def run(x: Any, indices: Any, updates: Any) -> Any:
        indices = _from_start(indices, plan.size)
        cells = [tf.cast(places, indices.dtype) for places in tf.meshgrid(*map(tf.range, indices.shape), indexing="ij")]
        cells[plan.axis] = indices
        return function(x, tf.stack(cells, -1), updates)

    return run


def _swapped(axis: int, rank: int) -> list[int]:
    """Return the permutation that swaps an axis with the last one; it is its own inverse."""
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    return order


def _from_start(indices: Any, size: int) -> Any:
    """Convert negative indices, which count from the end, to indices from the start."""
    return tf.where(indices < 0, indices + size, indices)


@in_onnx
def gather_nd(node: Node, context: Context) -> Call:
    plan = nodes.read_tuples(node, context)
    return lambda x, indices: tf.gather_nd(x, _tuples_from_start(indices, plan), batch_dims=plan.batch)


@in_onnx
def scatter_nd(node: Node, context: Context) -> Call:
    plan, function = nodes.read_tuples(node, context), nodes.choose_reduction(node, _SCATTERS)
    return lambda x, indices, updates: function(x, _tuples_from_start(indices, plan), updates)


def _tuples_from_start(indices: Any, plan: nodes.Tuples) -> Any:
    return _from_start(indices, tf.constant(plan.sizes, indices.dtype)) if plan.wraps else indices


@in_onnx
def cum_sum(node: Node, context: Context) -> Call:
    axis, exclusive, reverse = nodes.read_cumulative(node, context)
    return lambda x, *_: tf.cumsum(x, axis, exclusive, reverse)


@in_onnx
def top_k(node: Node, context: Context) -> Call:
    plan, wanted, last = nodes.read_extreme(node, context), context.wanted(node), _swapped_of(node, context)

    def run(x: Any, *_: Any) -> Any:
        x = tf.transpose(x, last)
        if plan.largest:
            found = tf.math.top_k(x, plan.count)
        elif x.dtype.is_floating:
            found = tf.math.top_k(-x, plan.count)
        else:  # without the negative of the least integer
            found = tf.math.top_k(x.dtype.max - x if x.dtype.is_unsigned else tf.bitwise.invert(x), plan.count)
        values = found[0] if plan.largest else tf.gather(x, found[1], batch_dims=len(last) - 1)
        indices = tf.cast(found[1], tf.int64)
        return select((tf.transpose(values, last), tf.transpose(indices, last)), wanted)

    return run


def _swapped_of(node: Node, context: Context) -> list[int]:
    return _swapped(nodes.read_extreme(node, context).axis, context.rank(node.inputs[0]))


@in_onnx
def extreme(node: Node, context: Context) -> Call:
    plan = nodes.read_extreme(node, context)
    axis, keep, function = plan.axis, plan.keep, tf.argmax if plan.largest else tf.argmin

    def run(x: Any) -> Any:
        found = function(tf.reverse(x, [axis]) if plan.last else x, axis)
        found = x.shape[axis] - 1 - found if plan.last else found
        return tf.expand_dims(found, axis) if keep else found

    return run


@in_onnx
def hardmax(node: Node, context: Context) -> Call:
    axis = read_axis(node, context)
    return lambda x: tf.one_hot(tf.argmax(x, axis), x.shape[axis], axis=axis, dtype=x.dtype)


@in_onnx
def reverse_sequence(node: Node, context: Context) -> Call:
    time, batch = nodes.read_reverse(node)
    return lambda x, lengths: tf.reverse_sequence(x, lengths, time, batch)


@in_onnx
def one_hot(node: Node, context: Context) -> Call:
    axis, depth = nodes.read_one_hot(node, context)

    def run(indices: Any, _: Any, values: Any) -> Any:
        # `tf.one_hot` has no gradient by its values.
        hot = tf.one_hot(_from_start(tf.cast(indices, tf.int64), depth), depth, True, False, axis, dtype=tf.bool)
        return tf.where(hot, values[1], values[0])

    return run


def range_(node: Node, context: Context) -> Call:
    start, limit, delta, dtype = nodes.read_range(node, context)
    kind = tf.float32 if dtype.itemsize == 2 and is_floating(dtype) else tf.as_dtype(dtype)  # no kernel in 16 bits
    return lambda *_: tf.cast(tf.range(start, limit, delta, kind), tf.as_dtype(dtype))


def constant_of_shape(node: Node, context: Context) -> Call:
    sizes, value, dtype = nodes.read_constant_of_shape(node, context)
    return lambda *_: tf.fill(sizes, tf.constant(value, tf.as_dtype(dtype)))


@in_onnx
def eye_like(node: Node, context: Context) -> Call:
    diagonal, dtype = nodes.read_eye(node, context)
    kind = tf.as_dtype(dtype)

    def run(x: Any) -> Any:
        rows, columns = (tf.range(tf.shape(x)[axis]) for axis in (0, 1))  # `tf.eye` has no other diagonals
        return tf.cast(columns - rows[:, tf.newaxis] == diagonal, kind)

    return run


@in_onnx
def shape(node: Node, context: Context) -> Call:
    axes = nodes.read_shape(node, context)
    return lambda x: tf.gather(tf.shape(x, tf.int64), tf.constant(axes, tf.int32))


arg_max = arg_min = extreme


_FUNCTIONS = SamplingFunctions(tf.floor, tf.round, tf.abs, tf.clip_by_value, lambda x: tf.cast(x, tf.int32))


def grid_sample(node: Node, context: Context) -> Call:
    """Return a weighted sum over the cells near each point; TensorFlow has no kernel for it."""
    plan, (image, grid) = read_grid_sample(node, context), node.inputs
    layout = context.layouts[node.outputs[0]] = channels_last(context.rank(image))
    to_last, to_onnx = context.convert(image, layout), context.to_onnx(grid)

    def run(x: Any, grid: Any) -> Any:
        rows = tf.reshape(in_float32(to_last(x)), [x.shape[0], -1, plan.channels])
        points = tf.reshape(in_float32(to_onnx(grid)), [x.shape[0], -1, len(plan.sizes)])
        near = taps(plan, _FUNCTIONS, tf.unstack(points, axis=-1))
        cells, weights = (tf.stack(each, 1) for each in ([tap.cell for tap in near], [tap.weight for tap in near]))
        y = tf.reduce_sum(tf.gather(rows, cells, batch_dims=1) * weights[..., tf.newaxis], 1)
        return tf.cast(tf.reshape(y, [x.shape[0], *plan.outputs, plan.channels]), x.dtype)

    return run
