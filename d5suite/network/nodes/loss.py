"""Losses.

Imports `d5suite.network`.
"""

from __future__ import annotations

from dataclasses import dataclass

from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext, has_input


@dataclass(frozen=True)
class SoftmaxCrossEntropyLoss:
    """A SoftmaxCrossEntropyLoss; classes are axis 1 of the scores.

    Attributes
    ----------
    reduction : str
        ``mean``, ``sum`` or ``none``.
    ignored : int or None
        The label to ignore.
    weighted : bool
        Whether classes have weights.
    logged : bool
        Whether the logarithms of the probabilities are also wanted.
    """

    reduction: str
    ignored: int | None
    weighted: bool
    logged: bool


def read_softmax_cross_entropy_loss(node: Node, context: NodeContext) -> SoftmaxCrossEntropyLoss:
    """Read a SoftmaxCrossEntropyLoss."""
    a = node.attributes
    logged = any(context.wanted(node)[1:])
    return SoftmaxCrossEntropyLoss(a["reduction"], a.get("ignore_index"), has_input(node, 2), logged)
