"""Reductions over axes.

Imports `d5suite.network`.
"""

from __future__ import annotations

from dataclasses import dataclass

from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.layouts import Layout, without
from d5suite.network.nodes.shape import read_axes


@dataclass(frozen=True)
class Reduction:
    """A reduction over axes, such as a ReduceSum.

    Attributes
    ----------
    axes : tuple of int
    keep : bool
        Whether reduced axes are kept, with size 1.
    empty : bool
        Whether a reduced axis has size 0.
    """

    axes: tuple[int, ...]
    keep: bool
    empty: bool

    def layout(self, layout: Layout) -> Layout:
        """Return the output's layout for an input layout."""
        return layout if self.keep else without(layout, self.axes)


def read_reduce(node: Node, context: NodeContext) -> Reduction | None:
    """Read a reduction; None if it reduces nothing (``noop_with_empty_axes``)."""
    shape = context.shape(node.inputs[0])
    axes = read_axes(node, context, len(shape))
    if not axes:
        if node.attributes["noop_with_empty_axes"]:
            return None
        axes = tuple(range(len(shape)))
    return Reduction(axes, bool(node.attributes["keepdims"]), any(shape[axis] == 0 for axis in axes))
