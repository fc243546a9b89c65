"""ONNX operators as native PyTorch calls, and Level 0 on PyTorch.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable that takes the node's inputs in
their order, None for an omitted one, and returns its first output or, if the node names others, a tuple of all. Inputs
that a factory has read through `Context.constant` are passed too, and ignored. Imports PyTorch, NumPy,
`d5suite.errors`, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from d5suite.backends.torch import custom as custom_operators
from d5suite.errors import BackendError, NetworkError
from d5suite.levels import attention as attention_nodes
from d5suite.levels import operator as level
from d5suite.levels.operator import NodeContext
from d5suite.levels.recurrent import Functions, Packing, Recurrent, recurrent, unrolled
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.operation import PRECISIONS, Operation
from d5suite.network.windows import Window, transposed_window, window

Function = Callable[..., torch.Tensor]
Factory = Callable[[Node, "Context"], Function]


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
    dtypes : mapping
        ONNX type of every tensor; only at level 0.
    non_negative : set
        Inputs whose values are known to be 0 or more; only at level 0.
    packing : dict
        Weights that a factory wants in a form of its own; only at level 0.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    overwrites: Mapping[str, int] = field(default_factory=dict)
    training: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    non_negative: frozenset[str] = frozenset()
    packing: dict[str, Packing] = field(default_factory=dict)


def _same(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x


def _native(function: Function) -> Factory:
    """A factory for a function that takes the node's inputs as they are."""
    return lambda node, context: function


def _relu(node: Node, context: Context) -> Function:
    return torch.relu_ if node.outputs[0] in context.overwrites else torch.relu


def _add(node: Node, context: Context) -> Function:
    overwritten = context.overwrites.get(node.outputs[0])
    if overwritten is None:
        return torch.add
    return torch.Tensor.add_ if overwritten == 0 else lambda a, b: b.add_(a)


def _sum(node: Node, context: Context) -> Function:
    if len(node.inputs) == 2:
        return _add(node, context)
    return lambda *terms: reduce(torch.add, terms)


def _leaky_relu(node: Node, context: Context) -> Function:
    alpha = node.attributes["alpha"]
    return lambda x: F.leaky_relu(x, alpha)


def _elu(node: Node, context: Context) -> Function:
    alpha = node.attributes["alpha"]
    return lambda x: F.elu(x, alpha)


def _gelu(node: Node, context: Context) -> Function:
    approximate = node.attributes["approximate"]
    return lambda x: F.gelu(x, approximate=approximate)


def _clip(node: Node, context: Context) -> Function:
    if all(name in context.constants for name in node.inputs[1:] if name):
        low, high = (None if c is None else c.item() for c in (context.constant(node, 1), context.constant(node, 2)))
        return _same if low is high is None else lambda x, *_: torch.clamp(x, low, high)
    return lambda x, low=None, high=None: torch.clamp(x, low, high)


def _dropout(node: Node, context: Context) -> Function:
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else ratio.item()
    masked = len(node.outputs) > 1
    if not context.training or probability == 0:
        return (lambda x, *_: (x, torch.ones_like(x, dtype=torch.bool))) if masked else _same
    if masked:
        return lambda x, *_: torch.native_dropout(x, probability, True)
    return lambda x, *_: F.dropout(x, probability, training=True)


def _along_axis(function: Function) -> Factory:
    def factory(node: Node, context: Context) -> Function:
        axis = node.attributes["axis"]
        return lambda x: function(x, axis)

    return factory


def _reduce(function: Callable[..., torch.Tensor], empty: float | None = None) -> Factory:
    """A factory for a reduction over the axes that the second input, or without it all, names."""

    def factory(node: Node, context: Context) -> Function:
        axes, keep = context.constant(node, 1), bool(node.attributes["keepdims"])
        rank = context.rank(node.inputs[0])
        if axes is None or not axes.size:
            if node.attributes["noop_with_empty_axes"]:
                return _same
            axes = np.arange(rank)
        chosen = [int(a) for a in axes]
        if empty is not None and any(context.shape(node.inputs[0])[a] == 0 for a in chosen):
            shape = [n or 0 for n in context.shape(node.outputs[0])]
            return lambda x, *_: x.new_full(shape, empty if x.is_floating_point() else 0)
        return lambda x, *_: function(x, chosen, keep)

    return factory


def _amax(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
    return torch.amax(x, axes, keep) if x.dtype != torch.bool else x.float().amax(axes, keep).bool()


def _gather(node: Node, context: Context) -> Function:
    axis = node.attributes["axis"] % context.rank(node.inputs[0])
    size = context.shape(node.inputs[0])[axis]
    if axis == 0 and context.rank(node.inputs[0]) == 2 and not _may_be_negative(node, context):
        return lambda data, indices: F.embedding(indices, data)
    shape = [n or 0 for n in context.shape(node.outputs[0])]

    def gather(data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        flat = torch.where(indices < 0, indices + size, indices).reshape(-1)
        return data.index_select(axis, flat).reshape(shape)

    return gather


def _may_be_negative(node: Node, context: Context) -> bool:
    """Whether indices may count from the end; those of a problem that says where they lie do not."""
    return node.inputs[1] not in context.non_negative


def _concat(node: Node, context: Context) -> Function:
    axis = node.attributes["axis"]
    return lambda *parts: torch.cat(parts, axis)


def _flatten(node: Node, context: Context) -> Function:
    rank = context.rank(node.inputs[0])
    axis = node.attributes["axis"] % rank if node.attributes["axis"] != rank else rank
    if axis == 0:
        return lambda x: x.reshape(1, -1)
    if axis == rank:
        return lambda x: x.reshape(-1, 1)
    if axis == 1:
        return lambda x: x.flatten(1)
    return lambda x: x.flatten(axis).flatten(0, axis - 1)


def _reshape(node: Node, context: Context) -> Function:
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


def _transpose(node: Node, context: Context) -> Function:
    order = list(node.attributes.get("perm") or reversed(range(context.rank(node.inputs[0]))))
    if context.dtypes:  # level 0 measures data being moved; a network is better off with a view
        return lambda x: x.permute(order).contiguous()
    return lambda x: x.permute(order)


def _squeeze(node: Node, context: Context) -> Function:
    axes = context.constant(node, 1)
    if axes is None:
        return lambda x, *_: x.squeeze()
    dimensions = tuple(int(a) for a in axes)
    return lambda x, _: x.squeeze(dimensions)


def _unsqueeze(node: Node, context: Context) -> Function:
    axes = context.constant(node, 1)
    assert axes is not None  # required since opset 13
    rank = context.rank(node.inputs[0]) + len(axes)
    dimensions = sorted(int(a) % rank for a in axes)
    return lambda x, _: reduce(torch.unsqueeze, dimensions, x)


def _pad(node: Node, context: Context) -> Function:
    mode = node.attributes["mode"]
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    rank = context.rank(node.inputs[0])
    chosen = range(rank) if axes is None else [int(a) % rank for a in axes]
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(chosen):
        begin[axis], end[axis] = int(amounts[i]), int(amounts[i + len(chosen)])
    if mode != "constant":
        return _pad_by_index(begin, end, context.shape(node.inputs[0]), mode)
    pads, fill = _pads(begin, end), 0.0 if value is None else value.item()
    return lambda x, *_: F.pad(x, pads, value=fill)


def _pad_by_index(begin: Sequence[int], end: Sequence[int], shape: Shape, mode: str) -> Function:
    """Padding that repeats the tensor itself, on any axes; `F.pad` has it for the last ones only."""
    rows = [
        torch.as_tensor(np.pad(np.arange(size or 0), (before, after), mode))  # type: ignore[call-overload]
        for size, before, after in zip(shape, begin, end, strict=True)
    ]
    moved = [axis for axis in range(len(shape)) if begin[axis] or end[axis]]
    return lambda x, *_: reduce(lambda y, axis: y.index_select(axis, rows[axis].to(y.device)), moved, x)


def _pads(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    """The argument of `F.pad`, which counts axes from the last."""
    return [n for pair in zip(reversed(begin), reversed(end), strict=True) for n in pair]


def _gemm(node: Node, context: Context) -> Function:
    a = node.attributes
    alpha, beta, trans_a, trans_b = a["alpha"], a["beta"], a["transA"], a["transB"]
    biased = len(node.inputs) > 2 and bool(node.inputs[2])
    plain = alpha == 1 and (not biased or (beta == 1 and context.rank(node.inputs[2]) == 1))
    # F.linear takes a bias of one value per feature, and no narrower one.
    if plain and biased:
        plain = context.shape(node.inputs[2])[0] == context.shape(node.inputs[1])[0 if trans_b else 1]
    if plain and trans_b and not trans_a:
        return F.linear
    if plain and not (trans_a or trans_b or biased):
        return torch.mm

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


def _conv(node: Node, context: Context) -> Function:
    convolve, sizes = _spatial(node, context, (F.conv1d, F.conv2d, F.conv3d))
    w = window(node, sizes, context.shape(node.inputs[1])[2:])
    strides, dilations, groups = w.strides, w.dilations, node.attributes["group"]
    if w.symmetric:
        padding = w.pads_begin
        return lambda x, weight, bias=None: convolve(x, weight, bias, strides, padding, dilations, groups)
    pads = _pads(w.pads_begin, w.pads_end)
    return lambda x, weight, bias=None: convolve(F.pad(x, pads), weight, bias, strides, 0, dilations, groups)


def _conv_transpose(node: Node, context: Context) -> Function:
    convolve, sizes = _spatial(node, context, (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d))
    w = transposed_window(node, sizes, context.shape(node.inputs[1])[2:])
    strides, dilations, groups, extra = w.strides, w.dilations, node.attributes["group"], w.output_padding
    # PyTorch wants the padding alike on both sides and the extra output smaller than a stride or dilation.
    limit = [max(s, d) for s, d in zip(strides, dilations, strict=True)]
    if w.symmetric and all(e < m for e, m in zip(extra, limit, strict=True)):
        padding = w.pads_begin
        return lambda x, weight, bias=None: convolve(x, weight, bias, strides, padding, extra, groups, dilations)
    pads = _pads([-n for n in w.pads_begin], [e - n for e, n in zip(extra, w.pads_end, strict=True)])

    def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = F.pad(convolve(x, weight, None, strides, 0, 0, groups, dilations), pads)
        return y if bias is None else y + bias.reshape(-1, *[1] * len(strides))

    return whole


def _is_native_pooling(w: Window) -> bool:
    """Whether the framework's own padding can express the window's: equal sides, at most half the kernel."""
    return w.symmetric and all(2 * p <= k for p, k in zip(w.pads_begin, w.kernel, strict=True))


def _full_pads(w: Window) -> list[int]:
    """All that the windows reach beyond the image."""
    return _pads(w.pads_begin, [end + more for end, more in zip(w.pads_end, w.overhang, strict=True)])


def _max_pool(node: Node, context: Context) -> Function:
    pool, sizes = _spatial(node, context, (F.max_pool1d, F.max_pool2d, F.max_pool3d))
    w = window(node, sizes)
    kernel, strides, dilations = w.kernel, w.strides, w.dilations
    if _is_native_pooling(w):
        padding, ceil = w.pads_begin, any(w.overhang)
        if len(node.outputs) > 1:
            return _with_indices(node, context, lambda x: pool(x, kernel, strides, padding, dilations, ceil, True))
        return lambda x: pool(x, kernel, strides, padding, dilations, ceil)
    if len(node.outputs) > 1:
        raise NetworkError("MaxPool with this padding and indices is not implemented", where=node.name)
    pads = _full_pads(w)
    return lambda x: pool(F.pad(x, pads, value=-math.inf), kernel, strides, 0, dilations)


def _with_indices(node: Node, context: Context, pool: Function) -> Function:
    """Pooling with indices, which ONNX counts through the whole tensor and PyTorch through each image plane."""
    planes, *sizes = [math.prod(n or 0 for n in context.shape(node.inputs[0])[:2]), *context.shape(node.inputs[0])[2:]]
    area, column_major = math.prod(n or 0 for n in sizes), bool(node.attributes["storage_order"])

    def run(x: torch.Tensor) -> Any:
        y, within = pool(x)
        if column_major:
            rows = torch.unravel_index(within, [n or 0 for n in sizes])
            strides = [math.prod(n or 0 for n in sizes[:axis]) for axis in range(len(sizes))]
            within = reduce(torch.add, (row * stride for row, stride in zip(rows, strides, strict=True)))
        first = torch.arange(planes, device=x.device).reshape(*y.shape[:2], *[1] * len(sizes)) * area
        return y, within + first

    return run


def _average_pool(node: Node, context: Context) -> Function:
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


def _global_pool(functions: Sequence[Function]) -> Factory:
    def factory(node: Node, context: Context) -> Function:
        pool, _ = _spatial(node, context, functions)
        return lambda x: pool(x, 1)

    return factory


def _batch_normalization(node: Node, context: Context) -> Function:
    """Running statistics are moved in place; the variance by the unbiased one, which `network.Executor` sets right."""
    training, epsilon, momentum = context.training, node.attributes["epsilon"], 1 - node.attributes["momentum"]
    if context.dtypes and training:  # level 0, where inputs stay as they are
        return _batch_normalization_by_batch(node, epsilon, momentum)
    return lambda x, scale, bias, mean, variance: F.batch_norm(
        x, mean, variance, scale, bias, training, momentum, epsilon
    )


def _batch_normalization_by_batch(node: Node, epsilon: float, momentum: float) -> Function:
    if not any(node.outputs[1:]):
        return lambda x, scale, bias, mean, variance: F.batch_norm(x, None, None, scale, bias, True, momentum, epsilon)

    def run(
        x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> Any:
        y = F.batch_norm(x, None, None, scale, bias, True, momentum, epsilon)
        spread, centre = torch.var_mean(_in_float32(x), [0, *range(2, x.ndim)], correction=0)
        return (
            y,
            torch.lerp(mean, centre.to(mean.dtype), momentum),
            torch.lerp(variance, spread.to(mean.dtype), momentum),
        )

    return run


def _layer_normalization(node: Node, context: Context) -> Function:
    rank, epsilon = context.rank(node.inputs[0]), node.attributes["epsilon"]
    first = node.attributes["axis"] % rank
    sizes = [n or 0 for n in context.shape(node.inputs[0])[first:]]
    statistics = list(range(first, rank))
    full = all(context.shape(name) == tuple(sizes) for name in node.inputs[1:] if name)

    def normalize(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if full:
            return F.layer_norm(x, sizes, scale, bias, epsilon)
        y = F.layer_norm(x, sizes, None, None, epsilon) * scale
        return y if bias is None else y + bias

    if len(node.outputs) == 1:
        return normalize

    def with_statistics(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        variance, mean = torch.var_mean(_in_float32(x), statistics, correction=0, keepdim=True)
        return normalize(x, *weights), mean, torch.rsqrt(variance + epsilon)

    return with_statistics


def _in_float32(x: torch.Tensor) -> torch.Tensor:
    """Activations as float32 where they have 16 bits; float64 stays."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _lrn(node: Node, context: Context) -> Function:
    a = node.attributes
    size, alpha, beta, bias = a["size"], a["alpha"], a["beta"], a["bias"]
    odd = bool(size % 2)

    def lrn(x: torch.Tensor) -> torch.Tensor:
        # PyTorch has no such kernel for bfloat16 on the CPU, and squares leave float16's range; and of an even window
        # ONNX has the longer half ahead, PyTorch behind.
        y = _in_float32(x) if odd else _in_float32(x).flip(1)
        y = F.local_response_norm(y, size, alpha, beta, bias)
        return (y if odd else y.flip(1)).to(x.dtype)

    return lrn


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Function:
    if len(node.outputs) > 1:
        first = Node(node.name, node.op_type, node.inputs, node.outputs[:1], node.attributes)
        loss = _softmax_cross_entropy_loss(first, context)
        return lambda x, *rest: (loss(x, *rest), torch.log_softmax(x, 1))
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


def _recurrent(node: Node, context: Context) -> Function:
    """An LSTM or GRU by PyTorch's kernel, or step by step where that has no such variant."""
    plan = recurrent(node, context.shapes, context.constants)
    if plan.peepholes or (plan.kind == "GRU" and not plan.linear_before_reset):
        return _step_by_step(node, context, plan)
    names = [*node.inputs, *[""] * 7]
    order = "ifco" if plan.kind == "LSTM" else "rzh"
    for name in names[1:3]:
        context.packing[name] = plan.gates(order)
    if names[3]:
        context.packing[names[3]] = plan.bias_gates(order)
    batch = context.shape(names[0])[0 if plan.batch_first else 1]
    shape = (plan.directions, batch, plan.hidden)
    time = 1 if plan.batch_first else 0
    kernel = torch.lstm if plan.kind == "LSTM" else torch.gru

    def run(
        x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, b: torch.Tensor | None = None, _lengths: Any = None,
        h: torch.Tensor | None = None, c: torch.Tensor | None = None, *_: Any,
    ) -> Any:  # fmt: skip
        weights: list[torch.Tensor] = []
        for d in range(plan.directions):
            weights += [w[d], r[d], *(b[d].chunk(2) if b is not None else ())]
        states = [
            x.new_zeros(shape) if s is None else s.transpose(0, 1).contiguous() if plan.batch_first else s
            for s in ((h, c) if plan.kind == "LSTM" else (h,))
        ]
        first = states if plan.kind == "LSTM" else states[0]
        y, *last = kernel(
            x.flip(time) if plan.reverse else x, first, weights, b is not None, 1, 0.0, x.requires_grad,
            plan.directions == 2, plan.batch_first,
        )  # fmt: skip
        if plan.reverse:
            y = y.flip(time)
        y = y.unflatten(2, (plan.directions, plan.hidden))
        results = (y, *(s.transpose(0, 1) for s in last)) if plan.batch_first else (y.transpose(1, 2), *last)
        return _wanted(results, plan.wanted)

    return run


def _step_by_step(node: Node, context: Context, plan: Recurrent) -> Function:
    sizes = context.shape(node.inputs[0])
    batch, steps = (sizes[0], sizes[1]) if plan.batch_first else (sizes[1], sizes[0])
    assert batch is not None and steps is not None  # an operation's shapes are all known

    def run(x: torch.Tensor, *rest: Any) -> Any:
        functions = Functions(
            torch.mm, torch.t, torch.sigmoid, torch.tanh, lambda t, n: t.chunk(n, -1), torch.stack,
            lambda rows, columns: x.new_zeros(rows, columns),
        )  # fmt: skip
        return _wanted(unrolled(plan, functions, batch, steps, x, *rest), plan.wanted)

    return run


def _wanted(results: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """The first result if nothing else is wanted, else a tuple with None for what is not."""
    if not any(wanted[1:]):
        return results[0]
    return tuple(result if asked else None for result, asked in zip(results, wanted, strict=False))


def _attention(node: Node, context: Context) -> Function:
    plan = attention_nodes.attention(node, context.shapes, context.constants, context.dtypes)
    bias = None if plan.bias is None else torch.as_tensor(plan.bias, dtype=context.dtype).to(context.device)
    grouped = plan.heads != plan.kv_heads
    if plan.plain:
        bias = None if plan.causal else bias

        def native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
            q, k, v = _heads(q, plan.heads, plan), _heads(k, plan.kv_heads, plan), _heads(v, plan.kv_heads, plan)
            y = F.scaled_dot_product_attention(
                q, k, v, bias, is_causal=plan.causal, scale=plan.scale, enable_gqa=grouped
            )
            return y.transpose(1, 2).flatten(2) if plan.split_heads else y

        return native

    def general(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None,
        past_k: torch.Tensor | None = None, past_v: torch.Tensor | None = None, *_: Any,
    ) -> Any:  # fmt: skip
        q, k, v = _heads(q, plan.heads, plan), _heads(k, plan.kv_heads, plan), _heads(v, plan.kv_heads, plan)
        if past_k is not None and past_v is not None:
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        present = k, v
        if grouped:
            k, v = (t.repeat_interleave(plan.heads // plan.kv_heads, 1) for t in present)
        root = math.sqrt(plan.scale)
        scores = (q * root) @ (k * root).transpose(2, 3)
        shown = {attention_nodes.SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * torch.tanh(scores / plan.softcap)
        shown[attention_nodes.CAPPED] = scores
        added = scores.new_zeros(()) if bias is None else bias
        if mask is not None:
            if plan.mask == "bool":
                mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
            added = added + F.pad(mask, (0, plan.mask_padding), value=-math.inf)
        scores = scores + added
        shown[attention_nodes.BIASED] = scores
        weights = torch.softmax(scores.float() if scores.dtype == torch.float16 else scores, -1).to(q.dtype)
        if plan.may_be_blind:
            weights = weights.masked_fill(torch.isneginf(added.amax(-1, keepdim=True)), 0)
        shown[attention_nodes.WEIGHTS] = weights
        y = weights @ v
        y = y.transpose(1, 2).flatten(2) if plan.split_heads else y
        return _wanted((y, *present, shown.get(plan.shows)), plan.wanted)

    return general


def _heads(x: torch.Tensor, heads: int, plan: attention_nodes.Attention) -> torch.Tensor:
    """(batch, heads, steps, size) of a tensor that may be (batch, steps, heads x size)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2) if plan.split_heads else x


OPERATORS: dict[str, Factory] = {
    "Add": _add,
    "Attention": _attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _native(torch.div),
    "Dropout": _dropout,
    "Elu": _elu,
    "Exp": _native(torch.exp),
    "Flatten": _flatten,
    "GRU": _recurrent,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)),
    "GlobalMaxPool": _global_pool((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)),
    "HardSwish": _native(F.hardswish),
    "Identity": _native(_same),
    "LRN": _lrn,
    "LSTM": _recurrent,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis(torch.log_softmax),
    "MatMul": _native(torch.matmul),
    "MaxPool": _max_pool,
    "Mul": _native(torch.mul),
    "Pad": _pad,
    "ReduceMax": _reduce(_amax, -math.inf),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _relu,
    "Reshape": _reshape,
    "Sigmoid": _native(torch.sigmoid),
    "Softmax": _along_axis(torch.softmax),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Sqrt": _native(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _native(torch.sub),
    "Sum": _sum,
    "Tanh": _native(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format of images and convolution weights in mode ``channels_last``, by number of axes."""

_TYPES = {precision: getattr(torch, name) for precision, name in
          {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.items()}  # fmt: skip


class Operator(level.Operator):
    """One ONNX node on PyTorch; its backward pass is autograd's."""

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        if mode == "compile":
            require_compiler()
        context = Context(
            shapes=operation.shapes,
            constants=operation.constants,
            training=operation.training,
            device=device,
            dtype=_TYPES[operation.precision],
            dtypes=operation.dtypes,
            non_negative=operation.non_negative,
        )
        custom = operation.custom
        factory = OPERATORS[operation.node.op_type] if custom is None else custom_operators.factory(custom)
        call = factory(operation.node, context)
        self._packing = context.packing
        self.forward = torch.compile(call, dynamic=False, fullgraph=True) if mode == "compile" else call

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        self.check_feed(arrays)
        fed = []
        for name, array in zip(self.operation.node.inputs, arrays, strict=True):
            if array is not None and name in self._packing:
                array = self._packing[name].pack(array)
            fed.append(None if array is None else self._native(array))
        return fed

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        return [self._native(array) for array in arrays]

    def _native(self, array: np.ndarray) -> torch.Tensor:
        rounded = array.dtype == PRECISIONS["bf16"]
        tensor = torch.tensor(array.view(np.int16) if rounded else array)
        tensor = tensor.view(torch.bfloat16) if rounded else tensor
        layout = CHANNELS_LAST.get(tensor.ndim) if self.mode == "channels_last" else None
        return tensor.to(self.device, memory_format=layout or torch.contiguous_format)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        operation = self.operation
        leaves = list(inputs)
        for index in operation.differentiable:
            leaves[index] = inputs[index].detach().requires_grad_()
        outputs = self.forward(*leaves)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        heads = [outputs[index] for index in operation.differentiated]
        sources = [leaves[index] for index in operation.differentiable]
        gradient = torch.autograd.grad
        return lambda *gradients: gradient(heads, sources, gradients, retain_graph=True)

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        names = self.operation.node.outputs
        return [
            _neutral(value, self.operation.dtypes[name]) for name, value in zip(names, outputs, strict=False) if name
        ]

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        fetched = []
        for index, gradient in zip(self.operation.differentiable, gradients, strict=True):
            name = self.operation.node.inputs[index]
            array = _neutral(gradient, self.operation.dtypes[name])
            fetched.append(self._packing[name].unpack(array) if name in self._packing else array)
        return fetched

    def extent(self, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, torch.Tensor):
            return None
        memory = value.untyped_storage()
        return memory.data_ptr(), memory.nbytes()

    def synchronize(self, *results: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _neutral(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        array = tensor.view(torch.int16).numpy().view(PRECISIONS["bf16"])
    else:
        array = tensor.numpy()
    return np.array(array, dtype, order="C")


def require_compiler() -> None:
    """Raise `BackendError` unless `torch.compile` will find a C++ compiler and Python's headers."""
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler) is None:
        raise BackendError(
            f"mode 'compile' needs a C++ compiler, and {compiler!r} is not found",
            hint="Install one (Debian: apt install g++), or name it in the environment variable CXX.",
        )
    if not header.exists():
        raise BackendError(
            "mode 'compile' needs Python's C headers", where=str(header), hint="Debian: apt install python3-dev."
        )
