"""ONNX in Keras: images sampled at the points of a grid.

Imports Keras, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from d5suite.backends.keras.operators.context import Context, Function, in_float32, in_onnx
from d5suite.network import Node
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps

_FUNCTIONS = SamplingFunctions(ops.floor, ops.round, ops.absolute, ops.clip, lambda x: ops.cast(x, "int32"))


@in_onnx
def grid_sample(node: Node, context: Context) -> Function:
    """Return a sum over the cells near every point; Keras has no such operation."""
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
