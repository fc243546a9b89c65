"""ONNX on JAX: images sampled at the points of a grid.

Imports JAX, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from d5suite.backends.jax.operators.context import Call, Context, in_float32
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps

_FUNCTIONS = SamplingFunctions(jnp.floor, jnp.round, jnp.abs, jnp.clip, lambda x: x.astype(jnp.int32))


def grid_sample(node: Node, context: Context) -> Call:
    """Return a sum over the cells near every point; JAX has no kernel."""
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
