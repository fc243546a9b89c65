"""ONNX on deep500: pooling.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import (
    Backward,
    Context,
    CustomOperator,
    Factory,
    Formula,
    cropped,
    formula,
    lowest,
    taps,
    widths,
)
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_pool, read_unpool
from d5suite.network.nodes.windows import Window


def _is_native(w: Window) -> bool:
    """Return whether deep500's pooling gives ONNX's output.

    It has neither dilations nor ceil_mode, and with two or more spatial axes it confuses their pads
    unless all are equal.
    """
    same = len(w.kernel) == 1 or len({*w.pads_begin, *w.pads_end}) == 1
    inside = all(max(b, e) < k for b, e, k in zip(w.pads_begin, w.pads_end, w.kernel, strict=True))
    return same and inside and not w.dilated and not any(w.overhang)


def _max_pool_gradient(w: Window) -> Backward:
    """Return a function that gives each output's gradient to the first maximum of its window."""
    cells = taps(w)

    def backward(above: np.ndarray, inputs: Sequence[np.ndarray], y: np.ndarray) -> list[np.ndarray]:
        padded = np.pad(inputs[0], widths(w), constant_values=-np.inf)
        gradient = np.zeros_like(padded)
        waiting = np.ones(y.shape, bool)
        for tap in cells:
            hit = waiting & (padded[tap] == y)
            gradient[tap] += np.where(hit, above, 0)
            waiting &= ~hit
        return [cropped(gradient, widths(w))]

    return backward


class _MaxPool(native.MaxPoolOp):
    """deep500's pool, with gradients of overlapping windows summed; deep500 keeps only one."""

    def __init__(self, *arguments: Any, full: Window, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._gradient = _max_pool_gradient(full)

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> Sequence[np.ndarray]:
        return self._gradient(grads[0], fwd_inputs, fwd_outputs[0])


def max_pool(node: Node, context: Context) -> CustomOperator:
    w = read_pool(node, context)
    cells = taps(w)
    if any(context.wanted(node)[1:]):
        return _max_pool_with_indices(node, context, w)
    if not context.vectorised and _is_native(w) and not context.is_integer(node.inputs[0]):
        settings = {"kernel_shape": list(w.kernel), "pads": [*w.pads_begin, *w.pads_end], "strides": list(w.strides)}
        if all(s >= k for s, k in zip(w.strides, w.kernel, strict=True)):
            return native.MaxPoolOp(*context.describe(node), **settings)
        return _MaxPool(*context.describe(node), full=w, **settings)

    def forward(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, widths(w), constant_values=lowest(x.dtype))
        return fold(np.maximum, (padded[tap] for tap in cells))

    return Formula(context.describe(node), forward, _max_pool_gradient(w))


def _max_pool_with_indices(node: Node, context: Context, w: Window) -> CustomOperator:
    """Return a pool that also gives each maximum's index in the input."""
    cells, area = taps(w), math.prod(w.image)
    order: Any = "F" if node.attributes["storage_order"] else "C"
    numbers = np.pad(np.arange(area).reshape(w.image, order=order), w.pads, constant_values=-1)

    def forward(x: np.ndarray) -> list[np.ndarray]:
        padded = np.pad(x, widths(w), constant_values=lowest(x.dtype))
        start, *others = cells
        values, found = padded[start], numbers[start]
        for tap in others:
            better = (padded[tap] > values) | (found < 0)
            values, found = np.where(better, padded[tap], values), np.where(better, numbers[tap], found)
        first = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(w.image)) * area
        return [values, found + first]

    return Formula(context.describe(node, outputs=2), forward, _max_pool_gradient(w))


def average_pool(node: Node, context: Context) -> CustomOperator:
    w, include = read_pool(node, context), node.attributes["count_include_pad"]
    if not context.vectorised and _is_native(w):
        return native.AveragePoolOp(
            *context.describe(node),
            count_include_pad=include,
            kernel_shape=list(w.kernel),
            pads=[*w.pads_begin, *w.pads_end],
            strides=list(w.strides),
        )
    cells = taps(w)
    counts: np.ndarray = w.counts(include_pad=bool(include)).astype(context.dtype)

    def forward(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, widths(w))
        return fold(np.add, (padded[tap] for tap in cells)) / counts

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        padded = np.pad(np.zeros_like(inputs[0]), widths(w))
        for tap in cells:
            padded[tap] += gradient / counts
        return [cropped(padded, widths(w))]

    return Formula(context.describe(node), forward, backward)


def lp_pool(node: Node, context: Context) -> CustomOperator:
    w, order = read_pool(node, context), node.attributes["p"]
    cells = taps(w)

    def forward(x: np.ndarray) -> np.ndarray:
        padded = np.pad(np.abs(x) ** order, widths(w))
        return fold(np.add, (padded[tap] for tap in cells)) ** (1 / order)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        (x,) = inputs
        share, padded = gradient * _slope(output, order), np.pad(np.zeros_like(x), widths(w))
        for tap in cells:
            padded[tap] += share
        return [cropped(padded, widths(w)) * np.sign(x) * np.abs(x) ** (order - 1)]

    return Formula(context.describe(node), forward, backward)


def _slope(norms: np.ndarray, order: int) -> np.ndarray:
    """Return the slope of norms by their sums of powers, times the order; 0 where a norm is 0."""
    return np.where(norms > 0, np.where(norms > 0, norms, 1) ** (1 - order), 0).astype(norms.dtype)


def global_lp_pool(node: Node, context: Context) -> CustomOperator:
    axes, order = tuple(range(2, context.rank(node.inputs[0]))), node.attributes["p"]

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        (x,) = inputs
        return [gradient * _slope(output, order) * np.sign(x) * np.abs(x) ** (order - 1)]

    return Formula(
        context.describe(node), lambda x: (np.abs(x) ** order).sum(axes, keepdims=True) ** (1 / order), backward
    )


def max_unpool(node: Node, context: Context) -> CustomOperator:
    plan = read_unpool(node, context)

    def forward(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        found = np.zeros((x.shape[0], plan.channels, *plan.image), x.dtype)
        found.reshape(-1)[indices.reshape(-1)] = x.reshape(-1)
        return np.pad(found, plan.padding)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        x, indices = inputs
        return [cropped(gradient, plan.padding).reshape(-1)[indices].reshape(x.shape), np.zeros_like(indices)]

    return Formula(context.describe(node), forward, backward)


class _GlobalAveragePool(native.GlobalAveragePoolOp):
    """Global average over spatial axes; deep500 averages over wrong axes unless there are two."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        return x.mean(tuple(range(2, x.ndim)), keepdims=True)


def global_average_pool(node: Node, context: Context) -> CustomOperator:
    planar = context.rank(node.inputs[0]) == 4
    return (native.GlobalAveragePoolOp if planar else _GlobalAveragePool)(*context.describe(node))


def _global_max_pool_gradient(
    gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray
) -> list[np.ndarray]:
    x = inputs[0]
    flat = x.reshape(*x.shape[:2], -1)
    found = np.zeros_like(flat)
    np.put_along_axis(found, flat.argmax(2)[..., None], gradient.reshape(*x.shape[:2], 1), 2)
    return [found.reshape(x.shape)]


OPERATORS: dict[str, Factory] = {
    "GlobalMaxPool": formula(lambda x: x.max(tuple(range(2, x.ndim)), keepdims=True), _global_max_pool_gradient),
}
