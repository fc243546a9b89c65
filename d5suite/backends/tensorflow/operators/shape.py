"""ONNX in TensorFlow: operators that only move data.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import converting, in_onnx, same
from d5suite.network import Node
from d5suite.network.nodes import shape as nodes
from d5suite.network.nodes.layouts import channels_last, identity, without
from d5suite.network.nodes.resize import read_resize


@in_onnx
def gather(node: Node, context: Context) -> Call:
    plan = nodes.read_gather(node, context)
    axis, size = plan.axis, plan.size
    if not plan.wraps:
        return lambda x, i: tf.gather(x, i, axis=axis)
    return lambda x, i: tf.gather(x, tf.where(i < 0, i + size, i), axis=axis)


def concat(node: Node, context: Context) -> Call:
    converters = context.aligned(node)
    axis = context.layout(node.outputs[0]).index(nodes.read_axis(node, context))
    return converting(lambda *xs: tf.concat(xs, axis), converters)


def flatten(node: Node, context: Context) -> Call:
    sizes, to_onnx = nodes.read_flatten(node, context), context.to_onnx(node.inputs[0])
    return lambda x: tf.reshape(to_onnx(x), sizes)


def reshape(node: Node, context: Context) -> Call:
    layout, sizes = nodes.read_stored_reshape(node, context)
    convert = context.convert(node.inputs[0], layout)
    return lambda x, *_: tf.reshape(convert(x), sizes)


def transpose(node: Node, context: Context) -> Call:
    layout, order = context.layout(node.inputs[0]), nodes.read_transpose(node, context)
    if layout != identity(len(layout)):
        # Data stay: only the axes are renamed, and the next operator moves what it must.
        context.layouts[node.outputs[0]] = tuple(order.index(axis) for axis in layout)
        return same
    return lambda x: tf.transpose(x, order)


def squeeze(node: Node, context: Context) -> Call:
    layout, axes = context.layout(node.inputs[0]), nodes.read_squeeze(node, context)
    context.layouts[node.outputs[0]] = without(layout, axes)
    positions = [layout.index(axis) for axis in axes]
    return (lambda x, *_: tf.squeeze(x, positions)) if positions else same


def unsqueeze(node: Node, context: Context) -> Call:
    axes, convert = nodes.read_unsqueeze(node, context), context.to_onnx(node.inputs[0])
    rank = context.rank(node.inputs[0]) + len(axes)
    index = tuple(tf.newaxis if axis in axes else slice(None) for axis in range(rank))
    return lambda x, *_: convert(x)[index]


def slice_(node: Node, context: Context) -> Call:
    plan, layout = nodes.read_slice(node, context), context.keep_layout(node)
    flipped, cuts = [layout.index(axis) for axis in plan.reversed], tuple(plan.cuts[axis] for axis in layout)
    return (lambda x, *_: tf.reverse(x, flipped)[cuts]) if flipped else lambda x, *_: x[cuts]


def pad(node: Node, context: Context) -> Call:
    plan, shape = nodes.read_pad(node, context), context.shape(node.inputs[0])
    layout = context.keep_layout(node)
    stored, kept, fill = [plan.added[axis] for axis in layout], [plan.kept[axis] for axis in layout], plan.value
    if plan.mode == "constant":
        return lambda x, *_: tf.pad(x[tuple(kept)], stored, constant_values=tf.cast(fill, x.dtype))
    # TensorFlow's kernel reflects, at most once.
    once = all(size is not None and max(width) < size for width, size in zip(plan.widths, shape, strict=True))
    if plan.mode == "reflect" and once:
        return lambda x, *_: tf.pad(x, stored, "REFLECT")
    rows = {layout.index(axis): indices for axis, indices in plan.rows(shape).items()}

    def run(x: Any, *_: Any) -> Any:
        for axis, indices in rows.items():
            x = tf.gather(x, indices, axis=axis)
        return x

    return run


def expand(node: Node, context: Context) -> Call:
    sizes = nodes.read_expand(node, context)
    convert = context.convert(node.inputs[0], identity(len(sizes)))

    def run(x: Any, *_: Any) -> Any:
        x = convert(x)
        return tf.broadcast_to(x, tf.broadcast_dynamic_shape(tf.shape(x), sizes))

    return run


def tile(node: Node, context: Context) -> Call:
    repeats = nodes.read_tile(node, context)
    stored = [repeats[axis] for axis in context.keep_layout(node)]
    return lambda x, *_: tf.tile(x, stored)


def split(node: Node, context: Context) -> Call:
    axis, sizes = nodes.read_split(node, context)
    return lambda x, *_: tuple(tf.split(x, sizes, axis))


def trilu(node: Node, context: Context) -> Call:
    kept, convert = nodes.read_triangle(node, context), context.to_onnx(node.inputs[0])
    return lambda x, *_: tf.where(kept, convert(x), tf.zeros((), x.dtype))


def blocks(node: Node, context: Context) -> Call:
    """DepthToSpace and SpaceToDepth."""
    last = context.layout(node.inputs[0]) == channels_last(4)
    layout = context.layouts[node.outputs[0]] = channels_last(4) if last else identity(4)
    plan, convert = nodes.read_blocks(node, context, last=last), context.convert(node.inputs[0], layout)
    if plan.depth_first and last and plan.size > 1:  # the kernels refuse blocks of one
        function = tf.nn.depth_to_space if node.op_type == "DepthToSpace" else tf.nn.space_to_depth
        return lambda x: function(x, plan.size)
    return lambda x: tf.reshape(tf.transpose(tf.reshape(convert(x), plan.split), plan.order), plan.merged)


def resize(node: Node, context: Context) -> Call:
    plan, layout = read_resize(node, context), context.keep_layout(node)
    rows = {layout.index(axis): index for axis, index in plan.rows.items()}
    weights = {layout.index(axis): matrix for axis, matrix in plan.weights.items()}
    exact = context.dtypes[node.inputs[0]] == "float64"
    if plan.aligned is not None and plan.mode == "linear" and layout == channels_last(4) and not (exact or context.xla):
        sizes, aligned = plan.sizes[2:], plan.aligned  # the kernel's result is float32

        def native(x: Any, *_: Any) -> Any:
            y = tf.raw_ops.ResizeBilinear(
                images=in_float32(x), size=sizes, align_corners=aligned, half_pixel_centers=not aligned
            )
            return tf.cast(y, x.dtype)

        return native

    def run(x: Any, *_: Any) -> Any:
        y = in_float32(x) if weights else x
        for axis, index in rows.items():
            y = tf.gather(y, index, axis=axis)
        for axis, matrix in weights.items():
            order = list(range(len(layout) - 1))
            product = tf.tensordot(y, tf.constant(matrix, y.dtype), [[axis], [1]])
            y = tf.transpose(product, [*order[:axis], len(order), *order[axis:]])
        return tf.cast(y, x.dtype)

    return run


depth_to_space = space_to_depth = blocks
