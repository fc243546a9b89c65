"""ONNX on JAX: losses. Imports JAX, Optax, `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from d5suite.backends.jax.operators.context import Call, Context, in_float32
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss


def softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    plan = read_softmax_cross_entropy_loss(node, context)
    ignored, reduction, logged = plan.ignored, plan.reduction, plan.logged
    rank = context.rank(node.inputs[0])
    classes_last = context.convert(node.inputs[0], channels_last(rank))

    def call(scores: Any, labels: Any, weight: Any = None) -> Any:
        kept = None if ignored is None else labels != ignored
        used = labels if kept is None else jnp.where(kept, labels, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(in_float32(classes_last(scores)), used)
        factors = None if weight is None else weight[used]
        if kept is not None:
            factors = kept.astype(losses.dtype) if factors is None else factors * kept
        if factors is not None:
            losses = losses * factors
        if reduction == "none":
            return losses
        if reduction == "sum":
            return losses.sum()
        return losses.mean() if factors is None else losses.sum() / factors.sum()

    if not context.single:
        return call
    if not logged:
        return lambda scores, *rest: call(scores, *rest).astype(scores.dtype)
    context.layouts[node.outputs[1]] = channels_last(rank)

    def with_logarithms(scores: Any, *rest: Any) -> Any:
        logarithms = jax.nn.log_softmax(in_float32(classes_last(scores)))
        return call(scores, *rest).astype(scores.dtype), logarithms.astype(scores.dtype)

    return with_logarithms
