"""ONNX operators as native TensorFlow code.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable on native tensors.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are kept in the layout that the
device's kernels want (usually N, H, W, C), and an operator says in which layout it leaves its output; data are moved
only where a kernel needs another order. Imports TensorFlow, NumPy, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

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
    if node.op_type == "Conv" and index == 1:
        return kernel_layout(rank)
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
        Whether BatchNormalization and Dropout are in training mode, and gradients will be asked for.
    native_gradients : bool
        Whether the gradient kernels of grouped and dilated convolutions exist (they do with XLA and with cuDNN, not in
        TensorFlow's CPU kernels).
    xla : bool
        Whether the code will be compiled by XLA, which has no pooling with explicit padding.
    images_last : bool
        Whether images are stored with their channels last.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    layouts: dict[str, Layout] = field(default_factory=dict)
    training: bool = False
    native_gradients: bool = False
    xla: bool = False
    images_last: bool = True

    def layout(self, name: str) -> Layout:
        """Storage layout of a tensor."""
        return self.layouts.get(name) or identity(self.rank(name))

    def image_layout(self, rank: int) -> Layout:
        """The layout that convolution and pooling work in."""
        return channels_last(rank) if self.images_last else identity(rank)

    def convert(self, name: str, wanted: Layout) -> Operator:
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


def _same(x: Any) -> Any:
    return x


# Element-wise


def _unary(function: Operator) -> Factory:
    def build(node: Node, context: Context) -> Operator:
        context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
        return function

    return build


def _aligned(node: Node, context: Context) -> list[Operator]:
    """For each input, what brings it to one layout under which ONNX's broadcasting holds."""
    rank = max(context.rank(name) for name in node.inputs)
    full = [context.layout(name) for name in node.inputs if context.rank(name) == rank]
    layout = next((x for x in full if x != identity(rank)), identity(rank))
    context.layouts[node.outputs[0]] = layout
    plain = layout == identity(rank)
    return [context.convert(name, identity(context.rank(name)) if plain else layout) for name in node.inputs]


def _binary(function: Operator) -> Factory:
    def build(node: Node, context: Context) -> Operator:
        first, second = _aligned(node, context)
        if first is _same and second is _same:
            return function
        return lambda x, y: function(first(x), second(y))

    return build


def _sum(node: Node, context: Context) -> Operator:
    converters = _aligned(node, context)
    if len({context.shape(name) for name in node.inputs}) == 1:
        return lambda *xs: tf.add_n([convert(x) for convert, x in zip(converters, xs, strict=True)])
    return lambda *xs: reduce(tf.add, [convert(x) for convert, x in zip(converters, xs, strict=True)])


def _leaky_relu(node: Node, context: Context) -> Operator:
    alpha = node.attributes["alpha"]
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    return lambda x: tf.nn.leaky_relu(x, alpha)


def _clip(node: Node, context: Context) -> Operator:
    low, high = context.constant(node, 1), context.constant(node, 2)
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])

    def clip(x: Any, *_: Any) -> Any:
        if low is not None:
            x = tf.maximum(x, tf.cast(float(low), x.dtype))
        if high is not None:
            x = tf.minimum(x, tf.cast(float(high), x.dtype))
        return x

    return clip


def _dropout(node: Node, context: Context) -> Operator:
    given = context.constant(node, 1)
    ratio = 0.5 if given is None else float(given)
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    if not context.training or ratio == 0:
        return lambda x, *_: x
    return lambda x, *_: tf.nn.dropout(x, ratio)


def _along_axis(function: Operator) -> Factory:
    def build(node: Node, context: Context) -> Operator:
        layout = context.layout(node.inputs[0])
        axis = layout.index(node.attributes["axis"] % len(layout))
        context.layouts[node.outputs[0]] = layout
        return lambda x: function(x, axis=axis)

    return build


# Shape


def _concat(node: Node, context: Context) -> Operator:
    converters = _aligned(node, context)
    layout = context.layout(node.outputs[0])
    axis = layout.index(node.attributes["axis"] % len(layout))
    return lambda *xs: tf.concat([convert(x) for convert, x in zip(converters, xs, strict=True)], axis)


def _flatten(node: Node, context: Context) -> Operator:
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


def _reshape(node: Node, context: Context) -> Operator:
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


def _transpose(node: Node, context: Context) -> Operator:
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


def _squeeze(node: Node, context: Context) -> Operator:
    name = node.inputs[0]
    shape, layout = context.shape(name), context.layout(name)
    axes = _axes(node, context, len(shape))
    if axes is None:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    context.layouts[node.outputs[0]] = tuple(
        axis - sum(gone < axis for gone in axes) for axis in layout if axis not in axes
    )
    positions = [layout.index(axis) for axis in axes]
    return (lambda x, *_: tf.squeeze(x, positions)) if positions else (lambda x, *_: x)


def _unsqueeze(node: Node, context: Context) -> Operator:
    name = node.inputs[0]
    rank = context.rank(name)
    added = context.constant(node, 1)
    assert added is not None
    axes = _axes(node, context, rank + len(added)) or []
    convert = context.convert(name, identity(rank))
    index = tuple(tf.newaxis if axis in axes else slice(None) for axis in range(rank + len(axes)))
    return lambda x, *_: convert(x)[index]


def _pad(node: Node, context: Context) -> Operator:
    if node.attributes["mode"] != "constant":
        raise NetworkError(f"padding mode {node.attributes['mode']!r} is not implemented", where=node.name)
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
    fill = 0.0 if value is None else float(value)
    return lambda x, *_: tf.pad(x, stored, constant_values=tf.cast(fill, x.dtype))


# Matrices


def _gemm(node: Node, context: Context) -> Operator:
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
            return tf.nn.bias_add(product, bias)
        if row:
            return tf.nn.bias_add(product, tf.reshape(bias, [-1]))
        if alpha != 1:
            product = product * tf.cast(alpha, product.dtype)
        if has_bias:
            product = product + (bias if beta == 1 else bias * tf.cast(beta, product.dtype))
        return product

    return gemm


def _matmul(node: Node, context: Context) -> Operator:
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

    def undilated(self, x: Any, kernel: Operator) -> Any:
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


def _conv(node: Node, context: Context) -> Operator:
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
    native = context.native_gradients or not context.training
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
    pads_natively = same or (plain and native)
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
            y = tf.nn.bias_add(y, bias, None if images.last else "NC..")
        return images.leave(y)

    return conv


def _max_pool(node: Node, context: Context) -> Operator:
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
            x = s.pad(x, -math.inf)
        return images.leave(s.undilated(x, pool))

    return max_pool


def _pool_3d_float64(pool: Operator, x: Any, kernel: Sequence[int], strides: Sequence[int], *, last: bool) -> Any:
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


def _average_pool(node: Node, context: Context) -> Operator:
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


def _global_pool(function: Operator) -> Factory:
    def build(node: Node, context: Context) -> Operator:
        layout = context.layout(node.inputs[0])
        axes = [position for position, axis in enumerate(layout) if axis > 1]
        context.layouts[node.outputs[0]] = layout
        return lambda x: function(x, axes, keepdims=True)

    return build


# Normalisation and loss


def _batch_normalization(node: Node, context: Context) -> Operator:
    """In training mode the callable returns output, running mean and running variance; it changes no variable."""
    image = node.inputs[0]
    rank = context.rank(image)
    layout = context.layout(image)
    if rank == 4:
        layout = context.image_layout(rank)
    to_image = context.convert(image, layout)
    context.layouts[node.outputs[0]] = layout
    channel_axis = layout.index(1)
    axes = [position for position in range(rank) if position != channel_axis]
    along_channel = [-1 if position == channel_axis else 1 for position in range(rank)]
    epsilon, momentum = node.attributes["epsilon"], node.attributes["momentum"]
    data_format = "NHWC" if context.images_last else "NCHW"
    training = context.training

    def fused(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        if not training:
            return tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=mean, variance=variance,
                epsilon=epsilon, data_format=data_format, is_training=False,
            )[0]  # fmt: skip
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

        wide = tf.cast(x, scale.dtype)  # bfloat16 activations are normalised in float32
        if not training:
            y = tf.nn.batch_normalization(wide, spread(mean), spread(variance), spread(offset), spread(scale), epsilon)
            return tf.cast(y, x.dtype)
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
        return kernel(x, scale, offset, mean, variance)

    return batch_normalization


def _lrn(node: Node, context: Context) -> Operator:
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


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Operator:
    scores = node.inputs[0]
    rank = context.rank(scores)
    to_last = context.convert(scores, channels_last(rank))
    reduction, ignored = node.attributes["reduction"], node.attributes.get("ignore_index")
    context.layouts[node.outputs[0]] = identity(rank - 1 if reduction == "none" else 0)
    probabilities = len(node.outputs) > 1 and bool(node.outputs[1])
    if probabilities:
        context.layouts[node.outputs[1]] = channels_last(rank)

    def loss(logits: Any, labels: Any, class_weights: Any = None) -> Any:
        logits = to_last(logits)
        if logits.dtype == tf.bfloat16:
            logits = tf.cast(logits, tf.float32)
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
        return (value, tf.nn.log_softmax(logits)) if probabilities else value

    return loss


OPERATORS: dict[str, Factory] = {
    "Add": _binary(tf.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _binary(tf.divide),
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool(tf.reduce_mean),
    "GlobalMaxPool": _global_pool(tf.reduce_max),
    "Identity": _unary(_same),
    "LRN": _lrn,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis(tf.nn.log_softmax),
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _binary(tf.multiply),
    "Pad": _pad,
    "Relu": _unary(tf.nn.relu),
    "Reshape": _reshape,
    "Sigmoid": _unary(tf.sigmoid),
    "Softmax": _along_axis(tf.nn.softmax),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Squeeze": _squeeze,
    "Sub": _binary(tf.subtract),
    "Sum": _sum,
    "Tanh": _unary(tf.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory."""
