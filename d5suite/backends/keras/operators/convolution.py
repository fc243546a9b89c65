"""ONNX in Keras: convolutions. Imports Keras, NumPy, `d5suite.network` and `context`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from keras import layers, ops

from d5suite.backends.keras.operators.context import Calculation, Context, Function, in_float32, in_onnx
from d5suite.network import Node
from d5suite.network.nodes.layouts import Layout, kernel_last
from d5suite.network.nodes.sliding import read_columns, read_conv, read_conv_transpose
from d5suite.network.nodes.windows import TransposedWindow, Window

_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_TRANSPOSED_CONVOLUTIONS = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
_ZERO_PADDINGS = (layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D)
"""Layers by number of spatial dimensions, less one."""


def conv(node: Node, context: Context) -> Any:
    w = read_conv(node, context)
    weights = [name for name in node.inputs[1:] if name]
    rank, groups = context.rank(node.inputs[0]), node.attributes["group"]
    outputs, channels = context.shape(weights[0])[0], context.shape(node.inputs[0])[1]
    # TensorFlow has no kernel for windows that are both dilated and strided, and Keras rejects them
    # on every backend.
    if (w.dilated and max(w.strides) > 1) or not context.owned(*weights):
        return _general_conv(node, context, w)
    x = context.image(node)
    if w.padded and not w.same:
        pads = w.pads[0] if rank == 3 else w.pads
        padding = _ZERO_PADDINGS[rank - 3](pads, data_format=context.data_format, **context.settings(node, ".pad"))
        x = padding(x)
    settings = {
        "strides": w.strides,
        "padding": "same" if w.padded and w.same else "valid",
        "data_format": context.data_format,
        "dilation_rate": w.dilations,
        "use_bias": len(weights) > 1,
        **context.settings(node),
    }
    if rank == 4 and groups > 1 and groups == channels == outputs and len(set(w.strides)) == 1:
        layer = layers.DepthwiseConv2D(w.kernel, depthwise_initializer="zeros", **settings)
        layout: Layout = (2, 3, 0, 1)
    else:
        layer = _CONVOLUTIONS[rank - 3](outputs, w.kernel, groups=groups, kernel_initializer="zeros", **settings)
        layout = kernel_last(rank)
    y = layer(x)
    context.own(weights, layer.kernel, layer.bias, layout=layout)
    return y


def _general_conv(node: Node, context: Context, w: Window) -> Any:
    rank = context.rank(node.inputs[0])
    image = context.layouts[node.outputs[0]] = context.image_layout(rank)
    context.prefer(node.inputs[0], image)
    context.prefer(node.inputs[1], kernel_last(rank))
    to_image, to_kernel = context.convert(node.inputs[0], image), context.convert(node.inputs[1], kernel_last(rank))
    pad, data_format = context.padding(w), context.data_format
    skips = context.backend == "tensorflow" and w.dilated and max(w.strides) > 1
    strides = (1,) * len(w.strides) if skips else w.strides
    skip = tuple(context.spatial([slice(None, None, stride) for stride in w.strides], slice(None)))

    def run(x: Any, kernel: Any, bias: Any = None) -> Any:
        x = pad(to_image(x), 0.0)
        y = ops.conv(x, to_kernel(kernel), strides, "valid", data_format, w.dilations)
        return _add_bias(y[skip] if skips else y, bias, context)

    return context.calculate(node, run)


def _add_bias(y: Any, bias: Any, context: Context) -> Any:
    if bias is None:
        return y
    return y + (bias if context.images_last else ops.reshape(bias, (-1, *[1] * (len(y.shape) - 2))))


def conv_transpose(node: Node, context: Context) -> Any:
    w = read_conv_transpose(node, context)
    weights = [name for name in node.inputs[1:] if name]
    rank = context.rank(node.inputs[0])
    # The size of Keras's `valid` result, and how much is cut off its end.
    whole = [n * s + max(span - s, 0) for n, s, span in zip(w.image, w.strides, w.spans, strict=True)]
    behind = [n - begin - wanted for n, begin, wanted in zip(whole, w.pads_begin, w.outputs, strict=True)]
    # Keras has no groups here and no dilation with strides, and TensorFlow no gradients of dilated
    # windows on the CPU.
    native = node.attributes["group"] == 1 and max(w.dilations) == 1 and min(behind) >= 0
    if not native or not context.owned(*weights):
        return _general_conv_transpose(node, context, w)
    same = all(
        outputs == size * stride and begin == max(span - stride, 0) // 2
        for size, outputs, stride, begin, span in zip(w.image, w.outputs, w.strides, w.pads_begin, w.spans, strict=True)
    )
    layer = _TRANSPOSED_CONVOLUTIONS[rank - 3](
        context.shape(weights[0])[1], w.kernel, w.strides, "same" if same else "valid", data_format=context.data_format,
        use_bias=len(weights) > 1, kernel_initializer="zeros", **context.settings(node),
    )  # fmt: skip
    y = layer(context.image(node))
    context.own(weights, layer.kernel, layer.bias, layout=kernel_last(rank))
    if same or not (any(w.pads_begin) or any(behind)):
        return y
    settings = context.settings(node, ".crop")
    if rank == 3:  # Keras's Cropping1D has no data format
        kept = tuple(context.spatial([slice(w.pads_begin[0], w.pads_begin[0] + w.outputs[0])], slice(None)))
        return Calculation(lambda x: x[kept], [...], context.stored(node.outputs[0]), **settings)(y)
    cropping = layers.Cropping2D if rank == 4 else layers.Cropping3D
    pairs = tuple(zip(w.pads_begin, behind, strict=True))
    return cropping(pairs, data_format=context.data_format, **settings)(y)


def _general_conv_transpose(node: Node, context: Context, w: TransposedWindow) -> Any:
    """Convolve the image, spread with zeros between its pixels, with the mirrored kernel."""
    image, weight = node.inputs[:2]
    rank, groups = context.rank(image), node.attributes["group"]
    layout = context.layouts[node.outputs[0]] = context.image_layout(rank)
    context.prefer(image, layout)
    to_image, to_kernel = context.convert(image, layout), context.to_onnx(weight)
    inputs, per_group = context.shape(weight)[:2]
    assert inputs is not None and per_group is not None
    first = 1 if context.images_last else 2
    around, cuts = [(0, 0)] * rank, [slice(None)] * rank
    for axis, (span, begin, tail) in enumerate(zip(w.spans, w.pads_begin, w.tail, strict=True), first):
        before, after = span - 1 - begin, span - 1 + tail  # a negative number of zeros crops
        around[axis] = (max(before, 0), max(after, 0))
        cuts[axis] = slice(max(-before, 0), None if after >= 0 else after)

    def spread(x: Any) -> Any:
        for axis, stride in enumerate(w.strides, first):
            if stride > 1:
                shape = list(x.shape)
                x = ops.pad(
                    ops.expand_dims(x, axis + 1),
                    [(0, stride - 1) if a == axis + 1 else (0, 0) for a in range(rank + 1)],
                )
                shape[axis] *= stride
                x = ops.reshape(x, [-1, *shape[1:]])
                x = x[(*[slice(None)] * axis, slice(0, shape[axis] - stride + 1))]
        return x

    def run(x: Any, kernel: Any, bias: Any = None) -> Any:
        x = ops.pad(spread(to_image(x)), around)[tuple(cuts)]
        kernel = ops.flip(to_kernel(kernel), tuple(range(2, rank)))
        kernel = ops.reshape(kernel, (groups, inputs // groups, per_group, *w.kernel))
        kernel = ops.transpose(kernel, (*range(3, rank + 1), 1, 0, 2))
        kernel = ops.reshape(kernel, (*w.kernel, inputs // groups, groups * per_group))
        y = ops.conv(x, kernel, 1, "valid", context.data_format, w.dilations)
        return _add_bias(y, bias, context)

    return context.calculate(node, run)


@in_onnx
def col2_im(node: Node, context: Context) -> Function:
    """Col2Im, without Keras's `segment_sum`, which on PyTorch computes in float32."""
    plan = read_columns(node, context)
    image, channels, cells = plan.window.image, plan.channels, plan.cells
    size, places = math.prod(image), np.expand_dims(cells, 1)

    def run(x: Any, *_: Any) -> Any:
        values = ops.transpose(ops.reshape(in_float32(x), (-1, channels, cells.size)), (2, 0, 1))
        zeros = ops.zeros((size + 1, ops.shape(x)[0], channels), dtype=values.dtype)
        sums = ops.scatter_update(zeros, places, values, "add")[:size]
        return ops.cast(ops.reshape(ops.transpose(sums, (1, 2, 0)), (-1, channels, *image)), x.dtype)

    return run
