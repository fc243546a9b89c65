"""ONNX on MXNet: element-wise operators.

Imports NumPy, `d5suite.errors`, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators.context import ARRAY_TYPES, Call, Context, Factory, rounded
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes import elementwise as nodes
from d5suite.network.nodes.elementwise import NUMPY_UNARY


def identity(node: Node, context: Context) -> Call:
    dtype = context.type_of(node.outputs[0])
    return lambda F, x, *_: (
        F.full((1,), x, dtype=dtype)
        if isinstance(x, bool | int | float)
        else F.identity(x)  # an output may be constant
    )


def formula(function: Call, *names: str) -> Factory:
    """Return a factory for a function of `F`, a node's inputs and some of its attributes."""
    return lambda node, context: nodes.with_attributes(function, node, *names)


def activation(kind: str) -> Factory:
    """Return a factory for MXNet's ``Activation`` of this ``act_type``."""
    return lambda node, context: lambda F, x: F.Activation(x, act_type=kind)


def binary(name: str, scalar: Callable[[Any, Any], Any]) -> Factory:
    """Return a factory for arithmetic: MXNet has separate functions for equal and other shapes."""
    equal, unequal = f"elemwise_{name}", f"broadcast_{name}"

    def factory(node: Node, context: Context) -> Call:
        if any(_is_scalar(context, operand) for operand in node.inputs):
            return lambda F, a, b: scalar(a, b)
        a, b = (context.shapes.get(operand) for operand in node.inputs)
        function = equal if a is not None and a == b else unequal
        if function == "elemwise_add" and not context.single:
            return lambda F, a, b: (F.broadcast_add if _given(a) or _given(b) else F.elemwise_add)(a, b)
        return lambda F, a, b: getattr(F, function)(a, b)

    return factory


def _given(x: Any) -> bool:
    """Return whether a symbol is an input: it has no gradient, and elemwise_add's is then wrong."""
    children = getattr(x, "get_children", None)
    return children is not None and children() is None


def _is_scalar(context: Context, name: str) -> bool:
    return name in context.constants and context.constants[name].ndim == 0


add = binary("add", operator.add)


def sum_(node: Node, context: Context) -> Call:
    if len(node.inputs) == 1:
        return identity(node, context)
    if len(node.inputs) == 2:
        return add(node, context)
    shapes = {context.shapes.get(name) for name in node.inputs}
    if len(shapes) == 1 and None not in shapes:
        return lambda F, *terms: F.add_n(*terms)
    if any(_is_scalar(context, name) for name in node.inputs):
        numbers = [_is_scalar(context, name) for name in node.inputs]

        def mixed(F: Any, *terms: Any) -> Any:
            arrays = [term for term, number in zip(terms, numbers, strict=True) if not number]
            total = reduce(F.broadcast_add, arrays)
            return total + sum(term for term, number in zip(terms, numbers, strict=True) if number)

        return mixed
    return lambda F, *terms: reduce(F.broadcast_add, terms)


def leaky_relu(node: Node, context: Context) -> Call:
    slope = node.attributes["alpha"]
    if context.dtype == "float64":  # the kernel rounds the slope
        return lambda F, x: F.relu(x) - F.relu(-x) * slope
    return lambda F, x: F.LeakyReLU(x, act_type="leaky", slope=slope)


def _selu(F: Any, x: Any, alpha: float, gamma: float) -> Any:
    return gamma * (F.relu(x) + alpha * F.expm1(-F.relu(-x)))  # the kernel has other digits


def hard_sigmoid(node: Node, context: Context) -> Call:
    alpha, beta = node.attributes["alpha"], node.attributes["beta"]
    if context.dtype == "float64":  # the kernel rounds its settings
        return lambda F, x: F.clip(x * alpha + beta, a_min=0, a_max=1)
    return lambda F, x: F.hard_sigmoid(x, alpha=alpha, beta=beta)


def _softplus(F: Any, x: Any) -> Any:
    return F.relu(x) + F.log1p(F.exp(-F.abs(x)))


def softplus(node: Node, context: Context) -> Call:
    if context.dtype == "float64":  # the kernel returns x from 20 on
        return _softplus
    return activation("softrelu")(node, context)


def erf(node: Node, context: Context) -> Call:
    return (lambda F, x: _exact_erf(F, x)) if context.dtype == "float64" else lambda F, x: F.erf(x)


def pow_(node: Node, context: Context) -> Call:
    if any(_is_scalar(context, operand) for operand in node.inputs):
        return lambda F, a, b: a**b
    first, second = (context.dtypes.get(operand, np.dtype(context.dtype)).name for operand in node.inputs)
    if first != second:  # level 0 only; the result has the base's type
        wide = first if first.startswith("float") else second
        return lambda F, a, b: F.cast(F.broadcast_power(F.cast(a, wide), F.cast(b, wide)), first)
    return lambda F, a, b: F.broadcast_power(a, b)


def gelu(node: Node, context: Context) -> Call:
    if node.attributes["approximate"] == "tanh":
        root = math.sqrt(2 / math.pi)
        return lambda F, x: 0.5 * x * (1 + F.tanh(root * (x + 0.044715 * F.square(x) * x)))
    if context.dtype == "float64":  # the kernel computes in float32
        return lambda F, x: 0.5 * x * (1 + _exact_erf(F, x * math.sqrt(0.5)))
    return lambda F, x: F.LeakyReLU(x, act_type="gelu")


def _exact_erf(F: Any, x: Any) -> Any:
    """Return erf with an exact float64 gradient: MXNet's divides by the root of pi in float32."""
    excess = float(np.float32(math.sqrt(math.pi))) / math.sqrt(math.pi)
    y = F.erf(x)
    return y * excess + F.BlockGrad(y * (1 - excess))


def hard_swish(node: Node, context: Context) -> Call:
    if context.dtype == "float64":  # the kernel rounds its settings
        return lambda F, x: x * F.clip(x / 6 + 0.5, a_min=0, a_max=1)
    return lambda F, x: x * F.hard_sigmoid(x, alpha=1 / 6, beta=0.5)


def unary(name: str) -> Factory:
    """Return a factory for a function of one tensor."""
    return lambda node, context: lambda F, x: getattr(F, name)(x)


def clip(node: Node, context: Context) -> Call:
    low, high = nodes.read_clip(node, context)
    if low is high is None:
        return identity(node, context)
    if context.is_integer(node.inputs[0]):  # F.clip would round the bounds to floating point
        bounds = [(low, "maximum"), (high, "minimum")]
        return lambda F, x, *_: reduce(lambda y, b: y if b[0] is None else getattr(F, b[1])(y, b[0]), bounds, x)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    low = min(low, high)  # if the bounds cross, the upper one wins
    return lambda F, x, *_: F.clip(x, a_min=low, a_max=high)


def dropout(node: Node, context: Context) -> Call:
    probability = nodes.read_dropout(node, context)
    drops = context.training and probability != 0
    if any(context.wanted(node)[1:]):  # MXNet does not return the mask, so drop from ones
        dropout: Call = (lambda F, x: F.Dropout(x, p=probability)) if drops else (lambda F, x: x)

        def masked(F: Any, x: Any, *_: Any) -> Any:
            factors = dropout(F, F.ones_like(x))
            return x * factors, factors != 0

        return masked
    return (lambda F, x, *_: F.Dropout(x, p=probability)) if drops else identity(node, context)


def compare(name: str, scalar: Callable[[Any, Any], Any]) -> Factory:
    """Return a factory for a comparison, whose result has the type of its operands in MXNet."""

    def factory(node: Node, context: Context) -> Call:
        fixed = any(_is_scalar(context, operand) for operand in node.inputs)
        first, second = (context.numbers(operand) for operand in node.inputs)
        dtype, same = context.dtype, context.type_of(node.inputs[0]) == context.dtype

        def run(F: Any, a: Any, b: Any) -> Any:
            a, b = first(F, a), second(F, b)
            found = scalar(a, b) if fixed else getattr(F, f"broadcast_{name}")(a, b)
            return found if same else F.cast(found, dtype)

        return run

    return factory


def logical(name: str) -> Factory:
    """Return a factory for a function of two tensors of Booleans."""

    def factory(node: Node, context: Context) -> Call:
        first, second = (context.numbers(operand) for operand in node.inputs)
        return lambda F, a, b: getattr(F, f"broadcast_logical_{name}")(*_filled(F, first(F, a), second(F, b)))

    return factory


def _filled(F: Any, *values: Any) -> list[Any]:
    """Expand each number to an array of the shape of the first array."""
    like = next(value for value in values if not isinstance(value, int | float))
    return [F.zeros_like(like) + value if isinstance(value, int | float) else value for value in values]


def not_(node: Node, context: Context) -> Call:
    numbers = context.numbers(node.inputs[0])
    return lambda F, x: F.logical_not(numbers(F, x))


def where(node: Node, context: Context) -> Call:
    converters = [context.numbers(name) for name in node.inputs]
    dtype = context.type_of(node.inputs[1])
    shapes = {context.shapes.get(name) for name in node.inputs}

    def run(F: Any, *inputs: Any) -> Any:
        condition, x, y = (convert(F, value) for convert, value in zip(converters, inputs, strict=True))
        x, y, condition = _filled(F, x, y, condition)
        condition = F.cast(condition, dtype)
        if len(shapes) > 1 or None in shapes:  # MXNet's operator does not broadcast
            zeros = reduce(F.broadcast_add, [F.zeros_like(value) for value in (condition, x, y)])
            condition, x, y = (F.broadcast_add(value, zeros) for value in (condition, x, y))
        return F.where(condition, x, y)

    return run


def extreme(name: str) -> Factory:
    """Return a factory for the maximum or minimum of any number of tensors."""

    def factory(node: Node, context: Context) -> Call:
        numbers = [_is_scalar(context, operand) for operand in node.inputs]

        def run(F: Any, *xs: Any) -> Any:
            arrays = [x for x, number in zip(xs, numbers, strict=True) if not number]
            found = reduce(getattr(F, f"broadcast_{name}"), arrays)
            fixed = [x for x, number in zip(xs, numbers, strict=True) if number]
            return reduce(getattr(F, name), fixed, found)

        return run

    return factory


def mean(node: Node, context: Context) -> Call:
    total, count = sum_(node, context), len(node.inputs)
    return lambda F, *xs: total(F, *xs) / count


def p_relu(node: Node, context: Context) -> Call:
    # In float64 the kernel rounds the slopes. In a cached graph, the slopes' gradient may be
    # computed from memory that the gradient of x has overwritten.
    exact = context.dtype != "float64" and (context.single or not context.training)
    if exact and nodes.slopes_of_channels(node, context):
        return lambda F, x, slope: F.LeakyReLU(x, F.reshape(slope, shape=(-1,)), act_type="prelu")
    if _is_scalar(context, node.inputs[1]):
        return lambda F, x, slope: F.relu(x) - F.relu(-x) * slope
    return lambda F, x, slope: F.relu(x) - F.broadcast_mul(F.relu(-x), slope)


def is_inf(node: Node, context: Context) -> Call:
    negative, positive = nodes.infinite_signs(node)
    return lambda F, x: (x == -math.inf) * negative + (x == math.inf) * positive


def _fmod(F: Any, a: Any, b: Any) -> Any:
    return F.broadcast_mul(F.sign(a), F.broadcast_mod(F.abs(a), F.abs(b)))


def mod(node: Node, context: Context) -> Call:
    numbers = [_is_scalar(context, operand) for operand in node.inputs]

    def run(F: Any, a: Any, b: Any) -> Any:
        if any(numbers):
            a, b = _filled(F, a, b)
        return _fmod(F, a, b) if node.attributes["fmod"] else F.broadcast_mod(a, b)

    return run


def cast(node: Node, context: Context) -> Call:
    dtype, numbers = context.dtypes[node.outputs[0]], context.numbers(node.inputs[0])
    if dtype == np.bool_:
        return lambda F, x: F.cast(numbers(F, x) != 0, context.dtype)
    if dtype.name not in ARRAY_TYPES:
        raise NetworkError(f"MXNet has no arrays of {dtype}", where=node.name)
    return lambda F, x: F.cast(numbers(F, x), dtype.name)


def bitwise(name: str) -> Factory:
    """Return a factory for a function of bits."""

    def call(F: Any, *xs: Any) -> Any:
        function = getattr(F.np, f"bitwise_{name}")
        return function(*[x.as_np_ndarray() for x in _filled(F, *xs)]).as_nd_ndarray()

    return lambda node, context: call


def bit_shift(node: Node, context: Context) -> Call:
    """Shift by a product or quotient in float32, which is exact: MXNet shifts no bits."""
    if context.type_of(node.inputs[0]) != "uint8":
        raise NetworkError("MXNet shifts no bits, and has no unsigned integers but of 8 bits", where=node.name)
    left = node.attributes["direction"] == "LEFT"

    def call(F: Any, x: Any, y: Any) -> Any:
        x, y = (F.cast(each, dtype="float32") for each in _filled(F, x, y))
        found = F.broadcast_mul(x, 2**y) % 256 if left else F.floor(F.broadcast_div(x, 2**y))
        return F.cast(found, dtype="uint8")

    return call


OPERATORS: dict[str, Factory] = {
    **{name: unary(function) for name, function in NUMPY_UNARY.items()},
    "And": logical("and"),
    "BitwiseAnd": bitwise("and"),
    "BitwiseNot": bitwise("not"),
    "BitwiseOr": bitwise("or"),
    "BitwiseXor": bitwise("xor"),
    "Div": binary("div", operator.truediv),
    "Elu": formula(lambda F, x, alpha: F.LeakyReLU(x, act_type="elu", slope=alpha), "alpha"),
    "Equal": compare("equal", operator.eq),
    "Greater": compare("greater", operator.gt),
    "GreaterOrEqual": compare("greater_equal", operator.ge),
    "IsNaN": formula(lambda F, x: x != x),
    "Less": compare("lesser", operator.lt),
    "LessOrEqual": compare("lesser_equal", operator.le),
    "Max": extreme("maximum"),
    "Min": extreme("minimum"),
    "Mish": formula(lambda F, x: x * F.tanh(_softplus(F, x))),
    "Mul": binary("mul", operator.mul),
    "Not": not_,
    "Or": logical("or"),
    "Relu": activation("relu"),
    "Round": formula(rounded),
    "Selu": formula(_selu, "alpha", "gamma"),
    "Sigmoid": activation("sigmoid"),
    "Softsign": unary("softsign"),
    "Sub": binary("sub", operator.sub),
    "Tanh": activation("tanh"),
    "ThresholdedRelu": formula(lambda F, x, alpha: F.where(x > alpha, x, F.zeros_like(x)), "alpha"),
    "Xor": logical("xor"),
}
