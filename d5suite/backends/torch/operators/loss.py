"""ONNX on PyTorch: the cross-entropy loss.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Function, in_float32
from d5suite.network import Node
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss


def softmax_cross_entropy_loss(node: Node, context: Context) -> Function:
    plan = read_softmax_cross_entropy_loss(node, context)
    ignored, reduction = -100 if plan.ignored is None else plan.ignored, plan.reduction

    def unweighted(x: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(in_float32(x), labels, ignore_index=ignored, reduction=reduction)

    def weighted(x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # PyTorch's own weighted loss has no gradient for the weights.
        kept = labels != ignored
        factors = weight[labels.where(kept, 0)] * kept
        losses = factors * F.cross_entropy(in_float32(x), labels, ignore_index=ignored, reduction="none")
        return losses if reduction == "none" else losses.sum() / (factors.sum() if reduction == "mean" else 1)

    loss = weighted if plan.weighted else unweighted
    return (lambda x, *rest: (loss(x, *rest), torch.log_softmax(x, 1))) if plan.logged else loss
