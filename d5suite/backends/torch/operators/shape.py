"""ONNX on PyTorch: operators that move data.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Function, in_float32, pad_argument
from d5suite.network import Node
from d5suite.network.nodes import shape as nodes
from d5suite.network.nodes.resize import read_resize


def concat(node: Node, context: Context) -> Function:
    axis = nodes.read_axis(node, context)
    return lambda *parts: torch.cat(parts, axis)


def flatten(node: Node, context: Context) -> Function:
    sizes = nodes.read_flatten(node, context)
    return lambda x: x.reshape(sizes)


def reshape(node: Node, context: Context) -> Function:
    sizes = nodes.read_reshape(node, context).sizes
    return lambda x, _: x.reshape(sizes)


def transpose(node: Node, context: Context) -> Function:
    order = nodes.read_transpose(node, context)
    if context.single:  # level 0 measures data being moved; a network is better off with a view
        return lambda x: x.permute(order).contiguous()
    return lambda x: x.permute(order)


def squeeze(node: Node, context: Context) -> Function:
    axes = nodes.read_squeeze(node, context)
    return lambda x, *_: x.squeeze(axes)


def unsqueeze(node: Node, context: Context) -> Function:
    axes = nodes.read_unsqueeze(node, context)
    return lambda x, _: reduce(torch.unsqueeze, axes, x)


def pad(node: Node, context: Context) -> Function:
    plan = nodes.read_pad(node, context)
    if plan.mode == "constant":
        pads, fill = pad_argument(plan.widths), plan.value
        return lambda x, *_: F.pad(x, pads, value=fill)
    # `F.pad` repeats the tensor itself along the last axes only.
    rows = {axis: torch.as_tensor(index) for axis, index in plan.rows(context.shape(node.inputs[0])).items()}
    return lambda x, *_: reduce(lambda y, axis: y.index_select(axis, rows[axis].to(y.device)), rows, x)


def slice_(node: Node, context: Context) -> Function:
    plan = nodes.read_slice(node, context)
    cuts = plan.cuts
    return (lambda x, *_: x.flip(plan.reversed)[cuts]) if plan.reversed else lambda x, *_: x[cuts]


def gather(node: Node, context: Context) -> Function:
    plan = nodes.read_gather(node, context)
    if plan.is_embedding:
        return lambda data, indices: F.embedding(indices, data)
    axis, size = plan.axis, plan.size

    def gather(data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        flat = torch.where(indices < 0, indices + size, indices).reshape(-1)
        rows = data.index_select(axis, flat)
        return rows.unflatten(axis, indices.shape) if indices.dim() else rows.squeeze(axis)

    return gather


def expand(node: Node, context: Context) -> Function:
    sizes = nodes.read_expand(node, context)
    return lambda x, _: x.expand(torch.broadcast_shapes(x.shape, sizes))


def tile(node: Node, context: Context) -> Function:
    repeats = nodes.read_tile(node, context)
    return lambda x, _: x.repeat(repeats)


def split(node: Node, context: Context) -> Function:
    axis, sizes = nodes.read_split(node, context)
    return lambda x, *_: tuple(torch.split(x, sizes, axis))


def trilu(node: Node, context: Context) -> Function:
    upper, diagonal = nodes.read_trilu(node, context)
    return lambda x, *_: (torch.triu if upper else torch.tril)(x, diagonal)


def blocks(node: Node, context: Context) -> Function:
    """DepthToSpace and SpaceToDepth."""
    plan = nodes.read_blocks(node, context)
    if not plan.depth_first:
        shuffle = F.pixel_shuffle if node.op_type == "DepthToSpace" else F.pixel_unshuffle
        return lambda x: shuffle(x, plan.size)
    return lambda x: x.reshape(plan.split).permute(plan.order).reshape(plan.merged)


_KERNELS = {
    ("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic",
    **{("nearest", axes): "nearest" for axes in (1, 2, 3)},
}  # fmt: skip
"""`F.interpolate`'s mode, by the mode of a Resize and the number of spatial axes."""


def resize(node: Node, context: Context) -> Function:
    plan = read_resize(node, context)
    sizes, factors = [n or 0 for n in plan.sizes[2:]], plan.factors()
    kernel = None if context.is_integer(node.inputs[0]) else _KERNELS.get((plan.mode, len(sizes)))  # not for all types
    if kernel is not None and plan.mode == "nearest":
        if factors is not None and min(factors, default=2) > 1:
            return lambda x, *_: F.interpolate(x, sizes, mode=kernel)
    elif kernel is not None and plan.aligned is not None:
        return lambda x, *_: F.interpolate(x, sizes, mode=kernel, align_corners=plan.aligned)
    rows = {axis: torch.as_tensor(index) for axis, index in plan.rows.items()}
    weights = {axis: torch.as_tensor(matrix) for axis, matrix in plan.weights.items()}

    def interpolated(x: torch.Tensor, axis: int) -> torch.Tensor:
        return torch.tensordot(x, weights[axis].to(x.device, x.dtype), ([axis], [1])).movedim(-1, axis)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        y = reduce(lambda y, axis: y.index_select(axis, rows[axis].to(y.device)), rows, x)
        return reduce(interpolated, weights, in_float32(y)).to(x.dtype) if weights else y

    return run


depth_to_space = space_to_depth = blocks
