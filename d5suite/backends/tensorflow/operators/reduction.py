"""ONNX in TensorFlow: reductions and softmax.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, Factory, first_extreme
from d5suite.levels.layouts import same
from d5suite.network import Node
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import read_axis


def softmax(function: Call) -> Factory:
    """Return a factory for a function along one axis."""

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


def _sum_square(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return tf.reduce_sum(tf.square(x), axes, keepdims=keepdims)


def _norm(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return tf.sqrt(_sum_square(x, axes, keepdims=keepdims))


def _sum_absolute(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return tf.reduce_sum(tf.abs(x), axes, keepdims=keepdims)


OPERATORS: dict[str, Factory] = {
    "LogSoftmax": softmax(tf.nn.log_softmax),
    "ReduceL1": reduce(_sum_absolute),
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
