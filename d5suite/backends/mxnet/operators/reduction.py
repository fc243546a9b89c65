"""ONNX on MXNet: reductions, softmax and its loss.

Imports NumPy, `d5suite.network`, and `context` and `elementwise` beside it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators.context import Call, Context, Factory
from d5suite.backends.mxnet.operators.elementwise import identity
from d5suite.network import Node
from d5suite.network.nodes.context import select
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import read_axis


def softmax(function: str) -> Factory:
    """Return a factory for Softmax or LogSoftmax."""

    def factory(node: Node, context: Context) -> Call:
        axis = read_axis(node, context)
        return lambda F, x: getattr(F, function)(x, axis=axis)

    return factory


def reduce(function: str | Call) -> Factory:
    """Return a factory for a reduction."""
    run = (lambda F, x, **settings: getattr(F, function)(x, **settings)) if isinstance(function, str) else function

    def factory(node: Node, context: Context) -> Call:
        plan = read_reduce(node, context)
        if plan is None:
            return identity(node, context)
        axes, keep = plan.axes, plan.keep
        return lambda F, x, *_: run(F, x, axis=axes, keepdims=keep)

    return factory


def extreme(function: str) -> Factory:
    """Return a factory for an extreme; in a training network, equal elements share its gradient."""

    def shared(F: Any, x: Any, *, axis: Any, keepdims: bool) -> Any:
        y = getattr(F, function)(x, axis=axis, keepdims=True)
        count = F.BlockGrad(F.sum(F.broadcast_equal(x, y), axis=axis, keepdims=keepdims))
        y = y if keepdims else F.reshape_like(y, count)
        part = y / count  # MXNet gives the whole gradient to each of the equal elements
        # Infinity minus infinity is NaN.
        return F.where(F.abs(y) < math.inf, F.BlockGrad(y) + (part - F.BlockGrad(part)), y)

    def factory(node: Node, context: Context) -> Call:
        exact = context.training and not context.single and not context.is_integer(node.inputs[0])
        return reduce(shared if exact else function)(node, context)

    return factory


_LEAST = float(np.finfo(np.float32).min)
"""The least finite number of float32."""


def _sum_square(F: Any, x: Any, **settings: Any) -> Any:
    return F.sum(F.square(x), **settings)


def _norm(F: Any, x: Any, **settings: Any) -> Any:
    return F.sqrt(_sum_square(F, x, **settings))


def _sum_absolute(F: Any, x: Any, **settings: Any) -> Any:
    return F.sum(F.abs(x), **settings)


def _log_sum_exp(F: Any, x: Any, *, axis: Any, keepdims: bool) -> Any:
    most = F.BlockGrad(F.maximum(F.max(x, axis=axis, keepdims=True), _LEAST))  # -inf minus -inf is NaN
    total = F.sum(F.exp(F.broadcast_sub(x, most)), axis=axis, keepdims=keepdims)
    return F.log(total) + (most if keepdims else F.reshape_like(most, total))


def softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    plan = read_softmax_cross_entropy_loss(node, context)
    ignored, wanted = plan.ignored, context.wanted(node)

    def call(F: Any, x: Any, labels: Any, weight: Any = None) -> Any:
        scores = F.log_softmax(x, axis=1)
        weights = F.take(weight, labels) if plan.weighted else None
        kept = None if ignored is None else F.cast(labels != ignored, dtype=context.dtype)
        losses = -F.pick(scores, labels, axis=1)
        return select((plan.reduce(losses, weights, kept, F.sum, F.mean), scores), wanted)

    return call


OPERATORS: dict[str, Factory] = {
    "LogSoftmax": softmax("log_softmax"),
    "ReduceL1": reduce(_sum_absolute),
    "ReduceL2": reduce(_norm),
    "ReduceLogSumExp": reduce(_log_sum_exp),
    "ReduceMax": extreme("max"),
    "ReduceMean": reduce("mean"),
    "ReduceMin": extreme("min"),
    "ReduceProd": reduce("prod"),
    "ReduceSum": reduce("sum"),
    "ReduceSumSquare": reduce(_sum_square),
    "Softmax": softmax("softmax"),
}
