"""ONNX on JAX: operators that only move data.

Imports JAX, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax

from d5suite.backends.jax.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import converting, in_onnx, same
from d5suite.network import Node
from d5suite.network.nodes import shape as nodes
from d5suite.network.nodes.layouts import channels_last, grouped_channels_last, identity, without
from d5suite.network.nodes.resize import read_resize


def concat(node: Node, context: Context) -> Call:
    converters = context.aligned(node)
    axis = context.layout(node.outputs[0]).index(nodes.read_axis(node, context))
    return converting(lambda *xs: jnp.concatenate(xs, axis), converters)


def flatten(node: Node, context: Context) -> Call:
    sizes = nodes.read_flatten(node, context)
    convert = context.to_onnx(node.inputs[0])
    return lambda x: convert(x).reshape(sizes)


def reshape(node: Node, context: Context) -> Call:
    plan = nodes.read_reshape(node, context)
    name, output = node.inputs[0], node.outputs[0]
    rank, layout = context.rank(name), context.layout(name)
    # Splitting channels into groups and merging them again (ShuffleNet) leaves the rest in place.
    if plan.splits and layout == channels_last(rank):
        context.layouts[output] = grouped_channels_last(rank + 1)
        groups, size = plan.sizes[1:3]
        return lambda x, _: x.reshape(*x.shape[:-1], groups, size)
    if plan.merges and layout != identity(rank):
        context.layouts[output] = channels_last(rank - 1)
        group = context.convert(name, grouped_channels_last(rank))

        def merge(x: Any, _: Any) -> Any:
            x = group(x)
            return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])

        return merge
    convert = context.convert(name, identity(rank))
    return lambda x, _: convert(x).reshape(plan.sizes)


def transpose(node: Node, context: Context) -> Call:
    order, layout = nodes.read_transpose(node, context), context.layout(node.inputs[0])
    if layout != identity(len(layout)):
        # Rename the axes only; the next operator moves what it must.
        context.layouts[node.outputs[0]] = tuple(order.index(axis) for axis in layout)
        return same
    return lambda x: x.transpose(order)


def squeeze(node: Node, context: Context) -> Call:
    gone, layout = nodes.read_squeeze(node, context), context.layout(node.inputs[0])
    context.layouts[node.outputs[0]] = without(layout, gone)
    axes = [layout.index(axis) for axis in gone]
    return lambda x, *_: x.squeeze(axes)


def unsqueeze(node: Node, context: Context) -> Call:
    convert = context.to_onnx(node.inputs[0])
    axes = nodes.read_unsqueeze(node, context)
    return lambda x, _: jnp.expand_dims(convert(x), axes)


def slice_(node: Node, context: Context) -> Call:
    plan, layout = nodes.read_slice(node, context), context.keep_layout(node)
    flipped, cuts = [layout.index(axis) for axis in plan.reversed], tuple(plan.cuts[axis] for axis in layout)
    return lambda x, *_: jnp.flip(x, flipped)[cuts] if flipped else x[cuts]


def pad(node: Node, context: Context) -> Call:
    plan = nodes.read_pad(node, context)
    widths = [plan.widths[axis] for axis in context.keep_layout(node)]
    if plan.mode != "constant":
        return lambda x, *_: jnp.pad(x, widths, plan.mode)
    return lambda x, *_: lax.pad(x, x.dtype.type(plan.value), [(begin, end, 0) for begin, end in widths])


@in_onnx
def gather(node: Node, context: Context) -> Call:
    plan = nodes.read_gather(node, context)
    axis, size = plan.axis, plan.size
    # ONNX has no indices out of bounds. XLA's gather clips them; JAX's default would add a mask.
    if not plan.wraps:
        return lambda data, indices: jnp.take(data, indices, axis, mode="clip")
    return lambda data, indices: jnp.take(data, jnp.where(indices < 0, indices + size, indices), axis, mode="clip")


def expand(node: Node, context: Context) -> Call:
    sizes = nodes.read_expand(node, context)
    convert = context.convert(node.inputs[0], identity(len(sizes)))

    def run(x: Any, _: Any) -> Any:
        x = convert(x)
        return jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, sizes))

    return run


def tile(node: Node, context: Context) -> Call:
    repeats = nodes.read_tile(node, context)
    stored = [repeats[axis] for axis in context.keep_layout(node)]
    return lambda x, _: jnp.tile(x, stored)


def split(node: Node, context: Context) -> Call:
    axis, sizes = nodes.read_split(node, context)
    places = list(itertools.accumulate(sizes[:-1]))
    return lambda x, *_: tuple(jnp.split(x, places, axis))


def trilu(node: Node, context: Context) -> Call:
    upper, diagonal = nodes.read_trilu(node, context)
    convert = context.to_onnx(node.inputs[0])
    return lambda x, *_: (jnp.triu if upper else jnp.tril)(convert(x), diagonal)


def blocks(node: Node, context: Context) -> Call:
    """DepthToSpace and SpaceToDepth."""
    last = context.layout(node.inputs[0]) == channels_last(4)
    layout = context.layouts[node.outputs[0]] = channels_last(4) if last else identity(4)
    plan, convert = nodes.read_blocks(node, context, last=last), context.convert(node.inputs[0], layout)
    return lambda x: convert(x).reshape(plan.split).transpose(plan.order).reshape(plan.merged)


def resize(node: Node, context: Context) -> Call:
    plan, layout, precision = read_resize(node, context), context.keep_layout(node), context.precision
    rows = {layout.index(axis): index for axis, index in plan.rows.items()}
    weights = {layout.index(axis): matrix for axis, matrix in plan.weights.items()}

    def run(x: Any, *_: Any) -> Any:
        y = in_float32(x) if weights else x
        for axis, index in rows.items():
            y = jnp.take(y, index, axis, mode="clip")
        for axis, matrix in weights.items():
            product = jnp.tensordot(y, matrix.astype(y.dtype), ([axis], [1]), precision=precision)
            y = jnp.moveaxis(product, -1, axis)
        return y.astype(x.dtype)

    return run


depth_to_space = space_to_depth = blocks
