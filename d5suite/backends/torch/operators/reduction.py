"""ONNX on PyTorch: reductions, softmax and its loss.

Imports PyTorch, `d5suite.levels`, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Factory, Function, in_float32, same
from d5suite.levels.operator import after
from d5suite.network import Node
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import read_axis


def softmax(function: Function) -> Factory:
    """Return a factory for Softmax or LogSoftmax."""

    def factory(node: Node, context: Context) -> Function:
        axis = read_axis(node, context)
        return lambda x: function(x, axis)

    return factory


def reduce(function: Callable[..., torch.Tensor], empty: float | None = None) -> Factory:
    """Return a factory for a reduction; ``empty`` is its value if there are no elements."""

    def factory(node: Node, context: Context) -> Function:
        plan = read_reduce(node, context)
        if plan is None:
            return same
        axes, keep = plan.axes, plan.keep
        if empty is not None and plan.empty:
            shape = [n or 0 for n in context.shape(node.outputs[0])]
            return lambda x, *_: x.new_full(shape, empty if x.is_floating_point() else 0)
        return lambda x, *_: function(x, axes, keep)

    return factory


def _extreme(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
        return function(x, axes, keep) if x.dtype != torch.bool else function(x.float(), axes, keep).bool()

    return run


def _prod(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keep)
    return x


def _norm(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
    return torch.linalg.vector_norm(x, 2, axes, keep)


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


OPERATORS: dict[str, Factory] = {
    "LogSoftmax": softmax(torch.log_softmax),
    "ReduceL1": reduce(after(torch.sum, torch.abs)),
    "ReduceL2": reduce(_norm),
    "ReduceLogSumExp": reduce(torch.logsumexp),
    "ReduceMax": reduce(_extreme(torch.amax), -math.inf),
    "ReduceMean": reduce(torch.mean),
    "ReduceMin": reduce(_extreme(torch.amin), math.inf),
    "ReduceProd": reduce(_prod),
    "ReduceSum": reduce(torch.sum),
    "ReduceSumSquare": reduce(after(torch.sum, torch.square)),
    "Softmax": softmax(torch.softmax),
}
