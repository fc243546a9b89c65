"""ONNX in Keras: losses. Imports Keras, `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

from keras import ops

from d5suite.backends.keras.operators.context import Context, in_float32
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last, identity
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss


def softmax_cross_entropy_loss(node: Node, context: Context) -> Any:
    plan, scores = read_softmax_cross_entropy_loss(node, context), node.inputs[0]
    reduction, ignored, logged = plan.reduction, plan.ignored, plan.logged
    rank = context.rank(scores)
    context.prefer(scores, channels_last(rank))
    to_last = context.convert(scores, channels_last(rank))
    context.layouts[node.outputs[0]] = identity(rank - 1 if reduction == "none" else 0)

    def loss(logits: Any, labels: Any, class_weights: Any = None) -> Any:
        logits = to_last(logits)
        counted = None if ignored is None else ops.not_equal(labels, ignored)
        used = labels if counted is None else ops.where(counted, labels, ops.zeros_like(labels))
        each = ops.sparse_categorical_crossentropy(used, logits, from_logits=True)
        weights = None
        if class_weights is not None:
            weights = ops.take(class_weights, used)
        if counted is not None:
            kept = ops.cast(counted, each.dtype)
            weights = kept if weights is None else weights * kept
        if weights is not None:
            each = each * weights
        if reduction == "none":
            return each
        if reduction == "sum":
            return ops.sum(each)
        return ops.mean(each) if weights is None else ops.sum(each) / ops.sum(weights)

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
