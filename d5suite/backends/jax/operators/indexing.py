"""ONNX on JAX: operators that look up, sample, rank, count and generate values.

Imports JAX, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from d5suite.backends.jax.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes import indexing as nodes
from d5suite.network.nodes.context import select
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps
from d5suite.network.nodes.shape import read_axis


@in_onnx
def gather_elements(node: Node, context: Context) -> Call:
    plan = nodes.read_elements(node, context)
    # ONNX has no indices out of bounds; JAX's default would add a mask.
    return lambda x, i: jnp.take_along_axis(x[plan.crop], _from_start(i, plan.size), plan.axis, mode="clip")


_METHODS = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}


@in_onnx
def scatter_elements(node: Node, context: Context) -> Call:
    plan, method = nodes.read_elements(node, context), _METHODS[node.attributes["reduction"]]

    def call(x: Any, indices: Any, updates: Any) -> Any:
        cells = list(jnp.indices(indices.shape, sparse=True))
        cells[plan.axis] = _from_start(indices, plan.size)
        return getattr(jnp.asarray(x).at[tuple(cells)], method)(updates)  # a constant is NumPy's

    return call


def _from_start(indices: Any, size: int) -> Any:
    """Convert negative indices, which count from the end, to indices from the start."""
    return jnp.where(indices < 0, indices + size, indices)


@in_onnx
def gather_nd(node: Node, context: Context) -> Call:
    plan = nodes.read_tuples(node, context)
    return lambda x, indices: jnp.asarray(x).at[_cells(indices, plan)].get(mode="clip")


@in_onnx
def scatter_nd(node: Node, context: Context) -> Call:
    plan, method = nodes.read_tuples(node, context), _METHODS[node.attributes["reduction"]]
    return lambda x, indices, updates: getattr(jnp.asarray(x).at[_cells(indices, plan)], method)(updates)


def _cells(indices: Any, plan: nodes.Tuples) -> tuple[Any, ...]:
    """Return an index of the cells named by tuples of indices; JAX wraps negative ones."""
    places = jnp.indices(indices.shape[:-1], sparse=True)[: plan.batch]
    return (*places, *(indices[..., axis] for axis in range(len(plan.sizes))))


@in_onnx
def cum_sum(node: Node, context: Context) -> Call:
    axis, exclusive, reverse = nodes.read_cumulative(node, context)

    def call(x: Any, *_: Any) -> Any:
        y = lax.cumsum(x, axis, reverse)
        if not exclusive:
            return y
        moved = (-1, 1, 0) if reverse else (1, -1, 0)
        return lax.pad(y, y.dtype.type(0), [moved if a == axis else (0, 0, 0) for a in range(y.ndim)])

    return call


@in_onnx
def top_k(node: Node, context: Context) -> Call:
    plan, wanted = nodes.read_extreme(node, context), context.wanted(node)

    def call(x: Any, *_: Any) -> Any:
        x = jnp.moveaxis(x, plan.axis, -1)
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        _, indices = lax.top_k(x if plan.largest else -x if floating else ~x, plan.count)  # -x may overflow
        values = jnp.take_along_axis(x, indices, -1, mode="clip")
        return select([jnp.moveaxis(y, -1, plan.axis) for y in (values, indices)], wanted)

    return call


@in_onnx
def extreme(node: Node, context: Context) -> Call:
    plan = nodes.read_extreme(node, context)
    axis, function = plan.axis, jnp.argmax if plan.largest else jnp.argmin
    if plan.last:
        return lambda x: x.shape[axis] - 1 - function(jnp.flip(x, axis), axis, keepdims=plan.keep)
    return lambda x: function(x, axis, keepdims=plan.keep)


@in_onnx
def hardmax(node: Node, context: Context) -> Call:
    axis = read_axis(node, context)
    return lambda x: jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], dtype=x.dtype, axis=axis)


@in_onnx
def reverse_sequence(node: Node, context: Context) -> Call:
    time, batch = nodes.read_reverse(node)

    def call(x: Any, lengths: Any) -> Any:
        lengths = jnp.expand_dims(lengths, time)  # the other of the first two axes is the batch
        steps = jnp.expand_dims(jnp.arange(x.shape[time]), batch)
        rows = jnp.where(steps < lengths, lengths - 1 - steps, steps)
        return jnp.take_along_axis(x, rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), time, mode="clip")

    return call


@in_onnx
def one_hot(node: Node, context: Context) -> Call:
    axis, depth = nodes.read_one_hot(node, context)

    def call(indices: Any, _: Any, values: Any) -> Any:
        classes = jnp.arange(depth).reshape(-1, *[1] * (indices.ndim - axis))
        return jnp.where(jnp.expand_dims(_from_start(indices, depth), axis) == classes, values[1], values[0])

    return call


def range_(node: Node, context: Context) -> Call:
    start, limit, delta, dtype = nodes.read_range(node, context)
    return lambda *_: jnp.arange(start, limit, delta, dtype)


def constant_of_shape(node: Node, context: Context) -> Call:
    sizes, value, dtype = nodes.read_constant_of_shape(node, context)
    return lambda *_: jnp.full(sizes, value, dtype)


@in_onnx
def eye_like(node: Node, context: Context) -> Call:
    diagonal, dtype = nodes.read_eye(node, context)
    return lambda x: jnp.eye(x.shape[0], x.shape[1], diagonal, dtype)


@in_onnx
def shape(node: Node, context: Context) -> Call:
    axes = nodes.read_shape(node, context)
    return lambda x: jnp.array([x.shape[axis] for axis in axes], int)


arg_max = arg_min = extreme


_FUNCTIONS = SamplingFunctions(jnp.floor, jnp.round, jnp.abs, jnp.clip, lambda x: x.astype(jnp.int32))


def grid_sample(node: Node, context: Context) -> Call:
    """Return a weighted sum over the cells near each point; JAX has no kernel for it."""
    plan, (image, grid) = read_grid_sample(node, context), node.inputs
    layout = context.layouts[node.outputs[0]] = channels_last(context.rank(image))
    to_last, to_onnx = context.convert(image, layout), context.to_onnx(grid)

    def call(x: Any, grid: Any) -> Any:
        rows = in_float32(to_last(x)).reshape(x.shape[0], -1, plan.channels)
        points = in_float32(to_onnx(grid)).reshape(x.shape[0], -1, len(plan.sizes))
        y: Any = 0
        for tap in taps(plan, _FUNCTIONS, [points[..., axis] for axis in range(len(plan.sizes))]):
            cells = jnp.expand_dims(tap.cell, -1)
            y = y + jnp.take_along_axis(rows, cells, 1, mode="clip") * jnp.expand_dims(tap.weight, -1)
        return y.reshape(x.shape[0], *plan.outputs, plan.channels).astype(x.dtype)

    return call
