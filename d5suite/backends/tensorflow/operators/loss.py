"""ONNX in TensorFlow: losses. Imports TensorFlow, `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, in_float32
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last, identity
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss


def softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    plan = read_softmax_cross_entropy_loss(node, context)
    reduction, ignored, logged = plan.reduction, plan.ignored, any(context.wanted(node)[1:])
    rank = context.rank(node.inputs[0])
    to_last = context.convert(node.inputs[0], channels_last(rank))
    context.layouts[node.outputs[0]] = identity(rank - 1 if reduction == "none" else 0)
    if logged:
        context.layouts[node.outputs[1]] = channels_last(rank)

    def run(logits: Any, labels: Any, class_weights: Any = None) -> Any:
        scores_type = logits.dtype
        logits = in_float32(to_last(logits))
        counted = None if ignored is None else tf.not_equal(labels, ignored)
        used = labels if counted is None else tf.where(counted, labels, 0)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(used, logits)
        weights = None
        if class_weights is not None:
            weights = tf.gather(tf.cast(class_weights, each.dtype), used)
        if counted is not None:
            kept = tf.cast(counted, each.dtype)
            weights = kept if weights is None else weights * kept
        if weights is not None:
            each = each * weights
        if reduction == "none":
            value = each
        elif reduction == "sum":
            value = tf.reduce_sum(each)
        else:
            value = tf.reduce_mean(each) if weights is None else tf.reduce_sum(each) / tf.reduce_sum(weights)
        results = (value, tf.nn.log_softmax(logits)) if logged else (value,)
        if context.single:  # a network's loss keeps the type it was computed in
            results = tuple(tf.cast(result, scores_type) for result in results)
        return results if logged else results[0]

    return run
