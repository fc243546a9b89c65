"""ONNX in Keras: reductions, softmax and its loss.

Imports Keras, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras import layers, ops

from d5suite.backends.keras.operators.context import (
    Calculation,
    Context,
    Factory,
    Function,
    first_extreme,
    in_float32,
    is_bool,
)
from d5suite.levels.layouts import same
from d5suite.levels.operator import after
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last, identity
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import read_axis


def softmax(node: Node, context: Context) -> Any:
    layout = context.keep_layout(node)
    axis, x = layout.index(read_axis(node, context)), context.enter(node, 0, layout)
    if context.backend == "jax":
        # XLA recomputes fused values, not always with the same rounding: a logit around 1e10, as in
        # ONNX's SqueezeNet, may then exceed the maximum that softmax subtracts, by hundreds. So the
        # maximum is subtracted twice.
        shift = Calculation(
            lambda x: x - ops.max(x, axis, keepdims=True), [...], x.shape, **context.settings(node, ".shift")
        )
        x = shift(x)
    return layers.Softmax(axis, **context.settings(node))(x)


def log_softmax(node: Node, context: Context) -> Any:
    axis = context.keep_layout(node).index(read_axis(node, context))
    return context.calculate(node, lambda x: ops.log_softmax(x, axis))


def reduce(function: Function, empty: float | None = None) -> Factory:
    """Return a factory for a reduction; ``empty`` is its value if there are no elements."""

    def factory(node: Node, context: Context) -> Any:
        layout, plan = context.keep_layout(node), read_reduce(node, context)
        if plan is None:
            return context.calculate(node, same)
        context.layouts[node.outputs[0]] = plan.layout(layout)
        positions, keep = tuple(layout.index(axis) for axis in plan.axes), plan.keep
        if empty is not None and plan.empty:
            shape = context.stored(node.outputs[0])
            return context.calculate(node, lambda x, *_: ops.full(shape, False if is_bool(x) else empty, dtype=x.dtype))
        return context.calculate(node, lambda x, *_: function(x, positions, keepdims=keep))

    return factory


def extreme(native: Function, empty: float, exact: Function) -> Factory:
    """Return a factory for a maximum or minimum; ``empty`` is its value of no elements."""

    def factory(node: Node, context: Context) -> Any:
        fused = context.xla and not context.is_integer(node.inputs[0])
        return reduce(exact if fused else native, empty)(node, context)

    return factory


def _maximum(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return (ops.any if is_bool(x) else ops.max)(x, axes, keepdims=keepdims)


def _minimum(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return (ops.all if is_bool(x) else ops.min)(x, axes, keepdims=keepdims)


_sum_square = after(ops.sum, ops.square)


def _norm(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return ops.sqrt(_sum_square(x, axes, keepdims=keepdims))


def softmax_cross_entropy_loss(node: Node, context: Context) -> Any:
    plan, scores = read_softmax_cross_entropy_loss(node, context), node.inputs[0]
    ignored, logged = plan.ignored, plan.logged
    rank = context.rank(scores)
    context.prefer(scores, channels_last(rank))
    to_last = context.convert(scores, channels_last(rank))
    context.layouts[node.outputs[0]] = identity(rank - 1 if plan.reduction == "none" else 0)

    def loss(logits: Any, labels: Any, class_weights: Any = None) -> Any:
        logits = to_last(logits)
        counted = None if ignored is None else ops.not_equal(labels, ignored)
        used = labels if counted is None else ops.where(counted, labels, ops.zeros_like(labels))
        each = ops.sparse_categorical_crossentropy(used, logits, from_logits=True)
        weights = None if class_weights is None else ops.take(class_weights, used)
        kept = None if counted is None else ops.cast(counted, each.dtype)
        return plan.reduce(each, weights, kept, ops.sum, ops.mean)

    if not context.single:
        return context.calculate(node, loss, policy=context.wide_policy)
    if logged:
        context.layouts[node.outputs[1]] = channels_last(rank)

    def single(x: Any, labels: Any, class_weights: Any = None) -> Any:
        wide = in_float32(x)
        value = loss(wide, labels, None if class_weights is None else in_float32(class_weights))
        value = ops.cast(value, x.dtype)
        return (value, ops.cast(ops.log_softmax(to_last(wide), -1), x.dtype)) if logged else value

    return single


OPERATORS: dict[str, Factory] = {
    "ReduceL1": reduce(after(ops.sum, ops.abs)),
    "ReduceL2": reduce(_norm),
    "ReduceLogSumExp": reduce(ops.logsumexp),
    "ReduceMax": extreme(_maximum, -math.inf, first_extreme(ops.max, ops.argmax)),
    "ReduceMean": reduce(ops.mean),
    "ReduceMin": extreme(_minimum, math.inf, first_extreme(ops.min, ops.argmin)),
    "ReduceProd": reduce(ops.prod),
    "ReduceSum": reduce(ops.sum),
    "ReduceSumSquare": reduce(_sum_square),
}
