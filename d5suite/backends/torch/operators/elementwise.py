"""ONNX on PyTorch: element-wise operators.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Factory, Function, native, same
from d5suite.network import Node
from d5suite.network.nodes import elementwise as nodes
from d5suite.network.nodes.elementwise import NUMPY_UNARY


def relu(node: Node, context: Context) -> Function:
    return torch.relu_ if node.outputs[0] in context.overwrites else torch.relu


def add(node: Node, context: Context) -> Function:
    overwritten = context.overwrites.get(node.outputs[0])
    if overwritten is None:
        return torch.add
    return torch.Tensor.add_ if overwritten == 0 else lambda a, b: b.add_(a)


def sum_(node: Node, context: Context) -> Function:
    if len(node.inputs) == 2:
        return add(node, context)
    return lambda *terms: reduce(torch.add, terms)


def pow_(node: Node, context: Context) -> Function:
    return lambda x, y: torch.pow(x, y).to(x.dtype)


def clip(node: Node, context: Context) -> Function:
    if not nodes.is_clip_fixed(node, context):
        return lambda x, low=None, high=None: torch.clamp(x, low, high)
    low, high = nodes.read_clip(node, context)
    return same if low is high is None else lambda x, *_: torch.clamp(x, low, high)


def dropout(node: Node, context: Context) -> Function:
    probability, masked = nodes.read_dropout(node, context), any(context.wanted(node)[1:])
    if not context.training or probability == 0:
        return (lambda x, *_: (x, torch.ones_like(x, dtype=torch.bool))) if masked else same
    if masked:
        return lambda x, *_: torch.native_dropout(x, probability, True)
    return lambda x, *_: F.dropout(x, probability, training=True)


def p_relu(node: Node, context: Context) -> Function:
    if nodes.slopes_of_channels(node, context):
        return lambda x, slope: F.prelu(x, slope.reshape(-1))
    return lambda x, slope: torch.where(x > 0, x, slope * x)


def repeated(function: Callable[..., torch.Tensor]) -> Factory:
    """Return a factory for a function of two tensors, repeated over more."""
    return lambda node, context: lambda *xs: reduce(function, xs)


def mean(node: Node, context: Context) -> Function:
    count = len(node.inputs)
    return lambda *xs: reduce(torch.add, xs) / count


def div(node: Node, context: Context) -> Function:
    if context.is_integer(node.inputs[0]):  # ONNX truncates quotients of integers
        return lambda x, y: torch.div(x, y, rounding_mode="trunc")
    return torch.div


def mod(node: Node, context: Context) -> Function:
    return torch.fmod if node.attributes["fmod"] else torch.remainder


def is_inf(node: Node, context: Context) -> Function:
    signs = nodes.infinite_signs(node)
    return {(1, 1): torch.isinf, (1, 0): torch.isneginf, (0, 1): torch.isposinf}.get(
        signs, lambda x: torch.zeros_like(x, dtype=torch.bool)
    )


def cast(node: Node, context: Context) -> Function:
    dtype = getattr(torch, context.dtypes[node.outputs[0]].name)
    return lambda x: x.to(dtype)


def bitwise(function: Function) -> Factory:
    """Return a factory for a function of bits; unsigned integers are seen as signed ones."""

    def factory(node: Node, context: Context) -> Function:
        signed = _SIGNED.get(context.dtypes[node.inputs[0]].name)
        if signed is None:
            return function
        return lambda *xs: function(*[x.view(signed) for x in xs]).view(xs[0].dtype)

    return factory


_SIGNED = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}
"""Signed types of the same width, for types that have few kernels in PyTorch (2.13)."""


def bit_shift(node: Node, context: Context) -> Function:
    dtype = context.dtypes[node.inputs[0]]
    signed, bits = _SIGNED.get(dtype.name), 8 * dtype.itemsize
    left = node.attributes["direction"] == "LEFT"
    if signed is None:
        return torch.bitwise_left_shift if left else torch.bitwise_right_shift

    def shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kind, x, y = x.dtype, x.view(signed), y.view(signed)
        if left:
            return torch.bitwise_left_shift(x, y).view(kind)
        # The sign is repeated on the left, as many times as bits are shifted out: clear these.
        kept = torch.bitwise_not(torch.bitwise_left_shift(torch.full_like(y, -1), bits - y))
        kept = torch.where(y == 0, -1, kept)
        return torch.bitwise_and(torch.bitwise_right_shift(x, y), kept).view(kind)

    return shifted


OPERATORS: dict[str, Factory] = {
    **{name: native(getattr(torch, name.lower())) for name in NUMPY_UNARY if name not in ("BitwiseNot", "Not")},
    "And": native(torch.logical_and),
    "BitwiseAnd": bitwise(torch.bitwise_and),
    "BitwiseNot": bitwise(torch.bitwise_not),
    "BitwiseOr": bitwise(torch.bitwise_or),
    "BitwiseXor": bitwise(torch.bitwise_xor),
    "Elu": native(F.elu, "alpha"),
    "Equal": native(torch.eq),
    "Erf": native(torch.erf),
    "Gelu": native(F.gelu, "approximate"),
    "Greater": native(torch.gt),
    "GreaterOrEqual": native(torch.ge),
    "HardSigmoid": native(lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1), "alpha", "beta"),
    "HardSwish": native(F.hardswish),
    "Identity": native(same),
    "LeakyRelu": native(F.leaky_relu, negative_slope="alpha"),
    "Less": native(torch.lt),
    "LessOrEqual": native(torch.le),
    "Max": repeated(torch.maximum),
    "Min": repeated(torch.minimum),
    "Mish": native(F.mish),
    "Mul": native(torch.mul),
    "Not": native(torch.logical_not),
    "Or": native(torch.logical_or),
    # `F.selu` has other digits.
    "Selu": native(lambda x, alpha, gamma: gamma * F.elu(x, alpha), "alpha", "gamma"),
    "Sigmoid": native(torch.sigmoid),
    "Softplus": native(F.softplus),
    "Softsign": native(F.softsign),
    "Sub": native(torch.sub),
    "ThresholdedRelu": native(lambda x, alpha: F.threshold(x, alpha, 0), "alpha"),
    "Where": native(torch.where),
    "Xor": native(torch.logical_xor),
}
