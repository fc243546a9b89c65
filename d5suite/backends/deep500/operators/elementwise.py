"""ONNX on deep500: element-wise operators.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from scipy.special import erf

from d5suite.backends.deep500.operators.context import (
    Context,
    CustomOperator,
    Factory,
    Formula,
    collapsed,
    formula,
    identity,
    native_operator,
    sigmoid,
)
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes import elementwise as nodes
from d5suite.network.nodes.elementwise import NUMPY_BINARY, NUMPY_UNARY

_random = np.random.default_rng()


def seed(number: int) -> None:
    """Restart the generator that Dropout draws from."""
    global _random
    _random = np.random.default_rng(number)


_LOW = 2**64 - 1


def random_state() -> np.ndarray:
    """Return the state and increment of Dropout's generator, 128 bits each, as uint64 (4,)."""
    held = _random.bit_generator.state["state"]
    return np.array([part for n in (held["state"], held["inc"]) for part in (n >> 64, n & _LOW)], np.uint64)


def load_random_state(parts: np.ndarray) -> None:
    """Restore a state that `random_state` returned."""
    high, low, more_high, more_low = (int(part) for part in parts)
    generator = _random.bit_generator
    generator.state = {**generator.state, "state": {"state": high << 64 | low, "inc": more_high << 64 | more_low}}


class _Relu(native.ReluOp):
    """deep500's ReLU, with the derivative 0 at 0 as in the frameworks; deep500 has 1.

    At the start of training whole branches of a ResNet are 0, so it matters.
    """

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        return [np.where(fwd_inputs[0] > 0, grads[0], 0)]


def relu(node: Node, context: Context) -> CustomOperator:
    return _Relu(*context.describe(node))


def binary(forward: Callable[..., np.ndarray], slopes: Callable[..., tuple[Any, Any]]) -> Factory:
    """Return a factory for a function of two tensors; ``slopes`` are its partial derivatives."""

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        return [collapsed(gradient * s, x.shape) for s, x in zip(slopes(*inputs), inputs, strict=True)]

    return formula(forward, backward)


def unary(forward: Callable[..., np.ndarray], slope: Callable[..., Any], *names: str) -> Factory:
    """Return a factory for a function of one tensor, and of attributes of its node.

    ``slope`` is the function's derivative: it takes the input, the output and the attributes.
    """

    def factory(node: Node, context: Context) -> CustomOperator:
        run, by_x = (nodes.with_attributes(function, node, *names) for function in (forward, slope))
        return Formula(
            context.describe(node), run, lambda gradient, inputs, output: [gradient * by_x(inputs[0], output)]
        )

    return factory


def _elu(x: np.ndarray, alpha: float, gamma: float = 1.0) -> np.ndarray:
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _elu_slope(x: np.ndarray, output: np.ndarray, alpha: float, gamma: float = 1.0) -> np.ndarray:
    return gamma * np.where(x > 0, 1, alpha * np.exp(np.minimum(x, 0)))


def _hard_sigmoid_slope(x: np.ndarray, output: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    return np.where((output > 0) & (output < 1), alpha, 0.0)


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _mish_slope(x: np.ndarray, output: np.ndarray) -> np.ndarray:
    t = np.tanh(_softplus(x))
    return t + x * (1 - t**2) * sigmoid(x)


def _pow(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.power(x, y).astype(x.dtype)


def _pow_slopes(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):  # a negative base has no slope by its exponent
        return y * np.power(x, y - 1), np.power(x, y) * np.log(x)


def gelu(node: Node, context: Context) -> CustomOperator:
    """X Φ(x) with the normal distribution's Φ, or its ``tanh`` approximation."""
    if node.attributes["approximate"] == "none":
        return unary(
            lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5))),
            lambda x, _: 0.5 * (1 + erf(x * math.sqrt(0.5))) + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi),
        )(node, context)
    factor = math.sqrt(2 / math.pi)

    def slope(x: np.ndarray, output: np.ndarray) -> np.ndarray:
        t = np.tanh(factor * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * factor * (1 + 3 * 0.044715 * x**2)

    return unary(lambda x: 0.5 * x * (1 + np.tanh(factor * (x + 0.044715 * x**3))), slope)(node, context)


def _hard_swish_slope(x: np.ndarray, output: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, x / 3 + 0.5, x > 0)


def div(node: Node, context: Context) -> CustomOperator:
    divide = (lambda a, b: (a - np.fmod(a, b)) // b) if context.is_integer(node.inputs[0]) else np.divide
    return binary(divide, lambda a, b: (1 / b, -a / b**2))(node, context)


def clip(node: Node, context: Context) -> CustomOperator:
    low, high = nodes.read_clip(node, context)

    def slope(x: np.ndarray, output: np.ndarray) -> np.ndarray:
        inside = np.ones(x.shape, bool) if low is None else x >= low
        return inside if high is None else inside & (x <= high)

    return unary(lambda x: np.clip(x, low, high), slope)(node, context)


class _Dropout(deep500.CustomPythonOp):
    """A custom operator; its second output is ONNX's mask of kept elements."""

    def __init__(self, *descriptors: list[Any], probability: float) -> None:
        super().__init__(*descriptors)
        self._probability = probability

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Drop elements at random."""
        kept = _random.random(x.shape) >= self._probability
        return [(x * (kept / (1 - self._probability))).astype(x.dtype), kept]

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Return the gradient where the input was kept."""
        return [grads[0] * (fwd_outputs[1] / (1 - self._probability))]


def dropout(node: Node, context: Context) -> CustomOperator:
    probability = nodes.read_dropout(node, context)
    if context.training and probability:
        return _Dropout(*context.describe(node, outputs=2), probability=probability)
    if not any(context.wanted(node)[1:]):
        return identity(node, context)
    return Formula(
        context.describe(node, outputs=2), lambda x: [x, np.ones(x.shape, bool)], lambda gradient, *_: [gradient]
    )


def flat(function: Callable[..., np.ndarray]) -> Factory:
    """Return a factory for a function with zero gradients: its results are Booleans or steps."""
    return formula(function, lambda gradient, inputs, output: [np.zeros_like(x) for x in inputs])


def extreme(function: Callable[..., np.ndarray]) -> Factory:
    """Return a factory for the maximum or minimum; equal inputs share the gradient."""

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        hits = [np.broadcast_to(x == output, output.shape) for x in inputs]
        share = gradient / np.sum(hits, 0, dtype=gradient.dtype)
        return [collapsed(share * hit, x.shape) for hit, x in zip(hits, inputs, strict=True)]

    return formula(lambda *xs: reduce(function, xs), backward)


def mean(node: Node, context: Context) -> CustomOperator:
    count = len(node.inputs)
    return Formula(
        context.describe(node),
        lambda *xs: reduce(np.add, xs) / count,
        lambda gradient, inputs, _: [collapsed(gradient / count, x.shape) for x in inputs],
    )


def _where_gradient(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
    condition, x, y = inputs
    taken = [np.where(condition, gradient, 0), np.where(condition, 0, gradient)]
    return [np.zeros_like(condition), collapsed(taken[0], x.shape), collapsed(taken[1], y.shape)]


def is_inf(node: Node, context: Context) -> CustomOperator:
    negative, positive = nodes.infinite_signs(node)
    return flat(lambda x: np.logical_or(np.isneginf(x) & bool(negative), np.isposinf(x) & bool(positive)))(
        node, context
    )


def mod(node: Node, context: Context) -> CustomOperator:
    if node.attributes["fmod"]:
        return binary(np.fmod, lambda a, b: (1, -np.trunc(a / b)))(node, context)
    return binary(np.mod, lambda a, b: (1, -np.floor(a / b)))(node, context)


def cast(node: Node, context: Context) -> CustomOperator:
    dtype = context.dtypes[node.outputs[0]]
    return Formula(
        context.describe(node),
        lambda x: x.astype(dtype),
        lambda gradient, inputs, _: [gradient.astype(inputs[0].dtype)],
    )


def bit_shift(node: Node, context: Context) -> CustomOperator:
    return flat(np.left_shift if node.attributes["direction"] == "LEFT" else np.right_shift)(node, context)


OPERATORS: dict[str, Factory] = {
    **{name: flat(getattr(np, function)) for name, function in (NUMPY_UNARY | NUMPY_BINARY).items()},
    "Abs": unary(np.abs, lambda x, _: np.sign(x)),
    "Acos": unary(np.arccos, lambda x, _: -1 / np.sqrt(1 - x**2)),
    "Acosh": unary(np.arccosh, lambda x, _: 1 / np.sqrt(x**2 - 1)),
    "Add": native_operator("AddOp"),
    "Asin": unary(np.arcsin, lambda x, _: 1 / np.sqrt(1 - x**2)),
    "Asinh": unary(np.arcsinh, lambda x, _: 1 / np.sqrt(x**2 + 1)),
    "Atan": unary(np.arctan, lambda x, _: 1 / (1 + x**2)),
    "Atanh": unary(np.arctanh, lambda x, _: 1 / (1 - x**2)),
    "Cos": unary(np.cos, lambda x, _: -np.sin(x)),
    "Cosh": unary(np.cosh, lambda x, _: np.sinh(x)),
    "Elu": unary(_elu, _elu_slope, "alpha"),
    "Erf": unary(erf, lambda x, _: 2 / math.sqrt(math.pi) * np.exp(-(x**2))),
    "Exp": unary(np.exp, lambda _, y: y),
    "HardSigmoid": unary(lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1), _hard_sigmoid_slope, "alpha", "beta"),
    "HardSwish": unary(lambda x: x * np.clip(x / 6 + 0.5, 0, 1), _hard_swish_slope),
    "LeakyRelu": unary(
        lambda x, alpha: np.where(x > 0, x, alpha * x), lambda x, _, alpha: np.where(x > 0, 1.0, alpha), "alpha"
    ),
    "Log": unary(np.log, lambda x, _: 1 / x),
    "Max": extreme(np.maximum),
    "Min": extreme(np.minimum),
    "Mish": unary(lambda x: x * np.tanh(_softplus(x)), _mish_slope),
    "Mul": binary(np.multiply, lambda a, b: (b, a)),
    "Neg": unary(np.negative, lambda x, _: -1.0),
    "PRelu": binary(
        lambda x, s: np.where(x > 0, x, s * x), lambda x, s: (np.where(x > 0, 1, s), np.where(x > 0, 0, x))
    ),
    "Pow": binary(_pow, _pow_slopes),
    "Reciprocal": unary(np.reciprocal, lambda x, y: -(y**2)),
    "Selu": unary(_elu, _elu_slope, "alpha", "gamma"),
    "Sigmoid": unary(sigmoid, lambda _, y: y * (1 - y)),
    "Sin": unary(np.sin, lambda x, _: np.cos(x)),
    "Sinh": unary(np.sinh, lambda x, _: np.cosh(x)),
    "Softplus": unary(_softplus, lambda x, _: sigmoid(x)),
    "Softsign": unary(lambda x: x / (1 + np.abs(x)), lambda x, _: 1 / (1 + np.abs(x)) ** 2),
    "Sqrt": unary(np.sqrt, lambda _, y: 0.5 / y),
    "Sub": binary(np.subtract, lambda a, b: (1, -1)),
    "Sum": native_operator("SumOp"),
    "Tan": unary(np.tan, lambda _, y: 1 + y**2),
    "Tanh": unary(np.tanh, lambda _, y: 1 - y**2),
    "ThresholdedRelu": unary(lambda x, alpha: np.where(x > alpha, x, 0), lambda x, _, alpha: x > alpha, "alpha"),
    "Where": formula(np.where, _where_gradient),
}
