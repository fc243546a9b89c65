"""ONNX operators as native TensorFlow code, and Level 0 in TensorFlow.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable on native tensors. That gives the
node's first output or, if the node names others, a tuple of all with None for those without a name.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are kept in the layout that the
device's kernels want (usually N, H, W, C), and an operator says in which layout it leaves its output; data are moved
only where a kernel needs another order. Imports TensorFlow, NumPy, `d5suite.errors`, `d5suite.levels` and
`d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.backends.tensorflow import custom as custom_operators
from d5suite.errors import NetworkError
from d5suite.levels import attention as attention_nodes
from d5suite.levels import operator as level
from d5suite.levels.operator import NodeContext
from d5suite.levels.recurrent import Packing, Recurrent, recurrent
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.operation import Operation
from d5suite.network.windows import Window, transposed_window, window

Layout = tuple[int, ...]
"""The ONNX axes of a tensor in the order in which they are stored: (0, 2, 3, 1) is an image stored as N, H, W, C."""

IMAGES_LAST = {("cuda", "fp32"): False, ("cuda", "fp64"): False}
"""Whether images are stored N, H, W, C, by device and precision; True unless said otherwise.

TensorFlow's CPU kernels are faster with channels last (measured with oneDNN), and so are NVIDIA's Tensor Cores, which
bf16 and fp16 use. Without them cuDNN prefers channels first (NVIDIA, "Convolutional layers user's guide", tensor
layouts).
"""

Call = Callable[..., Any]
Factory = Callable[[Node, "Context"], Call]


def channels_last(rank: int) -> Layout:
    """The layout N, spatial axes, C."""
    return (0, *range(2, rank), 1)


def identity(rank: int) -> Layout:
    """ONNX's own layout."""
    return tuple(range(rank))


def kernel_layout(rank: int) -> Layout:
    """TensorFlow's layout of a convolution weight: spatial axes, inputs, outputs."""
    return (*range(2, rank), 1, 0)


def weight_layout(node: Node, index: int, rank: int) -> Layout:
    """The layout in which a weight is best stored that is input number ``index`` of this node."""
    if node.op_type in ("Conv", "ConvTranspose") and index == 1:
        return kernel_layout(rank)
    if node.op_type == "Gemm" and index == 1 and node.attributes["transB"]:
        return (1, 0)
    if node.op_type in ("GRU", "LSTM") and index in (1, 2):
        return (0, 2, 1)
    return identity(rank)


def native_device(device: str) -> str:
    """TensorFlow's name for a device."""
    return "/CPU:0" if device == "cpu" else "/GPU:0"


def compiled(function: Call, mode: str) -> Call:
    """The function as a mode runs it: plain, traced into a graph, or compiled by XLA."""
    if mode == "eager":
        return function
    return tf.function(function, autograph=False, jit_compile=True if mode == "xla" else None)


def is_asynchronous(device: str) -> bool:
    """Whether calls may return before their work is done, as TensorFlow's CPU operators and functions do not."""
    return device != "cpu" or not tf.config.experimental.get_synchronous_execution()


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
    gradients : bool
        Whether gradients will be asked for.
    native_gradients : bool
        Whether the gradient kernels of grouped and dilated convolutions exist (they do with XLA and with cuDNN, not in
        TensorFlow's CPU kernels).
    xla : bool
        Whether the code will be compiled by XLA, which has no pooling with explicit padding.
    images_last : bool
        Whether images are stored with their channels last.
    device : str
        The kind of device that custom operators are built for.
    dtypes : mapping
        ONNX type of every tensor; only at level 0.
    non_negative : set
        Inputs whose values are known to be 0 or more; only at level 0.
    packing : dict
        Weights that a factory wants in a form of its own; only at level 0.
    generator : tf.random.Generator, optional
        What Dropout draws from; without it, as at level 0, from state of TensorFlow's own that cannot be read.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    layouts: dict[str, Layout] = field(default_factory=dict)
    training: bool = False
    gradients: bool = False
    native_gradients: bool = False
    xla: bool = False
    images_last: bool = True
    device: str = "cpu"
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    non_negative: frozenset[str] = frozenset()
    packing: dict[str, Packing] = field(default_factory=dict)
    generator: Any = None

    def layout(self, name: str) -> Layout:
        """Storage layout of a tensor."""
        return self.layouts.get(name) or identity(self.rank(name))

    def image_layout(self, rank: int) -> Layout:
        """The layout that convolution and pooling work in."""
        return channels_last(rank) if self.images_last else identity(rank)

    def convert(self, name: str, wanted: Layout) -> Call:
        """A function that brings a tensor into a layout, with leading axes of size 1 if that has more axes."""
        shape, layout = self.shape(name), self.layout(name)
        added = len(wanted) - len(shape)
        if layout == wanted or not shape:
            return _same
        shape = (1,) * added + shape
        layout = (*range(added), *(axis + added for axis in layout))
        if [a for a in layout if shape[a] != 1] == [a for a in wanted if shape[a] != 1]:
            sizes = [shape[axis] for axis in wanted]
            if sizes.count(None) <= 1:
                sizes = [-1 if size is None else size for size in sizes]
                return lambda x: tf.reshape(x, sizes)
        order = [layout.index(axis) for axis in wanted]
        if not added:
            return lambda x: tf.transpose(x, order)
        return lambda x: tf.transpose(x[(tf.newaxis,) * added], order)


def _same(x: Any, *_: Any) -> Any:
    return x


def _wanted(node: Node, results: Sequence[Any]) -> Any:
    """The first result if nothing else is wanted, else a tuple with None for what is not."""
    if not any(node.outputs[1:]):
        return results[0]
    return tuple(result if name else None for name, result in zip(node.outputs, results, strict=False))


def _wide(x: Any) -> Any:
    """Activations as float32 where they are shorter; float64 stays."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.bfloat16, tf.float16) else x


# Element-wise


def _unary(function: Call) -> Factory:
    def build(node: Node, context: Context) -> Call:
        context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
        return function

    return build


def _aligned(node: Node, context: Context) -> list[Call]:
    """For each input, what brings it to one layout under which ONNX's broadcasting holds."""
    rank = max(context.rank(name) for name in node.inputs)
    full = [context.layout(name) for name in node.inputs if context.rank(name) == rank]
    layout = next((x for x in full if x != identity(rank)), identity(rank))
    context.layouts[node.outputs[0]] = layout
    plain = layout == identity(rank)
    return [context.convert(name, identity(context.rank(name)) if plain else layout) for name in node.inputs]


def _binary(function: Call) -> Factory:
    def build(node: Node, context: Context) -> Call:
        first, second = _aligned(node, context)
        if first is _same and second is _same:
            return function
        return lambda x, y: function(first(x), second(y))

    return build


def _sum(node: Node, context: Context) -> Call:
    converters = _aligned(node, context)
    if len({context.shape(name) for name in node.inputs}) == 1:
        return lambda *xs: tf.add_n([convert(x) for convert, x in zip(converters, xs, strict=True)])
    return lambda *xs: reduce(tf.add, [convert(x) for convert, x in zip(converters, xs, strict=True)])


def _div(node: Node, context: Context) -> Call:
    integers = context.dtypes and context.dtypes[node.inputs[0]].kind in "iu"
    return _binary(tf.truncatediv if integers else tf.divide)(node, context)


def _leaky_relu(node: Node, context: Context) -> Call:
    alpha = node.attributes["alpha"]
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    return lambda x: tf.nn.leaky_relu(x, alpha)


def _elu(node: Node, context: Context) -> Call:
    alpha = node.attributes["alpha"]
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    if alpha == 1:
        return tf.nn.elu

    def elu(x: Any) -> Any:
        y = tf.nn.elu(x)
        return tf.where(x > 0, y, alpha * y)

    return elu


def _gelu(node: Node, context: Context) -> Call:
    """As `tf.nn.gelu`, whose constants have the precision of float32 even in float64."""
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    if node.attributes["approximate"] == "tanh":
        return lambda x: 0.5 * x * (1 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return lambda x: 0.5 * x * tf.math.erfc(x * -math.sqrt(0.5))


def _hard_swish(x: Any) -> Any:
    return x * tf.nn.relu6(x + 3) * (1 / 6)


def _clip(node: Node, context: Context) -> Call:
    low, high = context.constant(node, 1), context.constant(node, 2)
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])

    def clip(x: Any, *_: Any) -> Any:
        if low is not None:
            x = tf.maximum(x, tf.cast(float(low), x.dtype))
        if high is not None:
            x = tf.minimum(x, tf.cast(float(high), x.dtype))
        return x

    return clip


def _dropout(node: Node, context: Context) -> Call:
    given = context.constant(node, 1)
    ratio = 0.5 if given is None else float(given)
    context.layouts.update({name: context.layout(node.inputs[0]) for name in node.outputs})
    masked = any(node.outputs[1:])
    if not context.training or ratio == 0:
        return (lambda x, *_: (x, tf.ones_like(x, tf.bool))) if masked else _same
    if context.generator is not None:
        generator = context.generator
        return lambda x, *_: tf.nn.experimental.stateless_dropout(x, ratio, seed=generator.make_seeds(1)[:, 0])
    if not masked:
        return lambda x, *_: tf.nn.dropout(x, ratio)

    def dropout(x: Any, *_: Any) -> Any:
        kept = tf.random.uniform(x.shape) >= ratio
        return tf.where(kept, x / (1 - ratio), 0), kept

    return dropout


def _along_axis(function: Call) -> Factory:
    def build(node: Node, context: Context) -> Call:
        layout = context.layout(node.inputs[0])
        axis = layout.index(node.attributes["axis"] % len(layout))
        context.layouts[node.outputs[0]] = layout
        return lambda x: function(x, axis=axis)

    return build


def _reduce(function: Call) -> Factory:
    """A factory for a reduction over the axes that the second input, or without it all, names."""

    def build(node: Node, context: Context) -> Call:
        layout, keep = context.layout(node.inputs[0]), bool(node.attributes["keepdims"])
        axes = _axes(node, context, len(layout))
        if not axes and node.attributes["noop_with_empty_axes"]:
            context.layouts[node.outputs[0]] = layout
            return _same
        axes = axes or list(range(len(layout)))
        context.layouts[node.outputs[0]] = layout if keep else _without(layout, axes)
        positions = [layout.index(axis) for axis in axes]
        return lambda x, *_: function(x, positions, keepdims=keep)

    return build


def _reduce_max(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return (tf.reduce_any if x.dtype == tf.bool else tf.reduce_max)(x, axes, keepdims=keepdims)


def _without(layout: Layout, axes: Sequence[int]) -> Layout:
    """The layout when these axes are gone."""
    return tuple(axis - sum(gone < axis for gone in axes) for axis in layout if axis not in axes)


# Shape


def _gather(node: Node, context: Context) -> Call:
    name, indices = node.inputs
    rank = context.rank(name)
    axis = node.attributes["axis"] % rank
    size = context.shape(name)[axis]
    to_onnx = context.convert(name, identity(rank))
    if indices in context.non_negative:
        return lambda x, i: tf.gather(to_onnx(x), i, axis=axis)
    return lambda x, i: tf.gather(to_onnx(x), tf.where(i < 0, i + size, i), axis=axis)


def _concat(node: Node, context: Context) -> Call:
    converters = _aligned(node, context)
    layout = context.layout(node.outputs[0])
    axis = layout.index(node.attributes["axis"] % len(layout))
    return lambda *xs: tf.concat([convert(x) for convert, x in zip(converters, xs, strict=True)], axis)


def _flatten(node: Node, context: Context) -> Call:
    name = node.inputs[0]
    rank = context.rank(name)
    axis = node.attributes["axis"]
    axis += rank if axis < 0 else 0
    convert = context.convert(name, identity(rank))

    def flatten(x: Any) -> Any:
        x = convert(x)
        columns = math.prod(x.shape[axis:])
        return tf.reshape(x, [-1, columns] if columns else [math.prod(x.shape[:axis]), columns])

    return flatten


def _reshape(node: Node, context: Context) -> Call:
    name = node.inputs[0]
    wanted = context.constant(node, 1)
    assert wanted is not None
    sizes = [int(size) for size in wanted]
    shape = context.shape(name)
    # A copied batch size is known when the code is traced, as the input's static shape.
    zero_copies = not node.attributes["allowzero"]
    copied = [axis for axis, size in enumerate(sizes) if size == 0 and zero_copies]
    split = _channel_split(shape, sizes, copied)
    layout = context.layout(name)
    if split and layout == channels_last(len(shape)):
        # Dividing the channels into groups leaves the stored order as it is.
        context.layouts[node.outputs[0]] = (0, *range(3, len(sizes)), 1, 2)
        stored = [sizes[axis] for axis in context.layouts[node.outputs[0]]]
        return lambda x, *_: tf.reshape(x, [x.shape[0], *x.shape[1:-1], *stored[-2:]])
    merged = _channel_split(sizes, shape, [])
    if merged and layout != identity(len(shape)):
        grouped = (0, *range(3, len(shape)), 1, 2)
        convert = context.convert(name, grouped)
        context.layouts[node.outputs[0]] = channels_last(len(sizes))

        def merge(x: Any, *_: Any) -> Any:
            x = convert(x)
            return tf.reshape(x, [*x.shape[:-2], sizes[1]])

        return merge
    to_onnx = context.convert(name, identity(len(shape)))

    def reshape(x: Any, *_: Any) -> Any:
        x = to_onnx(x)
        return tf.reshape(x, [x.shape[axis] if axis in copied else size for axis, size in enumerate(sizes)])

    return reshape


def _channel_split(shape: Sequence[int | None], sizes: Sequence[int | None], copied: Sequence[int]) -> bool:
    """Whether (N, C, spatial...) becomes (N, a, b, spatial...) with a b = C and at least two spatial axes."""
    if len(shape) < 4 or len(sizes) != len(shape) + 1:
        return False
    if not (0 in copied or sizes[0] == shape[0]):
        return False
    first, second = sizes[1:3]
    if first is None or second is None or min(first, second) < 1 or first * second != shape[1]:
        return False
    return None not in shape[2:] and list(sizes[3:]) == list(shape[2:])


def _transpose(node: Node, context: Context) -> Call:
    layout = context.layout(node.inputs[0])
    order = list(node.attributes.get("perm") or reversed(range(len(layout))))
    if layout != identity(len(layout)):
        # An image that is not stored in ONNX's order: the axes get new names, and the next operator moves what it must.
        context.layouts[node.outputs[0]] = tuple(order.index(axis) for axis in layout)
        return _same
    return lambda x: tf.transpose(x, order)


def _axes(node: Node, context: Context, rank: int) -> list[int] | None:
    axes = context.constant(node, 1)
    return None if axes is None else sorted(int(axis) % rank for axis in axes)


def _squeeze(node: Node, context: Context) -> Call:
    name = node.inputs[0]
    shape, layout = context.shape(name), context.layout(name)
    axes = _axes(node, context, len(shape))
    if axes is None:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    context.layouts[node.outputs[0]] = _without(layout, axes)
    positions = [layout.index(axis) for axis in axes]
    return (lambda x, *_: tf.squeeze(x, positions)) if positions else _same


def _unsqueeze(node: Node, context: Context) -> Call:
    name = node.inputs[0]
    rank = context.rank(name)
    added = context.constant(node, 1)
    assert added is not None
    axes = _axes(node, context, rank + len(added)) or []
    convert = context.convert(name, identity(rank))
    index = tuple(tf.newaxis if axis in axes else slice(None) for axis in range(rank + len(axes)))
    return lambda x, *_: convert(x)[index]


def _pad(node: Node, context: Context) -> Call:
    mode = node.attributes["mode"]
    layout = context.layout(node.inputs[0])
    rank = len(layout)
    given, axes, value = context.constant(node, 1), context.constant(node, 3), context.constant(node, 2)
    assert given is not None
    padded = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    pads = [[0, 0] for _ in range(rank)]
    for axis, before, after in zip(padded, given[: len(padded)], given[len(padded) :], strict=True):
        pads[axis] = [int(before), int(after)]
    if min(min(pair) for pair in pads) < 0:
        raise NetworkError("negative padding is not implemented", where=node.name)
    context.layouts[node.outputs[0]] = layout
    stored = [pads[axis] for axis in layout]
    if mode != "constant":
        return _pad_by_index(stored, [context.shape(node.inputs[0])[axis] for axis in layout], mode)
    fill = 0.0 if value is None else value.item()
    return lambda x, *_: tf.pad(x, stored, constant_values=tf.cast(fill, x.dtype))


def _pad_by_index(pads: Sequence[Sequence[int]], sizes: Sequence[int | None], mode: str) -> Call:
    """Padding that repeats the tensor itself; TensorFlow's kernel knows reflection only."""
    if mode == "reflect" and all(size is not None and max(pair) < size for pair, size in zip(pads, sizes, strict=True)):
        return lambda x, *_: tf.pad(x, pads, "REFLECT")
    moved = [axis for axis, pair in enumerate(pads) if any(pair)]

    def pad(x: Any, *_: Any) -> Any:
        for axis in moved:
            rows = np.pad(np.arange(x.shape[axis]), pads[axis], mode)  # type: ignore[call-overload]
            x = tf.gather(x, rows, axis=axis)
        return x

    return pad


# Matrices


def _add_bias(y: Any, bias: Any, context: Context, data_format: str | None = None) -> Any:
    # On the CPU its gradient (2.21) adds bfloat16 up in bfloat16, unless oneDNN merges that with a convolution's.
    if y.dtype == tf.bfloat16 and context.gradients and context.dtypes:
        return y + bias
    return tf.nn.bias_add(y, bias, data_format)


def _gemm(node: Node, context: Context) -> Call:
    a, b = node.inputs[:2]
    alpha, beta = node.attributes["alpha"], node.attributes["beta"]
    transpose_a = bool(node.attributes["transA"]) != (context.layout(a) == (1, 0))
    transpose_b = bool(node.attributes["transB"]) != (context.layout(b) == (1, 0))
    has_bias = len(node.inputs) > 2 and bool(node.inputs[2]) and beta != 0
    features = context.shape(node.outputs[0])[1]
    # TensorFlow's graph optimizer (2.21) fuses an added (1, features) into the product as a bias, and then refuses it.
    row = has_bias and alpha == 1 == beta and context.shape(node.inputs[2]) == (1, features)
    vector = has_bias and alpha == 1 == beta and context.shape(node.inputs[2]) == (features,)

    def gemm(x: Any, y: Any, bias: Any = None) -> Any:
        product = tf.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b)
        if vector:
            return _add_bias(product, bias, context)
        if row:
            return _add_bias(product, tf.reshape(bias, [-1]), context)
        if alpha != 1:
            product = product * tf.cast(alpha, product.dtype)
        if has_bias:
            product = product + (bias if beta == 1 else bias * tf.cast(beta, product.dtype))
        return product

    return gemm


def _matmul(node: Node, context: Context) -> Call:
    ranks = [context.rank(name) for name in node.inputs]
    first, second = (context.convert(name, identity(rank)) for name, rank in zip(node.inputs, ranks, strict=True))
    if min(ranks) > 1:
        return lambda x, y: tf.matmul(first(x), second(y))

    def matmul(x: Any, y: Any) -> Any:
        x, y = first(x), second(y)
        product = tf.matmul(x[tf.newaxis] if ranks[0] == 1 else x, y[:, tf.newaxis] if ranks[1] == 1 else y)
        if ranks[1] == 1:
            product = tf.squeeze(product, -1)
        return tf.squeeze(product, -1 if ranks[1] == 1 else -2) if ranks[0] == 1 else product

    return matmul


# Convolution and pooling


@dataclass(frozen=True)
class _Images:
    """How TensorFlow's windowed kernels take an image of this rank; one-dimensional images get a second axis."""

    rank: int
    last: bool

    @property
    def dimensions(self) -> int:
        """Spatial dimensions that the kernel sees."""
        return max(self.rank - 2, 2)

    @property
    def data_format(self) -> str:
        space = "DHW"[-self.dimensions :]
        return f"N{space}C" if self.last else f"NC{space}"

    @property
    def channel_axis(self) -> int:
        return -1 if self.last else 1

    def spatial(self, values: Sequence[Any], rest: Any) -> list[Any]:
        """Values for the spatial axes, ``rest`` for batch and channels, in the kernel's order."""
        return [rest, *values, rest] if self.last else [rest, rest, *values]

    def enter(self, x: Any) -> Any:
        return x if self.rank > 3 else tf.expand_dims(x, 1 if self.last else 2)

    def leave(self, x: Any) -> Any:
        return x if self.rank > 3 else tf.squeeze(x, 1 if self.last else 2)


@dataclass(frozen=True)
class _Sliding:
    """A window in the form in which the kernels take it."""

    images: _Images
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, images: _Images, w: Window, *, overhang: bool) -> _Sliding:
        pads = [
            (before, after + (beyond if overhang else 0))
            for before, after, beyond in zip(w.pads_begin, w.pads_end, w.overhang, strict=True)
        ]
        kernel, strides, dilations = w.kernel, w.strides, w.dilations
        if len(kernel) == 1:
            kernel, strides, dilations, pads = (1, *kernel), (1, *strides), (1, *dilations), [(0, 0), *pads]
        return cls(images, kernel, strides, dilations, tuple(pads))

    @property
    def padded(self) -> bool:
        return any(map(any, self.pads))

    @property
    def keeps_size(self) -> bool:
        """Whether at stride 1 the output is as large as the image, with the odd pixel of padding behind."""
        totals = [(width - 1) * dilation for width, dilation in zip(self.kernel, self.dilations, strict=True)]
        return self.pads == tuple((total // 2, total - total // 2) for total in totals)

    def pad(self, x: Any, value: float) -> Any:
        if not self.padded:
            return x
        return tf.pad(x, self.images.spatial(self.pads, (0, 0)), constant_values=tf.cast(value, x.dtype))

    def undilated(self, x: Any, kernel: Call) -> Any:
        """Run ``kernel(x, strides)`` on each phase of a dilated window, without padding."""
        if max(self.dilations) == 1:
            return kernel(x, self.strides)
        if not self.images.last:
            x = tf.transpose(x, channels_last(self.images.dimensions + 2))
        sizes = x.shape[1:-1]
        fill = [[0, -size % dilation] for size, dilation in zip(sizes, self.dilations, strict=True)]
        x = tf.space_to_batch(x, self.dilations, fill)
        if not self.images.last:
            x = kernel(tf.transpose(x, (0, len(sizes) + 1, *range(1, len(sizes) + 1))), (1,) * len(sizes))
            x = tf.transpose(x, channels_last(self.images.dimensions + 2))
        else:
            x = kernel(x, (1,) * len(sizes))
        outputs = [
            size - (width - 1) * dilation
            for size, width, dilation in zip(sizes, self.kernel, self.dilations, strict=True)
        ]
        crops = [
            [0, count * dilation - size]
            for count, dilation, size in zip(x.shape[1:-1], self.dilations, outputs, strict=True)
        ]
        x = tf.batch_to_space(x, self.dilations, crops)
        if max(self.strides) > 1:
            x = x[(slice(None), *(slice(None, None, stride) for stride in self.strides))]
        return x if self.images.last else tf.transpose(x, (0, len(sizes) + 1, *range(1, len(sizes) + 1)))


def _conv(node: Node, context: Context) -> Call:
    image, weight = node.inputs[:2]
    rank = context.rank(image)
    if not 3 <= rank <= 5:
        raise NetworkError(f"a convolution of rank {rank} is not implemented", where=node.name)
    images = _Images(rank, context.images_last)
    layout = context.image_layout(rank)
    s = _Sliding.of(images, window(node, context.shape(image)[2:], context.shape(weight)[2:]), overhang=False)
    to_image, to_kernel = context.convert(image, layout), context.convert(weight, kernel_layout(rank))
    context.layouts[node.outputs[0]] = layout
    groups = node.attributes["group"]
    channels, outputs = context.shape(image)[1], context.shape(weight)[0]
    assert outputs is not None
    depthwise = rank < 5 and 1 < groups == channels
    native = context.native_gradients or not context.gradients
    dilate_natively = native and images.dimensions == 2 and not depthwise
    group_natively = native and images.dimensions == 2
    dilations = images.spatial(s.dilations, 1) if dilate_natively else None

    def convolve(x: Any, w: Any, strides: Sequence[int], padding: Any) -> Any:
        if images.dimensions == 3:
            return tf.nn.conv3d(x, w, images.spatial(strides, 1), padding, images.data_format)
        return tf.nn.conv2d(x, w, images.spatial(strides, 1), padding, images.data_format, dilations)

    def separate(x: Any, w: Any, strides: Sequence[int], padding: Any) -> Any:
        w = tf.reshape(w, [*w.shape[:2], groups, outputs // groups])
        if len(set(strides)) > 1:  # the kernel knows one stride only
            x = tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], padding, images.data_format)
            return x[tuple(slice(None, None, stride) for stride in images.spatial(strides, 1))]
        return tf.nn.depthwise_conv2d(x, w, images.spatial(strides, 1), padding, images.data_format)

    def split(x: Any, w: Any, strides: Sequence[int], padding: Any) -> Any:
        parts = zip(tf.split(x, groups, images.channel_axis), tf.split(w, groups, -1), strict=True)
        return tf.concat([convolve(a, b, strides, padding) for a, b in parts], images.channel_axis)

    run = separate if depthwise else convolve if groups == 1 or group_natively else split
    plain = images.dimensions == 2 and (dilate_natively or max(s.dilations) == 1)
    # Gradients of explicitly padded convolutions are slow on the CPU: with them ResNet-50's step takes twice as long.
    same = plain and s.padded and max(s.strides) == 1 and s.keeps_size
    # TensorFlow's graph optimizer (2.21) fuses a bias into an explicitly padded depthwise convolution, and then aborts.
    biased = len(node.inputs) > 2 and bool(node.inputs[2])
    pads_natively = same or (plain and native and not (depthwise and biased))
    padding = "SAME" if same else images.spatial(s.pads, (0, 0)) if s.padded and pads_natively else "VALID"

    def conv(x: Any, w: Any, bias: Any = None) -> Any:
        x, w = images.enter(to_image(x)), to_kernel(w)
        if rank == 3:
            w = tf.expand_dims(w, 0)
        if not pads_natively:
            x = s.pad(x, 0.0)
        if dilate_natively:
            y = run(x, w, s.strides, padding)
        else:
            y = s.undilated(x, lambda part, strides: run(part, w, strides, padding))
        if bias is not None:
            y = _add_bias(y, bias, context, None if images.last else "NC..")
        return images.leave(y)

    return conv


def _conv_transpose(node: Node, context: Context) -> Call:
    image, weight = node.inputs[:2]
    rank = context.rank(image)
    if not 3 <= rank <= 5:
        raise NetworkError(f"a transposed convolution of rank {rank} is not implemented", where=node.name)
    images = _Images(rank, context.images_last)
    layout = context.image_layout(rank)
    w = transposed_window(node, context.shape(image)[2:], context.shape(weight)[2:])
    to_image, to_kernel = context.convert(image, layout), context.convert(weight, kernel_layout(rank))
    context.layouts[node.outputs[0]] = layout
    groups = node.attributes["group"]
    group_natively = groups == 1 or (context.native_gradients and images.dimensions == 2)
    dilate_natively = max(w.dilations) == 1 or (context.native_gradients and images.dimensions == 2)
    plane = [1] * (images.dimensions - len(w.kernel))
    strides = images.spatial([*plane, *w.strides], 1)
    dilations = images.spatial([*plane, *w.dilations], 1) if dilate_natively else None
    spans = [(k - 1) * d + 1 for k, d in zip(w.kernel, w.dilations, strict=True)]
    sizes = [n for n in context.shape(image)[2:] if n is not None]
    # The kernel's "SAME" cuts what a convolution of the result would have been padded by.
    totals = [max((n - 1) * s + k - y, 0) for n, s, k, y in zip(sizes, w.strides, spans, w.outputs, strict=True)]
    same = tuple(t // 2 for t in totals) == w.pads_begin and all(
        -(-y // s) == n for y, s, n in zip(w.outputs, w.strides, sizes, strict=True)
    )
    # Otherwise the whole result is cut. Rows behind it are the kernel's if a stride leaves them out, else padding.
    within = [min(e, s - 1) for e, s in zip(w.output_padding, w.strides, strict=True)]
    whole = [(n - 1) * s + k + e for n, s, k, e in zip(sizes, w.strides, spans, within, strict=True)]
    ends = [min(begin + y, n) for begin, y, n in zip(w.pads_begin, w.outputs, whole, strict=True)]
    missing = [begin + y - end for begin, y, end in zip(w.pads_begin, w.outputs, ends, strict=True)]
    cut = images.spatial(
        [slice(None)] * len(plane) + [slice(begin, end) for begin, end in zip(w.pads_begin, ends, strict=True)],
        slice(None),
    )
    behind = images.spatial([(0, 0)] * len(plane) + [(0, more) for more in missing], (0, 0))
    is_cut = any(w.pads_begin) or ends != whole
    results = [*plane, *(w.outputs if same else whole)]
    padding = "SAME" if same else "VALID"

    def convolve(x: Any, kernel: Any) -> Any:
        shape = images.spatial(results, 0)
        shape[0], shape[images.channel_axis] = x.shape[0], kernel.shape[-2]
        if images.dimensions == 3:
            return tf.nn.conv3d_transpose(x, kernel, shape, strides, padding, images.data_format)
        if groups == 1 or not group_natively:
            return tf.nn.conv2d_transpose(x, kernel, shape, strides, padding, images.data_format, dilations)
        shape[images.channel_axis] *= groups
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=shape, filter=kernel, out_backprop=x, strides=strides, padding=padding,
            data_format=images.data_format, dilations=dilations or [1, 1, 1, 1],
        )  # fmt: skip

    def conv_transpose(x: Any, kernel: Any, bias: Any = None) -> Any:
        x, kernel = images.enter(to_image(x)), to_kernel(kernel)
        if not dilate_natively:
            kernel = _spread(kernel, w.dilations)
        if rank == 3:
            kernel = tf.expand_dims(kernel, 0)
        if group_natively:
            y = convolve(x, kernel)
        else:
            parts = zip(tf.split(x, groups, images.channel_axis), tf.split(kernel, groups, -1), strict=True)
            y = tf.concat([convolve(a, b) for a, b in parts], images.channel_axis)
        if not same and is_cut:
            y = y[tuple(cut)]
        if not same and any(missing):
            y = tf.pad(y, behind)
        if bias is not None:
            y = _add_bias(y, bias, context, None if images.last else "NC..")
        return images.leave(y)

    return conv_transpose


def _spread(kernel: Any, dilations: Sequence[int]) -> Any:
    """A convolution weight with the zeros of its dilation between its rows and columns."""
    for axis, dilation in enumerate(dilations):
        size = kernel.shape[axis]
        pads = [(0, 0)] * (len(kernel.shape) + 1)
        pads[axis + 1] = (0, dilation - 1)
        spread = tf.pad(tf.expand_dims(kernel, axis + 1), pads)
        shape = [*kernel.shape[:axis], size * dilation, *kernel.shape[axis + 1 :]]
        rows = (*[slice(None)] * axis, slice((size - 1) * dilation + 1))
        kernel = tf.reshape(spread, shape)[rows]
    return kernel


def _max_pool(node: Node, context: Context) -> Call:
    if any(node.outputs[1:]):
        return _max_pool_with_indices(node, context)
    image = node.inputs[0]
    rank = context.rank(image)
    images = _Images(rank, context.images_last)
    layout = context.image_layout(rank)
    s = _Sliding.of(images, window(node, context.shape(image)[2:]), overhang=True)
    to_image = context.convert(image, layout)
    context.layouts[node.outputs[0]] = layout
    # The kernel's own explicit padding wants every window to hold at least one pixel, as ONNX does.
    pads_natively = s.padded and images.dimensions == 2 and not context.xla and max(s.dilations) == 1
    padding = images.spatial(s.pads, (0, 0)) if pads_natively else "VALID"

    def pool(x: Any, strides: Sequence[int]) -> Any:
        if images.dimensions == 3 and x.dtype == tf.float64:
            return _pool_3d_float64(tf.nn.max_pool2d, x, s.kernel, strides, last=images.last)
        kernel = tf.nn.max_pool3d if images.dimensions == 3 else tf.nn.max_pool2d
        return kernel(x, images.spatial(s.kernel, 1), images.spatial(strides, 1), padding, images.data_format)

    def max_pool(x: Any) -> Any:
        x = images.enter(to_image(x))
        if not pads_natively:
            x = s.pad(x, -math.inf if x.dtype.is_floating else x.dtype.min)
        return images.leave(s.undilated(x, pool))

    return max_pool


def _max_pool_with_indices(node: Node, context: Context) -> Call:
    """Pooling with indices, which ONNX counts through the whole tensor and TensorFlow through each padded image."""
    image = node.inputs[0]
    rank = context.rank(image)
    images = _Images(rank, last=True)
    s = _Sliding.of(images, window(node, context.shape(image)[2:]), overhang=True)
    if images.dimensions != 2 or max(s.dilations) > 1 or context.xla:
        raise NetworkError(
            "MaxPool with indices is implemented for one or two axes, without dilation and without XLA", where=node.name
        )
    layout = channels_last(rank)
    to_image = context.convert(image, layout)
    context.layouts.update(dict.fromkeys(node.outputs, layout))
    column_major = bool(node.attributes["storage_order"])

    def max_pool(x: Any) -> Any:
        x = images.enter(to_image(x))
        batch, height, width, channels = x.shape
        x = s.pad(x, -math.inf)
        y, places = tf.nn.max_pool_with_argmax(
            x, images.spatial(s.kernel, 1), images.spatial(s.strides, 1), "VALID", output_dtype=tf.int64
        )
        channel, pixel = places % channels, places // channels
        row, column = pixel // x.shape[2] - s.pads[0][0], pixel % x.shape[2] - s.pads[1][0]
        within = column * height + row if column_major else row * width + column
        plane = tf.reshape(tf.range(batch, dtype=tf.int64), [-1, 1, 1, 1]) * channels + channel
        return images.leave(y), images.leave(plane * (height * width) + within)

    return max_pool


def _pool_3d_float64(pool: Call, x: Any, kernel: Sequence[int], strides: Sequence[int], *, last: bool) -> Any:
    """Pool over planes and then over depth, because TensorFlow's own kernels are for float32 and shorter."""
    images = _Images(4, last)

    def pool_2d(x: Any, kernel: Sequence[int], strides: Sequence[int]) -> Any:
        return pool(x, images.spatial(kernel, 1), images.spatial(strides, 1), "VALID", images.data_format)

    batch, depth = x.shape[0], x.shape[1 if last else 2]
    channels = x.shape[-1 if last else 1]
    height, width = x.shape[2:4] if last else x.shape[3:5]
    x = tf.reshape(x, [batch * depth, height, width, channels] if last else [batch, channels * depth, height, width])
    x = pool_2d(x, kernel[1:], strides[1:])
    height, width = x.shape[1:3] if last else x.shape[2:4]
    x = tf.reshape(x, [batch, depth, height * width, channels] if last else [batch, channels, depth, height * width])
    x = pool_2d(x, (kernel[0], 1), (strides[0], 1))
    return tf.reshape(x, [batch, -1, height, width, channels] if last else [batch, channels, -1, height, width])


def _average_pool(node: Node, context: Context) -> Call:
    image = node.inputs[0]
    rank = context.rank(image)
    images = _Images(rank, context.images_last)
    layout = context.image_layout(rank)
    w = window(node, context.shape(image)[2:])
    s = _Sliding.of(images, w, overhang=True)
    to_image = context.convert(image, layout)
    context.layouts[node.outputs[0]] = layout
    sizes = [size for size in context.shape(image)[2:] if size is not None]
    include = bool(node.attributes["count_include_pad"])
    # 3-D pooling in float64 is done in parts, and only without padding.
    same = not include and s.padded and rank < 5 and max(s.dilations) == 1 and _is_same_padding(w, sizes)
    scale = None if same else _divisor_correction(w, sizes, include=include)
    if scale is not None:
        scale = scale.reshape(images.spatial((1,) * (images.dimensions - scale.ndim) + scale.shape, 1))
    padding = "SAME" if same else "VALID"

    def pool(x: Any, strides: Sequence[int]) -> Any:
        if images.dimensions == 3 and x.dtype == tf.float64:
            return _pool_3d_float64(tf.nn.avg_pool2d, x, s.kernel, strides, last=images.last)
        kernel = tf.nn.avg_pool3d if images.dimensions == 3 else tf.nn.avg_pool2d
        return kernel(x, images.spatial(s.kernel, 1), images.spatial(strides, 1), padding, images.data_format)

    def average_pool(x: Any) -> Any:
        x = images.enter(to_image(x))
        if not same:
            x = s.pad(x, 0.0)
        y = s.undilated(x, pool)
        if scale is not None:
            y = y * tf.cast(scale, y.dtype)
        return images.leave(y)

    return average_pool


def _is_same_padding(w: Window, sizes: Sequence[int]) -> bool:
    """Whether the window is TensorFlow's own ``SAME``, whose average leaves padding out of the count."""
    for size, kernel, stride, before, after, beyond in zip(
        sizes, w.kernel, w.strides, w.pads_begin, w.pads_end, w.overhang, strict=True
    ):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        if (before, after + beyond) != (total // 2, total - total // 2):
            return False
    return True


def _divisor_correction(w: Window, sizes: Sequence[int], *, include: bool) -> np.ndarray | None:
    """Window size ÷ number of pixels that count, for every output position; None where it is 1 everywhere."""
    counts = []
    for axis, size in enumerate(sizes):
        starts = np.arange(w.outputs[axis]) * w.strides[axis] - w.pads_begin[axis]
        at = starts[:, None] + np.arange(w.kernel[axis]) * w.dilations[axis]
        low, high = (-w.pads_begin[axis], size + w.pads_end[axis]) if include else (0, size)
        counts.append(((at >= low) & (at < high)).sum(1))
    correction: np.ndarray = math.prod(w.kernel) / reduce(np.multiply.outer, counts)
    return None if np.all(correction == 1) else correction


def _global_pool(function: Call) -> Factory:
    def build(node: Node, context: Context) -> Call:
        layout = context.layout(node.inputs[0])
        axes = [position for position, axis in enumerate(layout) if axis > 1]
        context.layouts[node.outputs[0]] = layout
        return lambda x: function(x, axes, keepdims=True)

    return build


# Normalisation and loss


def _batch_normalization(node: Node, context: Context) -> Call:
    image = node.inputs[0]
    rank = context.rank(image)
    layout = context.layout(image)
    if rank == 4:
        layout = context.image_layout(rank)
    moving = any(node.outputs[1:])
    to_image = context.convert(image, layout)
    context.layouts[node.outputs[0]] = layout
    channel_axis = layout.index(1)
    axes = [position for position in range(rank) if position != channel_axis]
    along_channel = [-1 if position == channel_axis else 1 for position in range(rank)]
    epsilon, momentum = node.attributes["epsilon"], node.attributes["momentum"]
    data_format = "NHWC" if context.images_last else "NCHW"
    training = context.training

    def fused(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        scale, offset, mean, variance = (_wide(vector) for vector in (scale, offset, mean, variance))
        if training and not moving:
            return tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=[], variance=[],
                epsilon=epsilon, data_format=data_format, is_training=True,
            )[:1]  # fmt: skip
        if not training:
            return tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=mean, variance=variance,
                epsilon=epsilon, data_format=data_format, is_training=False,
            )[:1]  # fmt: skip
        # The kernel updates the running variance with n / (n - 1) times the batch's; ONNX's definition has the batch's
        # own. Going in and coming out in the kernel's scale makes the two recurrences equal.
        count = x.shape.num_elements() // x.shape[channel_axis]
        bessel = count / max(count - 1, 1)
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=mean, variance=variance * bessel,
            epsilon=epsilon, exponential_avg_factor=1 - momentum, data_format=data_format, is_training=True,
        )  # fmt: skip
        return y, mean, variance / bessel

    def unfused(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        def spread(vector: Any) -> Any:
            return vector if channel_axis == rank - 1 else tf.reshape(vector, along_channel)

        scale, offset, mean, variance = (_wide(vector) for vector in (scale, offset, mean, variance))
        wide = _wide(x)
        if not training:
            y = tf.nn.batch_normalization(wide, spread(mean), spread(variance), spread(offset), spread(scale), epsilon)
            return (tf.cast(y, x.dtype),)
        batch_mean, batch_variance = tf.nn.moments(wide, axes)
        y = tf.nn.batch_normalization(
            wide, spread(batch_mean), spread(batch_variance), spread(offset), spread(scale), epsilon
        )
        return (
            tf.cast(y, x.dtype),
            mean * momentum + batch_mean * (1 - momentum),
            variance * momentum + batch_variance * (1 - momentum),
        )

    def batch_normalization(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        x = to_image(x)
        kernel = fused if rank == 4 and x.dtype != tf.float64 else unfused
        return _wanted(node, kernel(x, scale, offset, mean, variance))

    return batch_normalization


def _layer_normalization(node: Node, context: Context) -> Call:
    name = node.inputs[0]
    rank, epsilon = context.rank(name), node.attributes["epsilon"]
    axes = list(range(node.attributes["axis"] % rank, rank))
    to_onnx = context.convert(name, identity(rank))

    def layer_normalization(x: Any, scale: Any, bias: Any = None) -> Any:
        x = to_onnx(x)
        wide = _wide(x)
        mean, variance = tf.nn.moments(wide, axes, keepdims=True)
        deviation = tf.math.rsqrt(variance + epsilon)
        y = (wide - mean) * deviation * _wide(scale)
        if bias is not None:
            y = y + _wide(bias)
        return _wanted(node, (tf.cast(y, x.dtype), mean, deviation))

    return layer_normalization


def _lrn(node: Node, context: Context) -> Call:
    image = node.inputs[0]
    rank, size = context.rank(image), node.attributes["size"]
    alpha, beta, bias = (node.attributes[key] for key in ("alpha", "beta", "bias"))
    layout = channels_last(rank)
    to_last = context.convert(image, layout)
    context.layouts[node.outputs[0]] = layout

    def lrn(x: Any) -> Any:
        x = to_last(x)
        if rank == 4 and size % 2 and x.dtype != tf.float64:
            wide = tf.cast(x, tf.float32)  # there is no bfloat16 kernel
            y = tf.nn.local_response_normalization(wide, size // 2, bias, alpha / size, beta)
            return tf.cast(y, x.dtype)
        channels = x.shape[-1]
        squares = tf.pad(x * x, [[0, 0]] * (rank - 1) + [[(size - 1) // 2, size // 2]])
        total = tf.add_n([squares[..., first : first + channels] for first in range(size)])
        return x / (bias + (alpha / size) * total) ** beta

    return lrn


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    scores = node.inputs[0]
    rank = context.rank(scores)
    to_last = context.convert(scores, channels_last(rank))
    reduction, ignored = node.attributes["reduction"], node.attributes.get("ignore_index")
    context.layouts[node.outputs[0]] = identity(rank - 1 if reduction == "none" else 0)
    probabilities = len(node.outputs) > 1 and bool(node.outputs[1])
    if probabilities:
        context.layouts[node.outputs[1]] = channels_last(rank)

    def loss(logits: Any, labels: Any, class_weights: Any = None) -> Any:
        scores_type = logits.dtype
        logits = _wide(to_last(logits))
        counted = None if ignored is None else tf.not_equal(labels, ignored)
        used = labels if counted is None else tf.where(counted, labels, 0)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(used, logits)
        weights = None
        if class_weights is not None:
            weights = tf.gather(tf.cast(class_weights, each.dtype), used)
        if counted is not None:
            kept = tf.cast(counted, each.dtype)
            weights = kept if weights is None else weights * kept
        if weights is not None:
            each = each * weights
        if reduction == "none":
            value = each
        elif reduction == "sum":
            value = tf.reduce_sum(each)
        else:
            value = tf.reduce_mean(each) if weights is None else tf.reduce_sum(each) / tf.reduce_sum(weights)
        results = (value, tf.nn.log_softmax(logits)) if probabilities else (value,)
        if context.dtypes:  # a network's loss stays as it was computed
            results = tuple(tf.cast(result, scores_type) for result in results)
        return results if probabilities else results[0]

    return loss


# Recurrence and attention

_BLOCK_GATES = "ifco"
"""The order in which the LSTM kernel stacks the gates."""


def _recurrent(node: Node, context: Context) -> Call:
    plan = recurrent(node, context.shapes, context.constants)
    names = [*node.inputs, *[""] * 8]
    batch = context.shape(names[0])[0 if plan.batch_first else 1]
    if plan.kind == "LSTM":
        context.packing.update({name: plan.gates(_BLOCK_GATES) for name in names[1:3]})
        if names[3]:
            context.packing[names[3]] = plan.bias_gates(_BLOCK_GATES)
    state_axis = 1 if plan.batch_first else 0
    weights = [context.convert(name, (0, 2, 1)) for name in names[1:3]]
    # What a loop keeps for its gradient does not leave XLA's code.
    scan = _unrolled_scan if context.xla and context.gradients else tf.scan

    def run(
        x: Any, w: Any, r: Any, b: Any = None, _lengths: Any = None, h: Any = None, c: Any = None, p: Any = None
    ) -> Any:
        if plan.batch_first:
            x = tf.transpose(x, (1, 0, 2))
        w, r = weights[0](w), weights[1](r)
        ends = []
        for d in range(plan.directions):
            states = [
                tf.zeros([batch, plan.hidden], x.dtype) if s is None else s[:, d] if plan.batch_first else s[d]
                for s in ((h, c) if plan.kind == "LSTM" else (h,))
            ]
            backwards = plan.reverse or d == 1
            biases = tf.split(b[d], 2) if b is not None else None
            if plan.kind == "GRU":
                ends.append(_gru(scan, x, w[d], r[d], biases, states[0], plan, backwards=backwards))
                continue
            peepholes = tf.split(p[d], 3) if p is not None else None
            # The kernel is for float32 and shorter, and XLA has none; its gradient is wrong (2.21 takes it for that of
            # the older kernel, whose gates are in another order).
            native = x.dtype in (tf.float32, tf.float16) and not (context.gradients or context.xla)
            lstm = _lstm_block if native else partial(_lstm, scan)
            ends.append(lstm(x, w[d], r[d], biases, states, peepholes, backwards=backwards))
        every, *last = zip(*ends, strict=True)
        y = tf.stack(every, 1)
        return _wanted(
            node,
            (tf.transpose(y, (2, 0, 1, 3)) if plan.batch_first else y, *(tf.stack(s, state_axis) for s in last)),
        )

    return run


def _lstm_block(
    x: Any, w: Any, r: Any, biases: Any, states: Sequence[Any], peepholes: Any, *, backwards: bool
) -> tuple[Any, ...]:
    """One direction of an LSTM by TensorFlow's kernel: every state h, and the last h and c."""
    i, o, f = peepholes if peepholes is not None else [tf.zeros([r.shape[0]], x.dtype)] * 3
    y = tf.raw_ops.BlockLSTMV2(
        seq_len_max=tf.constant(x.shape[0], tf.int64), x=tf.reverse(x, [0]) if backwards else x, cs_prev=states[1],
        h_prev=states[0], w=tf.concat([w, r], 0), wci=i, wcf=f, wco=o,
        b=biases[0] + biases[1] if biases is not None else tf.zeros([w.shape[1]], x.dtype),
        cell_clip=0.0, use_peephole=peepholes is not None,
    )  # fmt: skip
    return tf.reverse(y.h, [0]) if backwards else y.h, y.h[-1], y.cs[-1]


def _lstm(
    scan: Call, x: Any, w: Any, r: Any, biases: Any, states: Sequence[Any], peepholes: Any, *, backwards: bool
) -> tuple[Any, ...]:
    """One direction of an LSTM as a loop over the steps; results as of `_lstm_block`."""
    peepholes = [_wide(p) for p in peepholes] if peepholes is not None else None

    def step(state: Sequence[Any], x_t: Any) -> tuple[Any, ...]:
        h, c = state
        i, f, g, o = tf.split(_wide(x_t) + _product(h, r), 4, 1)
        if peepholes is not None:
            i, f = i + peepholes[0] * c, f + peepholes[2] * c
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        if peepholes is not None:
            o = o + peepholes[1] * c
        return tf.sigmoid(o) * tf.tanh(c), c

    total = biases[0] + biases[1] if biases is not None else None
    start = tuple(_wide(state) for state in states)
    every_h, every_c = (tf.cast(s, x.dtype) for s in scan(step, _projected(x, w, total), start, reverse=backwards))
    last = 0 if backwards else -1
    return every_h, every_h[last], every_c[last]


def _gru(
    scan: Call, x: Any, w: Any, r: Any, biases: Any, state: Any, plan: Recurrent, *, backwards: bool
) -> tuple[Any, ...]:
    """One direction of a GRU as a loop over the steps: every state h, and the last."""
    split = [2 * plan.hidden, plan.hidden]
    r_gates, r_new = tf.split(r, split, 1)
    if biases is None:
        total = b_r = None
    elif plan.linear_before_reset:
        total, b_r = biases[0], _wide(biases[1])
    else:
        total, b_r = biases[0] + biases[1], None

    def reset_last(h: Any, x_t: Any) -> Any:
        product = _product(h, r) if b_r is None else _product(h, r) + b_r
        (x_z, x_r, x_n), (h_z, h_r, h_n) = tf.split(_wide(x_t), 3, 1), tf.split(product, 3, 1)
        z = tf.sigmoid(x_z + h_z)
        new = tf.tanh(x_n + tf.sigmoid(x_r + h_r) * h_n)
        return z * h + (1 - z) * new

    def reset_first(h: Any, x_t: Any) -> Any:
        x_gates, x_n = tf.split(_wide(x_t), split, 1)
        z, reset = tf.split(tf.sigmoid(x_gates + _product(h, r_gates)), 2, 1)
        new = tf.tanh(x_n + _product(reset * h, r_new))
        return z * h + (1 - z) * new

    step = reset_last if plan.linear_before_reset else reset_first
    every = tf.cast(scan(step, _projected(x, w, total), _wide(state), reverse=backwards), x.dtype)
    return every, every[0 if backwards else -1]


def _unrolled_scan(step: Call, values: Any, state: Any, *, reverse: bool) -> Any:
    """`tf.scan` without a loop."""
    states = []
    for value in tf.unstack(tf.reverse(values, [0]) if reverse else values):
        state = step(state, value)
        states.append(state)
    return tf.nest.map_structure(lambda *every: tf.stack(every), *(states[::-1] if reverse else states))


def _product(state: Any, weight: Any) -> Any:
    """The state's share of the gates; gates and states of bfloat16 are kept in float32."""
    return _wide(tf.matmul(tf.cast(state, weight.dtype), weight))


def _projected(x: Any, w: Any, bias: Any) -> Any:
    """The inputs' share of the gates, of all steps in one product."""
    y = tf.matmul(tf.reshape(x, [-1, x.shape[2]]), w)
    return tf.reshape(y if bias is None else y + bias, [*x.shape[:2], -1])


def _attention(node: Node, context: Context) -> Call:
    plan = attention_nodes.attention(node, context.shapes, context.constants, context.dtypes)
    dtype = tf.as_dtype(context.dtypes[node.inputs[0]])
    bias = None if plan.bias is None else tf.constant(plan.bias, dtype)

    def attention(
        q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None, _lengths: Any = None
    ) -> Any:
        q, k, v = _heads(q, plan.heads, plan), _heads(k, plan.kv_heads, plan), _heads(v, plan.kv_heads, plan)
        if plan.past:
            k, v = tf.concat([past_k, k], 2), tf.concat([past_v, v], 2)
        batch, heads, queries, _ = q.shape
        # Query heads that share a key head are rows of one product.
        rows = [batch, plan.kv_heads, heads // plan.kv_heads * queries]
        scores = tf.matmul(tf.reshape(q * plan.scale, [*rows, -1]), k, transpose_b=True)
        scores = tf.reshape(scores, [batch, heads, queries, -1])
        shown = {attention_nodes.SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * tf.tanh(scores / plan.softcap)
        shown[attention_nodes.CAPPED] = scores
        added = _attention_bias(bias, mask, plan, dtype)
        if added is not None:
            scores = scores + added
        shown[attention_nodes.BIASED] = scores
        if plan.may_be_blind:
            seen = tf.reduce_max(added, -1, keepdims=True) > -math.inf
            scores = tf.where(seen, scores, 0)
        weights = tf.nn.softmax(scores)
        if plan.may_be_blind:
            weights = tf.where(seen, weights, 0)
        shown[attention_nodes.WEIGHTS] = weights
        y = tf.reshape(tf.matmul(tf.reshape(weights, [*rows, -1]), v), [batch, heads, queries, -1])
        if plan.split_heads:
            y = tf.reshape(tf.transpose(y, (0, 2, 1, 3)), [batch, queries, -1])
        return _wanted(node, (y, k, v, shown.get(plan.shows)))

    return attention


def _attention_bias(bias: Any, mask: Any, plan: attention_nodes.Attention, dtype: Any) -> Any:
    """What is added to the scores, None for nothing."""
    if mask is None:
        return bias
    if plan.mask == "bool":
        mask = tf.where(mask, tf.zeros([], dtype), -math.inf)
    if plan.mask_padding:
        pads = [(0, 0)] * (len(mask.shape) - 1) + [(0, plan.mask_padding)]
        mask = tf.pad(mask, pads, constant_values=tf.cast(-math.inf, dtype))
    return mask if bias is None else mask + bias


def _heads(x: Any, heads: int, plan: attention_nodes.Attention) -> Any:
    """(batch, heads, steps, size) of a tensor that may be (batch, steps, heads x size)."""
    if not plan.split_heads:
        return x
    return tf.transpose(tf.reshape(x, [*x.shape[:2], heads, -1]), (0, 2, 1, 3))


OPERATORS: dict[str, Factory] = {
    "Add": _binary(tf.add),
    "Attention": _attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _div,
    "Dropout": _dropout,
    "Elu": _elu,
    "Exp": _unary(tf.exp),
    "Flatten": _flatten,
    "GRU": _recurrent,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool(tf.reduce_mean),
    "GlobalMaxPool": _global_pool(tf.reduce_max),
    "HardSwish": _unary(_hard_swish),
    "Identity": _unary(_same),
    "LRN": _lrn,
    "LSTM": _recurrent,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis(tf.nn.log_softmax),
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _binary(tf.multiply),
    "Pad": _pad,
    "ReduceMax": _reduce(_reduce_max),
    "ReduceMean": _reduce(tf.reduce_mean),
    "ReduceSum": _reduce(tf.reduce_sum),
    "Relu": _unary(tf.nn.relu),
    "Reshape": _reshape,
    "Sigmoid": _unary(tf.sigmoid),
    "Softmax": _along_axis(tf.nn.softmax),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Sqrt": _unary(tf.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(tf.subtract),
    "Sum": _sum,
    "Tanh": _unary(tf.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory."""


_IMAGE_OPERATORS = frozenset(
    {"AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"}
)
"""Operators whose first input is an image, and faster in one layout than in another."""

_CHANNELS_LAST_OPERATORS = frozenset({"LRN", "SoftmaxCrossEntropyLoss"})
"""Operators that TensorFlow knows on the last axis only."""


class Operator(level.Operator):
    """One ONNX node in TensorFlow; its backward pass is the tape's or, of a traced node, that half of its gradient."""

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        self._device = native_device(device)
        self._asynchronous = is_asynchronous(device)
        self._context = self._make_context(gradients=False)
        call = self._call(self._context)
        # A traced function's calls cost less without names and defaults of arguments.
        self.forward = call if mode == "eager" else compiled(lambda *inputs: call(*inputs), mode)

    def _make_context(self, *, gradients: bool) -> Context:
        operation = self.operation
        native = self.mode == "xla" or self.device == "cuda"
        images_last = IMAGES_LAST.get((self.device, operation.precision), True)
        return Context(
            shapes=operation.shapes,
            constants=operation.constants,
            layouts=_layouts(operation, images_last=images_last),
            training=operation.training,
            gradients=gradients,
            native_gradients=native,
            xla=self.mode == "xla",
            images_last=images_last,
            device=self.device,
            dtypes=operation.dtypes,
            non_negative=operation.non_negative,
        )

    def _call(self, context: Context) -> Call:
        operation, custom = self.operation, self.operation.custom
        factory = OPERATORS[operation.node.op_type] if custom is None else custom_operators.factory(custom)
        with tf.device(self._device):
            return factory(operation.node, context)

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        self.check_feed(arrays)
        names = self.operation.node.inputs
        return [None if a is None else self._native(name, a) for name, a in zip(names, arrays, strict=True)]

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        names = [self.operation.node.outputs[index] for index in self.operation.differentiated]
        return [self._native(name, array) for name, array in zip(names, arrays, strict=True)]

    def _native(self, name: str, array: np.ndarray) -> Any:
        packing, layout = self._context.packing.get(name), self._context.layouts.get(name)
        array = packing.pack(array) if packing else array
        with tf.device(self._device):
            return tf.constant(np.ascontiguousarray(array.transpose(layout)) if layout else array)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        call = self._call(self._make_context(gradients=True))
        if self.mode != "eager":
            return self._traced_backward(call, inputs)
        operation = self.operation
        sources = [inputs[index] for index in operation.differentiable]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outputs = call(*inputs)
        heads = self._heads(outputs)
        return lambda *gradients: _gradients(tape.gradient, heads, sources, gradients)

    def _heads(self, outputs: Any) -> list[Any]:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [outputs[index] for index in self.operation.differentiated]

    def _traced_backward(self, call: Call, inputs: Sequence[Any]) -> Callable[..., Any]:
        """One graph of both passes, cut into two where the second reads what the first has computed.

        A tape would do, but one that may be read again makes `tf.function` compute what a second derivative would want.
        """
        operation, mode = self.operation, self.mode
        given = [value for value in inputs if value is not None]
        forward: set[str] = set()

        def both(*values: Any) -> Any:
            rest = iter(values)
            arguments = [None if value is None else next(rest) for value in inputs]
            heads = self._heads(call(*arguments))
            forward.update(node.name for node in heads[0].graph.get_operations())
            starts = [tf.compat.v1.placeholder(head.dtype, head.shape) for head in heads]
            return starts, _gradients(tf.gradients, heads, [arguments[i] for i in operation.differentiable], starts)

        whole = tf.compat.v1.wrap_function(both, [tf.TensorSpec(value.shape, value.dtype) for value in given])
        starts, gradients = whole.structured_outputs
        fixed = {tensor.name for tensor in whole.graph.internal_captures}
        shared: dict[str, Any] = {}
        seen: set[str] = set()
        pending = list(gradients)
        while pending:
            tensor = pending.pop()
            if tensor.op.name not in forward:
                pending.extend(() if tensor.op.name in seen else tensor.op.inputs)
                seen.add(tensor.op.name)
            # Constants stay in both halves: kernels want to know shapes and axes when they are built.
            elif tensor.op.type != "Const" and tensor.name not in fixed:
                shared[tensor.name] = tensor
        values = {tensor.name: value for tensor, value in zip(whole.inputs, given, strict=False)}
        computed = [tensor for name, tensor in shared.items() if name not in values]
        if computed:
            results = compiled(whole.prune(whole.inputs, computed), mode)(*given)
            values.update(zip((tensor.name for tensor in computed), results, strict=True))
        backward = compiled(whole.prune([*shared.values(), *starts], gradients), mode)
        kept = [values[name] for name in shared]
        return lambda *heads: backward(*kept, *heads)

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        names = self.operation.node.outputs
        return [self._neutral(name, value) for name, value in zip(names, outputs, strict=True) if name]

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        fetched = []
        for index, gradient in zip(self.operation.differentiable, gradients, strict=True):
            name = self.operation.node.inputs[index]
            array = self._neutral(name, gradient)
            fetched.append(self._context.packing[name].unpack(array) if name in self._context.packing else array)
        return fetched

    def _neutral(self, name: str, value: Any) -> np.ndarray:
        layout = self._context.layouts.get(name)
        array = value.numpy().transpose(np.argsort(layout)) if layout else value.numpy()
        return np.array(array, self.operation.dtypes[name], order="C")

    def extent(self, value: Any) -> tuple[int, int] | None:
        if self.device != "cpu" or not isinstance(value, tf.Tensor):
            return None
        if value.dtype == tf.bfloat16:  # which Python's buffers do not have
            value = tf.bitcast(value, tf.uint16)
        array = np.asarray(memoryview(value))  # of the tensor's own memory
        return array.ctypes.data, array.nbytes

    def synchronize(self, *results: Any) -> None:
        if self._asynchronous:
            tf.test.experimental.sync_devices()


def _gradients(function: Call, heads: Sequence[Any], sources: Sequence[Any], starts: Sequence[Any]) -> list[Any]:
    """Gradients by a tape's or a graph's function, as tensors: those of `tf.gather` come as slices."""
    found = function(heads, sources, list(starts), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(gradient) for gradient in found]


def _layouts(operation: Operation, *, images_last: bool) -> dict[str, Layout]:
    """How the inputs are stored that TensorFlow wants in another order than ONNX."""
    node, layouts = operation.node, {}
    for index, name in enumerate(node.inputs):
        if not name:
            continue
        rank = len(operation.shapes[name])
        layout = weight_layout(node, index, rank)
        last = node.op_type in _CHANNELS_LAST_OPERATORS or (images_last and node.op_type in _IMAGE_OPERATORS)
        if index == 0 and last and rank > 2:
            layout = channels_last(rank)
        if layout != identity(rank):
            layouts[name] = layout
    return layouts
