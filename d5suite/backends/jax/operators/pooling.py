"""ONNX on JAX: pooling. Imports JAX, NumPy, `d5suite.levels`, `d5suite.network` and `context`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from d5suite.backends.jax.operators.context import (
    NOWHERE,
    Call,
    Context,
    Factory,
    in_float32,
    largest,
    lowest,
    places,
    prefer,
)
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.layouts import Layout, arrange
from d5suite.network.nodes.sliding import read_pool, read_unpool
from d5suite.network.nodes.windows import Window


class _Pooling:
    """A pooling window over all axes in stored order, as `lax.reduce_window` takes it."""

    def __init__(self, w: Window, layout: Layout) -> None:
        self.kernel, self.strides, self.dilations = (arrange(layout, n, 1) for n in (w.kernel, w.strides, w.dilations))
        self.pads = arrange(layout, w.pads, (0, 0))
        self.dilated = w.dilated
        self.taps = [arrange(layout, tap, None) for tap in w.taps()]

    def reduce(self, x: Any, start: Any, function: Call) -> Any:
        """Reduce each window; ``start`` is the function's neutral element."""
        return self.over_windows(x, x.dtype.type(start), function)

    def maximum(self, x: Any) -> Any:
        """Return each window's maximum."""
        if not self.dilated:
            return self.reduce(x, lowest(x), lax.max)
        return _dilated_maximum(self, x)  # for which reduce_window has no gradient

    def over_windows(self, x: Any, start: Any, function: Call) -> Any:
        """Reduce each window of one tensor, or of several with a ``start`` each."""
        return lax.reduce_window(
            x, start, function, self.kernel, self.strides, self.pads, window_dilation=self.dilations
        )

    def cells(self, x: Any, fill: Any) -> list[Any]:
        """Return, for each cell of the kernel, the values that all windows have there."""
        x = lax.pad(x, x.dtype.type(fill), [(begin, end, 0) for begin, end in self.pads])
        whole = [slice(0, n, 1) for n in x.shape]
        found = []
        for tap in self.taps:
            cut = [each or every for each, every in zip(tap, whole, strict=True)]
            found.append(lax.slice(x, [c.start for c in cut], [c.stop for c in cut], [c.step for c in cut]))
        return found


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dilated_maximum(pooling: _Pooling, x: Any) -> Any:
    return pooling.reduce(x, lowest(x), lax.max)


def _derivative(pooling: _Pooling, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    (x,), (dx,) = primals, tangents
    start = (x.dtype.type(lowest(x)), NOWHERE)
    y, place = pooling.over_windows((x, places(x.shape, range(x.ndim))), start, prefer(jnp.greater))
    return y, jnp.take(dx, place, mode="clip")


_dilated_maximum.defjvp(_derivative)


def max_pool(node: Node, context: Context) -> Call:
    w, layout = read_pool(node, context), context.keep_layout(node)
    pooling = _Pooling(w, layout)
    if len(node.outputs) == 1:
        return pooling.maximum
    context.layouts[node.outputs[1]] = layout
    order = "F" if node.attributes["storage_order"] else "C"

    def with_indices(x: Any) -> Any:
        planes = [x.shape[layout.index(axis)] for axis in (0, 1)]
        plane = jnp.arange(math.prod(planes)).reshape(*planes, *[1] * len(w.image))
        within = jnp.arange(math.prod(w.image)).reshape(w.image, order=order)
        places = (plane * within.size + within).transpose(layout)
        seen = zip(pooling.cells(x, lowest(x)), pooling.cells(places, 0), strict=True)
        return pooling.maximum(x), reduce(_higher, seen)[1]

    return with_indices


def _higher(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return, per element, the (value, place) with the higher value; the first one of equals."""
    better = second[0] > first[0]
    return jnp.where(better, second[0], first[0]), jnp.where(better, second[1], first[1])


def average_pool(node: Node, context: Context) -> Call:
    w, layout = read_pool(node, context), context.keep_layout(node)
    pooling = _Pooling(w, layout)
    counts = w.counts(include_pad=bool(node.attributes["count_include_pad"]))
    uniform = bool((counts == counts.flat[0]).all())
    counts = np.array(counts.flat[0]) if uniform else counts[None, None].transpose(layout)

    def call(x: Any) -> Any:
        total = pooling.reduce(in_float32(x), 0.0, lax.add)
        return (total / counts.astype(total.dtype)).astype(x.dtype)

    return call


def lp_pool(node: Node, context: Context) -> Call:
    order, pooling = node.attributes["p"], _Pooling(read_pool(node, context), context.keep_layout(node))
    return lambda x: _root(pooling.reduce(jnp.abs(in_float32(x)) ** order, 0.0, lax.add), order).astype(x.dtype)


def _root(sums: Any, order: int) -> Any:
    """Return the root of this order, with the gradient 0 at 0."""
    return jnp.where(sums > 0, jnp.where(sums > 0, sums, 1) ** (1 / order), 0)


def global_lp_pool(node: Node, context: Context) -> Call:
    order = node.attributes["p"]

    def norm(x: Any, axes: tuple[int, ...], *, keepdims: bool) -> Any:
        return _root((jnp.abs(in_float32(x)) ** order).sum(axes, keepdims=keepdims), order).astype(x.dtype)

    return global_pool(norm)(node, context)


@in_onnx
def max_unpool(node: Node, context: Context) -> Call:
    plan = read_unpool(node, context)

    def call(x: Any, indices: Any, *_: Any) -> Any:
        y = jnp.zeros(x.shape[0] * plan.channels * math.prod(plan.image), x.dtype)
        y = y.at[indices.reshape(-1)].set(x.reshape(-1)).reshape(x.shape[0], plan.channels, *plan.image)
        return lax.pad(y, y.dtype.type(0), [(*pair, 0) for pair in plan.padding])

    return call


def global_pool(function: Call) -> Factory:
    """Return a factory for GlobalAveragePool or GlobalMaxPool."""

    def factory(node: Node, context: Context) -> Call:
        axes = tuple(place for place, axis in enumerate(context.keep_layout(node)) if axis > 1)
        return lambda x: function(x, axes, keepdims=True)

    return factory


def global_max_pool(node: Node, context: Context) -> Call:
    """Pool by `largest`; at level 0, where XLA recomputes no input, by JAX's own maximum."""
    return global_pool(jnp.max if context.single else largest)(node, context)


OPERATORS: dict[str, Factory] = {
    "GlobalAveragePool": global_pool(jnp.mean),
}
