"""ONNX on deep500: reductions, softmax and its loss.

Imports deep500 (through `repairs`), NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import (
    Context,
    CustomOperator,
    Factory,
    Formula,
    highest,
    identity,
    log_softmax_of,
    lowest,
)
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.levels.operator import after
from d5suite.network import Node
from d5suite.network.nodes.loss import SoftmaxCrossEntropyLoss, read_softmax_cross_entropy_loss
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import read_axis


def reduce(
    forward: Callable[..., np.ndarray], backward: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
) -> Factory:
    """Return a factory for a reduction.

    Parameters
    ----------
    forward : callable
        Maps ``(x, axes, keepdims=...)`` to the reduced tensor.
    backward : callable
        Maps the output's gradient, the input and the output to the input's gradient; the output and
        its gradient keep the reduced axes.
    """

    def factory(node: Node, context: Context) -> CustomOperator:
        plan = read_reduce(node, context)
        if plan is None:
            return identity(node, context)
        axes, keep = plan.axes, plan.keep

        def gradient_of(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
            (x,) = inputs
            shape = [1 if axis in axes else n for axis, n in enumerate(x.shape)]
            return [backward(np.reshape(gradient, shape), x, np.reshape(output, shape))]

        return Formula(context.describe(node), lambda x: forward(x, axes, keepdims=keep), gradient_of)

    return factory


def _maximum(x: np.ndarray, axes: tuple[int, ...], *, keepdims: bool) -> np.ndarray:
    return np.max(x, axes, keepdims=keepdims, initial=lowest(x.dtype))


def _minimum(x: np.ndarray, axes: tuple[int, ...], *, keepdims: bool) -> np.ndarray:
    return np.min(x, axes, keepdims=keepdims, initial=highest(x.dtype))


_sum_square = after(np.sum, np.square)


def _norm(x: np.ndarray, axes: tuple[int, ...], *, keepdims: bool) -> np.ndarray:
    return np.sqrt(_sum_square(x, axes, keepdims=keepdims))


def _extreme_gradient(gradient: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Share the gradient among all cells that hold the maximum or minimum."""
    hits = x == y
    axes = tuple(axis for axis, (n, m) in enumerate(zip(x.shape, y.shape, strict=True)) if n != m)
    return gradient * hits / hits.sum(axes, keepdims=True, dtype=x.dtype)


class _Softmax(native.SoftmaxOp):
    """deep500's softmax along one axis; deep500 flattens all axes from it on, as ONNX 12 did."""

    def __init__(self, *descriptors: list[Any], along: int, rank: int) -> None:
        super().__init__(*descriptors, axis=rank - 1)
        self._along = along

    def forward(self, x: np.ndarray) -> np.ndarray:
        return np.moveaxis(super().forward(np.moveaxis(x, self._along, -1)), -1, self._along)

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        moved = ([np.moveaxis(values[0], self._along, -1)] for values in (grads, fwd_inputs, fwd_outputs))
        return [np.moveaxis(super().backward(*moved)[0], -1, self._along)]


def softmax(node: Node, context: Context) -> CustomOperator:
    return _Softmax(*context.describe(node), along=read_axis(node, context), rank=context.rank(node.inputs[0]))


def log_softmax(node: Node, context: Context) -> CustomOperator:
    axis = read_axis(node, context)
    return Formula(
        context.describe(node),
        lambda x: log_softmax_of(x, axis),
        lambda gradient, _, output: [gradient - np.exp(output) * gradient.sum(axis, keepdims=True)],
    )


def _log_sum_exp(x: np.ndarray, axes: tuple[int, ...], *, keepdims: bool) -> np.ndarray:
    most = np.maximum(_maximum(x, axes, keepdims=True), np.finfo(x.dtype).min)  # -inf minus -inf is NaN
    with np.errstate(divide="ignore"):  # the sum over no elements
        total = np.log(np.sum(np.exp(x - most), axes, keepdims=keepdims))
    return total + most.reshape(total.shape)


class _SoftmaxCrossEntropy(deep500.CustomPythonOp):
    """ONNX's SoftmaxCrossEntropyLoss; deep500's cross-entropies take probabilities, and clip them.

    Parameters
    ----------
    inputs, outputs : list of deep500.TensorDescriptor
    plan : SoftmaxCrossEntropyLoss
    """

    def __init__(self, inputs: list[Any], outputs: list[Any], plan: SoftmaxCrossEntropyLoss) -> None:
        super().__init__(inputs, outputs)
        self._reduction, self._ignored, self._logged = plan.reduction, plan.ignored, plan.logged

    def _parts(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Return log-probabilities, valid labels, sample weights and unweighted losses."""
        logarithms = log_softmax_of(x, 1)
        kept = labels != self._ignored if self._ignored is not None else np.ones(labels.shape, bool)
        valid = np.where(kept, labels, 0)
        factors = kept.astype(x.dtype) if weight is None else weight[valid] * kept
        return logarithms, valid, factors, -np.take_along_axis(logarithms, valid[:, None], 1)[:, 0]

    def _share(self, factors: np.ndarray) -> Any:
        return 1 / factors.sum() if self._reduction == "mean" else 1

    def forward(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> Any:
        """Return the loss and, if they are wanted, the log-probabilities."""
        logarithms, _, factors, losses = self._parts(x, labels, weight)
        weighted = factors * losses
        loss = weighted if self._reduction == "none" else np.asarray(weighted.sum() * self._share(factors))
        return [loss, logarithms] if self._logged else loss

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Return the gradients of logits, labels (zeros) and, if there are any, weights."""
        x, labels, *weight = fwd_inputs
        logarithms, valid, factors, losses = self._parts(x, labels, weight[0] if weight else None)
        above = grads[0] * self._share(factors)
        difference = np.exp(logarithms)
        np.put_along_axis(difference, valid[:, None], np.take_along_axis(difference, valid[:, None], 1) - 1, 1)
        found = [difference * (above * factors)[:, None], np.zeros_like(labels)]
        if weight:
            excess = losses - (fwd_outputs[0] if self._reduction == "mean" else 0)
            by_weight = np.zeros_like(weight[0])
            np.add.at(by_weight, valid, above * excess * (factors != 0))
            found.append(by_weight)
        return found


def softmax_cross_entropy_loss(node: Node, context: Context) -> CustomOperator:
    plan = read_softmax_cross_entropy_loss(node, context)
    return _SoftmaxCrossEntropy(*context.describe(node, outputs=1 + plan.logged), plan)


OPERATORS: dict[str, Factory] = {
    "ReduceL1": reduce(after(np.sum, np.abs), lambda gradient, x, y: gradient * np.sign(x)),
    "ReduceL2": reduce(_norm, lambda gradient, x, y: gradient * x / y),
    "ReduceLogSumExp": reduce(_log_sum_exp, lambda gradient, x, y: gradient * np.exp(x - y)),
    "ReduceMax": reduce(_maximum, _extreme_gradient),
    "ReduceMean": reduce(np.mean, lambda gradient, x, y: np.broadcast_to(gradient * (y.size / x.size), x.shape)),
    "ReduceMin": reduce(_minimum, _extreme_gradient),
    "ReduceProd": reduce(np.prod, lambda gradient, x, y: gradient * y / x),
    "ReduceSum": reduce(np.sum, lambda gradient, x, y: np.broadcast_to(gradient, x.shape)),
    "ReduceSumSquare": reduce(_sum_square, lambda gradient, x, y: 2 * gradient * x),
}
