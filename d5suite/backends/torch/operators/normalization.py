"""ONNX on PyTorch: normalization.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Function, in_float32
from d5suite.network import Node
from d5suite.network.nodes.normalization import LEAST_NORM, read_layer_normalization, read_lrn
from d5suite.network.nodes.shape import read_axis


def batch_normalization(node: Node, context: Context) -> Function:
    """Update running statistics in place; `network.Executor` corrects the unbiased variance."""
    training, epsilon, momentum = context.training, node.attributes["epsilon"], 1 - node.attributes["momentum"]
    if context.single and training:  # level 0 leaves its inputs unchanged
        return _by_batch(epsilon, momentum, moved=any(node.outputs[1:]))
    return lambda x, scale, bias, mean, variance: F.batch_norm(
        x, mean, variance, scale, bias, training, momentum, epsilon
    )


def _by_batch(epsilon: float, momentum: float, *, moved: bool) -> Function:
    if not moved:
        return lambda x, scale, bias, mean, variance: F.batch_norm(x, None, None, scale, bias, True, momentum, epsilon)

    def run(
        x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> Any:
        y = F.batch_norm(x, None, None, scale, bias, True, momentum, epsilon)
        spread, centre = torch.var_mean(in_float32(x), [0, *range(2, x.ndim)], correction=0)
        return (
            y,
            torch.lerp(mean, centre.to(mean.dtype), momentum),
            torch.lerp(variance, spread.to(mean.dtype), momentum),
        )

    return run


def instance_normalization(node: Node, context: Context) -> Function:
    epsilon = node.attributes["epsilon"]
    return lambda x, scale, bias: F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def layer_normalization(node: Node, context: Context) -> Function:
    plan = read_layer_normalization(node, context)
    sizes, axes, epsilon, full = [n or 0 for n in plan.sizes], plan.axes, plan.epsilon, plan.full

    def normalize(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if full:
            return F.layer_norm(x, sizes, scale, bias, epsilon)
        y = F.layer_norm(x, sizes, None, None, epsilon) * scale
        return y if bias is None else y + bias

    if not any(context.wanted(node)[1:]):
        return normalize

    def with_statistics(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        variance, mean = torch.var_mean(in_float32(x), axes, correction=0, keepdim=True)
        return normalize(x, *weights), mean, torch.rsqrt(variance + epsilon)

    return with_statistics


def lrn(node: Node, context: Context) -> Function:
    plan = read_lrn(node)
    size, alpha, beta, bias = plan.size, plan.alpha, plan.beta, plan.bias
    odd = plan.before == plan.after

    def lrn(x: torch.Tensor) -> torch.Tensor:
        # In float32: the CPU has no kernel for bfloat16, and squares overflow float16. Flipped,
        # because the longer half of an even window is behind in ONNX, ahead in PyTorch.
        y = in_float32(x) if odd else in_float32(x).flip(1)
        y = F.local_response_norm(y, size, alpha, beta, bias)
        return (y if odd else y.flip(1)).to(x.dtype)

    return lrn


def group_normalization(node: Node, context: Context) -> Function:
    groups, epsilon = node.attributes["num_groups"], node.attributes["epsilon"]
    return lambda x, scale, bias: F.group_norm(x, groups, scale, bias, epsilon)


def rms_normalization(node: Node, context: Context) -> Function:
    plan = read_layer_normalization(node, context)
    sizes, epsilon = [n or 0 for n in plan.sizes], plan.epsilon
    if plan.full:
        return lambda x, scale: F.rms_norm(x, sizes, scale, epsilon)
    return lambda x, scale: F.rms_norm(x, sizes, None, epsilon) * scale


def lp_normalization(node: Node, context: Context) -> Function:
    axis, order = read_axis(node, context), node.attributes["p"]
    return lambda x: F.normalize(in_float32(x), order, axis, LEAST_NORM).to(x.dtype)
