"""ONNX on PyTorch: pooling.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Factory, Function, in_float32, pad_argument
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_global_pool, read_pool, read_unpool
from d5suite.network.nodes.windows import Window


def _is_native(w: Window) -> bool:
    """Return whether PyTorch can pad this itself: symmetric, at most half the kernel."""
    return w.symmetric and all(2 * p <= k for p, k in zip(w.pads_begin, w.kernel, strict=True))


def max_pool(node: Node, context: Context) -> Function:
    w = read_pool(node, context)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(w.kernel) - 1]
    indexed, native, pads = any(context.wanted(node)[1:]), _is_native(w), pad_argument(w.pads)
    settings: Any = w.kernel, w.strides, w.pads_begin if native else 0, w.dilations, native and any(w.overhang), indexed

    def run(x: torch.Tensor) -> Any:
        return pool(x if native else F.pad(x, pads, value=-math.inf), *settings)

    return _with_indices(node, context, w, run) if indexed else run


def _with_indices(node: Node, context: Context, w: Window, pool: Function) -> Function:
    """Return a pool with indices into the whole tensor; PyTorch's count within each plane."""
    area, column_major = math.prod(w.image), bool(node.attributes["storage_order"])
    strides = w.cell_strides(column_major=column_major)
    added = (0,) * len(w.image) if _is_native(w) else w.pads_begin
    seen = w.image if _is_native(w) else tuple(n + sum(pair) for n, pair in zip(w.image, w.pads, strict=True))

    def run(x: torch.Tensor) -> Any:
        y, within = pool(x)
        if column_major or seen != w.image:
            places = zip(torch.unravel_index(within, seen), added, strict=True)
            within = reduce(torch.add, ((p - a) * stride for (p, a), stride in zip(places, strides, strict=True)))
        first = torch.arange(y.shape[0] * y.shape[1], device=x.device).reshape(*y.shape[:2], *[1] * len(w.image)) * area
        return y, within + first

    return run


def average_pool(node: Node, context: Context) -> Function:
    return _average(read_pool(node, context), context, include=bool(node.attributes["count_include_pad"]))


def _average(w: Window, context: Context, *, include: bool) -> Function:
    """Return a pool that averages each window, with its padding if ``include``."""
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(w.kernel) - 1]
    kernel, strides, dilations = w.kernel, w.strides, w.dilations
    if _is_native(w) and not w.dilated:
        padding, ceil = w.pads_begin, any(w.overhang)
        return lambda x: pool(x, kernel, strides, padding, ceil, include)
    pads = pad_argument(w.pads)
    correction = torch.as_tensor(w.divisor_correction(include_pad=include), dtype=context.dtype).to(context.device)
    if not w.dilated:
        return lambda x: (pool(F.pad(x, pads), kernel, strides) * correction).to(x.dtype)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]

    def dilated(x: torch.Tensor) -> torch.Tensor:
        ones = x.new_full((1, 1, *kernel), 1 / math.prod(kernel))
        channels = F.pad(x, pads).flatten(0, 1).unsqueeze(1)
        means = convolve(channels, ones, None, strides, 0, dilations).squeeze(1).unflatten(0, x.shape[:2])
        return (means * correction).to(x.dtype)

    return dilated


def lp_pool(node: Node, context: Context) -> Function:
    """LpPool; PyTorch's own does not take absolute values, and has no padding."""
    w, order = read_pool(node, context), node.attributes["p"]
    average = _average(w, context, include=True)
    counts = torch.as_tensor(w.counts(include_pad=True), dtype=torch.float64).to(context.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        means = average(in_float32(x).abs() ** order)
        return _root(means * counts.to(means.dtype), order).to(x.dtype)

    return run


def _root(sums: torch.Tensor, order: int) -> torch.Tensor:
    """Return the root of this order, with the gradient 0 at 0, as in PyTorch's own norms."""
    return torch.where(sums > 0, torch.where(sums > 0, sums, 1) ** (1 / order), 0)


def global_lp_pool(node: Node, context: Context) -> Function:
    axes, order = tuple(range(2, context.rank(node.inputs[0]))), node.attributes["p"]
    return lambda x: torch.linalg.vector_norm(in_float32(x), order, axes, True).to(x.dtype)


def max_unpool(node: Node, context: Context) -> Function:
    plan = read_unpool(node, context)
    image, area, channels = plan.image, math.prod(plan.image), plan.channels
    pads = pad_argument(plan.padding)

    def run(x: torch.Tensor, indices: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(x.shape[0] * channels * area).scatter(0, indices.reshape(-1), x.reshape(-1))
        y = y.reshape(x.shape[0], channels, *image)
        return F.pad(y, pads) if plan.padded else y

    return run


def global_pool(functions: Sequence[Function]) -> Factory:
    """Return a factory for a pool over the whole image, by number of spatial axes."""

    def factory(node: Node, context: Context) -> Function:
        pool = functions[read_global_pool(node, context) - 1]
        return lambda x: pool(x, 1)

    return factory


OPERATORS: dict[str, Factory] = {
    "GlobalAveragePool": global_pool((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)),
    "GlobalMaxPool": global_pool((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)),
}
