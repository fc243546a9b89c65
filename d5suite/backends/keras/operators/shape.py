"""ONNX in Keras: operators that only move data.

Imports Keras, NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import itertools
import math
from functools import reduce
from typing import Any

import numpy as np
from keras import layers, ops

from d5suite.backends.keras.operators.context import Context, Function, in_float32, in_onnx
from d5suite.levels.layouts import converting, same
from d5suite.network import Node
from d5suite.network.nodes import shape as nodes
from d5suite.network.nodes.layouts import channels_last, identity, without
from d5suite.network.nodes.resize import read_resize


def concat(node: Node, context: Context) -> Any:
    converters = context.aligned(node)
    axis = context.layout(node.outputs[0]).index(nodes.read_axis(node, context))
    alone = len(node.inputs) == 1 or context.single
    if not alone and context.computed(*node.inputs) and set(converters) == {same}:
        return layers.Concatenate(axis, **context.settings(node))([context.tensors[name] for name in node.inputs])
    return context.calculate(node, converting(lambda *xs: ops.concatenate(xs, axis), converters))


def flatten(node: Node, context: Context) -> Any:
    shape, sizes = context.shape(node.inputs[0]), nodes.read_flatten(node, context)
    if None not in shape[1:] and sizes == (-1, math.prod(n or 0 for n in shape[1:])):
        return layers.Flatten("channels_last", **context.settings(node))(context.enter(node, 0, identity(len(shape))))
    convert = context.to_onnx(node.inputs[0])
    return context.calculate(node, lambda x: ops.reshape(convert(x), sizes))


def reshape(node: Node, context: Context) -> Any:
    layout, sizes = nodes.read_stored_reshape(node, context)
    convert = context.convert(node.inputs[0], layout)
    return context.calculate(node, lambda x, _: ops.reshape(convert(x), sizes))


def transpose(node: Node, context: Context) -> Any:
    layout, order = context.layout(node.inputs[0]), nodes.read_transpose(node, context)
    if layout != identity(len(layout)):
        # Data stay: only the axes are renamed, and the next operator moves what it must.
        context.layouts[node.outputs[0]] = tuple(order.index(axis) for axis in layout)
        return layers.Identity(**context.settings(node))(context.tensors[node.inputs[0]])
    return context.calculate(node, lambda x: ops.transpose(x, order))


def squeeze(node: Node, context: Context) -> Any:
    layout, axes = context.layout(node.inputs[0]), nodes.read_squeeze(node, context)
    context.layouts[node.outputs[0]] = without(layout, axes)
    positions = tuple(layout.index(axis) for axis in axes)
    return context.calculate(node, (lambda x, *_: ops.squeeze(x, positions)) if positions else same)


def unsqueeze(node: Node, context: Context) -> Any:
    axes, convert = nodes.read_unsqueeze(node, context), context.to_onnx(node.inputs[0])
    return context.calculate(node, lambda x, _: ops.expand_dims(convert(x), axes))


def slice_(node: Node, context: Context) -> Any:
    plan, layout = nodes.read_slice(node, context), context.keep_layout(node)
    flipped, cuts = tuple(layout.index(axis) for axis in plan.reversed), tuple(plan.cuts[axis] for axis in layout)
    return context.calculate(node, lambda x, *_: ops.flip(x, flipped)[cuts] if flipped else x[cuts])


def pad(node: Node, context: Context) -> Any:
    plan, layout = nodes.read_pad(node, context), context.keep_layout(node)
    if plan.mode == "constant":
        stored, kept, fill = (
            [plan.added[axis] for axis in layout],
            tuple(plan.kept[axis] for axis in layout),
            plan.value,
        )
        return context.calculate(node, lambda x, *_: ops.pad(x[kept], stored, constant_values=fill))
    rows = {
        layout.index(axis): ops.convert_to_tensor(indices.astype(np.int32))
        for axis, indices in plan.rows(context.shape(node.inputs[0])).items()
    }
    return context.calculate(node, lambda x, *_: reduce(lambda y, axis: ops.take(y, rows[axis], axis), rows, x))


@in_onnx
def gather(node: Node, context: Context) -> Function:
    axis = nodes.read_axis(node, context)
    return lambda data, indices: ops.take(data, indices, axis)


def expand(node: Node, context: Context) -> Any:
    sizes = nodes.read_expand(node, context)
    convert = context.convert(node.inputs[0], identity(len(sizes)))

    def run(x: Any, _: Any) -> Any:
        x = convert(x)
        shape = (*[1] * (len(sizes) - len(x.shape)), *ops.shape(x))
        return ops.broadcast_to(x, [n if size == 1 else size for n, size in zip(shape, sizes, strict=True)])

    return context.calculate(node, run)


def tile(node: Node, context: Context) -> Any:
    repeats = nodes.read_tile(node, context)
    stored = [repeats[axis] for axis in context.keep_layout(node)]
    return context.calculate(node, lambda x, _: ops.tile(x, stored))


def split(node: Node, context: Context) -> Any:
    axis, sizes = nodes.read_split(node, context)
    places = list(itertools.accumulate(sizes[:-1]))
    return context.calculate(node, lambda x, *_: tuple(ops.split(x, places, axis)))


def trilu(node: Node, context: Context) -> Any:
    # Keras's own fails on TensorFlow if the diagonal is outside the matrix.
    kept, convert = nodes.read_triangle(node, context), context.to_onnx(node.inputs[0])
    return context.calculate(node, lambda x, *_: ops.where(kept, convert(x), ops.zeros((), x.dtype)))


def blocks(node: Node, context: Context) -> Any:
    """DepthToSpace and SpaceToDepth."""
    last = context.layout(node.inputs[0]) == channels_last(4)
    layout = context.layouts[node.outputs[0]] = channels_last(4) if last else identity(4)
    plan, convert = nodes.read_blocks(node, context, last=last), context.convert(node.inputs[0], layout)
    return context.calculate(
        node, lambda x: ops.reshape(ops.transpose(ops.reshape(convert(x), plan.split), plan.order), plan.merged)
    )


def resize(node: Node, context: Context) -> Any:
    plan, layout = read_resize(node, context), context.keep_layout(node)
    rows = {layout.index(axis): index.astype(np.int32) for axis, index in plan.rows.items()}
    weights = {layout.index(axis): matrix for axis, matrix in plan.weights.items()}

    def run(x: Any, *_: Any) -> Any:
        y = in_float32(x) if weights else x
        for axis, index in rows.items():
            y = ops.take(y, ops.convert_to_tensor(index), axis)
        for axis, matrix in weights.items():
            y = ops.moveaxis(ops.tensordot(y, ops.convert_to_tensor(matrix, y.dtype), [[axis], [1]]), -1, axis)
        return ops.cast(y, x.dtype)

    return context.calculate(node, run)


depth_to_space = space_to_depth = blocks
