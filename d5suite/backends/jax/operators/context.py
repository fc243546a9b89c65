"""Common parts of JAX's operator factories: their context, and native helpers.

Imports JAX, NumPy, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from d5suite.levels.layouts import ConvertingContext
from d5suite.network import Node
from d5suite.network.nodes.layouts import Conversion

Call = Callable[..., Any]
Factory = Callable[[Node, "Context"], Call]

HEADS_INSIDE = (0, 2, 1, 3)
"""The layout batch, steps, heads, size, which JAX's attention takes."""


@dataclass(kw_only=True)
class Context(ConvertingContext):
    """What a factory knows about its node and the network around it.

    Attributes
    ----------
    precision : jax.lax.Precision or None
        Precision of matrix products and convolutions; None for XLA's default.
    device : str
        The kind of device that custom operators are built for.
    """

    precision: lax.Precision | None = None
    device: str = "cpu"

    def moved(self, how: Conversion) -> Call:
        added = tuple(range(how.added))
        return lambda x: jnp.expand_dims(x, added).transpose(how.order)


def in_float32(x: Any) -> Any:
    """Widen 16-bit activations to float32; float64 stays."""
    return x.astype(jnp.float32) if _is_narrow(x) else x


_NARROW = frozenset({np.dtype(np.float16), np.dtype(jnp.bfloat16)})
"""Types too narrow for sums."""


def _is_narrow(x: Any) -> bool:
    return x.dtype in _NARROW


def sum_type(x: Any) -> Any:
    """Return the type for sums over a tensor."""
    return jnp.promote_types(x.dtype, jnp.float32)


def lowest(x: Any) -> Any:
    """Return the neutral element of the maximum."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return -math.inf
    return jnp.iinfo(x.dtype).min if jnp.issubdtype(x.dtype, jnp.integer) else False


def highest(x: Any) -> Any:
    """Return the neutral element of the minimum."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return math.inf
    return jnp.iinfo(x.dtype).max if jnp.issubdtype(x.dtype, jnp.integer) else True


# JAX differentiates a maximum by comparing the elements with it. Under ``jit``, XLA may compute
# either of them again, in another fusion and with other roundings; then no element equals the
# maximum, and the gradient is lost or infinite (docs/findings.md). The maxima and minima below
# compare the elements with each other, once, and keep an index, which no rounding changes.


def prefer(better: Call) -> Call:
    """Return a function that reduces pairs (value, place) to the best one, the first of equals."""

    def best(first: Sequence[Any], second: Sequence[Any]) -> Sequence[Any]:
        (x, i), (y, j) = first, second
        chosen = better(x, y) | jnp.isnan(x) | ((x == y) & (i < j))
        return jnp.where(chosen, x, y), jnp.where(chosen, i, j)

    return best


NOWHERE = np.int32(np.iinfo(np.int32).max)
"""An index greater than all elements' indices."""


def places(shape: Sequence[int], axes: Sequence[int]) -> Any:
    """Return each element's flat index along some axes."""
    index: Any = np.int32(0)
    for axis in axes:
        index = index * np.int32(shape[axis]) + lax.broadcasted_iota(np.int32, shape, axis)
    return index


def _extreme(function: Call, better: Call, start: Call) -> Call:
    """Return a reduction whose gradient goes to the first of equal elements."""

    @partial(jax.custom_jvp, nondiff_argnums=(1, 2))
    def extreme(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
        return function(x, axes, keepdims=keepdims)

    def derivative(axes: tuple[int, ...], keepdims: bool, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        (x,), (dx,) = primals, tangents
        index = places(x.shape, axes)
        y, place = lax.reduce((x, index), (x.dtype.type(start(x)), NOWHERE), prefer(better), axes)
        dy = jnp.where(index == jnp.expand_dims(place, axes), dx, 0).sum(axes)
        return (jnp.expand_dims(y, axes), jnp.expand_dims(dy, axes)) if keepdims else (y, dy)

    extreme.defjvp(derivative)

    def call(x: Any, axes: tuple[int, ...], *, keepdims: bool) -> Any:
        return extreme(x, axes, keepdims)

    return call


largest = _extreme(jnp.max, jnp.greater, lowest)
smallest = _extreme(jnp.min, jnp.less, highest)


def typed(node: Node, context: Context, *further: Any) -> list[Any]:
    """Cast the outputs after the first to their ONNX types, None for an unwanted one."""
    return [
        result.astype(context.dtypes[name]) if name else None
        for name, result in zip(node.outputs[1:], further, strict=False)
    ]


def broadcast(function: Call, x: Any, y: Any) -> Any:
    """Apply a function of two tensors.

    XLA sums the gradient of a broadcast tensor in the type in which it is broadcast, so narrow
    tensors are widened first.
    """
    return _widened(function, x, y) if _is_narrow(x) and x.shape != y.shape else function(x, y)


def _in_wider_type(function: Call, x: Any, y: Any) -> Any:
    return function(in_float32(x), in_float32(y)).astype(x.dtype)


_widened = jax.jit(_in_wider_type, static_argnums=0, inline=True)
"""Runs the function in float32, as one program even in mode ``eager``."""
