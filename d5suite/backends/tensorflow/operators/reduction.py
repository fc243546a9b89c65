"""ONNX in TensorFlow: reductions, softmax and its loss.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, Factory, first_extreme, in_float32
from d5suite.levels.layouts import same
from d5suite.levels.operator import after
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last, identity
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import read_axis


def softmax(function: Call) -> Factory:
    """Return a factory for Softmax or LogSoftmax."""

    def factory(node: Node, context: Context) -> Call:
        axis = context.keep_layout(node).index(read_axis(node, context))
        return lambda x: function(x, axis=axis)

    return factory


def reduce(function: Call) -> Factory:
    """Return a factory for a reduction."""

    def factory(node: Node, context: Context) -> Call:
        layout, plan = context.keep_layout(node), read_reduce(node, context)
        if plan is None:
            return same
        context.layouts[node.outputs[0]] = plan.layout(layout)
        positions, keep = [layout.index(axis) for axis in plan.axes], plan.keep
        return lambda x, *_: function(x, positions, keepdims=keep)

    return factory


def extreme(native: Call, best: Call) -> Factory:
    """Return a factory for a maximum or minimum."""
    factories = {False: reduce(native), True: reduce(first_extreme(best))}

    def factory(node: Node, context: Context) -> Call:
        name, plan = node.inputs[0], read_reduce(node, context)
        empty = plan is not None and bool(plan.empty)
        return factories[context.recomputes and not empty and not context.is_integer(name)](node, context)

    return factory


def _reduce_max(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return (tf.reduce_any if x.dtype == tf.bool else tf.reduce_max)(x, axes, keepdims=keepdims)


def _reduce_min(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return (tf.reduce_all if x.dtype == tf.bool else tf.reduce_min)(x, axes, keepdims=keepdims)


_sum_square = after(tf.reduce_sum, tf.square)


def _norm(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return tf.sqrt(_sum_square(x, axes, keepdims=keepdims))


def softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    plan = read_softmax_cross_entropy_loss(node, context)
    ignored, logged = plan.ignored, plan.logged
    rank = context.rank(node.inputs[0])
    to_last = context.convert(node.inputs[0], channels_last(rank))
    context.layouts[node.outputs[0]] = identity(rank - 1 if plan.reduction == "none" else 0)
    if logged:
        context.layouts[node.outputs[1]] = channels_last(rank)

    def run(logits: Any, labels: Any, class_weights: Any = None) -> Any:
        scores_type = logits.dtype
        logits = in_float32(to_last(logits))
        counted = None if ignored is None else tf.not_equal(labels, ignored)
        used = labels if counted is None else tf.where(counted, labels, 0)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(used, logits)
        weights = None if class_weights is None else tf.gather(tf.cast(class_weights, each.dtype), used)
        kept = None if counted is None else tf.cast(counted, each.dtype)
        value = plan.reduce(each, weights, kept, tf.reduce_sum, tf.reduce_mean)
        results = (value, tf.nn.log_softmax(logits)) if logged else (value,)
        if context.single:  # a network's loss keeps the type it was computed in
            results = tuple(tf.cast(result, scores_type) for result in results)
        return results if logged else results[0]

    return run


OPERATORS: dict[str, Factory] = {
    "LogSoftmax": softmax(tf.nn.log_softmax),
    "ReduceL1": reduce(after(tf.reduce_sum, tf.abs)),
    "ReduceL2": reduce(_norm),
    "ReduceLogSumExp": reduce(tf.reduce_logsumexp),
    "ReduceMax": extreme(_reduce_max, tf.argmax),
    "ReduceMean": reduce(tf.reduce_mean),
    "ReduceMin": extreme(_reduce_min, tf.argmin),
    "ReduceProd": reduce(tf.reduce_prod),
    "ReduceSum": reduce(tf.reduce_sum),
    "ReduceSumSquare": reduce(_sum_square),
    "Softmax": softmax(tf.nn.softmax),
}
