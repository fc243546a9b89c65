"""Element-wise nodes: attributes, bounds, ratios and slopes.

Imports `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext, has_input

NUMPY_UNARY: dict[str, str] = {
    "Abs": "abs", "Acos": "arccos", "Acosh": "arccosh", "Asin": "arcsin", "Asinh": "arcsinh", "Atan": "arctan",
    "Atanh": "arctanh", "BitwiseNot": "bitwise_not", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Exp": "exp",
    "Floor": "floor", "IsNaN": "isnan", "Log": "log", "Neg": "negative", "Not": "logical_not",
    "Reciprocal": "reciprocal", "Round": "round", "Sign": "sign", "Sin": "sin", "Sinh": "sinh", "Sqrt": "sqrt",
    "Tan": "tan", "Tanh": "tanh",
}  # fmt: skip
"""NumPy's names of operators of one tensor; other frameworks share them."""

NUMPY_BINARY: dict[str, str] = {
    "And": "logical_and", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
    "Equal": "equal", "Greater": "greater", "GreaterOrEqual": "greater_equal", "Less": "less",
    "LessOrEqual": "less_equal", "Max": "maximum", "Min": "minimum", "Mul": "multiply", "Or": "logical_or",
    "Sub": "subtract", "Xor": "logical_xor",
}  # fmt: skip
"""NumPy's names of operators of two tensors; other frameworks share them."""


def with_attributes(function: Callable[..., Any], node: Node, *names: str, **renamed: str) -> Callable[..., Any]:
    """Return a function that also gets attributes of a node, as keyword arguments.

    Parameters
    ----------
    function : callable
        Takes the node's inputs and these arguments.
    node : Node
    *names : str
        Attributes whose arguments have the same names.
    **renamed : str
        Further attributes by the names of their arguments.
    """
    wanted = {**dict(zip(names, names, strict=True)), **renamed}
    settings = {key: node.attributes[name] for key, name in wanted.items()}
    return (lambda *xs: function(*xs, **settings)) if settings else function


def read_clip(node: Node, context: NodeContext) -> tuple[Any, Any]:
    """Return Clip's constant bounds as Python numbers; None for an omitted bound.

    Raises
    ------
    NetworkError
        If a bound is computed; see `is_clip_fixed`.
    """
    low, high = (context.constant(node, index) for index in (1, 2))
    return None if low is None else low.item(), None if high is None else high.item()


def is_clip_fixed(node: Node, context: NodeContext) -> bool:
    """Return whether both bounds of a Clip are constants or omitted."""
    return all(node.inputs[index] in context.constants for index in (1, 2) if has_input(node, index))


def infinite_signs(node: Node) -> tuple[int, int]:
    """Return whether an IsInf detects negative and positive infinity, each as 0 or 1."""
    return node.attributes["detect_negative"], node.attributes["detect_positive"]


def read_dropout(node: Node, context: NodeContext) -> float:
    """Return the probability that Dropout drops an element."""
    ratio = context.constant(node, 1)
    return 0.5 if ratio is None else float(ratio.item())


def slopes_of_channels(node: Node, context: NodeContext) -> bool:
    """Return whether a PRelu has one slope per channel, the second axis."""
    shape, slope = context.shape(node.inputs[0]), context.shape(node.inputs[1])
    rest = len(shape) - 2
    return rest >= 0 and slope == (shape[1], *[1] * rest)
