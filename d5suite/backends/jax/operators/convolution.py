"""ONNX on JAX: convolutions. Imports JAX, `d5suite.levels`, `d5suite.network` and `context`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from d5suite.backends.jax.operators.context import Call, Context, broadcast, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.context import Packing
from d5suite.network.nodes.layouts import Layout, channels_last, identity, kernel_last
from d5suite.network.nodes.sliding import read_columns, read_conv, read_conv_transpose
from d5suite.network.nodes.windows import TransposedWindow, Window


def conv(node: Node, context: Context) -> Call:
    w = read_conv(node, context)
    output = context.layouts[node.outputs[0]] = channels_last(len(w.kernel) + 2)
    layouts = (context.layout(node.inputs[0]), context.layout(node.inputs[1]), output)
    return _biased(_convolution(node, context, w, layouts, window_strides=w.strides, padding=w.pads))


def conv_transpose(node: Node, context: Context) -> Call:
    """Return a convolution of the image, spread with zeros, with the mirrored weight."""
    w, sizes = read_conv_transpose(node, context), context.shape(node.inputs[1])
    rank = len(sizes)
    output = context.layouts[node.outputs[0]] = channels_last(rank)
    layouts = (context.layout(node.inputs[0]), kernel_last(rank), output)
    pads = [
        (span - 1 - begin, span - 1 + tail) for span, begin, tail in zip(w.spans, w.pads_begin, w.tail, strict=True)
    ]
    convolve = _convolution(
        node, context, w, layouts, window_strides=(1,) * (rank - 2), padding=pads, lhs_dilation=w.strides
    )
    packing = _mirrored_weight(sizes, node.attributes["group"])
    if not context.single:
        to_onnx = context.convert(node.inputs[1], identity(rank))  # a computed weight may be stored as an image
        return _biased(lambda x, weight: convolve(x, packing.pack(to_onnx(weight))))
    context.packing[node.inputs[1]] = packing
    return _biased(convolve)


def _convolution(
    node: Node, context: Context, w: Window | TransposedWindow, layouts: Sequence[Layout], **settings: Any
) -> Call:
    """Return a convolution of tensors in the layouts of image, weight and output."""
    dimensions = lax.ConvDimensionNumbers(*(tuple(map(layout.index, range(len(layout)))) for layout in layouts))
    return partial(
        lax.conv_general_dilated, rhs_dilation=w.dilations, dimension_numbers=dimensions,
        feature_group_count=node.attributes["group"], precision=context.precision, **settings,
    )  # fmt: skip


def _biased(convolve: Call) -> Call:
    """Return the convolution with an optional bias."""

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        y = convolve(x, weight)
        return y if bias is None else broadcast(jnp.add, y, bias)

    return call


def _mirrored_weight(shape: Shape, groups: int) -> Packing:
    """Return a packing of weights (inputs, outputs of a group, spatial).

    The packed form is (mirrored spatial, inputs of a group, outputs).
    """
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


@in_onnx
def col2_im(node: Node, context: Context) -> Call:
    """Col2Im; indices past the end are the padding's, and are dropped."""
    plan = read_columns(node, context)
    image, channels, cells = plan.window.image, plan.channels, plan.cells

    def call(x: Any, *_: Any) -> Any:
        values = in_float32(x).reshape(x.shape[0], channels, -1)
        y = jnp.zeros((*values.shape[:2], math.prod(image)), values.dtype).at[..., cells].add(values, mode="drop")
        return y.reshape(*y.shape[:2], *image).astype(x.dtype)

    return call
