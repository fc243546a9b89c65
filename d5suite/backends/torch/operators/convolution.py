"""ONNX on PyTorch: convolution and transposed convolution.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Function, in_float32, pad_argument
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_columns, read_conv, read_conv_transpose


def conv(node: Node, context: Context) -> Function:
    w = read_conv(node, context)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(w.kernel) - 1]
    strides, dilations, groups = w.strides, w.dilations, node.attributes["group"]
    if w.symmetric:
        padding = w.pads_begin
        return lambda x, weight, bias=None: convolve(x, weight, bias, strides, padding, dilations, groups)
    pads = pad_argument(w.pads)
    return lambda x, weight, bias=None: convolve(F.pad(x, pads), weight, bias, strides, 0, dilations, groups)


def conv_transpose(node: Node, context: Context) -> Function:
    w = read_conv_transpose(node, context)
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(w.kernel) - 1]
    strides, dilations, groups, extra = w.strides, w.dilations, node.attributes["group"], w.output_padding
    # PyTorch wants symmetric padding, and an output padding below a stride or dilation.
    limit = [max(s, d) for s, d in zip(strides, dilations, strict=True)]
    if w.symmetric and all(e < m for e, m in zip(extra, limit, strict=True)):
        padding = w.pads_begin
        return lambda x, weight, bias=None: convolve(x, weight, bias, strides, padding, extra, groups, dilations)
    pads = pad_argument([(-begin, end) for begin, end in zip(w.pads_begin, w.tail, strict=True)])

    def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = F.pad(convolve(x, weight, None, strides, 0, 0, groups, dilations), pads)
        return y if bias is None else y + bias.reshape(-1, *[1] * len(strides))

    return whole


def col2_im(node: Node, context: Context) -> Function:
    """Col2Im."""
    plan = read_columns(node, context)
    w, channels = plan.window, plan.channels
    if len(w.image) == 2 and w.symmetric and not context.is_integer(node.inputs[0]):
        settings = w.image, w.kernel, w.dilations, w.pads_begin, w.strides
        return lambda x, *_: F.fold(in_float32(x), *settings).to(x.dtype)
    cells = torch.as_tensor(plan.cells).to(context.device)
    size = math.prod(w.image)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(x.shape[0], channels, size + 1).index_add(2, cells, x.reshape(x.shape[0], channels, -1))
        return y.narrow(2, 0, size).reshape(*y.shape[:2], *w.image)

    return run
