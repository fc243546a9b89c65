"""ONNX on MXNet: losses. Imports `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

from d5suite.backends.mxnet.operators.context import Call, Context
from d5suite.network import Node
from d5suite.network.nodes.context import select
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss


def softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    plan = read_softmax_cross_entropy_loss(node, context)
    ignored, reduction, weighted, dtype = plan.ignored, plan.reduction, plan.weighted, context.dtype
    wanted = context.wanted(node)

    def call(F: Any, x: Any, labels: Any, weight: Any = None) -> Any:
        scores = F.log_softmax(x, axis=1)
        return select((reduced(F, -F.pick(scores, labels, axis=1), labels, weight), scores), wanted)

    def reduced(F: Any, losses: Any, labels: Any, weight: Any) -> Any:
        if ignored is None and not weighted:
            return {"none": F.identity, "sum": F.sum, "mean": F.mean}[reduction](losses)
        factors = F.take(weight, labels) if weighted else F.ones_like(losses)
        if ignored is not None:
            factors = F.broadcast_mul(factors, F.cast(labels != ignored, dtype=dtype))
        losses = losses * factors
        if reduction == "none":
            return losses
        return F.sum(losses) if reduction == "sum" else F.sum(losses) / F.sum(factors)

    return call
