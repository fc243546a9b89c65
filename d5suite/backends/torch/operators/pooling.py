"""ONNX on PyTorch: pooling.

Imports PyTorch, `d5suite.errors`, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Factory, Function, pad_argument
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_global_pool, read_pool
from d5suite.network.nodes.windows import Window


def _is_native(w: Window) -> bool:
    """Whether PyTorch's padding can express it: symmetric, at most half the kernel."""
    return w.symmetric and all(2 * p <= k for p, k in zip(w.pads_begin, w.kernel, strict=True))


def max_pool(node: Node, context: Context) -> Function:
    w = read_pool(node, context)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(w.kernel) - 1]
    kernel, strides, dilations, indexed = w.kernel, w.strides, w.dilations, any(context.wanted(node)[1:])
    if _is_native(w):
        padding, ceil = w.pads_begin, any(w.overhang)
        if indexed:
            return _with_indices(node, context, w, lambda x: pool(x, kernel, strides, padding, dilations, ceil, True))
        return lambda x: pool(x, kernel, strides, padding, dilations, ceil)
    if indexed:
        raise NetworkError("MaxPool with this padding and indices is not implemented", where=node.name)
    pads = pad_argument(w.pads)
    return lambda x: pool(F.pad(x, pads, value=-math.inf), kernel, strides, 0, dilations)


def _with_indices(node: Node, context: Context, w: Window, pool: Function) -> Function:
    """Return a pool with indices into the whole tensor; PyTorch's are per plane."""
    planes, area = math.prod(n or 0 for n in context.shape(node.inputs[0])[:2]), math.prod(w.image)
    column_major = bool(node.attributes["storage_order"])
    strides = w.cell_strides(column_major=True)

    def run(x: torch.Tensor) -> Any:
        y, within = pool(x)
        if column_major:
            rows = torch.unravel_index(within, w.image)
            within = reduce(torch.add, (row * stride for row, stride in zip(rows, strides, strict=True)))
        first = torch.arange(planes, device=x.device).reshape(*y.shape[:2], *[1] * len(w.image)) * area
        return y, within + first

    return run


def average_pool(node: Node, context: Context) -> Function:
    w, include = read_pool(node, context), bool(node.attributes["count_include_pad"])
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


def global_pool(functions: Sequence[Function]) -> Factory:
    """Return a factory for a pool over the whole image, by number of spatial axes."""

    def factory(node: Node, context: Context) -> Function:
        pool = functions[read_global_pool(node, context) - 1]
        return lambda x: pool(x, 1)

    return factory


OPERATORS: dict[str, Factory] = {
    "AveragePool": average_pool,
    "GlobalAveragePool": global_pool((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)),
    "GlobalMaxPool": global_pool((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)),
    "MaxPool": max_pool,
}
