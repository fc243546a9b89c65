"""ONNX on deep500: images sampled at the points of a grid.

Imports NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, Formula
from d5suite.network import Node
from d5suite.network.nodes.sampling import Sampling, SamplingFunctions, Tap, place, read_grid_sample, taps

_FUNCTIONS = SamplingFunctions(np.floor, np.rint, np.abs, np.clip, lambda x: x.astype(np.int64))


def grid_sample(node: Node, context: Context) -> CustomOperator:
    plan = read_grid_sample(node, context)

    def near(grid: np.ndarray) -> tuple[list[np.ndarray], list[Tap]]:
        """Return the coordinates of every point, (images, points), and its cells."""
        coordinates = list(np.moveaxis(grid.reshape(len(grid), -1, grid.shape[-1]), -1, 0))
        return coordinates, taps(plan, _FUNCTIONS, coordinates)

    def forward(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
        rows = x.reshape(*x.shape[:2], -1)
        parts = [np.take_along_axis(rows, tap.cell[:, None], 2) * tap.weight[:, None] for tap in near(grid)[1]]
        y: np.ndarray = sum(parts[1:], parts[0]).reshape(*x.shape[:2], *plan.outputs)
        return y

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        x, grid = inputs
        rows, above = x.reshape(*x.shape[:2], -1), gradient.reshape(*x.shape[:2], -1)
        by_rows = np.zeros_like(rows)
        coordinates, cells = near(grid)
        by_places = [np.zeros_like(coordinates[0]) for _ in coordinates]
        images, channels = np.ogrid[: x.shape[0], : x.shape[1]]
        for tap in cells:
            cell = tap.cell[:, None]
            np.add.at(by_rows, (images[..., None], channels[..., None], cell), above * tap.weight[:, None])
            by_weight = (above * np.take_along_axis(rows, cell, 2)).sum(1)
            for axis, slope in enumerate(tap.slopes):
                others = [factor for other, factor in enumerate(tap.factors) if other != axis]
                by_places[axis] += by_weight * slope * reduce(mul, others, 1)
        by_coordinates = [
            by_place * _slope(plan, coordinate, axis)
            for axis, (by_place, coordinate) in enumerate(zip(by_places, reversed(coordinates), strict=True))
        ]
        return [by_rows.reshape(x.shape), np.stack(by_coordinates[::-1], -1).reshape(grid.shape)]

    return Formula(context.describe(node), forward, backward)


def _slope(plan: Sampling, coordinate: np.ndarray, axis: int) -> np.ndarray:
    """Return the derivative of a point's position, which stops or turns back at the border."""
    step = 2.0**-20
    ends = [place(plan, _FUNCTIONS, coordinate.astype(np.float64) + sign * step, axis) for sign in (1, -1)]
    slope: np.ndarray = np.rint((ends[0] - ends[1]) / step) / 2  # a whole number of half cells
    return slope.astype(coordinate.dtype)
