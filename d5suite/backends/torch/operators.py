"""ONNX operators as native PyTorch calls.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable that takes the node's inputs in
their order, None for an omitted one, and returns its first output. Inputs that a factory has read through
`Context.constant` are passed too, and ignored. Imports PyTorch, NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from d5suite.errors import NetworkError
from d5suite.levels.operator import NodeContext
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.windows import Window, window

Operator = Callable[..., torch.Tensor]
Factory = Callable[[Node, "Context"], Operator]


@dataclass(frozen=True)
class Context(NodeContext):
    """What a factory may know about the place of its node.

    Attributes
    ----------
    shapes : mapping
        ONNX shape of every tensor.
    constants : mapping
        Values of the inputs that are fixed (shapes, axes, bounds).
    overwrites : mapping of str to int
        By output tensor: the number of the input whose memory the node may reuse for it.
    training : bool
        Whether BatchNormalization and Dropout are in training mode.
    device : str
        Where tensors made by the factory shall lie.
    dtype : torch.dtype
        Type of the parameters and of other constants.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    overwrites: Mapping[str, int] = field(default_factory=dict)
    training: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def _same(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x


def _native(function: Operator) -> Factory:
    """A factory for a function that takes the node's inputs as they are."""
    return lambda node, context: function


def _relu(node: Node, context: Context) -> Operator:
    return torch.relu_ if node.outputs[0] in context.overwrites else torch.relu


def _add(node: Node, context: Context) -> Operator:
    overwritten = context.overwrites.get(node.outputs[0])
    if overwritten is None:
        return torch.add
    return torch.Tensor.add_ if overwritten == 0 else lambda a, b: b.add_(a)


def _sum(node: Node, context: Context) -> Operator:
    if len(node.inputs) == 2:
        return _add(node, context)
    return lambda *terms: reduce(torch.add, terms)


def _leaky_relu(node: Node, context: Context) -> Operator:
    alpha = node.attributes["alpha"]
    return lambda x: F.leaky_relu(x, alpha)


def _clip(node: Node, context: Context) -> Operator:
    if all(name in context.constants for name in node.inputs[1:] if name):
        low, high = (None if c is None else c.item() for c in (context.constant(node, 1), context.constant(node, 2)))
        return _same if low is high is None else lambda x, *_: torch.clamp(x, low, high)
    return lambda x, low=None, high=None: torch.clamp(x, low, high)


def _dropout(node: Node, context: Context) -> Operator:
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else ratio.item()
    if not context.training or probability == 0:
        return _same
    return lambda x, *_: F.dropout(x, probability, training=True)


def _along_axis(function: Operator) -> Factory:
    def factory(node: Node, context: Context) -> Operator:
        axis = node.attributes["axis"]
        return lambda x: function(x, axis)

    return factory


def _concat(node: Node, context: Context) -> Operator:
    axis = node.attributes["axis"]
    return lambda *parts: torch.cat(parts, axis)


def _flatten(node: Node, context: Context) -> Operator:
    rank = context.rank(node.inputs[0])
    axis = node.attributes["axis"] % rank if node.attributes["axis"] != rank else rank
    if axis == 0:
        return lambda x: x.reshape(1, -1)
    if axis == rank:
        return lambda x: x.reshape(-1, 1)
    if axis == 1:
        return lambda x: x.flatten(1)
    return lambda x: x.flatten(axis).flatten(0, axis - 1)


def _reshape(node: Node, context: Context) -> Operator:
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default shape
    sizes = [int(n) for n in wanted]
    copied = [] if node.attributes["allowzero"] else [i for i, n in enumerate(sizes) if n == 0]
    if not copied:
        return lambda x, _: x.reshape(sizes)
    known = context.shape(node.inputs[0])
    for i in copied:
        sizes[i] = known[i] or 0
    if 0 not in sizes:
        return lambda x, _: x.reshape(sizes)
    return lambda x, _: x.reshape([n or x.shape[i] for i, n in enumerate(sizes)])


def _transpose(node: Node, context: Context) -> Operator:
    order = list(node.attributes.get("perm") or reversed(range(context.rank(node.inputs[0]))))
    return lambda x: x.permute(order)


def _squeeze(node: Node, context: Context) -> Operator:
    axes = context.constant(node, 1)
    if axes is None:
        return lambda x, *_: x.squeeze()
    dimensions = tuple(int(a) for a in axes)
    return lambda x, _: x.squeeze(dimensions)


def _unsqueeze(node: Node, context: Context) -> Operator:
    axes = context.constant(node, 1)
    assert axes is not None  # required since opset 13
    rank = context.rank(node.inputs[0]) + len(axes)
    dimensions = sorted(int(a) % rank for a in axes)
    return lambda x, _: reduce(torch.unsqueeze, dimensions, x)


def _pad(node: Node, context: Context) -> Operator:
    if node.attributes["mode"] != "constant":
        raise NetworkError(f"Pad with mode {node.attributes['mode']!r} is not implemented", where=node.name)
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    rank = context.rank(node.inputs[0])
    chosen = range(rank) if axes is None else [int(a) % rank for a in axes]
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(chosen):
        begin[axis], end[axis] = int(amounts[i]), int(amounts[i + len(chosen)])
    pads, fill = _pads(begin, end), 0.0 if value is None else value.item()
    return lambda x, *_: F.pad(x, pads, value=fill)


def _pads(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    """The argument of `F.pad`, which counts axes from the last."""
    return [n for pair in zip(reversed(begin), reversed(end), strict=True) for n in pair]


def _gemm(node: Node, context: Context) -> Operator:
    a = node.attributes
    alpha, beta, trans_a, trans_b = a["alpha"], a["beta"], a["transA"], a["transB"]
    biased = len(node.inputs) > 2 and bool(node.inputs[2])
    plain = alpha == 1 and (not biased or (beta == 1 and context.rank(node.inputs[2]) == 1))
    # F.linear takes a bias of one value per feature, and no narrower one.
    if plain and biased:
        plain = context.shape(node.inputs[2])[0] == context.shape(node.inputs[1])[0 if trans_b else 1]
    if plain and trans_b and not trans_a:
        return F.linear

    def gemm(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        x, y = x.t() if trans_a else x, y.t() if trans_b else y
        if z is not None:
            return torch.addmm(z, x, y, beta=beta, alpha=alpha)
        return alpha * torch.mm(x, y) if alpha != 1 else torch.mm(x, y)

    return gemm


def _spatial(node: Node, context: Context, functions: Sequence[Any]) -> tuple[Any, tuple[int | None, ...]]:
    """The function for the image's number of spatial dimensions (1, 2, 3), and their sizes."""
    sizes = context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    return functions[len(sizes) - 1], sizes


def _conv(node: Node, context: Context) -> Operator:
    convolve, sizes = _spatial(node, context, (F.conv1d, F.conv2d, F.conv3d))
    w = window(node, sizes, context.shape(node.inputs[1])[2:])
    strides, dilations, groups = w.strides, w.dilations, node.attributes["group"]
    if w.symmetric:
        padding = w.pads_begin
        return lambda x, weight, bias=None: convolve(x, weight, bias, strides, padding, dilations, groups)
    pads = _pads(w.pads_begin, w.pads_end)
    return lambda x, weight, bias=None: convolve(F.pad(x, pads), weight, bias, strides, 0, dilations, groups)


def _is_native_pooling(w: Window) -> bool:
    """Whether the framework's own padding can express the window's: equal sides, at most half the kernel."""
    return w.symmetric and all(2 * p <= k for p, k in zip(w.pads_begin, w.kernel, strict=True))


def _full_pads(w: Window) -> list[int]:
    """All that the windows reach beyond the image."""
    return _pads(w.pads_begin, [end + more for end, more in zip(w.pads_end, w.overhang, strict=True)])


def _max_pool(node: Node, context: Context) -> Operator:
    pool, sizes = _spatial(node, context, (F.max_pool1d, F.max_pool2d, F.max_pool3d))
    w = window(node, sizes)
    kernel, strides, dilations = w.kernel, w.strides, w.dilations
    if _is_native_pooling(w):
        padding, ceil = w.pads_begin, any(w.overhang)
        return lambda x: pool(x, kernel, strides, padding, dilations, ceil)
    pads = _full_pads(w)
    return lambda x: pool(F.pad(x, pads, value=-math.inf), kernel, strides, 0, dilations)


def _average_pool(node: Node, context: Context) -> Operator:
    pool, sizes = _spatial(node, context, (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d))
    w = window(node, sizes)
    kernel, strides, dilations, include = w.kernel, w.strides, w.dilations, bool(node.attributes["count_include_pad"])
    if _is_native_pooling(w) and max(dilations) == 1:
        padding, ceil = w.pads_begin, any(w.overhang)
        return lambda x: pool(x, kernel, strides, padding, ceil, include)
    pads = _full_pads(w)
    correction = torch.as_tensor(_divisor_correction(w, sizes, include=include), dtype=context.dtype).to(context.device)
    if max(dilations) == 1:
        return lambda x: (pool(F.pad(x, pads), kernel, strides) * correction).to(x.dtype)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]

    def dilated(x: torch.Tensor) -> torch.Tensor:
        ones = x.new_full((1, 1, *kernel), 1 / math.prod(kernel))
        channels = F.pad(x, pads).flatten(0, 1).unsqueeze(1)
        means = convolve(channels, ones, None, strides, 0, dilations).squeeze(1).unflatten(0, x.shape[:2])
        return (means * correction).to(x.dtype)

    return dilated


def _divisor_correction(w: Window, sizes: Sequence[int | None], *, include: bool) -> np.ndarray:
    """Kernel size over the number of cells that count, for each output: float64.

    Cells of the padding count if ``include``; what a ceil-mode window reaches beyond the padding never does.
    """
    ratio = np.ones((1,) * len(w.kernel))
    for axis, size in enumerate(sizes):
        assert size is not None  # window() has seen to it
        first = np.arange(w.outputs[axis])[:, None] * w.strides[axis]
        cells = first + np.arange(w.kernel[axis]) * w.dilations[axis] - w.pads_begin[axis]
        low, high = (-w.pads_begin[axis], size + w.pads_end[axis]) if include else (0, size)
        counts = ((cells >= low) & (cells < high)).sum(1)
        shape = [1] * len(w.kernel)
        shape[axis] = -1
        ratio = ratio * (w.kernel[axis] / np.maximum(counts, 1)).reshape(shape)
    return ratio


def _global_pool(functions: Sequence[Operator]) -> Factory:
    def factory(node: Node, context: Context) -> Operator:
        pool, _ = _spatial(node, context, functions)
        return lambda x: pool(x, 1)

    return factory


def _batch_normalization(node: Node, context: Context) -> Operator:
    """Running statistics are moved in place; the variance by the unbiased one, which `network.Executor` sets right."""
    training, epsilon, momentum = context.training, node.attributes["epsilon"], 1 - node.attributes["momentum"]
    return lambda x, scale, bias, mean, variance: F.batch_norm(
        x, mean, variance, scale, bias, training, momentum, epsilon
    )


def _in_float32(x: torch.Tensor) -> torch.Tensor:
    """Activations as float32 where they are bfloat16; float64 stays."""
    return x.float() if x.dtype == torch.bfloat16 else x


def _lrn(node: Node, context: Context) -> Operator:
    a = node.attributes
    size, alpha, beta, bias = a["size"], a["alpha"], a["beta"], a["bias"]
    odd = bool(size % 2)

    def lrn(x: torch.Tensor) -> torch.Tensor:
        # PyTorch has no such kernel for bfloat16 on the CPU; and of an even window ONNX has the longer half ahead,
        # PyTorch behind.
        y = _in_float32(x) if odd else _in_float32(x).flip(1)
        y = F.local_response_norm(y, size, alpha, beta, bias)
        return (y if odd else y.flip(1)).to(x.dtype)

    return lrn


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Operator:
    ignored, reduction = node.attributes.get("ignore_index", -100), node.attributes["reduction"]
    if len(node.inputs) < 3 or not node.inputs[2]:
        return lambda x, labels, *_: F.cross_entropy(_in_float32(x), labels, ignore_index=ignored, reduction=reduction)

    def weighted(x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # PyTorch's own weighted loss has no gradient for the weights.
        kept = labels != ignored
        factors = weight[labels.where(kept, 0)] * kept
        losses = factors * F.cross_entropy(_in_float32(x), labels, ignore_index=ignored, reduction="none")
        return losses if reduction == "none" else losses.sum() / (factors.sum() if reduction == "mean" else 1)

    return weighted


OPERATORS: dict[str, Factory] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _native(torch.div),
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)),
    "GlobalMaxPool": _global_pool((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)),
    "Identity": _native(_same),
    "LRN": _lrn,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis(torch.log_softmax),
    "MatMul": _native(torch.matmul),
    "MaxPool": _max_pool,
    "Mul": _native(torch.mul),
    "Pad": _pad,
    "Relu": _relu,
    "Reshape": _reshape,
    "Sigmoid": _native(torch.sigmoid),
    "Softmax": _along_axis(torch.softmax),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Squeeze": _squeeze,
    "Sub": _native(torch.sub),
    "Sum": _sum,
    "Tanh": _native(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""
