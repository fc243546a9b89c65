"""ONNX in Keras: normalization.

Imports Keras, `d5suite.errors`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

from keras import layers, ops

from d5suite.backends.keras.operators.context import Context, Function, in_float32, in_onnx
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.context import select
from d5suite.network.nodes.layouts import identity
from d5suite.network.nodes.normalization import (
    LEAST_NORM,
    read_group_normalization,
    read_layer_normalization,
    read_lrn,
)
from d5suite.network.nodes.shape import read_axis


def batch_normalization(node: Node, context: Context) -> Any:
    # Keras's running variance is the biased one, as ONNX's.
    image, *weights = node.inputs
    if context.training:
        return _batch_normalization_by_batch(node, context)
    scaled, statistics = context.owned(*weights[:2]), weights[2:]
    if not context.owned(*statistics):
        raise NetworkError(
            "the statistics of a BatchNormalization must be initializers that no other node reads", where=node.name
        )
    rank = context.rank(image)
    if rank > 2:
        x, axis = context.image(node), -1 if context.images_last else 1
    else:
        x, axis = context.enter(node, 0, identity(rank)), 1
    settings = {key: node.attributes[key] for key in ("momentum", "epsilon")}
    layer = layers.BatchNormalization(axis, center=scaled, scale=scaled, **settings, **context.settings(node))
    y = layer(x)
    context.own(statistics, layer.moving_mean, layer.moving_variance)
    if not scaled:
        return _scaled(node, context, y, axis % rank)
    context.own(weights[:2], layer.gamma, layer.beta)
    return y


def _scaled(node: Node, context: Context, y: Any, axis: int) -> Any:
    """Apply a scale and a bias that a layer cannot own: other nodes read them, or compute them."""
    _, scale, bias, *_ = node.inputs
    plain = f"{node.outputs[0]}.d5suite.plain"
    context.tensors[plain] = y
    along = [1] * context.rank(node.inputs[0])
    along[axis] = -1

    def run(x: Any, scale: Any, bias: Any) -> Any:
        scale, bias = (ops.reshape(ops.cast(vector, x.dtype), along) for vector in (scale, bias))
        return x * scale + bias

    return context.calculate(replace(node, inputs=(plain, scale, bias)), run)


def _batch_normalization_by_batch(node: Node, context: Context) -> Any:
    """Compute what the layer does in training, but return the running statistics."""
    rank, momentum, epsilon = context.rank(node.inputs[0]), node.attributes["momentum"], node.attributes["epsilon"]
    layout = context.layouts[node.outputs[0]] = context.image_layout(rank)
    context.prefer(node.inputs[0], layout)
    axis, wanted = layout.index(1), context.wanted(node)
    others = [a for a in range(rank) if a != axis]

    def run(x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any) -> Any:
        wide = in_float32(x)
        mean, variance = ops.moments(wide, others)
        y = ops.batch_normalization(wide, mean, variance, axis, in_float32(bias), in_float32(scale), epsilon)
        y = ops.cast(y, x.dtype)
        if not any(wanted[1:]):
            return y
        old = in_float32(running_mean), in_float32(running_variance)
        moved = [before * momentum + now * (1 - momentum) for before, now in zip(old, (mean, variance), strict=True)]
        return select((y, *(ops.cast(statistic, running_mean.dtype) for statistic in moved)), wanted)

    return context.calculate(node, run)


def instance_normalization(node: Node, context: Context) -> Any:
    layout, epsilon = context.keep_layout(node), node.attributes["epsilon"]
    axes = [place for place, axis in enumerate(layout) if axis > 1]
    along_channel = [-1 if axis == 1 else 1 for axis in layout]

    def run(x: Any, scale: Any, bias: Any) -> Any:
        wide = in_float32(x)
        mean, variance = ops.moments(wide, axes, keepdims=True)
        scale, bias = (ops.reshape(in_float32(vector), along_channel) for vector in (scale, bias))
        return ops.cast((wide - mean) * ops.rsqrt(variance + epsilon) * scale + bias, x.dtype)

    return context.calculate(node, run)


def layer_normalization(node: Node, context: Context) -> Any:
    plan, wanted = read_layer_normalization(node, context), context.wanted(node)
    axes, epsilon = list(plan.axes), plan.epsilon
    image, *weights = [name for name in node.inputs if name]
    if plan.full and not any(wanted[1:]) and context.owned(*weights) and context.computed(image):
        layer = layers.LayerNormalization(axes, epsilon, center=len(weights) > 1, **context.settings(node))
        y = layer(context.enter(node, 0, identity(context.rank(image))))
        context.own(weights, layer.gamma, layer.beta)
        return y
    converters = [context.to_onnx(name) for name in (image, *weights)]

    def run(*inputs: Any) -> Any:
        x, scale, bias = (*(convert(each) for convert, each in zip(converters, inputs, strict=False)), None)[:3]
        wide = in_float32(x)
        mean, variance = ops.moments(wide, axes, keepdims=True)
        spread = ops.rsqrt(variance + epsilon)
        y = (wide - mean) * spread * in_float32(scale)
        y = ops.cast(y if bias is None else y + in_float32(bias), x.dtype)
        return select((y, mean, spread), wanted)

    return context.calculate(node, run)


def lrn(node: Node, context: Context) -> Any:
    plan, (_, channels, *spatial) = read_lrn(node), context.shape(node.inputs[0])
    assert channels is not None
    rank = 2 + len(spatial)
    context.prefer(node.inputs[0], context.image_layout(rank))
    axis = context.keep_layout(node).index(1)
    size, beta, bias, factor = plan.size, plan.beta, plan.bias, plan.alpha / plan.size
    pads = [(plan.before, plan.after) if a == axis else (0, 0) for a in range(rank)]

    def run(x: Any) -> Any:
        squares = ops.pad(x * x, pads)
        rest = (slice(None),) * axis
        total = reduce(ops.add, [squares[(*rest, slice(first, first + channels))] for first in range(size)])
        return x / (bias + factor * total) ** beta

    return context.calculate(node, run)


def group_normalization(node: Node, context: Context) -> Any:
    image, *weights = node.inputs
    context.prefer(image, context.image_layout(context.rank(image)))
    layout, epsilon = context.keep_layout(node), node.attributes["epsilon"]
    plan = read_group_normalization(node, layout)
    if context.owned(*weights) and context.computed(image) and None not in context.shape(image)[1:]:
        settings = context.settings(node)
        layer = layers.GroupNormalization(plan.groups, layout.index(1) - len(layout), epsilon, **settings)
        y = layer(context.tensors[image])
        context.own(weights, layer.gamma, layer.beta)
        return y

    def run(x: Any, scale: Any, bias: Any) -> Any:
        wide = ops.reshape(in_float32(x), plan.split(x.shape))
        mean, variance = ops.moments(wide, plan.axes, keepdims=True)
        normal = ops.reshape((wide - mean) * ops.rsqrt(variance + epsilon), x.shape)
        scale, bias = (ops.reshape(in_float32(vector), plan.along_channel) for vector in (scale, bias))
        return ops.cast(normal * scale + bias, x.dtype)

    return context.calculate(node, run)


def rms_normalization(node: Node, context: Context) -> Any:
    plan, (image, weight) = read_layer_normalization(node, context), node.inputs
    axes, epsilon = list(plan.axes), plan.epsilon
    if plan.full and context.owned(weight) and context.computed(image):
        layer = layers.RMSNormalization(axes, epsilon, **context.settings(node))
        y = layer(context.enter(node, 0, identity(context.rank(image))))
        context.own([weight], layer.scale)
        return y
    onnx, stretched = context.to_onnx(image), context.to_onnx(weight)
    return context.calculate(
        node,
        lambda x, scale: ops.rms_normalization(onnx(x), None, axes, epsilon) * ops.cast(stretched(scale), x.dtype),
    )


@in_onnx
def lp_normalization(node: Node, context: Context) -> Function:
    axis, order = read_axis(node, context), node.attributes["p"]
    return lambda x: ops.cast(ops.normalize(in_float32(x), axis, order, LEAST_NORM), x.dtype)
