"""ONNX in TensorFlow: convolutions.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, add_bias, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.context import has_input
from d5suite.network.nodes.layouts import kernel_last
from d5suite.network.nodes.sliding import read_columns, read_conv, read_conv_transpose


@cache
def _fuses_groups() -> bool:
    """Return whether a graph may hold a grouped convolution.

    TensorFlow's graph optimizer (2.21) fuses a bias or a normalization into one. Without oneDNN,
    which TensorFlow leaves out on CPUs without AVX-512, the fused kernel refuses groups.
    """

    @tf.function  # type: ignore[untyped-decorator]
    def fused(x: Any, kernel: Any, bias: Any) -> Any:
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "VALID"), bias))

    with tf.init_scope():
        try:
            fused(tf.ones([1, 2, 2, 4]), tf.ones([1, 1, 2, 4]), tf.ones([4]))
        except tf.errors.UnimplementedError:
            return False
    return True


def conv(node: Node, context: Context) -> Call:
    image, weight = node.inputs[:2]
    images, to_image = context.image(node)
    rank, w = images.rank, images.lift(read_conv(node, context))
    to_kernel, pad = context.convert(weight, kernel_last(rank)), images.padding(w)
    groups = node.attributes["group"]
    channels, outputs = context.shape(image)[1], context.shape(weight)[0]
    assert outputs is not None
    depthwise = rank < 5 and 1 < groups == channels
    native = context.native_gradients or not context.gradients
    dilate_natively = native and images.dimensions == 2 and not depthwise
    group_natively = native and images.dimensions == 2 and (groups == 1 or _fuses_groups())
    dilations = images.spatial(w.dilations, 1) if dilate_natively else None

    def convolve(x: Any, kernel: Any, strides: Sequence[int], padding: Any) -> Any:
        if images.dimensions == 3:
            return tf.nn.conv3d(x, kernel, images.spatial(strides, 1), padding, images.data_format)
        return tf.nn.conv2d(x, kernel, images.spatial(strides, 1), padding, images.data_format, dilations)

    def separate(x: Any, kernel: Any, strides: Sequence[int], padding: Any) -> Any:
        kernel = tf.reshape(kernel, [*kernel.shape[:2], groups, outputs // groups])
        if len(set(strides)) > 1:  # the native one has one stride for both axes
            x = tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], padding, images.data_format)
            return x[tuple(slice(None, None, stride) for stride in images.spatial(strides, 1))]
        return tf.nn.depthwise_conv2d(x, kernel, images.spatial(strides, 1), padding, images.data_format)

    def split(x: Any, kernel: Any, strides: Sequence[int], padding: Any) -> Any:
        parts = zip(tf.split(x, groups, images.channel_axis), tf.split(kernel, groups, -1), strict=True)
        return tf.concat([convolve(a, b, strides, padding) for a, b in parts], images.channel_axis)

    call = separate if depthwise else convolve if groups == 1 or group_natively else split
    plain = images.dimensions == 2 and (dilate_natively or not w.dilated)
    # Gradients of explicitly padded convolutions are slow on the CPU: ResNet-50's step would take
    # twice as long.
    same_padding = plain and w.padded and max(w.strides) == 1 and w.same
    # TensorFlow's graph optimizer (2.21) fuses a bias, or what is added behind, into an explicitly
    # padded depthwise convolution, and then aborts.
    behind = context.readers.get(node.outputs[0], set())
    fused = depthwise and (has_input(node, 2) or not behind.isdisjoint({"Add", "Sum"}))
    pads_natively = same_padding or (plain and native and not fused)
    padding = "SAME" if same_padding else images.spatial(w.pads, (0, 0)) if w.padded and pads_natively else "VALID"

    def run(x: Any, kernel: Any, bias: Any = None) -> Any:
        x, kernel = images.enter(to_image(x)), to_kernel(kernel)
        if rank == 3:
            kernel = tf.expand_dims(kernel, 0)
        if not pads_natively:
            x = pad(x, 0.0)
        if dilate_natively:
            y = call(x, kernel, w.strides, padding)
        else:
            y = images.undilated(x, w, lambda part, strides: call(part, kernel, strides, padding))
        if bias is not None:
            y = add_bias(y, bias, context, None if images.last else "NC..")
        return images.leave(y)

    return run


def conv_transpose(node: Node, context: Context) -> Call:
    w = read_conv_transpose(node, context)
    images, to_image = context.image(node)
    rank, to_kernel = images.rank, context.convert(node.inputs[1], kernel_last(images.rank))
    groups = node.attributes["group"]
    group_natively = groups == 1 or (context.native_gradients and images.dimensions == 2)
    dilate_natively = max(w.dilations) == 1 or (context.native_gradients and images.dimensions == 2)
    plane = [1] * (images.dimensions - len(w.kernel))
    strides = images.spatial([*plane, *w.strides], 1)
    dilations = images.spatial([*plane, *w.dilations], 1) if dilate_natively else None
    # The kernel's "SAME" cuts the padding of the convolution whose gradient it is.
    totals = [max((n - 1) * s + k - y, 0) for n, s, k, y in zip(w.image, w.strides, w.spans, w.outputs, strict=True)]
    same_padding = tuple(t // 2 for t in totals) == w.pads_begin and all(
        -(-y // s) == n for y, s, n in zip(w.outputs, w.strides, w.image, strict=True)
    )
    # Otherwise the full result is cut. The kernel adds rows at its end if a stride skips them; the
    # rest are padding.
    within = [min(e, s - 1) for e, s in zip(w.output_padding, w.strides, strict=True)]
    whole = [(n - 1) * s + k + e for n, s, k, e in zip(w.image, w.strides, w.spans, within, strict=True)]
    ends = [min(begin + y, n) for begin, y, n in zip(w.pads_begin, w.outputs, whole, strict=True)]
    missing = [begin + y - end for begin, y, end in zip(w.pads_begin, w.outputs, ends, strict=True)]
    cut = images.spatial(
        [slice(None)] * len(plane) + [slice(begin, end) for begin, end in zip(w.pads_begin, ends, strict=True)],
        slice(None),
    )
    behind = images.spatial([(0, 0)] * len(plane) + [(0, more) for more in missing], (0, 0))
    is_cut = any(w.pads_begin) or ends != whole
    results = [*plane, *(w.outputs if same_padding else whole)]
    padding = "SAME" if same_padding else "VALID"

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

    def run(x: Any, kernel: Any, bias: Any = None) -> Any:
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
        if not same_padding and is_cut:
            y = y[tuple(cut)]
        if not same_padding and any(missing):
            y = tf.pad(y, behind)
        if bias is not None:
            y = add_bias(y, bias, context, None if images.last else "NC..")
        return images.leave(y)

    return run


def _spread(kernel: Any, dilations: Sequence[int]) -> Any:
    """Return a convolution weight with the zeros of its dilation filled in."""
    for axis, dilation in enumerate(dilations):
        size = kernel.shape[axis]
        pads = [(0, 0)] * (len(kernel.shape) + 1)
        pads[axis + 1] = (0, dilation - 1)
        spread = tf.pad(tf.expand_dims(kernel, axis + 1), pads)
        shape = [*kernel.shape[:axis], size * dilation, *kernel.shape[axis + 1 :]]
        rows = (*[slice(None)] * axis, slice((size - 1) * dilation + 1))
        kernel = tf.reshape(spread, shape)[rows]
    return kernel


@in_onnx
def col2_im(node: Node, context: Context) -> Call:
    """Col2Im, as sums of the columns' values by cell of the image."""
    plan = read_columns(node, context)
    image, channels, cells = plan.window.image, plan.channels, plan.cells
    size = math.prod(image)

    def run(x: Any, *_: Any) -> Any:
        values = tf.transpose(tf.reshape(in_float32(x), [-1, channels, cells.size]), [2, 0, 1])
        sums = tf.math.unsorted_segment_sum(values, cells, size + 1)[:size]
        return tf.cast(tf.reshape(tf.transpose(sums, [1, 2, 0]), [-1, channels, *image]), x.dtype)

    return run
