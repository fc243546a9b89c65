"""ONNX operators as native JAX calls.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable that takes the node's inputs in
their order, None for an omitted one, and returns its first output; of a BatchNormalization in training mode, the
running statistics too. Inputs that a factory has read through `Context.constant` are passed too, and ignored.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are fed as N, H, W, C, in which
XLA's convolutions are fastest on the CPU (on GPUs XLA chooses for itself); data are moved only where an operator needs
another order. Imports JAX, Optax, NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from d5suite.errors import NetworkError
from d5suite.levels.operator import NodeContext
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.windows import Window, window

Layout = tuple[int, ...]
"""The ONNX axes of a tensor in the order in which they are stored: (0, 2, 3, 1) is an image stored as N, H, W, C."""

Operator = Callable[..., Any]
Factory = Callable[[Node, "Context"], Operator]


def channels_last(rank: int) -> Layout:
    """The layout N, spatial axes, C; ONNX's own of what has no channels."""
    return (0, *range(2, rank), 1) if rank > 1 else identity(rank)


def identity(rank: int) -> Layout:
    """ONNX's own layout."""
    return tuple(range(rank))


def weight_layout(node: Node, index: int, rank: int) -> Layout:
    """The layout in which a weight is best stored that is input number ``index`` of this node."""
    if node.op_type == "Conv" and index == 1:
        return (*range(2, rank), 1, 0)
    if node.op_type == "Gemm" and index == 1 and node.attributes["transB"]:
        return (1, 0)
    return identity(rank)


@dataclass
class Context(NodeContext):
    """What a factory may know about the place of its node.

    Attributes
    ----------
    shapes : mapping
        ONNX shape of every tensor.
    constants : mapping
        Values of the inputs that are fixed (shapes, axes, bounds).
    layouts : dict
        Storage layout by tensor; factories read their inputs' and write their outputs'. Absent means ONNX's own.
    training : bool
        Whether BatchNormalization and Dropout are in training mode.
    precision : jax.lax.Precision or None
        Of matrix products and convolutions; None for XLA's default.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    layouts: dict[str, Layout] = field(default_factory=dict)
    training: bool = False
    precision: lax.Precision | None = None

    def layout(self, name: str) -> Layout:
        """Storage layout of a tensor."""
        return self.layouts.get(name) or identity(self.rank(name))

    def convert(self, name: str, wanted: Layout) -> Operator:
        """A function that brings a tensor into a layout, with leading axes of size 1 if that has more axes."""
        layout = self.layout(name)
        added = len(wanted) - len(layout)
        if layout == wanted or not layout:
            return _same
        layout = (*range(added), *(axis + added for axis in layout))
        order = [layout.index(axis) for axis in wanted]
        return lambda x: jnp.expand_dims(x, tuple(range(added))).transpose(order)


def _same(x: Any, *_: Any) -> Any:
    return x


def _in_float32(x: Any) -> Any:
    """Activations as float32 where they are bfloat16; float64 stays."""
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


# Element-wise


def _unary(function: Operator) -> Factory:
    """A factory for a function of one tensor that keeps its layout."""

    def factory(node: Node, context: Context) -> Operator:
        context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
        return function

    return factory


def _aligned(node: Node, context: Context) -> list[Operator]:
    """For each input, what brings it to one layout under which ONNX's broadcasting holds."""
    rank = max(context.rank(name) for name in node.inputs)
    full = [context.layout(name) for name in node.inputs if context.rank(name) == rank]
    layout = next((x for x in full if x != identity(rank)), identity(rank))
    context.layouts[node.outputs[0]] = layout
    plain = layout == identity(rank)
    return [context.convert(name, identity(context.rank(name)) if plain else layout) for name in node.inputs]


def _elementwise(function: Operator) -> Factory:
    """A factory for a function of two tensors, repeated over more."""

    def factory(node: Node, context: Context) -> Operator:
        converters = _aligned(node, context)
        return lambda *xs: reduce(function, [convert(x) for convert, x in zip(converters, xs, strict=True)])

    return factory


def _leaky_relu(node: Node, context: Context) -> Operator:
    alpha = node.attributes["alpha"]
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    return lambda x: jax.nn.leaky_relu(x, alpha)


def _clip(node: Node, context: Context) -> Operator:
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    return lambda x, low=None, high=None: jnp.clip(x, low, high)


def _dropout(node: Node, context: Context) -> Operator:
    """In training mode the callable takes a random key as ``key``."""
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else float(ratio)
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])

    def dropout(x: Any, *_: Any, key: jax.Array | None = None) -> Any:
        if key is None or probability == 0:
            return x
        kept = jax.random.bernoulli(key, 1 - probability, x.shape)
        return jnp.where(kept, x / (1 - probability), 0)

    return dropout


def _along_axis(function: Operator) -> Factory:
    def factory(node: Node, context: Context) -> Operator:
        layout = context.layout(node.inputs[0])
        axis = layout.index(node.attributes["axis"] % len(layout))
        context.layouts[node.outputs[0]] = layout
        # XLA computes again what it fuses, not always with the same rounding: of logits around 1e10 (ONNX's SqueezeNet)
        # one may then exceed, by hundreds, the maximum that softmax subtracts. So it is subtracted twice.
        return lambda x: function(x - lax.stop_gradient(x.max(axis, keepdims=True)), axis=axis)

    return factory


# Shape


def _concat(node: Node, context: Context) -> Operator:
    converters = _aligned(node, context)
    layout = context.layout(node.outputs[0])
    axis = layout.index(node.attributes["axis"] % len(layout))
    return lambda *xs: jnp.concatenate([convert(x) for convert, x in zip(converters, xs, strict=True)], axis)


def _flatten(node: Node, context: Context) -> Operator:
    rank = context.rank(node.inputs[0])
    axis = node.attributes["axis"] + (rank if node.attributes["axis"] < 0 else 0)
    convert = context.convert(node.inputs[0], identity(rank))

    def flatten(x: Any) -> Any:
        x = convert(x)
        return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))

    return flatten


def _reshape(node: Node, context: Context) -> Operator:
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default shape
    name, output = node.inputs[0], node.outputs[0]
    rank, layout = context.rank(name), context.layout(name)
    sizes = [int(n) for n in wanted]
    copied = [] if node.attributes["allowzero"] else [i for i, n in enumerate(sizes) if n == 0]
    # Splitting the channels into groups and merging them again (ShuffleNet) leaves the rest where it is.
    if layout == channels_last(rank) and _splits_channels(context.shape(name), context.shape(output)):
        context.layouts[output] = _grouped(rank + 1)
        groups, size = (int(n or 0) for n in context.shape(output)[1:3])
        return lambda x, _: x.reshape(*x.shape[:-1], groups, size)
    if layout != identity(rank) and _splits_channels(context.shape(output), context.shape(name)):
        context.layouts[output] = channels_last(rank - 1)
        group = context.convert(name, _grouped(rank))

        def merge(x: Any, _: Any) -> Any:
            x = group(x)
            return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])

        return merge
    convert = context.convert(name, identity(rank))

    def reshape(x: Any, _: Any) -> Any:
        x = convert(x)
        return x.reshape([x.shape[i] if i in copied else n for i, n in enumerate(sizes)])

    return reshape


def _grouped(rank: int) -> Layout:
    """The layout N, spatial axes, groups of channels, channels of a group."""
    return (0, *range(3, rank), 1, 2)


def _splits_channels(shape: Shape, split: Shape) -> bool:
    """Whether (N, C, spatial...) becomes (N, a, b, spatial...) with a b = C; the batch size may be unknown."""
    if len(shape) < 4 or len(split) != len(shape) + 1 or None in (*shape[1:], *split[1:]):
        return False
    return split[0] == shape[0] and split[3:] == shape[2:]


def _transpose(node: Node, context: Context) -> Operator:
    layout = context.layout(node.inputs[0])
    order = list(node.attributes.get("perm") or reversed(range(len(layout))))
    if layout != identity(len(layout)):
        # The axes get new names, and the next operator moves what it must.
        context.layouts[node.outputs[0]] = tuple(order.index(axis) for axis in layout)
        return _same
    return lambda x: x.transpose(order)


def _squeeze(node: Node, context: Context) -> Operator:
    shape, layout = context.shape(node.inputs[0]), context.layout(node.inputs[0])
    given = context.constant(node, 1)
    gone = [i for i, n in enumerate(shape) if n == 1] if given is None else [int(a) % len(shape) for a in given]
    context.layouts[node.outputs[0]] = tuple(
        axis - sum(other < axis for other in gone) for axis in layout if axis not in gone
    )
    axes = [layout.index(axis) for axis in gone]
    return lambda x, *_: x.squeeze(axes)


def _unsqueeze(node: Node, context: Context) -> Operator:
    rank = context.rank(node.inputs[0])
    convert = context.convert(node.inputs[0], identity(rank))
    given = context.constant(node, 1)
    assert given is not None  # required since opset 13
    axes = [int(a) for a in given]
    return lambda x, _: jnp.expand_dims(convert(x), axes)


def _pad(node: Node, context: Context) -> Operator:
    if node.attributes["mode"] != "constant":
        raise NetworkError(f"Pad with mode {node.attributes['mode']!r} is not implemented", where=node.name)
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    layout = context.layout(node.inputs[0])
    chosen = range(len(layout)) if axes is None else [int(a) % len(layout) for a in axes]
    pads = [(0, 0, 0)] * len(layout)
    for i, axis in enumerate(chosen):
        pads[layout.index(axis)] = (int(amounts[i]), int(amounts[i + len(chosen)]), 0)
    context.layouts[node.outputs[0]] = layout
    fill = 0.0 if value is None else value.item()
    return lambda x, *_: lax.pad(x, x.dtype.type(fill), pads)


# Matrices


def _gemm(node: Node, context: Context) -> Operator:
    a = node.attributes
    alpha, beta, precision = a["alpha"], a["beta"], context.precision
    first, second = (context.layout(name) for name in node.inputs[:2])
    contracted = ((first.index(0 if a["transA"] else 1),), (second.index(1 if a["transB"] else 0),))
    biased = len(node.inputs) > 2 and bool(node.inputs[2])
    convert = context.convert(node.inputs[2], identity(context.rank(node.inputs[2]))) if biased else _same

    def gemm(x: Any, y: Any, z: Any = None) -> Any:
        product = lax.dot_general(x, y, (contracted, ((), ())), precision=precision)
        if alpha != 1:
            product = alpha * product
        if z is None:
            return product
        return product + (convert(z) if beta == 1 else beta * convert(z))

    return gemm


def _matmul(node: Node, context: Context) -> Operator:
    first, second = (context.convert(name, identity(context.rank(name))) for name in node.inputs)
    precision = context.precision
    return lambda x, y: jnp.matmul(first(x), second(y), precision=precision)


# Convolution and pooling


def _spatial(node: Node, context: Context) -> Shape:
    """Sizes of the image's one, two or three spatial dimensions."""
    sizes = context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    return sizes


def _conv(node: Node, context: Context) -> Operator:
    w = window(node, _spatial(node, context), context.shape(node.inputs[1])[2:])
    rank = len(w.kernel) + 2
    output = context.layouts[node.outputs[0]] = channels_last(rank)
    layouts = (context.layout(node.inputs[0]), context.layout(node.inputs[1]), output)
    # JAX names, for each ONNX axis, where it is stored.
    dimensions = lax.ConvDimensionNumbers(*(tuple(x.index(axis) for axis in range(rank)) for x in layouts))
    pads = list(zip(w.pads_begin, w.pads_end, strict=True))
    groups, precision = node.attributes["group"], context.precision

    def conv(x: Any, weight: Any, bias: Any = None) -> Any:
        y = lax.conv_general_dilated(
            x,
            weight,
            w.strides,
            pads,
            rhs_dilation=w.dilations,
            dimension_numbers=dimensions,
            feature_group_count=groups,
            precision=precision,
        )
        return y if bias is None else y + bias

    return conv


@dataclass(frozen=True)
class _Pooling:
    """A window over every stored axis, as `lax.reduce_window` takes it, ceil-mode overhang padded."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, w: Window, layout: Layout) -> _Pooling:
        ends = [end + more for end, more in zip(w.pads_end, w.overhang, strict=True)]
        pads = list(zip(w.pads_begin, ends, strict=True))

        def stored(values: Sequence[Any], rest: Any) -> tuple[Any, ...]:
            return tuple(rest if axis < 2 else values[axis - 2] for axis in layout)

        return cls(stored(w.kernel, 1), stored(w.strides, 1), stored(w.dilations, 1), stored(pads, (0, 0)))

    def reduce(self, x: Any, start: float, function: Operator) -> Any:
        """The function over each window; ``start`` is its neutral element."""
        return lax.reduce_window(
            x, x.dtype.type(start), function, self.kernel, self.strides, self.pads, window_dilation=self.dilations
        )

    def shifted(self, x: Any, fill: float) -> list[Any]:
        """For each place in the window, what all windows see there."""
        x = lax.pad(x, x.dtype.type(fill), [(begin, end, 0) for begin, end in self.pads])
        spans = [(k - 1) * d for k, d in zip(self.kernel, self.dilations, strict=True)]
        found = []
        for place in np.ndindex(*self.kernel):
            starts = [i * d for i, d in zip(place, self.dilations, strict=True)]
            ends = [first + n - span for first, n, span in zip(starts, x.shape, spans, strict=True)]
            found.append(lax.slice(x, starts, ends, self.strides))
        return found


def _max_pool(node: Node, context: Context) -> Operator:
    layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    pooling = _Pooling.of(window(node, _spatial(node, context)), layout)
    if max(pooling.dilations) > 1:  # of which reduce_window has no gradient
        return lambda x: reduce(jnp.maximum, pooling.shifted(x, -math.inf))
    return lambda x: pooling.reduce(x, -math.inf, lax.max)


def _average_pool(node: Node, context: Context) -> Operator:
    layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    sizes = _spatial(node, context)
    w = window(node, sizes)
    pooling = _Pooling.of(w, layout)
    counts = _counts(w, sizes, layout, include=bool(node.attributes["count_include_pad"]))

    def average_pool(x: Any) -> Any:
        total = pooling.reduce(_in_float32(x), 0.0, lax.add)
        return (total / counts.astype(total.dtype)).astype(x.dtype)

    return average_pool


def _counts(w: Window, sizes: Sequence[int | None], layout: Layout, *, include: bool) -> np.ndarray:
    """For each output the number of cells that count, in stored order; a single number where it is the same for all.

    Cells of the padding count if ``include``; what a ceil-mode window reaches beyond the padding never does.
    """
    counts = np.ones((1,) * len(layout))
    for axis, size in enumerate(sizes):
        assert size is not None  # window() has seen to it
        first = np.arange(w.outputs[axis])[:, None] * w.strides[axis]
        cells = first + np.arange(w.kernel[axis]) * w.dilations[axis] - w.pads_begin[axis]
        low, high = (-w.pads_begin[axis], size + w.pads_end[axis]) if include else (0, size)
        shape = [1] * len(layout)
        shape[layout.index(axis + 2)] = -1
        counts = counts * np.maximum(((cells >= low) & (cells < high)).sum(1), 1).reshape(shape)
    return np.array(counts.flat[0]) if (counts == counts.flat[0]).all() else counts


def _global_pool(function: Operator) -> Factory:
    def factory(node: Node, context: Context) -> Operator:
        layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
        axes = tuple(position for position, axis in enumerate(layout) if axis > 1)
        return lambda x: function(x, axes, keepdims=True)

    return factory


# Normalisation and loss


def _batch_normalization(node: Node, context: Context) -> Operator:
    """In training mode the callable returns output, running mean and running variance."""
    layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    axes = tuple(position for position, axis in enumerate(layout) if axis != 1)
    epsilon, momentum, training = node.attributes["epsilon"], node.attributes["momentum"], context.training

    def spread(vector: Any) -> Any:
        return jnp.expand_dims(vector, axes)

    def batch_normalization(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        wide = _in_float32(x)
        if not training:
            factor = scale * lax.rsqrt(variance + epsilon)
            return ((wide - spread(mean)) * spread(factor) + spread(bias)).astype(x.dtype)
        batch_mean = wide.mean(axes)
        # The variance's derivative by the mean is zero, and the output's is minus the factor: said of vectors, it
        # spares the backward pass a sum over the image.
        fixed = lax.stop_gradient(batch_mean)
        centred = wide - spread(fixed)
        batch_variance = lax.square(centred).mean(axes)
        factor = scale * lax.rsqrt(batch_variance + epsilon)
        shift = bias + (fixed - batch_mean) * factor
        return (
            (centred * spread(factor) + spread(shift)).astype(x.dtype),
            momentum * mean + (1 - momentum) * batch_mean,
            momentum * variance + (1 - momentum) * batch_variance,
        )

    return batch_normalization


def _lrn(node: Node, context: Context) -> Operator:
    a = node.attributes
    size, alpha, beta, bias = a["size"], a["alpha"], a["beta"], a["bias"]
    layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    kernel = tuple(size if axis == 1 else 1 for axis in layout)
    pads = tuple(((size - 1) // 2, size // 2) if axis == 1 else (0, 0) for axis in layout)
    ones = (1,) * len(layout)

    def lrn(x: Any) -> Any:
        wide = _in_float32(x)
        squares = lax.reduce_window(lax.square(wide), wide.dtype.type(0), lax.add, kernel, ones, pads)
        return (wide / (bias + alpha / size * squares) ** beta).astype(x.dtype)

    return lrn


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Operator:
    rank = context.rank(node.inputs[0])
    classes_last = context.convert(node.inputs[0], channels_last(rank))
    ignored, reduction = node.attributes.get("ignore_index"), node.attributes["reduction"]

    def loss(scores: Any, labels: Any, weight: Any = None) -> Any:
        kept = None if ignored is None else labels != ignored
        used = labels if kept is None else jnp.where(kept, labels, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(_in_float32(classes_last(scores)), used)
        factors = None if weight is None else weight[used]
        if kept is not None:
            factors = kept.astype(losses.dtype) if factors is None else factors * kept
        if factors is not None:
            losses = losses * factors
        if reduction == "none":
            return losses
        if reduction == "sum":
            return losses.sum()
        return losses.mean() if factors is None else losses.sum() / factors.sum()

    return loss


OPERATORS: dict[str, Factory] = {
    "Add": _elementwise(jnp.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _elementwise(jnp.divide),
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool(jnp.mean),
    "GlobalMaxPool": _global_pool(jnp.max),
    "Identity": _unary(_same),
    "LRN": _lrn,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis(jax.nn.log_softmax),
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _elementwise(jnp.multiply),
    "Pad": _pad,
    "Relu": _unary(jax.nn.relu),
    "Reshape": _reshape,
    "Sigmoid": _unary(jax.nn.sigmoid),
    "Softmax": _along_axis(jax.nn.softmax),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Squeeze": _squeeze,
    "Sub": _elementwise(jnp.subtract),
    "Sum": _elementwise(jnp.add),
    "Tanh": _unary(jnp.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""
