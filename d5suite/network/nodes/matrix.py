"""Matrix products.

Imports `d5suite.network`.
"""

from __future__ import annotations

from dataclasses import dataclass

from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.context import NodeContext, has_input
from d5suite.network.nodes.equation import Einsum, expand_equation


@dataclass(frozen=True)
class Gemm:
    """A Gemm: ``alpha A' B' + beta C``.

    Attributes
    ----------
    alpha, beta : float
    trans_a, trans_b : bool
    features : int or None
        Columns of the product.
    bias : tuple or None
        Shape of C; None if it is omitted.
    """

    alpha: float
    beta: float
    trans_a: bool
    trans_b: bool
    features: int | None
    bias: Shape | None

    @property
    def has_vector(self) -> bool:
        """Whether C is unscaled, with one value per feature."""
        return self.beta == 1 and self.bias == (self.features,)

    @property
    def plain(self) -> bool:
        """Whether it is a dense layer: an unscaled product plus at most one value per feature."""
        return self.alpha == 1 and (self.bias is None or self.has_vector)


def read_gemm(node: Node, context: NodeContext) -> Gemm:
    """Read a Gemm."""
    a = node.attributes
    bias = context.shape(node.inputs[2]) if has_input(node, 2) else None
    features = context.shape(node.inputs[1])[0 if a["transB"] else 1]
    return Gemm(a["alpha"], a["beta"], bool(a["transA"]), bool(a["transB"]), features, bias)


def read_einsum(node: Node, context: NodeContext) -> Einsum:
    """Read an Einsum."""
    return expand_equation(node.attributes["equation"], [context.rank(name) for name in node.inputs])
