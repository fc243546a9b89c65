"""ONNX in Keras: pooling. Imports Keras, NumPy, `d5suite.network` and `context`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from keras import layers, ops

from d5suite.backends.keras.operators.context import (
    Calculation,
    Context,
    Factory,
    Function,
    first_extreme,
    in_float32,
    in_onnx,
)
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_global_pool, read_pool, read_unpool
from d5suite.network.nodes.windows import Window

_MAX_POOLINGS = (layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D)
_AVERAGE_POOLINGS = (layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D)
_GLOBAL_AVERAGES = (layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D)
_GLOBAL_MAXIMA = (layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D)
"""Layers by number of spatial dimensions, less one."""


def max_pool(node: Node, context: Context) -> Any:
    w, x = read_pool(node, context), context.image(node)
    integer = context.is_integer(node.inputs[0])  # no kernel pools integers
    if integer or not w.same or len(node.outputs) > 1 or _by_taps(w, context):
        x = _padded(node, context, w, x, np.iinfo(context.dtypes[node.inputs[0]]).min if integer else -math.inf)
    if len(node.outputs) > 1:
        context.layouts[node.outputs[1]] = context.layout(node.outputs[0])
        return _with_indices(node, context, w, x)
    if integer or _by_taps(w, context):
        larger = _larger if context.xla and not integer else ops.maximum
        return _combined(node, context, w, x, lambda taps: reduce(larger, taps))
    settings = {"data_format": context.data_format, **context.settings(node)}
    padding = "same" if w.padded and w.same else "valid"
    return _MAX_POOLINGS[len(w.kernel) - 1](w.kernel, w.strides, padding, **settings)(x)


def _with_indices(node: Node, context: Context, w: Window, x: Any) -> Any:
    """Return maxima, and their indices in the whole tensor in ONNX's layout."""
    layout, area = context.layout(node.outputs[0]), math.prod(w.image)
    steps = w.cell_strides(column_major=bool(node.attributes["storage_order"]))
    offsets = [np.dot(cell, np.multiply(w.dilations, steps)) for cell in itertools.product(*map(range, w.kernel))]
    corner = np.zeros((1, 1, *[1] * len(steps)), np.int64)
    for axis, step in enumerate(steps):
        place = (np.arange(w.outputs[axis]) * w.strides[axis] - w.pads_begin[axis]) * step
        corner = corner + place.reshape(-1, *[1] * (len(steps) - 1 - axis))
    corner = corner.transpose(layout)
    from_corner, corners = (ops.convert_to_tensor(np.asarray(n), dtype="int32") for n in (offsets, corner))
    taps = _taps(w, context)
    largest = first_extreme(ops.max, ops.argmax) if context.xla else ops.max

    def pool(y: Any) -> Any:
        seen, channels = ops.stack(taps(y)), y.shape[layout.index(1)]
        planes = ops.reshape(ops.arange(ops.shape(y)[0] * channels, dtype="int32"), (-1, channels, *[1] * len(steps)))
        first = ops.transpose(planes * area, layout)
        within = ops.take(from_corner, ops.argmax(seen, 0)) + corners
        return largest(seen, (0,)), ops.cast(within + first, "int64")

    return tuple(Calculation(pool, [...], *_results(node, context), **context.settings(node))(x))


def _larger(x: Any, y: Any) -> Any:
    """Return the maximum; its gradient does not compare elements with it (see `first_extreme`)."""
    return ops.where(x > y, x, ops.where(x < y, y, x / 2 + y / 2))


def _results(node: Node, context: Context) -> tuple[Any, Any, Any]:
    """Return shape and type of maxima, and of their indices, as a `Calculation` takes them."""
    integer = str(context.dtypes[node.inputs[0]]) if context.is_integer(node.inputs[0]) else None
    stored = [context.stored(name or node.outputs[0]) for name in node.outputs]
    return stored[0], integer, [(stored[1], "int64")]


def _taps(w: Window, context: Context) -> Function:
    """Return a function of a padded image: for each cell of the window, the pixels it covers."""
    cuts = [tuple(context.spatial(cut, slice(None))) for cut in w.taps()]
    return lambda x: [x[cut] for cut in cuts]


def _by_taps(w: Window, context: Context) -> bool:
    """Return whether to pool by cells: dilated, or in 3-D on TensorFlow except in float32."""
    return w.dilated or (len(w.kernel) == 3 and context.backend == "tensorflow" and context.policy != "float32")


def _combined(node: Node, context: Context, w: Window, x: Any, combine: Function) -> Any:
    """Pool a padded image by combining the cells of each window."""
    taps, shape = _taps(w, context), context.stored(node.outputs[0])
    return Calculation(lambda y: combine(taps(y)), [...], shape, **context.settings(node))(x)


def _padded(node: Node, context: Context, w: Window, x: Any, value: float) -> Any:
    """Return the image, padded for a window."""
    if not w.padded:
        return x
    pad, widths = context.padding(w), context.spatial(w.pads, (0, 0))
    shape = tuple(size + sum(width) if any(width) else size for size, width in zip(x.shape, widths, strict=True))
    return Calculation(lambda y: pad(y, value), [...], shape, **context.settings(node, ".pad"))(x)


def average_pool(node: Node, context: Context) -> Any:
    w, include = read_pool(node, context), bool(node.attributes["count_include_pad"])
    x = context.image(node)
    # On PyTorch, Keras repeats the border where `same` pads one side more, and counts it.
    symmetric = all(before == after for before, after in w.pads)
    native = w.same and not include and not w.dilated and (symmetric or context.backend != "torch")
    if not _by_taps(w, context) and (native or not w.padded):
        settings = {"data_format": context.data_format, **context.settings(node)}
        padding = "same" if w.padded else "valid"
        return _AVERAGE_POOLINGS[len(w.kernel) - 1](w.kernel, w.strides, padding, **settings)(x)
    x = _padded(node, context, w, x, 0.0)
    scale = w.divisor_correction(include_pad=include)
    scale = scale[..., None] if context.images_last else scale
    if _by_taps(w, context):
        scale = scale / math.prod(w.kernel)
        return _combined(
            node, context, w, x, lambda taps: reduce(ops.add, taps) * ops.convert_to_tensor(scale, dtype=taps[0].dtype)
        )

    def average(y: Any) -> Any:
        y = ops.average_pool(y, w.kernel, w.strides, "valid", context.data_format)
        return y if np.all(scale == 1) else y * ops.convert_to_tensor(scale, dtype=y.dtype)

    return Calculation(average, [...], context.stored(node.outputs[0]), **context.settings(node))(x)


def lp_pool(node: Node, context: Context) -> Any:
    w, order = read_pool(node, context), node.attributes["p"]
    x, taps = _padded(node, context, w, context.image(node), 0.0), _taps(w, context)
    by_taps, count = _by_taps(w, context), math.prod(w.kernel)

    def pool(y: Any) -> Any:
        powers = ops.abs(in_float32(y)) ** order
        if by_taps:
            sums = reduce(ops.add, taps(powers))
        else:
            sums = ops.average_pool(powers, w.kernel, w.strides, "valid", context.data_format) * count
        return ops.cast(_root(sums, order), y.dtype)

    return Calculation(pool, [...], context.stored(node.outputs[0]), **context.settings(node))(x)


def _root(sums: Any, order: int) -> Any:
    """Return the root of this order, with the gradient 0 at 0."""
    return ops.where(sums > 0, ops.where(sums > 0, sums, 1) ** (1 / order), 0)


def global_lp_pool(node: Node, context: Context) -> Any:
    axes, order = [place for place, axis in enumerate(context.keep_layout(node)) if axis > 1], node.attributes["p"]

    def norm(x: Any) -> Any:
        return ops.cast(_root(ops.sum(ops.abs(in_float32(x)) ** order, axes, keepdims=True), order), x.dtype)

    return context.calculate(node, norm)


@in_onnx
def max_unpool(node: Node, context: Context) -> Function:
    plan = read_unpool(node, context)

    def run(x: Any, indices: Any, *_: Any) -> Any:
        batch = ops.shape(x)[0]
        y = ops.zeros((batch * plan.channels * math.prod(plan.image),), dtype=x.dtype)
        y = ops.scatter_update(y, ops.reshape(indices, (-1, 1)), ops.reshape(x, (-1,)))
        return ops.pad(ops.reshape(y, (batch, plan.channels, *plan.image)), plan.padding)

    return run


def global_pool(kinds: Sequence[Any]) -> Factory:
    """Return a factory for a pooling over all spatial axes."""

    def factory(node: Node, context: Context) -> Any:
        kind = kinds[read_global_pool(node, context) - 1]
        return kind(context.data_format, keepdims=True, **context.settings(node))(context.image(node))

    return factory


def global_max_pool(node: Node, context: Context) -> Any:
    if not context.xla:
        return global_pool(_GLOBAL_MAXIMA)(node, context)
    axes = tuple(place for place, axis in enumerate(context.keep_layout(node)) if axis > 1)
    largest = first_extreme(ops.max, ops.argmax)
    return context.calculate(node, lambda x: largest(x, axes, keepdims=True))


OPERATORS: dict[str, Factory] = {
    "GlobalAveragePool": global_pool(_GLOBAL_AVERAGES),
}
