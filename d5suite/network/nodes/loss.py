"""Losses.

Imports `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext, has_input

Function = Callable[[Any], Any]


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

    def reduce(self, losses: Any, weights: Any, kept: Any, total: Function, mean: Function) -> Any:
        """Reduce a framework's losses with its functions that sum and average a whole tensor.

        ``weights`` holds the class weight of each loss, and ``kept`` is 0 where a loss is ignored;
        each may be None.
        """
        factors = kept if weights is None else weights if kept is None else weights * kept
        losses = losses if factors is None else losses * factors
        if self.reduction == "none":
            return losses
        if self.reduction == "sum":
            return total(losses)
        return mean(losses) if factors is None else total(losses) / total(factors)


def read_softmax_cross_entropy_loss(node: Node, context: NodeContext) -> SoftmaxCrossEntropyLoss:
    """Read a SoftmaxCrossEntropyLoss."""
    a = node.attributes
    logged = any(context.wanted(node)[1:])
    return SoftmaxCrossEntropyLoss(a["reduction"], a.get("ignore_index"), has_input(node, 2), logged)
