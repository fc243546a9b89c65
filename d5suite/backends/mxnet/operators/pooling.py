"""ONNX on MXNet: pooling. Imports NumPy, `d5suite.errors`, `d5suite.network` and `context`."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Literal

import numpy as np

from d5suite.backends.mxnet.operators.context import Call, Context, Factory, padded, places
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_global_pool, read_pool, read_unpool
from d5suite.network.nodes.windows import Window


def _is_native(w: Window) -> bool:
    """Return whether MXNet can pool this: symmetric padding below the kernel, no dilation."""
    inside = all(p < k for p, k in zip(w.pads_begin, w.kernel, strict=True))
    return w.symmetric and inside and not w.dilated


def _cells(F: Any, x: Any, w: Window) -> list[Any]:
    """Return, for each cell of the kernel, the values that all windows have there."""
    return [
        F.slice(
            x,
            begin=(None, None, *(axis.start for axis in tap)),
            end=(None, None, *(axis.stop for axis in tap)),
            step=(None, None, *w.strides),
        )
        for tap in w.taps()
    ]


def max_pool(node: Node, context: Context) -> Call:
    w = read_pool(node, context)
    pool = _max_pool(w)
    return _with_indices(node, context, w, pool) if any(context.wanted(node)[1:]) else pool


def _max_pool(w: Window) -> Call:
    settings = {"kernel": w.kernel, "stride": w.strides, "pool_type": "max"}
    if _is_native(w):
        zipped = zip(w.image, w.pads_begin, w.kernel, w.strides, strict=True)
        rooms = [(size + 2 * begin - k, stride) for size, begin, k, stride in zipped]
        for convention, counts in (
            ("valid", tuple(room // stride + 1 for room, stride in rooms)),
            ("full", tuple(-(-room // stride) + 1 for room, stride in rooms)),
        ):
            if counts == w.outputs:
                settings.update(pad=w.pads_begin, pooling_convention=convention)
                return lambda F, x: F.Pooling(x, **settings)
    widths = ((0, 0), (0, 0), *w.pads)
    if not w.dilated:
        return lambda F, x: F.Pooling(padded(F, x, widths, -math.inf), **settings)
    return lambda F, x: reduce(F.broadcast_maximum, _cells(F, padded(F, x, widths, -math.inf), w))


def _with_indices(node: Node, context: Context, w: Window, pool: Call) -> Call:
    """Return a pool that also gives indices into the whole tensor; MXNet has no such operator."""
    area = math.prod(w.image)
    order: Literal["C", "F"] = "F" if node.attributes["storage_order"] else "C"
    numbers = np.arange(area).reshape(w.image, order=order)
    context.keep(node, np.pad(numbers, w.pads)[None, None])
    widths, channels = ((0, 0), (0, 0), *w.pads), context.shape(node.inputs[0])[1]
    rank = len(widths)

    def call(F: Any, x: Any, cells: Any) -> Any:
        seen = zip(_cells(F, padded(F, x, widths, -math.inf), w), _cells(F, cells, w), strict=True)
        (values, found), *others = seen
        found = F.broadcast_like(found, values)
        for value, place in others:
            better = value > values
            values, found = F.where(better, value, values), F.where(better, F.broadcast_like(place, value), found)
        plane = places(F, values, 0, rank) * channels + places(F, values, 1, rank)
        return pool(F, x), F.cast(found, dtype="int64") + plane * area

    return call


def average_pool(node: Node, context: Context) -> Call:
    """Pool with the padding counted, then correct; otherwise oneDNN would log every new shape."""
    w = read_pool(node, context)
    means = _means(w)
    correction = w.divisor_correction(include_pad=bool(node.attributes["count_include_pad"]))
    if not (correction != 1).any():
        return means
    context.keep(node, correction[None, None])
    return lambda F, x, factor: F.broadcast_mul(means(F, x), factor)


def _means(w: Window) -> Call:
    """Return the average of each whole window, padding and overhang included."""
    native = _is_native(w) and not any(w.overhang)
    settings = {"kernel": w.kernel, "stride": w.strides, "pool_type": "avg", "count_include_pad": True}
    if native:
        settings["pad"] = w.pads_begin
    widths = ((0, 0), (0, 0), *w.pads)

    def call(F: Any, x: Any) -> Any:
        x = x if native else padded(F, x, widths)
        return F.add_n(*_cells(F, x, w)) / math.prod(w.kernel) if w.dilated else F.Pooling(x, **settings)

    return call


def lp_pool(node: Node, context: Context) -> Call:
    w, order = read_pool(node, context), node.attributes["p"]
    means, count = _means(w), math.prod(w.kernel)
    return lambda F, x: _root(F, means(F, F.abs(x) ** order) * count, order)


def _root(F: Any, sums: Any, order: int) -> Any:
    """Return the root of this order, with the gradient 0 at 0."""
    positive = sums > 0
    return F.where(positive, F.where(positive, sums, F.ones_like(sums)) ** (1 / order), F.zeros_like(sums))


def global_lp_pool(node: Node, context: Context) -> Call:
    axes, order = tuple(range(2, context.rank(node.inputs[0]))), node.attributes["p"]
    return lambda F, x: _root(F, F.sum(F.abs(x) ** order, axis=axes, keepdims=True), order)


def max_unpool(node: Node, context: Context) -> Call:
    plan, batch = read_unpool(node, context), context.shape(node.inputs[0])[0]
    if batch is None:
        raise NetworkError(
            "MaxUnpool of a batch of unknown size: MXNet's scatter wants the whole shape", where=node.name
        )
    if plan.overlapping:
        raise NetworkError("MaxUnpool of windows that overlap: MXNet's scatter adds equal indices", where=node.name)
    shape = (batch, plan.channels, *plan.image)

    def call(F: Any, x: Any, indices: Any, *_: Any) -> Any:
        values, cells = F.reshape(x, shape=(-1,)), F.reshape(indices, shape=(1, -1))
        y = F._internal._backward_gather_nd(values, cells, shape=(math.prod(shape),))
        return padded(F, F.reshape(y, shape=shape), plan.padding)

    return call


def global_pool(kind: str) -> Factory:
    """Return a factory for GlobalAveragePool or GlobalMaxPool."""

    def factory(node: Node, context: Context) -> Call:
        kernel = (1,) * read_global_pool(node, context)
        return lambda F, x: F.Pooling(x, kernel=kernel, global_pool=True, pool_type=kind)

    return factory


OPERATORS: dict[str, Factory] = {
    "GlobalAveragePool": global_pool("avg"),
    "GlobalMaxPool": global_pool("max"),
}
