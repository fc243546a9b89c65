"""ONNX on MXNet: normalization. Imports `d5suite.errors`, `d5suite.network` and `context`."""

from __future__ import annotations

import math
from typing import Any

from d5suite.backends.mxnet.operators.context import Call, Context, padded
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.context import select
from d5suite.network.nodes.normalization import LEAST_NORM, read_layer_normalization, read_lrn
from d5suite.network.nodes.shape import read_axis


def batch_normalization(node: Node, context: Context) -> Call:
    """MXNet updates running statistics in place, in the backward pass, with the biased variance."""
    momentum = node.attributes["momentum"]
    settings = {
        "eps": node.attributes["epsilon"],
        "momentum": 1 if context.single else momentum,  # level 0 must not change its inputs
        "fix_gamma": False,
        "use_global_stats": not context.training,
    }
    wanted = context.wanted(node)
    if not any(wanted[1:]):
        return lambda F, x, scale, bias, mean, variance: F.BatchNorm(x, scale, bias, mean, variance, **settings)
    axes = (0, *range(2, context.rank(node.inputs[0])))

    def with_statistics(F: Any, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        y = F.BatchNorm(x, scale, bias, mean, variance, **settings)
        batch = F.moments(x, axes=axes)
        moved = [a * momentum + b * (1 - momentum) for a, b in zip((mean, variance), batch, strict=True)]
        return select((y, *moved), wanted)

    return with_statistics


def instance_normalization(node: Node, context: Context) -> Call:
    epsilon = node.attributes["epsilon"]
    if context.dtype == "float32":
        return lambda F, x, scale, bias: F.InstanceNorm(x, scale, bias, eps=epsilon)
    rank = context.rank(node.inputs[0])
    axes, column = tuple(range(2, rank)), (1, -1, *[1] * (rank - 2))

    def call(F: Any, x: Any, scale: Any, bias: Any) -> Any:  # the kernel takes float32 only
        centred = F.broadcast_sub(x, F.mean(x, axis=axes, keepdims=True))
        inverse = F.rsqrt(F.mean(F.square(centred), axis=axes, keepdims=True) + epsilon)
        factor = F.broadcast_mul(inverse, F.reshape(scale, shape=column))
        return F.broadcast_add(F.broadcast_mul(centred, factor), F.reshape(bias, shape=column))

    return call


def layer_normalization(node: Node, context: Context) -> Call:
    """Normalize; several axes are merged into one, as MXNet normalizes only one."""
    plan, wanted = read_layer_normalization(node, context), context.wanted(node)
    first, full, epsilon = plan.axes[0], plan.full, plan.epsilon
    merged, shown = len(plan.axes) > 1, any(wanted[1:])
    if not full and None in plan.sizes:
        raise NetworkError("LayerNormalization of unknown sizes is not implemented", where=node.name)
    count = math.prod(n or 0 for n in plan.sizes)

    def call(F: Any, x: Any, scale: Any, bias: Any = None) -> Any:
        flat = F.reshape(x, shape=(*[0] * first, -1)) if merged else x
        if full:
            gamma = F.reshape(scale, shape=(-1,)) if merged else scale
            beta = F.reshape(bias, shape=(-1,)) if merged and bias is not None else bias
        else:
            gamma, beta = F.ones(shape=(count,), dtype=context.dtype), None
        beta = F.zeros_like(gamma) if beta is None else beta
        found = F.LayerNorm(flat, gamma, beta, axis=first, eps=epsilon, output_mean_var=shown)
        y, *statistics = found if shown else (found,)
        y = F.reshape_like(y, x) if merged else y
        if not full:
            y = F.broadcast_mul(y, scale)
            y = y if bias is None else F.broadcast_add(y, bias)
        if not shown:
            return y
        mean, deviation = (F.reshape(s, shape=(*[0] * first, *[1] * len(plan.axes))) for s in statistics)
        return select((y, mean, 1 / deviation), wanted)

    return call


def lrn(node: Node, context: Context) -> Call:
    plan = read_lrn(node)
    size, alpha, beta, bias = plan.size, plan.alpha, plan.beta, plan.bias
    if size % 2 and context.dtype == "float32":
        return lambda F, x: F.LRN(x, nsize=size, alpha=alpha, beta=beta, knorm=bias)
    # MXNet's own has no even windows, and its settings are float32.
    widths = [(0, 0), (plan.before, plan.after), *[(0, 0)] * (context.rank(node.inputs[0]) - 2)]

    def call(F: Any, x: Any) -> Any:
        squares = padded(F, F.square(x), widths)
        parts = [F.slice_axis(squares, axis=1, begin=i, end=i - size + 1 or None) for i in range(size)]
        return x / (F.add_n(*parts) * (alpha / size) + bias) ** beta

    return call


def group_normalization(node: Node, context: Context) -> Call:
    """Apply scale and bias per channel outside MXNet's kernel, whose own are per group."""
    groups, epsilon = node.attributes["num_groups"], node.attributes["epsilon"]
    column = (1, -1, *[1] * (context.rank(node.inputs[0]) - 2))

    def call(F: Any, x: Any, scale: Any, bias: Any) -> Any:
        ones = F.ones(shape=(groups,), dtype=context.dtype)
        image = F.expand_dims(x, axis=2) if len(column) == 2 else x
        normal = F.GroupNorm(image, ones, F.zeros_like(ones), num_groups=groups, eps=epsilon)
        normal = F.squeeze(normal, axis=2) if len(column) == 2 else normal
        scaled = F.broadcast_mul(normal, F.reshape(scale, shape=column))
        return F.broadcast_add(scaled, F.reshape(bias, shape=column))

    return call


def rms_normalization(node: Node, context: Context) -> Call:
    plan = read_layer_normalization(node, context)

    def call(F: Any, x: Any, scale: Any) -> Any:
        inverse = F.rsqrt(F.mean(F.square(x), axis=plan.axes, keepdims=True) + plan.epsilon)
        return F.broadcast_mul(F.broadcast_mul(x, inverse), scale)

    return call


def lp_normalization(node: Node, context: Context) -> Call:
    axis, order = read_axis(node, context), node.attributes["p"]

    def call(F: Any, x: Any) -> Any:
        norm = F.norm(x, ord=order, axis=axis, keepdims=True)
        return F.broadcast_div(x, F.maximum(norm, LEAST_NORM))

    return call
