"""ONNX in TensorFlow: pooling.

Imports TensorFlow, NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, Factory, Images, first_extreme, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.sliding import read_pool, read_unpool
from d5suite.network.nodes.windows import Window


def max_pool(node: Node, context: Context) -> Call:
    if any(node.outputs[1:]):
        return _max_pool_with_indices(node, context)
    images, to_image = context.image(node)
    w = images.lift(read_pool(node, context))
    pad = images.padding(w)
    # Like ONNX, the kernel's explicit padding requires at least one pixel in every window.
    pads_natively = w.padded and images.dimensions == 2 and not context.xla and not w.dilated
    padding = images.spatial(w.pads, (0, 0)) if pads_natively else "VALID"
    pool = _pooling(tf.nn.max_pool2d, tf.nn.max_pool3d, images, w, padding)

    def run(x: Any) -> Any:
        x = images.enter(to_image(x))
        if not pads_natively:
            x = pad(x, -math.inf if x.dtype.is_floating else x.dtype.min)
        return images.leave(images.undilated(x, w, pool))

    return run


def _max_pool_with_indices(node: Node, context: Context) -> Call:
    """Pool with indices into the whole tensor; TensorFlow's count within each padded image."""
    rank = context.rank(node.inputs[0])
    images = Images(rank, last=True)
    w = images.lift(read_pool(node, context))
    if images.dimensions != 2 or w.dilated or context.xla or context.is_integer(node.inputs[0]):  # no kernel
        return _max_pool_by_taps(node, context)
    to_image, pad = context.convert(node.inputs[0], channels_last(rank)), images.padding(w)
    context.layouts.update(dict.fromkeys(node.outputs, channels_last(rank)))
    (top, left), size = w.pads_begin, math.prod(w.image)
    down, right = w.cell_strides(column_major=bool(node.attributes["storage_order"]))

    def run(x: Any) -> Any:
        x = images.enter(to_image(x))
        batch, channels = tf.shape(x)[0], x.shape[-1]
        x = pad(x, -math.inf)
        y, places = tf.nn.max_pool_with_argmax(
            x, images.spatial(w.kernel, 1), images.spatial(w.strides, 1), "VALID", output_dtype=tf.int64
        )
        channel, pixel = places % channels, places // channels
        row, column = pixel // x.shape[2] - top, pixel % x.shape[2] - left
        plane = tf.reshape(tf.cast(tf.range(batch), tf.int64), [-1, 1, 1, 1]) * channels + channel
        return images.leave(y), images.leave(plane * size + row * down + column * right)

    return run


def _max_pool_by_taps(node: Node, context: Context) -> Call:
    """Pool with indices, by comparing the cells of each window."""
    w, to_onnx = read_pool(node, context), context.to_onnx(node.inputs[0])
    order: Any = "F" if node.attributes["storage_order"] else "C"
    largest = _largest(context)
    area, pads = math.prod(w.image), [(0, 0), (0, 0), *w.pads]
    numbers = np.pad(np.arange(area).reshape(w.image, order=order), w.pads)
    taps = [((..., *tap), numbers[tap]) for tap in w.taps()]

    def run(x: Any) -> Any:
        x = to_onnx(x)
        padded = tf.pad(x, pads, constant_values=tf.cast(-math.inf if x.dtype.is_floating else x.dtype.min, x.dtype))
        seen = tf.stack([padded[cut] for cut, _ in taps])
        first = tf.argmax(seen, 0)
        places = tf.constant(np.stack([place for _, place in taps]))
        chosen = tf.one_hot(first, len(taps), axis=0, dtype=tf.int64)
        within = tf.reduce_sum(chosen * places[:, tf.newaxis, tf.newaxis], 0)
        planes = tf.reshape(
            tf.cast(tf.range(tf.shape(x)[0] * x.shape[1]), tf.int64), [-1, x.shape[1], *[1] * len(w.image)]
        )
        return largest(seen, [0]), within + planes * area

    return run


def _pooling(pool_2d: Call, pool_3d: Call, images: Images, w: Window, padding: Any) -> Call:
    """Return a pooling without dilation: a function of an image and strides."""

    def pool(x: Any, strides: Sequence[int]) -> Any:
        if images.dimensions == 3 and x.dtype == tf.float64:
            return _pool_3d_float64(pool_2d, x, w.kernel, strides, last=images.last)
        kernel = pool_3d if images.dimensions == 3 else pool_2d
        return kernel(x, images.spatial(w.kernel, 1), images.spatial(strides, 1), padding, images.data_format)

    return pool


def _pool_3d_float64(pool: Call, x: Any, kernel: Sequence[int], strides: Sequence[int], *, last: bool) -> Any:
    """Pool over planes, then over depth: TensorFlow's 3-D kernels have no float64."""
    images = Images(4, last)

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


def average_pool(node: Node, context: Context) -> Call:
    return _average(node, context, include=bool(node.attributes["count_include_pad"]))


def _average(node: Node, context: Context, *, include: bool) -> Call:
    """Return a pool that averages each window, with its padding if ``include``."""
    images, to_image = context.image(node)
    w = images.lift(read_pool(node, context))
    pad = images.padding(w)
    # "SAME" averages without the padding. 3-D pooling in float64 is done in parts, which only work
    # without padding.
    same_padding = not include and w.padded and images.dimensions == 2 and not w.dilated and w.same
    scale = np.ones(1) if same_padding else w.divisor_correction(include_pad=include)
    scaled = bool((scale != 1).any())
    if scaled:
        scale = scale.reshape(images.spatial(scale.shape, 1))
    pool = _pooling(tf.nn.avg_pool2d, tf.nn.avg_pool3d, images, w, "SAME" if same_padding else "VALID")

    def run(x: Any) -> Any:
        x = images.enter(to_image(x))
        if not same_padding:
            x = pad(x, 0.0)
        y = images.undilated(x, w, pool)
        if scaled:
            y = y * tf.cast(scale, y.dtype)
        return images.leave(y)

    return run


def lp_pool(node: Node, context: Context) -> Call:
    order, average, counts = node.attributes["p"], _average(node, context, include=True), _counts(node, context)

    def run(x: Any) -> Any:
        means = average(tf.abs(in_float32(x)) ** order)
        return tf.cast(_root(means * tf.cast(counts, means.dtype), order), x.dtype)

    return run


def _counts(node: Node, context: Context) -> np.ndarray:
    """Return how many cells each window has, padding included, as the images are stored."""
    counts: np.ndarray = read_pool(node, context).counts(include_pad=True)
    return counts.reshape(Images(counts.ndim + 2, context.images_last).spatial(counts.shape, 1))


def _root(sums: Any, order: int) -> Any:
    """Return the root of this order, with the gradient 0 at 0."""
    return tf.where(sums > 0, tf.where(sums > 0, sums, 1) ** (1 / order), 0)


def global_lp_pool(node: Node, context: Context) -> Call:
    order = node.attributes["p"]

    def norm(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
        return tf.cast(_root(tf.reduce_sum(tf.abs(in_float32(x)) ** order, axes, keepdims), order), x.dtype)

    return global_pool(norm)(node, context)


@in_onnx
def max_unpool(node: Node, context: Context) -> Call:
    plan = read_unpool(node, context)

    def run(x: Any, indices: Any, *_: Any) -> Any:
        shape = (tf.shape(x)[0], plan.channels, *plan.image)
        y = tf.zeros([tf.reduce_prod(shape)], x.dtype)
        y = tf.tensor_scatter_nd_update(y, tf.reshape(indices, [-1, 1]), tf.reshape(x, [-1]))
        return tf.pad(tf.reshape(y, shape), plan.padding)

    return run


def _largest(context: Context) -> Call:
    maximum: Call = first_extreme(tf.argmax) if context.recomputes else tf.reduce_max
    return maximum


def global_max_pool(node: Node, context: Context) -> Call:
    return global_pool(_largest(context))(node, context)


def global_pool(function: Call) -> Factory:
    """Return a factory for a pooling over all spatial axes."""

    def factory(node: Node, context: Context) -> Call:
        axes = [position for position, axis in enumerate(context.keep_layout(node)) if axis > 1]
        return lambda x: function(x, axes, keepdims=True)

    return factory


OPERATORS: dict[str, Factory] = {
    "GlobalAveragePool": global_pool(tf.reduce_mean),
}
