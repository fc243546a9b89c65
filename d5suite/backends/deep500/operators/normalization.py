"""ONNX on deep500: normalization.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, Formula, collapsed
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes.normalization import LEAST_NORM, read_layer_normalization, read_lrn
from d5suite.network.nodes.shape import read_axis


class _BatchNormalizationInference(native.BatchNormalizationInferenceOp):
    """deep500's inference operator with its own gradient; deep500 has only that of training."""

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        above = grads[0]
        x, scale, _, mean, variance = fwd_inputs
        axes, column = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        spread = np.sqrt(variance + self.epsilon).reshape(column)
        normal = (x - mean.reshape(column)) / spread
        by_weights = [(above * normal).sum(axes), above.sum(axes)]
        return [above * scale.reshape(column) / spread, *by_weights, np.zeros_like(mean), np.zeros_like(variance)]


def batch_normalization(node: Node, context: Context) -> CustomOperator:
    """Return deep500's training or inference operator; momentum and biased variance are as in ONNX.

    The training operator has five outputs: the result, the updated running statistics and the
    batch's statistics.
    """
    settings = {"epsilon": node.attributes["epsilon"], "momentum": node.attributes["momentum"]}
    if context.training:
        return native.BatchNormalizationTrainingOp(*context.describe(node, outputs=5), **settings)
    return _BatchNormalizationInference(*context.describe(node), **settings)


class _LayerNormalization(deep500.CustomPythonOp):
    """A custom operator with ONNX's three outputs; deep500 has no LayerNormalization."""

    def __init__(self, *descriptors: list[Any], axes: tuple[int, ...], epsilon: float) -> None:
        super().__init__(*descriptors)
        self._axes, self._epsilon = axes, epsilon

    def forward(self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> list[np.ndarray]:
        """Return the scaled normalised input, the mean and the inverse deviation."""
        mean = x.mean(self._axes, keepdims=True)
        centred = x - mean
        inverse = 1 / np.sqrt((centred**2).mean(self._axes, keepdims=True) + self._epsilon)
        y = centred * inverse * scale
        return [y if bias is None else y + bias, mean, inverse]

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Return the gradients of input, scale and, if there is one, bias."""
        above = grads[0]
        x, scale, *bias = fwd_inputs
        _, mean, inverse = fwd_outputs
        normal, scaled = (x - mean) * inverse, above * scale
        inner = scaled.mean(self._axes, keepdims=True) + normal * (scaled * normal).mean(self._axes, keepdims=True)
        by_bias = [collapsed(above, b.shape) for b in bias]
        return [inverse * (scaled - inner), collapsed(above * normal, scale.shape), *by_bias]


def instance_normalization(node: Node, context: Context) -> CustomOperator:
    """Normalise the spatial axes as a LayerNormalization, with scale and bias per channel."""
    rank = context.rank(node.inputs[0])
    column = (-1, *[1] * (rank - 2))
    inner = _LayerNormalization(
        *context.describe(node, outputs=3), axes=tuple(range(2, rank)), epsilon=node.attributes["epsilon"]
    )

    def forward(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return inner.forward(x, scale.reshape(column), bias.reshape(column))[0]

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        x, *vectors = inputs
        given = [x, *(vector.reshape(column) for vector in vectors)]
        by_x, *by_vectors = inner.backward([gradient], given, inner.forward(*given))
        return [by_x, *(found.reshape(-1) for found in by_vectors)]

    return Formula(context.describe(node), forward, backward)


def layer_normalization(node: Node, context: Context) -> CustomOperator:
    plan = read_layer_normalization(node, context)
    return _LayerNormalization(*context.describe(node, outputs=3), axes=plan.axes, epsilon=plan.epsilon)


def lrn(node: Node, context: Context) -> CustomOperator:
    plan = read_lrn(node)
    size, before, after = plan.size, plan.before, plan.after
    alpha, beta, bias = plan.alpha / size, plan.beta, plan.bias

    def neighbours(x: np.ndarray, before: int, after: int) -> np.ndarray:
        """Return sums over a window of channels."""
        padded = np.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        return fold(np.add, (padded[:, i : i + x.shape[1]] for i in range(size)))

    def forward(x: np.ndarray) -> np.ndarray:
        return x * (bias + alpha * neighbours(x**2, before, after)) ** -beta

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        x = inputs[0]
        total = bias + alpha * neighbours(x**2, before, after)
        through = neighbours(gradient * x * total ** (-beta - 1), after, before)
        return [gradient * total**-beta - 2 * alpha * beta * x * through]

    return Formula(context.describe(node), forward, backward)


def group_normalization(node: Node, context: Context) -> CustomOperator:
    """Normalise the cells of a group as a LayerNormalization, with scale and bias per channel."""
    groups, epsilon = node.attributes["num_groups"], node.attributes["epsilon"]
    rank = context.rank(node.inputs[0])
    column, others = (-1, *[1] * (rank - 2)), (0, *range(2, rank))
    inner = _LayerNormalization([None] * 2, [None] * 3, axes=(2,), epsilon=epsilon)
    one: np.ndarray = np.array([1], context.dtype)

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), groups, -1)

    def forward(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
        normal = inner.forward(grouped(x), one)[0].reshape(x.shape)
        return normal * scale.reshape(column) + bias.reshape(column)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        x, scale, _bias = inputs
        given = [grouped(x), one]
        outputs = inner.forward(*given)
        by_x = inner.backward([grouped(gradient * scale.reshape(column))], given, outputs)[0].reshape(x.shape)
        return [by_x, (gradient * outputs[0].reshape(x.shape)).sum(others), gradient.sum(others)]

    return Formula(context.describe(node), forward, backward)


def rms_normalization(node: Node, context: Context) -> CustomOperator:
    plan = read_layer_normalization(node, context)

    def normal(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inverse = 1 / np.sqrt((x**2).mean(plan.axes, keepdims=True) + plan.epsilon)
        return x * inverse, inverse

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        (x, scale), scaled = inputs, gradient * inputs[1]
        y, inverse = normal(x)
        by_x = inverse * (scaled - y * (scaled * y).mean(plan.axes, keepdims=True))
        return [by_x, collapsed(gradient * y, scale.shape)]

    return Formula(context.describe(node), lambda x, scale: normal(x)[0] * scale, backward)


def lp_normalization(node: Node, context: Context) -> CustomOperator:
    axis, order = read_axis(node, context), node.attributes["p"]

    def norm(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.linalg.norm(x, order, axis, keepdims=True)
        return np.maximum(found, LEAST_NORM)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], y: np.ndarray) -> list[np.ndarray]:
        (x,) = inputs
        along = y if order == 2 else np.sign(x)
        return [(gradient - along * (gradient * y).sum(axis, keepdims=True)) / norm(x)]

    return Formula(context.describe(node), lambda x: x / norm(x), backward)
