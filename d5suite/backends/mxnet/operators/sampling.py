"""ONNX on MXNet: images sampled at the points of a grid.

Imports `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

from d5suite.backends.mxnet.operators.context import Call, Context, places, rounded
from d5suite.network import Node
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps


def grid_sample(node: Node, context: Context) -> Call:
    """Return a sum over the cells near every point.

    MXNet's own kernel is for bilinear samples of aligned two-dimensional images in zeros.
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
