"""ONNX in TensorFlow: normalization.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.context import select
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.normalization import (
    LEAST_NORM,
    read_group_normalization,
    read_layer_normalization,
    read_lrn,
)
from d5suite.network.nodes.shape import read_axis


def batch_normalization(node: Node, context: Context) -> Call:
    image = node.inputs[0]
    rank = context.rank(image)
    layout = context.layout(image)
    if rank == 4:
        layout = context.image_layout(rank)
    wanted = context.wanted(node)
    moving = any(wanted[1:])
    to_image = context.convert(image, layout)
    context.layouts[node.outputs[0]] = layout
    channel_axis = layout.index(1)
    axes = [position for position in range(rank) if position != channel_axis]
    along_channel = [-1 if position == channel_axis else 1 for position in range(rank)]
    epsilon, momentum = node.attributes["epsilon"], node.attributes["momentum"]
    data_format = "NHWC" if context.images_last else "NCHW"
    training = context.training

    def fused(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        scale, offset, mean, variance = (in_float32(vector) for vector in (scale, offset, mean, variance))
        settings = {"epsilon": epsilon, "data_format": data_format, "is_training": training}
        if not (training and moving):
            mean, variance = ([], []) if training else (mean, variance)
            return tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=mean, variance=variance, **settings
            )[:1]  # fmt: skip
        # The kernel updates the running variance with n / (n - 1) times the batch's variance, ONNX
        # with the batch's own. Scaling it for the kernel and back makes the recurrences equal.
        count = x.shape.num_elements() // x.shape[channel_axis]
        bessel = count / max(count - 1, 1)
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=mean, variance=variance * bessel,
            exponential_avg_factor=1 - momentum, **settings,
        )  # fmt: skip
        return y, mean, variance / bessel

    def unfused(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        def spread(vector: Any) -> Any:
            return vector if channel_axis == rank - 1 else tf.reshape(vector, along_channel)

        scale, offset, mean, variance = (in_float32(vector) for vector in (scale, offset, mean, variance))
        wide, before = in_float32(x), (mean, variance)
        used = tf.nn.moments(wide, axes) if training else before
        y = tf.nn.batch_normalization(wide, *map(spread, (*used, offset, scale)), epsilon)
        moved = [old * momentum + now * (1 - momentum) for old, now in zip(before, used, strict=True) if training]
        return (tf.cast(y, x.dtype), *moved)

    def run(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        x = to_image(x)
        kernel = fused if rank == 4 and x.dtype != tf.float64 else unfused
        return select(kernel(x, scale, offset, mean, variance), wanted)

    return run


def instance_normalization(node: Node, context: Context) -> Call:
    layout, epsilon = context.keep_layout(node), node.attributes["epsilon"]
    axes = [place for place, axis in enumerate(layout) if axis > 1]
    along_channel = [-1 if axis == 1 else 1 for axis in layout]

    def run(x: Any, scale: Any, bias: Any) -> Any:
        wide = in_float32(x)
        mean, variance = tf.nn.moments(wide, axes, keepdims=True)
        scale, bias = (tf.reshape(in_float32(vector), along_channel) for vector in (scale, bias))
        return tf.cast(tf.nn.batch_normalization(wide, mean, variance, bias, scale, epsilon), x.dtype)

    return run


@in_onnx
def layer_normalization(node: Node, context: Context) -> Call:
    plan = read_layer_normalization(node, context)
    axes, epsilon, wanted = list(plan.axes), plan.epsilon, context.wanted(node)

    def run(x: Any, scale: Any, bias: Any = None) -> Any:
        wide = in_float32(x)
        mean, variance = tf.nn.moments(wide, axes, keepdims=True)
        deviation = tf.math.rsqrt(variance + epsilon)
        y = (wide - mean) * deviation * in_float32(scale)
        if bias is not None:
            y = y + in_float32(bias)
        return select((tf.cast(y, x.dtype), mean, deviation), wanted)

    return run


def lrn(node: Node, context: Context) -> Call:
    plan, rank = read_lrn(node), context.rank(node.inputs[0])
    size, beta, bias, factor = plan.size, plan.beta, plan.bias, plan.alpha / plan.size
    layout = context.layouts[node.outputs[0]] = channels_last(rank)
    to_last = context.convert(node.inputs[0], layout)
    pads = [[0, 0]] * (rank - 1) + [[plan.before, plan.after]]

    def run(x: Any) -> Any:
        x = to_last(x)
        if rank == 4 and size % 2 and x.dtype != tf.float64:
            wide = tf.cast(x, tf.float32)  # no bfloat16 kernel
            y = tf.nn.local_response_normalization(wide, size // 2, bias, factor, beta)
            return tf.cast(y, x.dtype)
        channels = x.shape[-1]
        squares = tf.pad(x * x, pads)
        total = tf.add_n([squares[..., first : first + channels] for first in range(size)])
        return x / (bias + factor * total) ** beta

    return run


def group_normalization(node: Node, context: Context) -> Call:
    plan, epsilon = read_group_normalization(node, context.keep_layout(node)), node.attributes["epsilon"]

    def run(x: Any, scale: Any, bias: Any) -> Any:
        wide = tf.reshape(in_float32(x), plan.split(x.shape))
        mean, variance = tf.nn.moments(wide, plan.axes, keepdims=True)
        normal = tf.reshape((wide - mean) * tf.math.rsqrt(variance + epsilon), x.shape)
        scale, bias = (tf.reshape(in_float32(vector), plan.along_channel) for vector in (scale, bias))
        return tf.cast(normal * scale + bias, x.dtype)

    return run


@in_onnx
def rms_normalization(node: Node, context: Context) -> Call:
    plan = read_layer_normalization(node, context)

    def run(x: Any, scale: Any) -> Any:
        wide = in_float32(x)
        inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(wide), list(plan.axes), keepdims=True) + plan.epsilon)
        return tf.cast(wide * inverse * in_float32(scale), x.dtype)

    return run


def lp_normalization(node: Node, context: Context) -> Call:
    axis = context.keep_layout(node).index(read_axis(node, context))
    if node.attributes["p"] == 2:
        return lambda x: tf.cast(tf.math.l2_normalize(in_float32(x), axis, LEAST_NORM**2), x.dtype)

    def run(x: Any) -> Any:
        wide = in_float32(x)
        return tf.cast(wide / tf.maximum(tf.reduce_sum(tf.abs(wide), axis, keepdims=True), LEAST_NORM), x.dtype)

    return run
