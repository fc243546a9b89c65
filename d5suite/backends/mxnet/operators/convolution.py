"""ONNX on MXNet: convolutions. Imports `d5suite.errors`, `d5suite.network` and `context`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d5suite.backends.mxnet.operators.context import Call, Context, padded
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.context import has_input
from d5suite.network.nodes.sliding import read_columns, read_conv, read_conv_transpose
from d5suite.network.nodes.windows import TransposedWindow


def conv(node: Node, context: Context) -> Call:
    w = read_conv(node, context)
    settings = {
        "kernel": w.kernel,
        "stride": w.strides,
        "dilate": w.dilations,
        "pad": w.pads_begin if w.symmetric else (0,) * len(w.kernel),
        "num_filter": context.shape(node.inputs[1])[0],
        "num_group": node.attributes["group"],
        "no_bias": not has_input(node, 2),
    }
    widths, symmetric = ((0, 0), (0, 0), *w.pads), w.symmetric

    def call(F: Any, x: Any, *weights: Any) -> Any:
        given = [weight for weight in weights if weight is not None]
        return F.Convolution(x if symmetric else padded(F, x, widths), *given, **settings)

    return call


def conv_transpose(node: Node, context: Context) -> Call:
    w, shape = read_conv_transpose(node, context), context.shape(node.inputs[1])
    groups, rank = node.attributes["group"], len(w.kernel)
    if shape[1] is None:
        raise NetworkError(f"{node.op_type} with an unknown number of channels is not implemented", where=node.name)
    settings = {"kernel": w.kernel, "dilate": w.dilations, "num_filter": shape[1] * groups, "num_group": groups}
    # Only oneDNN's kernel has three dimensions, in float32 and without dilation. MXNet's own
    # kernel, for float64, is wrong if there are both strides and dilations.
    dilated, wide = max(w.dilations) > 1, context.dtype == "float64"
    exotic = (rank == 3 and (wide or dilated)) or (wide and dilated and max(w.strides) > 1)
    if not exotic and w.symmetric and all(e < s for e, s in zip(w.output_padding, w.strides, strict=True)):
        settings.update(stride=w.strides, pad=w.pads_begin, adj=w.output_padding, no_bias=not has_input(node, 2))
        return lambda F, *inputs: F.Deconvolution(*(t for t in inputs if t is not None), **settings)
    widths = ((0, 0), (0, 0), *((-before, after) for before, after in zip(w.pads_begin, w.tail, strict=True)))

    def whole(F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        if exotic:
            y = _by_convolution(F, x, weight, w, settings, shape)
        else:
            y = F.Deconvolution(x, weight, stride=w.strides, no_bias=True, **settings)
        y = padded(F, y, widths)
        return y if bias is None else F.broadcast_add(y, F.reshape(bias, shape=(1, -1, *[1] * rank)))

    return whole


def _by_convolution(F: Any, x: Any, weight: Any, w: TransposedWindow, settings: Mapping[str, Any], shape: Shape) -> Any:
    """Convolve the image, spread with zeros between its pixels, with the mirrored kernel."""
    rank = len(shape)
    for axis, (size, stride) in enumerate(zip(w.image, w.strides, strict=True), start=2):
        if stride > 1:
            x = F.expand_dims(x, axis=axis + 1)
            x = F.concat(x, *[F.zeros_like(x)] * (stride - 1), dim=axis + 1)
            x = F.reshape(x, shape=(*[0] * axis, -3, *[0] * (rank - axis - 1)))
            x = F.slice_axis(x, axis=axis, begin=0, end=(size - 1) * stride + 1)
    mirrored = F.reverse(weight, axis=tuple(range(2, rank)))
    mirrored = F.reshape(mirrored, shape=(settings["num_group"], -1, *shape[1:]))
    mirrored = F.reshape(F.swapaxes(mirrored, 1, 2), shape=(-3, -2))
    return F.Convolution(x, mirrored, pad=tuple(span - 1 for span in w.spans), no_bias=True, **settings)


def col2_im(node: Node, context: Context) -> Call:
    """Col2Im."""
    w = read_columns(node, context).window
    if len(w.image) > 2:
        raise NetworkError("MXNet's col2im has one or two spatial axes", where=node.name)
    sizes, line = [n + sum(pair) for n, pair in zip(w.image, w.pads, strict=True)], len(w.image) == 1
    ahead = (1,) if line else ()  # the kernel fails on one axis
    settings = {
        "output_size": (*ahead, *sizes),
        "kernel": (*ahead, *w.kernel),
        "stride": (*ahead, *w.strides),
        "dilate": (*ahead, *w.dilations),
        "pad": (0, 0),
    }
    widths = ((0, 0), (0, 0), *((-before, -after) for before, after in w.pads))

    def call(F: Any, x: Any, *_: Any) -> Any:
        y = F.col2im(x, **settings)
        return padded(F, F.squeeze(y, axis=2) if line else y, widths)

    return call
