"""ONNX in TensorFlow: element-wise operators.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, Factory, in_float32
from d5suite.levels.layouts import converting, same, unary
from d5suite.network import Node
from d5suite.network.nodes.elementwise import NUMPY_BINARY, NUMPY_UNARY, infinite_signs, read_clip, read_dropout


def binary(function: Call) -> Factory:
    """Return a factory for a function of two tensors that broadcasts."""

    def factory(node: Node, context: Context) -> Call:
        first, second = context.aligned(node)
        if context.single and first is same and second is same:
            return function

        def run(x: Any, y: Any) -> Any:
            x, y = first(x), second(y)
            if x.dtype != y.dtype:  # a loss is float32 where activations and constants have 16 bits
                x, y = in_float32(x), in_float32(y)
            return function(x, y)

        return run

    return factory


def sum_(node: Node, context: Context) -> Call:
    converters = context.aligned(node)
    if len({context.shape(name) for name in node.inputs}) == 1:
        return converting(lambda *xs: tf.add_n(xs), converters)
    return converting(lambda *xs: reduce(tf.add, xs), converters)


def div(node: Node, context: Context) -> Call:
    return binary(tf.truncatediv if context.is_integer(node.inputs[0]) else tf.divide)(node, context)


def _elu(x: Any, alpha: float) -> Any:
    y = tf.nn.elu(x)
    return y if alpha == 1 else tf.where(x > 0, y, alpha * y)


def _hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    return tf.clip_by_value(alpha * x + beta, tf.cast(0, x.dtype), tf.cast(1, x.dtype))


def _mish(x: Any) -> Any:
    return x * tf.tanh(tf.math.softplus(x))


def _pow(x: Any, y: Any) -> Any:
    if x.dtype == y.dtype:
        return tf.pow(x, y)
    wide = tf.float64 if x.dtype == tf.float64 or y.dtype == tf.float64 else tf.float32
    return tf.cast(tf.pow(tf.cast(x, wide), tf.cast(y, wide)), x.dtype)


def gelu(node: Node, context: Context) -> Call:
    # `tf.nn.gelu` has its constants in float32, even for float64.
    context.keep_layout(node)
    if node.attributes["approximate"] == "tanh":
        return lambda x: 0.5 * x * (1 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return lambda x: 0.5 * x * tf.math.erfc(x * -math.sqrt(0.5))


def _hard_swish(x: Any) -> Any:
    return x * tf.nn.relu6(x + 3) * (1 / 6)


def clip(node: Node, context: Context) -> Call:
    low, high = read_clip(node, context)
    context.keep_layout(node)

    def run(x: Any, *_: Any) -> Any:
        if low is not None:
            x = tf.maximum(x, tf.cast(float(low), x.dtype))
        if high is not None:
            x = tf.minimum(x, tf.cast(float(high), x.dtype))
        return x

    return run


def dropout(node: Node, context: Context) -> Call:
    ratio = read_dropout(node, context)
    context.layouts.update({name: context.layout(node.inputs[0]) for name in node.outputs})
    masked = any(node.outputs[1:])
    if not context.training or ratio == 0:
        return (lambda x, *_: (x, tf.ones_like(x, tf.bool))) if masked else same
    if context.generator is not None:
        generator = context.generator
        return lambda x, *_: tf.nn.experimental.stateless_dropout(x, ratio, seed=generator.make_seeds(1)[:, 0])
    if not masked:
        return lambda x, *_: tf.nn.dropout(x, ratio)

    def run(x: Any, *_: Any) -> Any:
        kept = tf.random.uniform(x.shape) >= ratio
        return tf.where(kept, x / (1 - ratio), 0), kept

    return run


def _p_relu(x: Any, slope: Any) -> Any:
    return tf.where(x > 0, x, slope * x)


def repeated(function: Call) -> Factory:
    """Return a factory for a function of two tensors, repeated over more."""

    def factory(node: Node, context: Context) -> Call:
        return converting(lambda *xs: reduce(function, xs), context.aligned(node))

    return factory


def mean(node: Node, context: Context) -> Call:
    count, total = len(node.inputs), sum_(node, context)
    return lambda *xs: total(*xs) / count


def where(node: Node, context: Context) -> Call:
    def run(condition: Any, x: Any, y: Any) -> Any:
        if x.dtype != y.dtype:  # as for `binary`
            x, y = in_float32(x), in_float32(y)
        return tf.where(condition, x, y)

    return converting(run, context.aligned(node))


def _fmod(x: Any, y: Any) -> Any:
    return tf.sign(x) * tf.math.floormod(tf.abs(x), tf.abs(y))  # `tf.truncatemod` has no gradient


def mod(node: Node, context: Context) -> Call:
    return binary(_fmod if node.attributes["fmod"] else tf.math.floormod)(node, context)


def is_inf(node: Node, context: Context) -> Call:
    found = [sign * math.inf for sign, wanted in zip((-1, 1), infinite_signs(node), strict=True) if wanted]
    return unary(lambda x: reduce(tf.logical_or, [tf.equal(x, each) for each in found], tf.zeros_like(x, tf.bool)))(
        node, context
    )


def cast(node: Node, context: Context) -> Call:
    dtype = tf.as_dtype(context.dtypes[node.outputs[0]])
    context.keep_layout(node)
    return lambda x: tf.cast(x, dtype)


def bit_shift(node: Node, context: Context) -> Call:
    left, bits = node.attributes["direction"] == "LEFT", 8 * context.dtypes[node.inputs[0]].itemsize

    def shifted(x: Any, y: Any) -> Any:
        inside = (y >= 0) & (y < bits)  # TensorFlow does not define other shifts
        y = tf.where(inside, y, tf.cast(bits - 1, y.dtype))
        if left:
            return tf.where(inside, tf.bitwise.left_shift(x, y), tf.zeros_like(x))
        # Shifted by all its bits, a signed number is its sign alone.
        found = tf.bitwise.right_shift(x, y)
        return tf.where(inside, found, tf.zeros_like(found)) if x.dtype.is_unsigned else found

    return repeated(shifted)(node, context)


_OTHER_NAMES = ("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "IsNaN", "Neg", "Not")

OPERATORS: dict[str, Factory] = {
    **{name: unary(getattr(tf.math, name.lower())) for name in NUMPY_UNARY if name not in _OTHER_NAMES},
    **{name: binary(getattr(tf.math, function)) for name, function in NUMPY_BINARY.items() if name not in _OTHER_NAMES},
    "Add": binary(tf.add),
    "BitwiseAnd": repeated(tf.bitwise.bitwise_and),
    "BitwiseNot": unary(tf.bitwise.invert),
    "BitwiseOr": repeated(tf.bitwise.bitwise_or),
    "BitwiseXor": repeated(tf.bitwise.bitwise_xor),
    "Elu": unary(_elu, "alpha"),
    "Erf": unary(tf.math.erf),
    "HardSigmoid": unary(_hard_sigmoid, "alpha", "beta"),
    "HardSwish": unary(_hard_swish),
    "Identity": unary(same),
    "IsNaN": unary(tf.math.is_nan),
    "LeakyRelu": unary(tf.nn.leaky_relu, "alpha"),
    "Max": repeated(tf.maximum),
    "Min": repeated(tf.minimum),
    "Mish": unary(_mish),
    "Neg": unary(tf.negative),
    "Not": unary(tf.logical_not),
    "PRelu": binary(_p_relu),
    "Pow": binary(_pow),
    "Relu": unary(tf.nn.relu),
    "Selu": unary(lambda x, alpha, gamma: gamma * _elu(x, alpha), "alpha", "gamma"),
    "Sigmoid": unary(tf.sigmoid),
    "Softplus": unary(tf.math.softplus),
    "Softsign": unary(tf.nn.softsign),
    "ThresholdedRelu": unary(lambda x, alpha: tf.where(x > alpha, x, tf.zeros((), x.dtype)), "alpha"),
}
