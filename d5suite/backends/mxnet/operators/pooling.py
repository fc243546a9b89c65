"""ONNX on MXNet: pooling. Imports `d5suite.errors`, `d5suite.network` and `context`."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from d5suite.backends.mxnet.operators.context import Call, Context, Factory, padded
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_global_pool, read_pool
from d5suite.network.nodes.windows import Window


def _is_native(w: Window) -> bool:
    """Whether MXNet's padding can express the window's: symmetric, below the kernel, undilated."""
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
    if any(context.wanted(node)[1:]):
        raise NetworkError("MaxPool with indices is not implemented: MXNet's pooling has none", where=node.name)
    w = read_pool(node, context)
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


def average_pool(node: Node, context: Context) -> Call:
    """MXNet counts its own padding, and a factor corrects it: oneDNN would log every new shape."""
    w = read_pool(node, context)
    native = _is_native(w) and not any(w.overhang)
    settings = {"kernel": w.kernel, "stride": w.strides, "pool_type": "avg", "count_include_pad": True}
    if native:
        settings["pad"] = w.pads_begin
    widths = ((0, 0), (0, 0), *w.pads)
    correction = w.divisor_correction(include_pad=bool(node.attributes["count_include_pad"]))
    corrected = bool((correction != 1).any())
    if corrected:
        context.keep(node, correction[None, None])

    def call(F: Any, x: Any, factor: Any = None) -> Any:
        x = x if native else padded(F, x, widths)
        y = F.add_n(*_cells(F, x, w)) / math.prod(w.kernel) if w.dilated else F.Pooling(x, **settings)
        return F.broadcast_mul(y, factor) if corrected else y

    return call


def global_pool(kind: str) -> Factory:
    """Return a factory for GlobalAveragePool or GlobalMaxPool."""

    def factory(node: Node, context: Context) -> Call:
        kernel = (1,) * read_global_pool(node, context)
        return lambda F, x: F.Pooling(x, kernel=kernel, global_pool=True, pool_type=kind)

    return factory


OPERATORS: dict[str, Factory] = {
    "AveragePool": average_pool,
    "GlobalAveragePool": global_pool("avg"),
    "GlobalMaxPool": global_pool("max"),
    "MaxPool": max_pool,
}
