"""ONNX on JAX: element-wise operators.

Imports JAX, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from d5suite.backends.jax.operators.context import Call, Context, Factory, broadcast
from d5suite.levels.layouts import converting, same, unary
from d5suite.network import Node
from d5suite.network.nodes.elementwise import NUMPY_BINARY, NUMPY_UNARY, infinite_signs, read_clip, read_dropout


def binary(function: Call) -> Factory:
    """Return a factory for a function of two tensors, repeated over more."""
    each = partial(broadcast, function)

    def factory(node: Node, context: Context) -> Call:
        return converting(lambda *xs: reduce(each, xs), context.aligned(node))

    return factory


def _mish(x: Any) -> Any:
    return x * jnp.tanh(jax.nn.softplus(x))


def _pow(x: Any, y: Any) -> Any:
    return jnp.power(x, y).astype(x.dtype)


def _divide(x: Any, y: Any) -> Any:
    """Divide; ONNX truncates quotients of integers."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(x, y))
    return jnp.divide(x, y)


def clip(node: Node, context: Context) -> Call:
    context.keep_layout(node)
    if context.single:  # there bounds are fixed, and not passed
        low, high = read_clip(node, context)
        return lambda x, *_: jnp.clip(x, low, high)
    return lambda x, low=None, high=None: jnp.clip(x, low, high)


def dropout(node: Node, context: Context) -> Call:
    """Return a callable that in training mode takes a random key, ``key``."""
    probability = read_dropout(node, context)
    masked = len(node.outputs) > 1
    for output in node.outputs:
        context.layouts[output] = context.layout(node.inputs[0])

    def call(x: Any, *_: Any, key: jax.Array | None = None) -> Any:
        if key is None or probability == 0:
            return (x, jnp.ones_like(x, bool)) if masked else x
        kept = jax.random.bernoulli(key, 1 - probability, x.shape)
        y = jnp.where(kept, x / (1 - probability), 0)
        return (y, kept) if masked else y

    return call


def _p_relu(x: Any, slope: Any) -> Any:
    return jnp.where(x > 0, x, slope * x)


def mean(node: Node, context: Context) -> Call:
    count, total = len(node.inputs), binary(jnp.add)(node, context)
    return lambda *xs: total(*xs) / count


def where(node: Node, context: Context) -> Call:
    return converting(jnp.where, context.aligned(node))


def mod(node: Node, context: Context) -> Call:
    return binary(jnp.fmod if node.attributes["fmod"] else jnp.remainder)(node, context)


def is_inf(node: Node, context: Context) -> Call:
    negative, positive = infinite_signs(node)
    return unary(lambda x: (jnp.isneginf(x) & bool(negative)) | (jnp.isposinf(x) & bool(positive)))(node, context)


def cast(node: Node, context: Context) -> Call:
    dtype = context.dtypes[node.outputs[0]]
    return unary(lambda x: x.astype(dtype))(node, context)


def bit_shift(node: Node, context: Context) -> Call:
    return binary(jnp.left_shift if node.attributes["direction"] == "LEFT" else jnp.right_shift)(node, context)


OPERATORS: dict[str, Factory] = {
    **{name: unary(getattr(jnp, function)) for name, function in NUMPY_UNARY.items()},
    **{name: binary(getattr(jnp, function)) for name, function in NUMPY_BINARY.items()},
    "Add": binary(jnp.add),
    "Div": binary(_divide),
    "Elu": unary(jax.nn.elu, "alpha"),
    "Erf": unary(lax.erf),
    "Gelu": unary(lambda x, approximate: jax.nn.gelu(x, approximate == "tanh"), "approximate"),
    "HardSigmoid": unary(lambda x, alpha, beta: jnp.clip(alpha * x + beta, 0, 1), "alpha", "beta"),
    "HardSwish": unary(jax.nn.hard_swish),
    "Identity": unary(same),
    "LeakyRelu": unary(jax.nn.leaky_relu, negative_slope="alpha"),
    "Mish": unary(_mish),
    "PRelu": binary(_p_relu),
    "Pow": binary(_pow),
    "Relu": unary(jax.nn.relu),
    # `jax.nn.selu` has other digits.
    "Selu": unary(lambda x, alpha, gamma: gamma * jax.nn.elu(x, alpha), "alpha", "gamma"),
    "Sigmoid": unary(jax.nn.sigmoid),
    "Softplus": unary(jax.nn.softplus),
    "Softsign": unary(jax.nn.soft_sign),
    "Sum": binary(jnp.add),
    "ThresholdedRelu": unary(lambda x, alpha: jnp.where(x > alpha, x, 0), "alpha"),
}
