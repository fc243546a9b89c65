"""ONNX on deep500: operators that look up, sample, rank, count and generate values.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, Formula
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes import indexing as nodes
from d5suite.network.nodes.sampling import Sampling, SamplingFunctions, Tap, place, read_grid_sample, taps
from d5suite.network.nodes.shape import read_axis


def _cells(indices: np.ndarray, plan: nodes.Elements) -> Any:
    """Return an index of the cells named by indices along an axis; NumPy wraps negative ones."""
    places: list[Any] = list(np.indices(indices.shape, sparse=True))
    places[plan.axis] = indices
    return tuple(places)


def gather_elements(node: Node, context: Context) -> CustomOperator:
    plan = nodes.read_elements(node, context)
    return _gather(node, context, lambda indices: _cells(indices, plan))


def gather_nd(node: Node, context: Context) -> CustomOperator:
    plan = nodes.read_tuples(node, context)
    return _gather(node, context, lambda indices: _named_cells(indices, plan))


def _gather(node: Node, context: Context, cells_of: Callable[[np.ndarray], Any]) -> CustomOperator:
    """Return an operator that reads the cells to which indices refer."""

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        x, indices = inputs
        found = np.zeros_like(x)
        np.add.at(found, cells_of(indices), gradient)
        return [found, np.zeros_like(indices)]

    return Formula(context.describe(node), lambda x, indices: x[cells_of(indices)], backward)


def _named_cells(indices: np.ndarray, plan: nodes.Tuples) -> Any:
    """Return an index of the cells named by tuples of indices."""
    places = np.indices(indices.shape[:-1], sparse=True)[: plan.batch]
    return (*places, *np.moveaxis(indices, -1, 0))


def scatter_elements(node: Node, context: Context) -> CustomOperator:
    plan = nodes.read_elements(node, context)
    return _scatter(node, context, lambda indices: _cells(indices, plan))


def scatter_nd(node: Node, context: Context) -> CustomOperator:
    plan = nodes.read_tuples(node, context)
    return _scatter(node, context, lambda indices: _named_cells(indices, plan))


def _scatter(node: Node, context: Context, cells_of: Callable[[np.ndarray], Any]) -> CustomOperator:
    """Return an operator that changes the cells to which indices refer."""
    reduction = node.attributes["reduction"]
    combine: Any = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}.get(reduction)

    def forward(x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
        found, cells = x.copy(), cells_of(indices)
        if combine is None:
            found[cells] = updates
        else:
            combine.at(found, cells, updates)
        return found

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        x, indices, updates = inputs
        cells, by_x = cells_of(indices), gradient.copy()
        by_updates = gradient[cells]
        if reduction == "none":
            by_x[cells] = 0
        elif reduction == "mul":
            by_x, by_updates = gradient * output / x, gradient[cells] * output[cells] / updates
        elif reduction in ("max", "min"):
            by_x, by_updates = gradient * (output == x), gradient[cells] * (output[cells] == updates)
        return [by_x, np.zeros_like(indices), by_updates]

    return Formula(context.describe(node), forward, backward)


def cum_sum(node: Node, context: Context) -> CustomOperator:
    axis, exclusive, reverse = nodes.read_cumulative(node, context)

    def sums(x: np.ndarray, *, reverse: bool) -> np.ndarray:
        x = np.flip(x, axis) if reverse else x
        y = np.cumsum(x, axis, x.dtype)
        if exclusive:
            y = np.roll(y, 1, axis)
            np.moveaxis(y, axis, 0)[0] = 0
        return np.flip(y, axis) if reverse else y

    return Formula(
        context.describe(node),
        lambda x: sums(x, reverse=reverse),
        lambda gradient, *_: [sums(gradient, reverse=not reverse)],
    )


class _TopK(deep500.CustomPythonOp):
    """A custom operator with ONNX's two outputs; deep500 has no TopK."""

    def __init__(self, *descriptors: list[Any], plan: nodes.Extreme) -> None:
        super().__init__(*descriptors)
        self._plan = plan

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the values and their indices; of equal values, the first."""
        axis, count = self._plan.axis, self._plan.count
        backwards = np.flip(x, axis) if self._plan.largest else x
        order = np.argsort(backwards, axis, kind="stable")
        if self._plan.largest:
            order = x.shape[axis] - 1 - np.flip(order, axis)
        indices = np.take(order, range(count), axis)
        return [np.take_along_axis(x, indices, axis), indices]

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Return the input's gradient; only the values have one."""
        found = np.zeros_like(fwd_inputs[0])
        np.put_along_axis(found, fwd_outputs[1], grads[0], self._plan.axis)
        return [found]


def top_k(node: Node, context: Context) -> CustomOperator:
    return _TopK(*context.describe(node, outputs=2), plan=nodes.read_extreme(node, context))


def _without_gradient(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
    return [np.zeros_like(x) for x in inputs]


def extreme(node: Node, context: Context) -> CustomOperator:
    plan = nodes.read_extreme(node, context)
    axis, function = plan.axis, np.argmax if plan.largest else np.argmin

    def forward(x: np.ndarray) -> np.ndarray:
        found = function(np.flip(x, axis) if plan.last else x, axis, keepdims=plan.keep)
        return x.shape[axis] - 1 - found if plan.last else found

    return Formula(context.describe(node), forward, _without_gradient)


def hardmax(node: Node, context: Context) -> CustomOperator:
    axis = read_axis(node, context)

    def forward(x: np.ndarray) -> np.ndarray:
        found = np.zeros_like(x)
        np.put_along_axis(found, x.argmax(axis, keepdims=True), 1, axis)
        return found

    return Formula(context.describe(node), forward, _without_gradient)


def reverse_sequence(node: Node, context: Context) -> CustomOperator:
    time, batch = nodes.read_reverse(node)

    def reversed_(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        lengths = np.expand_dims(lengths, time)  # the other of the first two axes is the batch
        steps = np.expand_dims(np.arange(x.shape[time]), batch)
        rows = np.where(steps < lengths, lengths - 1 - steps, steps)
        return np.take_along_axis(x, rows.reshape(*rows.shape, *[1] * (x.ndim - 2)), time)

    return Formula(
        context.describe(node),
        reversed_,
        lambda gradient, inputs, _: [reversed_(gradient, inputs[1]), np.zeros_like(inputs[1])],
    )


def one_hot(node: Node, context: Context) -> CustomOperator:
    axis, depth = nodes.read_one_hot(node, context)

    def hits(indices: np.ndarray) -> np.ndarray:
        rows = np.expand_dims(np.where(indices < 0, indices + depth, indices), axis)
        return rows == np.arange(depth).reshape(-1, *[1] * (indices.ndim - axis))

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        hot = hits(inputs[0])
        by_values = np.array([gradient[~hot].sum(), gradient[hot].sum()], gradient.dtype)
        return [np.zeros_like(inputs[0]), by_values]

    return Formula(
        context.describe(node), lambda indices, values: np.where(hits(indices), values[1], values[0]), backward
    )


def range_(node: Node, context: Context) -> CustomOperator:
    start, limit, delta, dtype = nodes.read_range(node, context)
    return Formula(context.describe(node), lambda: np.arange(start, limit, delta, dtype=dtype), _without_gradient)


def constant_of_shape(node: Node, context: Context) -> CustomOperator:
    sizes, value, dtype = nodes.read_constant_of_shape(node, context)
    return Formula(context.describe(node), lambda: np.full(sizes, value, dtype), _without_gradient)


def eye_like(node: Node, context: Context) -> CustomOperator:
    diagonal, dtype = nodes.read_eye(node, context)
    return Formula(context.describe(node), lambda x: np.eye(x.shape[0], x.shape[1], diagonal, dtype), _without_gradient)


def shape(node: Node, context: Context) -> CustomOperator:
    axes = list(nodes.read_shape(node, context))
    return Formula(context.describe(node), lambda x: np.array(x.shape, np.int64)[axes], _without_gradient)


arg_max = arg_min = extreme


_FUNCTIONS = SamplingFunctions(np.floor, np.rint, np.abs, np.clip, lambda x: x.astype(np.int64))


def grid_sample(node: Node, context: Context) -> CustomOperator:
    plan = read_grid_sample(node, context)

    def near(grid: np.ndarray) -> tuple[list[np.ndarray], list[Tap]]:
        """Return the points' coordinates, (images, points) per axis, and the cells near each."""
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
    """Return the slope of a point's position by its coordinate; padding clips or reflects it."""
    step = 2.0**-20
    ends = [place(plan, _FUNCTIONS, coordinate.astype(np.float64) + sign * step, axis) for sign in (1, -1)]
    slope: np.ndarray = np.rint((ends[0] - ends[1]) / step) / 2  # a whole number of half cells
    return slope.astype(coordinate.dtype)
