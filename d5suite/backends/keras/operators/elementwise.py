"""ONNX in Keras: element-wise operators.

Imports Keras, NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
from keras import Variable, layers, ops

from d5suite.backends.keras.operators.context import Calculation, Context, Factory, Function
from d5suite.levels.layouts import converting, same
from d5suite.network import Node
from d5suite.network.nodes import elementwise as nodes
from d5suite.network.nodes.elementwise import NUMPY_BINARY, NUMPY_UNARY


def activation(layer: Any, **arguments: Any) -> Factory:
    """Return a factory for a layer that takes one tensor in any layout."""

    def factory(node: Node, context: Context) -> Any:
        layout = context.keep_layout(node)
        return layer(**arguments, **context.settings(node))(context.enter(node, 0, layout))

    return factory


def unary(function: Function, *names: str) -> Factory:
    """Return a factory for a function of one tensor in any layout, and of attributes of a node."""

    def factory(node: Node, context: Context) -> Any:
        context.keep_layout(node)
        return context.calculate(node, nodes.with_attributes(function, node, *names))

    return factory


def leaky_relu(node: Node, context: Context) -> Any:
    return activation(layers.LeakyReLU, negative_slope=node.attributes["alpha"])(node, context)


def _mish(x: Any) -> Any:
    return x * ops.tanh(ops.softplus(x))


def _pow(x: Any, y: Any) -> Any:
    return ops.cast(ops.power(x, y), x.dtype)


def gelu(node: Node, context: Context) -> Any:
    approximate = node.attributes["approximate"] == "tanh"
    if context.backend == "tensorflow" and context.policy == "float64":
        # TensorFlow's own has its constants in float32.
        return unary(_gelu_tanh if approximate else _gelu_erf)(node, context)
    return unary(lambda x: ops.gelu(x, approximate))(node, context)


def _gelu_tanh(x: Any) -> Any:
    root = np.float64(math.sqrt(2 / math.pi))
    return 0.5 * x * (1 + ops.tanh(root * (x + np.float64(0.044715) * x * x * x)))


def _gelu_erf(x: Any) -> Any:
    return 0.5 * x * (1 + ops.erf(x * np.float64(math.sqrt(0.5))))


def _add(x: Any, y: Any) -> Any:
    """Add. On TensorFlow, `ops.add` mistakes a vector along any axis for a bias per channel."""
    rank = len(x.shape)
    axes = [axis for axis, size in enumerate(y.shape, rank - len(y.shape)) if size != 1]
    if len(y.shape) > rank or (len(axes) == 1 and axes != [rank - 1 if y.shape[axes[0] - rank] == x.shape[-1] else 1]):
        x, y = (each.value if isinstance(each, Variable) else each for each in (x, y))  # a variable's + is `ops.add`
        return x + y
    return ops.add(x, y)


def binary(layer: Any, function: Function) -> Factory:
    """Return a factory that merges equal shapes by a layer, and other shapes by a function."""

    def factory(node: Node, context: Context) -> Any:
        converters = context.aligned(node)
        shapes = {context.shape(name) for name in node.inputs}
        # Keras's layers do not merge scalars.
        mergeable = len(shapes) == 1 and shapes != {()} and len(node.inputs) > 1 and set(converters) == {same}
        if layer and mergeable and not context.single and context.computed(*node.inputs):
            return layer(**context.settings(node))([context.tensors[name] for name in node.inputs])
        return context.calculate(node, converting(lambda *xs: reduce(function, xs), converters))

    return factory


def div(node: Node, context: Context) -> Any:
    return binary(None, _truncated if context.is_integer(node.outputs[0]) else ops.divide)(node, context)


def _truncated(a: Any, b: Any) -> Any:
    """Divide integers, rounding towards 0."""
    b = ops.cast(b, a.dtype)  # an input of int64 is fed as int32
    whole = ops.cast(ops.floor_divide(a, b), a.dtype)  # Keras divides uint64 to uint32
    up = ops.logical_and(ops.not_equal(whole * b, a), ops.not_equal(a < 0, b < 0))
    return whole + ops.cast(up, whole.dtype)


def _fmod(a: Any, b: Any) -> Any:
    return ops.sign(a) * ops.mod(ops.abs(a), ops.abs(b))


def mod(node: Node, context: Context) -> Any:
    return binary(None, _fmod if node.attributes["fmod"] else ops.mod)(node, context)


def is_inf(node: Node, context: Context) -> Any:
    found = [sign * math.inf for sign, wanted in zip((-1, 1), nodes.infinite_signs(node), strict=True) if wanted]
    return unary(lambda x: reduce(ops.logical_or, [ops.equal(x, each) for each in found], ops.zeros_like(x, "bool")))(
        node, context
    )


def clip(node: Node, context: Context) -> Any:
    context.keep_layout(node)
    if nodes.is_clip_fixed(node, context):
        low, high = nodes.read_clip(node, context)
        if low is not None and high is not None and low <= high:  # TensorFlow's clip is undefined elsewhere
            return context.calculate(node, lambda x, *_: ops.clip(x, low, high))

    def run(x: Any, low: Any = None, high: Any = None) -> Any:
        x = x if low is None else ops.maximum(x, low)
        return x if high is None else ops.minimum(x, high)

    return context.calculate(node, run)


def dropout(node: Node, context: Context) -> Any:
    ratio = nodes.read_dropout(node, context)
    if context.single and len(node.outputs) > 1:
        return _dropout_with_mask(node, context, ratio)
    factory = activation(layers.Dropout, rate=ratio) if ratio else activation(layers.Identity)
    return factory(node, context)


def _dropout_with_mask(node: Node, context: Context, ratio: float) -> Any:
    """Return a Dropout with its mask, which is the layer's result on ones."""
    if not context.training or not ratio:
        return lambda x, *_: (x, ops.ones_like(x, dtype="bool"))
    x = context.tensors[node.inputs[0]]
    ones = Calculation(ops.ones_like, [...], x.shape, **context.settings(node, ".ones"))(x)
    factors = layers.Dropout(ratio, **context.settings(node))(ones)
    apply = Calculation(lambda y, f: (y * f, f != 0), [..., ...], None, **context.settings(node, ".apply"))
    return tuple(apply([x, factors]))


def _p_relu(x: Any, slope: Any) -> Any:
    return ops.where(x > 0, x, slope * x)


def mean(node: Node, context: Context) -> Any:
    count = len(node.inputs)
    return context.calculate(node, converting(lambda *xs: reduce(_add, xs) / count, context.aligned(node)))


def where(node: Node, context: Context) -> Any:
    return context.calculate(node, converting(ops.where, context.aligned(node)))


def cast(node: Node, context: Context) -> Any:
    dtype = str(context.dtypes[node.outputs[0]])
    return unary(lambda x: ops.cast(x, dtype))(node, context)


def bit_shift(node: Node, context: Context) -> Any:
    dtype = context.dtypes[node.inputs[0]]
    left, bits, unsigned = node.attributes["direction"] == "LEFT", 8 * dtype.itemsize, dtype.kind == "u"

    def shifted(x: Any, y: Any) -> Any:
        inside = ops.logical_and(y >= 0, y < bits)  # Keras does not define other shifts
        y = ops.where(inside, y, ops.full_like(y, bits - 1))
        if left:
            return ops.where(inside, ops.left_shift(x, y), ops.zeros_like(x))
        # Shifted by all its bits, a signed number is its sign alone.
        found = ops.right_shift(x, y)
        return ops.where(inside, found, ops.zeros_like(found)) if unsigned else found

    return binary(None, shifted)(node, context)


OPERATORS: dict[str, Factory] = {
    **{name: unary(getattr(ops, function)) for name, function in NUMPY_UNARY.items()},
    **{name: binary(None, getattr(ops, function)) for name, function in NUMPY_BINARY.items()},
    "Add": binary(layers.Add, _add),
    "Elu": unary(ops.elu, "alpha"),
    "Erf": unary(ops.erf),
    "HardSigmoid": unary(lambda x, alpha, beta: ops.clip(alpha * x + beta, 0, 1), "alpha", "beta"),
    "HardSwish": unary(ops.hard_silu),
    "Identity": activation(layers.Identity),
    "Max": binary(layers.Maximum, ops.maximum),
    "Min": binary(layers.Minimum, ops.minimum),
    "Mish": unary(_mish),
    "Mul": binary(layers.Multiply, ops.multiply),
    "PRelu": binary(None, _p_relu),
    "Pow": binary(None, _pow),
    "Relu": activation(layers.ReLU),
    # `ops.selu` has other digits.
    "Selu": unary(lambda x, alpha, gamma: gamma * ops.elu(x, alpha), "alpha", "gamma"),
    "Sigmoid": activation(layers.Activation, activation="sigmoid"),
    "Softplus": unary(ops.softplus),
    "Softsign": unary(ops.softsign),
    "Sub": binary(layers.Subtract, ops.subtract),
    "Sum": binary(layers.Add, _add),
    "Tanh": activation(layers.Activation, activation="tanh"),
    "ThresholdedRelu": unary(lambda x, alpha: ops.where(x > alpha, x, ops.zeros_like(x)), "alpha"),
}
