"""ONNX on JAX: normalization. Imports JAX, `d5suite.levels`, `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from d5suite.backends.jax.operators.context import Call, Context, in_float32, typed
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.normalization import (
    LEAST_NORM,
    read_group_normalization,
    read_layer_normalization,
    read_lrn,
)
from d5suite.network.nodes.shape import read_axis


def batch_normalization(node: Node, context: Context) -> Call:
    """Return a callable; in training it also returns running statistics, at level 0 if wanted."""
    axes = tuple(place for place, axis in enumerate(context.keep_layout(node)) if axis != 1)
    epsilon, momentum, training = node.attributes["epsilon"], node.attributes["momentum"], context.training
    single = context.single
    alone = single and not any(context.wanted(node)[1:])

    def spread(vector: Any) -> Any:
        return jnp.expand_dims(vector, axes)

    def call(x: Any, *vectors: Any) -> Any:
        wide = in_float32(x)
        scale, bias, mean, variance = map(in_float32, vectors)
        if not training:
            factor = scale * lax.rsqrt(variance + epsilon)
            return ((wide - spread(mean)) * spread(factor) + spread(bias)).astype(x.dtype)
        batch_mean = wide.mean(axes)
        # The variance's derivative with respect to the mean is 0, and the output's is minus the
        # factor. Applied to vectors, this saves the backward pass a sum over the image.
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
        return (y, *typed(node, context, mean, variance)) if single else (y, mean, variance)

    return call


def instance_normalization(node: Node, context: Context) -> Call:
    layout, epsilon = context.keep_layout(node), node.attributes["epsilon"]
    axes = tuple(place for place, axis in enumerate(layout) if axis > 1)
    others = tuple(place for place, axis in enumerate(layout) if axis != 1)

    def call(x: Any, scale: Any, bias: Any) -> Any:
        wide, scale, bias = in_float32(x), in_float32(scale), in_float32(bias)
        centred = wide - wide.mean(axes, keepdims=True)
        inverse = lax.rsqrt(lax.square(centred).mean(axes, keepdims=True) + epsilon)
        y = centred * inverse * jnp.expand_dims(scale, others) + jnp.expand_dims(bias, others)
        return y.astype(x.dtype)

    return call


@in_onnx
def layer_normalization(node: Node, context: Context) -> Call:
    plan = read_layer_normalization(node, context)
    axes, epsilon = plan.axes, plan.epsilon
    alone = len(node.outputs) == 1

    def call(x: Any, scale: Any, bias: Any = None) -> Any:
        wide = in_float32(x)
        mean = wide.mean(axes, keepdims=True)
        centred = wide - mean
        inverse = lax.rsqrt(lax.square(centred).mean(axes, keepdims=True) + epsilon)
        y = centred * inverse * in_float32(scale)
        y = (y if bias is None else y + in_float32(bias)).astype(x.dtype)
        return y if alone else (y, *typed(node, context, mean, inverse))

    return call


def lrn(node: Node, context: Context) -> Call:
    plan, layout = read_lrn(node), context.keep_layout(node)
    kernel = tuple(plan.size if axis == 1 else 1 for axis in layout)
    pads = tuple((plan.before, plan.after) if axis == 1 else (0, 0) for axis in layout)
    ones = (1,) * len(layout)
    factor, beta, bias = plan.alpha / plan.size, plan.beta, plan.bias

    def call(x: Any) -> Any:
        wide = in_float32(x)
        squares = lax.reduce_window(lax.square(wide), wide.dtype.type(0), lax.add, kernel, ones, pads)
        return (wide / (bias + factor * squares) ** beta).astype(x.dtype)

    return call


def group_normalization(node: Node, context: Context) -> Call:
    plan, epsilon = read_group_normalization(node, context.keep_layout(node)), node.attributes["epsilon"]

    def call(x: Any, scale: Any, bias: Any) -> Any:
        wide = in_float32(x).reshape(plan.split(x.shape))
        centred = wide - wide.mean(plan.axes, keepdims=True)
        inverse = lax.rsqrt(lax.square(centred).mean(plan.axes, keepdims=True) + epsilon)
        scale, bias = (in_float32(vector).reshape(plan.along_channel) for vector in (scale, bias))
        return ((centred * inverse).reshape(x.shape) * scale + bias).astype(x.dtype)

    return call


@in_onnx
def rms_normalization(node: Node, context: Context) -> Call:
    plan = read_layer_normalization(node, context)

    def call(x: Any, scale: Any) -> Any:
        wide = in_float32(x)
        inverse = lax.rsqrt(lax.square(wide).mean(plan.axes, keepdims=True) + plan.epsilon)
        return (wide * inverse * in_float32(scale)).astype(x.dtype)

    return call


def lp_normalization(node: Node, context: Context) -> Call:
    axis = context.keep_layout(node).index(read_axis(node, context))
    order = node.attributes["p"]

    def call(x: Any) -> Any:
        wide = in_float32(x)
        if order == 1:
            return (wide / jnp.maximum(jnp.abs(wide).sum(axis, keepdims=True), LEAST_NORM)).astype(x.dtype)
        squares = lax.square(wide).sum(axis, keepdims=True)
        return (wide * lax.rsqrt(jnp.maximum(squares, LEAST_NORM**2))).astype(x.dtype)

    return call
