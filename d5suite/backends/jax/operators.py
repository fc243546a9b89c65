"""ONNX operators as native JAX calls, and Level 0 on JAX.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable that takes the node's inputs in
their order, None for an omitted one, and returns its first output or, if the node names others, a tuple of all; of a
BatchNormalization in training mode, the running statistics always. Inputs that a factory has read through
`Context.constant` are passed too, and ignored.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are fed as N, H, W, C, in which
XLA's convolutions are fastest on the CPU (on GPUs XLA chooses for itself); data are moved only where an operator needs
another order. Imports JAX, Optax, NumPy, `d5suite.errors`, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from d5suite.backends.jax import custom as custom_operators
from d5suite.backends.jax import runtime
from d5suite.errors import NetworkError
from d5suite.levels import attention as attention_nodes
from d5suite.levels import operator as level
from d5suite.levels.operator import NodeContext
from d5suite.levels.recurrent import Packing, Recurrent, recurrent
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.operation import STATIC_INPUTS, Operation
from d5suite.network.windows import Window, transposed_window, window

Layout = tuple[int, ...]
"""The ONNX axes of a tensor in the order in which they are stored: (0, 2, 3, 1) is an image stored as N, H, W, C."""

Function = Callable[..., Any]
Factory = Callable[[Node, "Context"], Function]


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
    if node.op_type in ("GRU", "LSTM") and index in (1, 2):
        return (0, 2, 1)
    return identity(rank)


def _input_layout(node: Node, index: int, rank: int) -> Layout:
    """The layout in which any input of a single node is best stored."""
    if node.op_type in _OF_IMAGES and index == 0:
        return channels_last(rank)
    if node.op_type == "Attention" and index in (0, 1, 2, 4, 5) and rank == 4:
        return _HEADS_INSIDE
    return weight_layout(node, index, rank)


_OF_IMAGES = frozenset(
    {
        "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "GlobalAveragePool", "GlobalMaxPool", "LRN",
        "MaxPool", "SoftmaxCrossEntropyLoss",
    }
)  # fmt: skip
"""Operators whose first input has channels, or classes, as its second axis."""

_HEADS_INSIDE = (0, 2, 1, 3)
"""The layout batch, steps, heads, size, which JAX's attention takes."""


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
    device : str
        The kind of device that custom operators are built for.
    dtypes : mapping
        ONNX type of every tensor; only at level 0.
    non_negative : set
        Inputs whose values are known to be 0 or more; only at level 0.
    packing : dict
        Weights that a factory wants in a form of its own; only at level 0.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    layouts: dict[str, Layout] = field(default_factory=dict)
    training: bool = False
    precision: lax.Precision | None = None
    device: str = "cpu"
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    non_negative: frozenset[str] = frozenset()
    packing: dict[str, Packing] = field(default_factory=dict)

    def layout(self, name: str) -> Layout:
        """Storage layout of a tensor."""
        return self.layouts.get(name) or identity(self.rank(name))

    def convert(self, name: str, wanted: Layout) -> Function:
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
    """Activations as float32 where they are narrower; float64 stays."""
    return x.astype(jnp.float32) if _is_narrow(x) else x


_NARROW = frozenset({np.dtype(np.float16), np.dtype(jnp.bfloat16)})
"""Types too short to add up in."""


def _is_narrow(x: Any) -> bool:
    return x.dtype in _NARROW


def _wide(x: Any) -> Any:
    """The type in which sums over a tensor are kept."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _lowest(x: Any) -> Any:
    """The neutral element of the maximum."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return -math.inf
    return jnp.iinfo(x.dtype).min if jnp.issubdtype(x.dtype, jnp.integer) else False


def _typed(node: Node, context: Context, *further: Any) -> list[Any]:
    """The outputs after the first in their ONNX types at level 0, None for one that is not wanted."""
    return [
        result.astype(context.dtypes[name]) if name else None
        for name, result in zip(node.outputs[1:], further, strict=False)
    ]


# Element-wise


def _unary(function: Function) -> Factory:
    """A factory for a function of one tensor that keeps its layout."""

    def factory(node: Node, context: Context) -> Function:
        context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
        return function

    return factory


def _aligned(node: Node, context: Context) -> list[Function]:
    """For each input, what brings it to one layout under which ONNX's broadcasting holds."""
    rank = max(context.rank(name) for name in node.inputs)
    full = [context.layout(name) for name in node.inputs if context.rank(name) == rank]
    layout = next((x for x in full if x != identity(rank)), identity(rank))
    context.layouts[node.outputs[0]] = layout
    plain = layout == identity(rank)
    return [context.convert(name, identity(context.rank(name)) if plain else layout) for name in node.inputs]


def _elementwise(function: Function) -> Factory:
    """A factory for a function of two tensors, repeated over more."""
    each = partial(_broadcast, function)

    def factory(node: Node, context: Context) -> Function:
        converters = _aligned(node, context)
        return lambda *xs: reduce(each, [convert(x) for convert, x in zip(converters, xs, strict=True)])

    return factory


def _broadcast(function: Function, x: Any, y: Any) -> Any:
    """The function of two tensors; XLA adds up the gradient of a repeated one in the type that it is repeated in."""
    return _widened(function, x, y) if _is_narrow(x) and x.shape != y.shape else function(x, y)


def _in_wider_type(function: Function, x: Any, y: Any) -> Any:
    return function(_in_float32(x), _in_float32(y)).astype(x.dtype)


_widened = jax.jit(_in_wider_type, static_argnums=0, inline=True)
"""The function of two narrow tensors taken in float32; one program in mode ``eager`` too."""


def _leaky_relu(node: Node, context: Context) -> Function:
    alpha = node.attributes["alpha"]
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    return lambda x: jax.nn.leaky_relu(x, alpha)


def _elu(node: Node, context: Context) -> Function:
    alpha = node.attributes["alpha"]
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    return lambda x: jax.nn.elu(x, alpha)


def _gelu(node: Node, context: Context) -> Function:
    approximate = node.attributes["approximate"] == "tanh"
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    return lambda x: jax.nn.gelu(x, approximate)


def _divide(x: Any, y: Any) -> Any:
    """ONNX's quotient, which of integers is cut towards zero."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(x, y))
    return jnp.divide(x, y)


def _clip(node: Node, context: Context) -> Function:
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    if context.dtypes:  # level 0, where bounds are fixed
        low, high = (None if c is None else c.item() for c in (context.constant(node, 1), context.constant(node, 2)))
        return lambda x, *_: jnp.clip(x, low, high)
    return lambda x, low=None, high=None: jnp.clip(x, low, high)


def _dropout(node: Node, context: Context) -> Function:
    """In training mode the callable takes a random key as ``key``."""
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else float(ratio)
    masked = len(node.outputs) > 1
    for output in node.outputs:
        context.layouts[output] = context.layout(node.inputs[0])

    def dropout(x: Any, *_: Any, key: jax.Array | None = None) -> Any:
        if key is None or probability == 0:
            return (x, jnp.ones_like(x, bool)) if masked else x
        kept = jax.random.bernoulli(key, 1 - probability, x.shape)
        y = jnp.where(kept, x / (1 - probability), 0)
        return (y, kept) if masked else y

    return dropout


def _along_axis(function: Function) -> Factory:
    def factory(node: Node, context: Context) -> Function:
        layout = context.layout(node.inputs[0])
        axis = layout.index(node.attributes["axis"] % len(layout))
        context.layouts[node.outputs[0]] = layout
        # XLA computes again what it fuses, not always with the same rounding: of logits around 1e10 (ONNX's SqueezeNet)
        # one may then exceed, by hundreds, the maximum that softmax subtracts. So it is subtracted twice.
        return lambda x: function(x - lax.stop_gradient(x.max(axis, keepdims=True)), axis=axis)

    return factory


# Shape


def _concat(node: Node, context: Context) -> Function:
    converters = _aligned(node, context)
    layout = context.layout(node.outputs[0])
    axis = layout.index(node.attributes["axis"] % len(layout))
    return lambda *xs: jnp.concatenate([convert(x) for convert, x in zip(converters, xs, strict=True)], axis)


def _flatten(node: Node, context: Context) -> Function:
    rank = context.rank(node.inputs[0])
    axis = node.attributes["axis"] + (rank if node.attributes["axis"] < 0 else 0)
    convert = context.convert(node.inputs[0], identity(rank))

    def flatten(x: Any) -> Any:
        x = convert(x)
        return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))

    return flatten


def _reshape(node: Node, context: Context) -> Function:
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


def _transpose(node: Node, context: Context) -> Function:
    layout = context.layout(node.inputs[0])
    order = list(node.attributes.get("perm") or reversed(range(len(layout))))
    if layout != identity(len(layout)):
        # The axes get new names, and the next operator moves what it must.
        context.layouts[node.outputs[0]] = tuple(order.index(axis) for axis in layout)
        return _same
    return lambda x: x.transpose(order)


def _squeeze(node: Node, context: Context) -> Function:
    shape, layout = context.shape(node.inputs[0]), context.layout(node.inputs[0])
    given = context.constant(node, 1)
    gone = [i for i, n in enumerate(shape) if n == 1] if given is None else [int(a) % len(shape) for a in given]
    context.layouts[node.outputs[0]] = _without(layout, gone)
    axes = [layout.index(axis) for axis in gone]
    return lambda x, *_: x.squeeze(axes)


def _without(layout: Layout, gone: Sequence[int]) -> Layout:
    """The layout of what is left when axes are gone."""
    return tuple(axis - sum(other < axis for other in gone) for axis in layout if axis not in gone)


def _unsqueeze(node: Node, context: Context) -> Function:
    rank = context.rank(node.inputs[0])
    convert = context.convert(node.inputs[0], identity(rank))
    given = context.constant(node, 1)
    assert given is not None  # required since opset 13
    axes = [int(a) for a in given]
    return lambda x, _: jnp.expand_dims(convert(x), axes)


def _pad(node: Node, context: Context) -> Function:
    mode = node.attributes["mode"]
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    layout = context.layout(node.inputs[0])
    chosen = range(len(layout)) if axes is None else [int(a) % len(layout) for a in axes]
    pads = [(0, 0, 0)] * len(layout)
    for i, axis in enumerate(chosen):
        pads[layout.index(axis)] = (int(amounts[i]), int(amounts[i + len(chosen)]), 0)
    context.layouts[node.outputs[0]] = layout
    if mode != "constant":
        widths = [(begin, end) for begin, end, _ in pads]
        return lambda x, *_: jnp.pad(x, widths, mode)
    fill = 0.0 if value is None else value.item()
    return lambda x, *_: lax.pad(x, x.dtype.type(fill), pads)


def _gather(node: Node, context: Context) -> Function:
    rank = context.rank(node.inputs[0])
    axis = node.attributes["axis"] % rank
    size = context.shape(node.inputs[0])[axis]
    convert = context.convert(node.inputs[0], identity(rank))
    # Mode "clip" is what XLA's gather does by itself; JAX's default adds a mask, and does not need to: ONNX has no
    # indices out of bounds.
    if node.inputs[1] in context.non_negative:
        return lambda data, indices: jnp.take(convert(data), indices, axis, mode="clip")
    return lambda data, indices: jnp.take(
        convert(data), jnp.where(indices < 0, indices + size, indices), axis, mode="clip"
    )


def _reduce(function: Function, empty: Function | None = None) -> Factory:
    """A factory for a reduction over the axes that the second input, or without it all, names.

    Parameters
    ----------
    function : callable
    empty : callable, optional
        Gives the reduction of nothing for a tensor, where the function has no answer of its own.
    """

    def factory(node: Node, context: Context) -> Function:
        given, keep = context.constant(node, 1), bool(node.attributes["keepdims"])
        layout, shape = context.layout(node.inputs[0]), context.shape(node.inputs[0])
        if given is None or not given.size:
            if node.attributes["noop_with_empty_axes"]:
                context.layouts[node.outputs[0]] = layout
                return _same
            given = np.arange(len(layout))
        gone = [int(a) % len(layout) for a in given]
        context.layouts[node.outputs[0]] = layout if keep else _without(layout, gone)
        axes = tuple(layout.index(axis) for axis in gone)
        if empty is not None and any(shape[axis] == 0 for axis in gone):
            return lambda x, *_: function(x, axes, keepdims=keep, initial=empty(x))
        return lambda x, *_: function(x, axes, keepdims=keep)

    return factory


# Matrices


def _gemm(node: Node, context: Context) -> Function:
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
        return _broadcast(jnp.add, product, convert(z) if beta == 1 else beta * convert(z))

    return gemm


def _matmul(node: Node, context: Context) -> Function:
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


def _conv(node: Node, context: Context) -> Function:
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
        return y if bias is None else _broadcast(jnp.add, y, bias)

    return conv


def _conv_transpose(node: Node, context: Context) -> Function:
    """A convolution with the mirrored weight over an image with zeros between its points, as JAX has it."""
    sizes = context.shape(node.inputs[1])
    w = transposed_window(node, _spatial(node, context), sizes[2:])
    rank, groups, precision = len(sizes), node.attributes["group"], context.precision
    packing = _transposed_weight(sizes, groups)
    pack = packing.pack
    if context.dtypes:
        context.packing[node.inputs[1]], pack = packing, _same
    output = context.layouts[node.outputs[0]] = channels_last(rank)
    image = tuple(context.layout(node.inputs[0]).index(axis) for axis in range(rank))
    weight_axes = (rank - 1, rank - 2, *range(rank - 2))
    dimensions = lax.ConvDimensionNumbers(image, weight_axes, tuple(output.index(axis) for axis in range(rank)))
    spans = [(k - 1) * d for k, d in zip(w.kernel, w.dilations, strict=True)]
    pads = [
        (span - begin, span - end + more)
        for span, begin, end, more in zip(spans, w.pads_begin, w.pads_end, w.output_padding, strict=True)
    ]

    def conv_transpose(x: Any, weight: Any, bias: Any = None) -> Any:
        y = lax.conv_general_dilated(
            x,
            pack(weight),
            (1,) * (rank - 2),
            pads,
            lhs_dilation=w.strides,
            rhs_dilation=w.dilations,
            dimension_numbers=dimensions,
            feature_group_count=groups,
            precision=precision,
        )
        return y if bias is None else _broadcast(jnp.add, y, bias)

    return conv_transpose


def _transposed_weight(shape: Shape, groups: int) -> Packing:
    """ONNX's (inputs, outputs of a group, spatial) as (mirrored spatial, inputs of a group, outputs), and back."""
    inputs, outputs, *kernel = (n or 0 for n in shape)
    spatial = range(len(kernel))
    mirror = (slice(None, None, -1),) * len(kernel)
    back = [len(kernel) + 1, len(kernel), len(kernel) + 2, *spatial]

    def pack(w: Any) -> Any:
        w = w[(..., *mirror)].reshape(groups, inputs // groups, outputs, *kernel)
        return w.transpose(*(3 + i for i in spatial), 1, 0, 2).reshape(*kernel, inputs // groups, groups * outputs)

    def unpack(w: Any) -> Any:
        w = w[mirror].reshape(*kernel, inputs // groups, groups, outputs)
        return w.transpose(back).reshape(inputs, outputs, *kernel)

    return Packing(pack, unpack)


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

    def reduce(self, x: Any, start: Any, function: Function) -> Any:
        """The function over each window; ``start`` is its neutral element."""
        return lax.reduce_window(
            x, x.dtype.type(start), function, self.kernel, self.strides, self.pads, window_dilation=self.dilations
        )

    def shifted(self, x: Any, fill: Any) -> list[Any]:
        """For each place in the window, what all windows see there."""
        x = lax.pad(x, x.dtype.type(fill), [(begin, end, 0) for begin, end in self.pads])
        spans = [(k - 1) * d for k, d in zip(self.kernel, self.dilations, strict=True)]
        found = []
        for place in np.ndindex(*self.kernel):
            starts = [i * d for i, d in zip(place, self.dilations, strict=True)]
            ends = [first + n - span for first, n, span in zip(starts, x.shape, spans, strict=True)]
            found.append(lax.slice(x, starts, ends, self.strides))
        return found


def _max_pool(node: Node, context: Context) -> Function:
    layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    pooling = _Pooling.of(window(node, _spatial(node, context)), layout)

    def max_pool(x: Any) -> Any:
        if max(pooling.dilations) > 1:  # of which reduce_window has no gradient
            return reduce(jnp.maximum, pooling.shifted(x, _lowest(x)))
        return pooling.reduce(x, _lowest(x), lax.max)

    if len(node.outputs) == 1:
        return max_pool
    context.layouts[node.outputs[1]] = layout
    order = "F" if node.attributes["storage_order"] else "C"
    sizes = [n or 0 for n in context.shape(node.inputs[0])]

    def with_indices(x: Any) -> Any:
        planes = jnp.arange(math.prod(sizes[:2])).reshape(*sizes[:2], *[1] * len(sizes[2:]))
        within = jnp.arange(math.prod(sizes[2:])).reshape(sizes[2:], order=order)
        places = (planes * within.size + within).transpose(layout)
        seen = zip(pooling.shifted(x, _lowest(x)), pooling.shifted(places, 0), strict=True)
        return max_pool(x), reduce(_higher, seen)[1]

    return with_indices


def _higher(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Of two (value, place), by element the one with the higher value; the first if they are alike."""
    better = second[0] > first[0]
    return jnp.where(better, second[0], first[0]), jnp.where(better, second[1], first[1])


def _average_pool(node: Node, context: Context) -> Function:
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


def _global_pool(function: Function) -> Factory:
    def factory(node: Node, context: Context) -> Function:
        layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
        axes = tuple(position for position, axis in enumerate(layout) if axis > 1)
        return lambda x: function(x, axes, keepdims=True)

    return factory


# Normalisation and loss


def _batch_normalization(node: Node, context: Context) -> Function:
    """In training mode the callable returns the running mean and variance too; at level 0 if they are wanted."""
    layout = context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    axes = tuple(position for position, axis in enumerate(layout) if axis != 1)
    epsilon, momentum, training = node.attributes["epsilon"], node.attributes["momentum"], context.training
    alone = bool(context.dtypes) and not any(node.outputs[1:])

    def spread(vector: Any) -> Any:
        return jnp.expand_dims(vector, axes)

    def batch_normalization(x: Any, *vectors: Any) -> Any:
        wide = _in_float32(x)
        scale, bias, mean, variance = map(_in_float32, vectors)
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
        y = (centred * spread(factor) + spread(shift)).astype(x.dtype)
        if alone:
            return y
        mean = momentum * mean + (1 - momentum) * batch_mean
        variance = momentum * variance + (1 - momentum) * batch_variance
        return (y, mean, variance) if not context.dtypes else (y, *_typed(node, context, mean, variance))

    return batch_normalization


def _layer_normalization(node: Node, context: Context) -> Function:
    rank, epsilon = context.rank(node.inputs[0]), node.attributes["epsilon"]
    axes = tuple(range(node.attributes["axis"] % rank, rank))
    convert = context.convert(node.inputs[0], identity(rank))
    alone = len(node.outputs) == 1

    def layer_normalization(x: Any, scale: Any, bias: Any = None) -> Any:
        wide = _in_float32(convert(x))
        mean = wide.mean(axes, keepdims=True)
        centred = wide - mean
        inverse = lax.rsqrt(lax.square(centred).mean(axes, keepdims=True) + epsilon)
        y = centred * inverse * _in_float32(scale)
        y = (y if bias is None else y + _in_float32(bias)).astype(x.dtype)
        return y if alone else (y, *_typed(node, context, mean, inverse))

    return layer_normalization


def _lrn(node: Node, context: Context) -> Function:
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


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Function:
    rank = context.rank(node.inputs[0])
    classes_last = context.convert(node.inputs[0], channels_last(rank))
    ignored, reduction = node.attributes.get("ignore_index"), node.attributes["reduction"]
    if len(node.outputs) > 1:
        context.layouts[node.outputs[1]] = channels_last(rank)

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

    if not context.dtypes:
        return loss

    def rounded(scores: Any, *rest: Any) -> Any:
        y = loss(scores, *rest).astype(scores.dtype)
        if len(node.outputs) == 1:
            return y
        return y, jax.nn.log_softmax(_in_float32(classes_last(scores))).astype(scores.dtype)

    return rounded


# Sequences


def _recurrent(node: Node, context: Context) -> Function:
    """An LSTM or GRU as a scan over the steps, behind one matrix product for the inputs of all steps."""
    plan = recurrent(node, context.shapes, context.constants)
    cell = _lstm_cell if plan.kind == "LSTM" else _gru_cell
    precision, axis = context.precision, 1 if plan.batch_first else 0

    def run(
        x: Any, w: Any, r: Any, b: Any = None, _lengths: Any = None, initial_h: Any = None, initial_c: Any = None,
        p: Any = None,
    ) -> Any:  # fmt: skip
        dot = partial(jnp.matmul, precision=precision, preferred_element_type=_wide(x))
        x = x.swapaxes(0, 1) if plan.batch_first else x
        zeros = jnp.zeros((x.shape[1], plan.hidden), _wide(x))
        given = (initial_h, initial_c) if plan.kind == "LSTM" else (initial_h,)
        sequences, states = [], []
        for d in range(plan.directions):
            start = [zeros if s is None else _in_float32(lax.index_in_dim(s, d, axis, keepdims=False)) for s in given]
            inputs, inside = dot(x, w[d]), None if p is None else _in_float32(p[d])
            if b is not None:
                ahead, behind = jnp.split(_in_float32(b[d]), 2)
                if plan.linear_before_reset:
                    behind, inside = behind.at[2 * plan.hidden :].set(0), behind[2 * plan.hidden :]
                inputs = inputs + (ahead + behind)
            step = partial(cell, plan, lambda h, matrix: dot(h.astype(x.dtype), matrix), r[d], inside)
            last, y = lax.scan(step, tuple(start), inputs, reverse=plan.reverse or d == 1)
            sequences.append(y.astype(x.dtype))
            states.append(last)
        y = jnp.stack(sequences, 1)
        y = y.transpose(2, 0, 1, 3) if plan.batch_first else y
        if not any(plan.wanted[1:]):
            return y
        return (y, *_typed(node, context, *(jnp.stack(last, axis) for last in zip(*states, strict=True))))

    return jax.jit(run)  # a scan is compiled whenever it meets new functions, such as those within


def _lstm_cell(plan: Recurrent, dot: Function, r: Any, peepholes: Any, state: Sequence[Any], inputs: Any) -> Any:
    """One step from (h, c) and the inputs' part of the gates to the next (h, c), and h once more."""
    h, c = state
    i, o, forget, g = jnp.split(inputs + dot(h, r), 4, axis=-1)
    if peepholes is not None:
        p_i, p_o, p_f = jnp.split(peepholes, 3)
        i, forget = i + p_i * c, forget + p_f * c
    c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    if peepholes is not None:
        o = o + p_o * c
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru_cell(plan: Recurrent, dot: Function, r: Any, bias: Any, state: Sequence[Any], inputs: Any) -> Any:
    """One step from (h,) and the inputs' part of the gates to the next (h,), and h once more."""
    (h,) = state
    gates, new = jnp.split(inputs, [2 * plan.hidden], axis=-1)
    if plan.linear_before_reset:
        by_state, again = jnp.split(dot(h, r), [2 * plan.hidden], axis=-1)
        z, reset = jnp.split(jax.nn.sigmoid(gates + by_state), 2, axis=-1)
        new = jnp.tanh(new + reset * (again if bias is None else again + bias))
    else:
        z, reset = jnp.split(jax.nn.sigmoid(gates + dot(h, r[:, : 2 * plan.hidden])), 2, axis=-1)
        new = jnp.tanh(new + dot(reset * h, r[:, 2 * plan.hidden :]))
    h = new - z * new + z * h
    return (h,), h


def _attention(node: Node, context: Context) -> Function:
    plan = attention_nodes.attention(node, context.shapes, context.constants, context.dtypes)
    precision, grouped = context.precision, plan.heads // plan.kv_heads
    for output in node.outputs[1 if plan.split_heads else 0 : 3]:
        context.layouts[output] = _HEADS_INSIDE
    counts = (plan.heads, plan.kv_heads, plan.kv_heads) if plan.split_heads else (1, 1, 1)
    sizes = {(context.shape(name)[-1] or 0) // n for name, n in zip(node.inputs[:3], counts, strict=True)}

    def heads(x: Any, count: int) -> Any:
        return x.reshape(*x.shape[:2], count, -1) if plan.split_heads else x

    def merged(y: Any) -> Any:
        return y.reshape(*y.shape[:2], -1) if plan.split_heads else y

    # JAX's own attention takes its softmax in float32 even of float64, and has no float16 on the CPU.
    if plan.plain and len(sizes) == 1 and context.dtypes[node.inputs[0]] in (np.float32, jnp.bfloat16):
        seen = None
        if plan.bias is not None and not plan.causal:
            seen = (plan.bias == 0).reshape((1,) * (4 - plan.bias.ndim) + plan.bias.shape)

        def native(q: Any, k: Any, v: Any, *_: Any) -> Any:
            with jax.default_matmul_precision("highest") if precision is not None else nullcontext():
                q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
                y = jax.nn.dot_product_attention(q, k, v, mask=seen, scale=plan.scale, is_causal=plan.causal)
                return merged(y)

        return native

    def general(q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None, *_: Any) -> Any:
        dot = partial(jnp.einsum, precision=precision, preferred_element_type=_wide(q))
        q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
        if past_k is not None and past_v is not None:
            k, v = jnp.concatenate((past_k, k), 1), jnp.concatenate((past_v, v), 1)
        present = k, v
        if grouped > 1:
            k, v = (jnp.repeat(t, grouped, 2) for t in present)
        scores = dot("bqnh,bknh->bnqk", q, k) * plan.scale
        shown = {attention_nodes.SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        shown[attention_nodes.CAPPED] = scores
        added = None if plan.bias is None else jnp.asarray(plan.bias, scores.dtype)
        if mask is not None:
            mask = jnp.where(mask, 0, -jnp.inf) if plan.mask == "bool" else mask.astype(scores.dtype)
            mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, plan.mask_padding)], constant_values=-jnp.inf)
            added = mask if added is None else added + mask
        scores = scores if added is None else scores + added
        shown[attention_nodes.BIASED] = scores
        weights = jax.nn.softmax(scores)
        if plan.may_be_blind and added is not None:
            weights = jnp.where(jnp.isneginf(added.max(-1, keepdims=True)), 0, weights)
        shown[attention_nodes.WEIGHTS] = weights
        y = merged(dot("bnqk,bknh->bqnh", weights.astype(v.dtype), v)).astype(q.dtype)
        return (y, *_typed(node, context, *present, shown.get(plan.shows))) if any(plan.wanted[1:]) else y

    return general


OPERATORS: dict[str, Factory] = {
    "Add": _elementwise(jnp.add),
    "Attention": _attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _elementwise(_divide),
    "Dropout": _dropout,
    "Elu": _elu,
    "Exp": _unary(jnp.exp),
    "Flatten": _flatten,
    "GRU": _recurrent,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool(jnp.mean),
    "GlobalMaxPool": _global_pool(jnp.max),
    "HardSwish": _unary(jax.nn.hard_swish),
    "Identity": _unary(_same),
    "LRN": _lrn,
    "LSTM": _recurrent,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis(jax.nn.log_softmax),
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _elementwise(jnp.multiply),
    "Pad": _pad,
    "ReduceMax": _reduce(jnp.max, _lowest),
    "ReduceMean": _reduce(jnp.mean),
    "ReduceSum": _reduce(jnp.sum),
    "Relu": _unary(jax.nn.relu),
    "Reshape": _reshape,
    "Sigmoid": _unary(jax.nn.sigmoid),
    "Softmax": _along_axis(jax.nn.softmax),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Sqrt": _unary(jnp.sqrt),
    "Squeeze": _squeeze,
    "Sub": _elementwise(jnp.subtract),
    "Sum": _elementwise(jnp.add),
    "Tanh": _unary(jnp.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""


_INDICES = {"Gather": (1,), "SoftmaxCrossEntropyLoss": (1,)}
"""Inputs that only index: they are int32, JAX's own type for it."""


class Operator(level.Operator):
    """One ONNX node on JAX.

    The backward pass is the node's `jax.vjp`, cut in two programs: the first returns what the second needs.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        node = operation.node
        self._device = runtime.native_device(device)
        # On the CPU float32 is always float32; on GPUs XLA's default is TF32.
        exact = device == "cuda" and operation.precision not in ("bf16", "fp16")
        context = Context(
            shapes=operation.shapes,
            constants=operation.constants,
            layouts={
                name: _input_layout(node, index, len(operation.shapes[name]))
                for index, name in enumerate(node.inputs)
                if name
            },
            training=operation.training,
            precision=lax.Precision.HIGHEST if exact else None,
            device=device,
            dtypes=operation.dtypes,
            non_negative=operation.non_negative,
        )
        self._random = node.op_type == "Dropout" and operation.training
        custom = operation.custom
        factory = OPERATORS[node.op_type] if custom is None else custom_operators.factory(custom)
        call = factory(node, context)
        self._call = _with_key(call) if self._random else call
        self._layouts, self._packing = context.layouts, context.packing
        special = {*_INDICES.get(node.op_type, ()), *STATIC_INPUTS.get(node.op_type, ())}
        self._double = any(
            operation.dtypes[name].itemsize == 8
            for index, name in enumerate(node.inputs)
            if name and index not in special
        )
        if custom is not None:  # its code writes outputs of just these types
            self._double |= any(operation.dtypes[name].itemsize == 8 for name in operation.outputs)
        self.forward = self._native(self._call)
        self._record = self._native(self._recorded)
        self._pull: Function | None = None

    def _scope(self) -> AbstractContextManager[None]:
        return runtime.double_precision() if self._double else nullcontext()

    def _native(self, function: Function) -> Function:
        """The function as this mode runs it, which may be called outside of `_scope`."""
        if self.mode == "eager":

            def scoped(*arguments: Any) -> Any:
                with self._scope():
                    return function(*arguments)

            return scoped if self._double else function
        jitted: Function = jax.jit(function)
        if not self._double:
            return jitted
        program: Function | None = None

        def compiled(*arguments: Any) -> Any:
            # The program by itself needs no scope, and entering one takes longer than this call.
            nonlocal program
            if program is None:
                with self._scope():
                    program = jitted.lower(*arguments).compile()  # type: ignore[attr-defined]
            return program(*arguments)

        return compiled

    def _recorded(self, *inputs: Any) -> Any:
        """The gradient as a function, which is a pytree of what it needs of the forward pass."""
        operation = self.operation

        def run(*sources: Any) -> Any:
            leaves = list(inputs)
            for index, source in zip(operation.differentiable, sources, strict=True):
                leaves[index] = source
            outputs = self._call(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return tuple(outputs[index] for index in operation.differentiated)

        _, pull = jax.vjp(run, *(inputs[index] for index in operation.differentiable))
        return pull

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        self.check_feed(arrays)
        node = self.operation.node
        fed: list[Any] = []
        for index, (name, array) in enumerate(zip(node.inputs, arrays, strict=True)):
            if array is None or index in STATIC_INPUTS.get(node.op_type, ()):
                fed.append(None)
                continue
            if index in _INDICES.get(node.op_type, ()):
                array = array.astype(np.int32)
            fed.append(self._stored(name, self._packing[name].pack(array) if name in self._packing else array))
        if self._random:
            fed.append(jax.device_put(jax.random.key_data(runtime.initial_key()), self._device))
        return jax.block_until_ready(fed)

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        operation = self.operation
        names = (operation.node.outputs[index] for index in operation.differentiated)
        return jax.block_until_ready([self._stored(name, array) for name, array in zip(names, arrays, strict=True)])

    def _stored(self, name: str, array: np.ndarray) -> jax.Array:
        """A copy on the device, in its storage layout."""
        layout = None if name in self._packing else self._layouts.get(name)
        stored = np.array(array.transpose(layout) if layout else array, order="C")
        with self._scope():
            return jax.device_put(stored, self._device)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Taken apart once and for all, as JAX is slow to take a function apart.
        residuals, structure = jax.tree_util.tree_flatten(self._record(*inputs))
        if self._pull is None or self.mode == "eager":
            self._pull = self._native(
                lambda leaves, *gradients: jax.tree_util.tree_unflatten(structure, leaves)(gradients)
            )
        jax.block_until_ready(residuals)
        return partial(self._pull, residuals)

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [
            self._neutral(name, value)
            for name, value in zip(self.operation.node.outputs, outputs, strict=False)
            if name
        ]

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        operation = self.operation
        names = (operation.node.inputs[index] for index in operation.differentiable)
        return [self._neutral(name, gradient) for name, gradient in zip(names, gradients, strict=True)]

    def _neutral(self, name: str, value: jax.Array) -> np.ndarray:
        array = np.asarray(value)
        if name in self._packing:
            array = self._packing[name].unpack(array)
        elif self._layouts.get(name):
            array = array.transpose(np.argsort(self._layouts[name]))
        return np.array(array, self.operation.dtypes[name], order="C")

    def extent(self, value: Any) -> tuple[int, int] | None:
        return (value.unsafe_buffer_pointer(), value.nbytes) if isinstance(value, jax.Array) else None

    def synchronize(self, *results: Any) -> None:
        jax.block_until_ready(results)  # JAX can wait for nothing else


def _with_key(call: Function) -> Function:
    """A function that takes its random key, as numbers, after its inputs."""
    return lambda *inputs: call(*inputs[:-1], key=jax.random.wrap_key_data(inputs[-1]))
