"""Convolutions and pools as nodes: the windows that they slide over images.

Imports `d5suite.errors`, `d5suite.network` and its neighbours.
"""

from __future__ import annotations

from d5suite.errors import NetworkError
from d5suite.network.model import Node, Shape
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.windows import TransposedWindow, Window, transposed_window, window


def read_conv(node: Node, context: NodeContext) -> Window:
    """Return the window of a Conv; raises like `window`, and unless 1 to 3 axes are spatial."""
    return window(node, _spatial(node, context), context.shape(node.inputs[1])[2:])


def read_conv_transpose(node: Node, context: NodeContext) -> TransposedWindow:
    """Return the windows of a ConvTranspose; raises like `transposed_window` and `read_conv`."""
    return transposed_window(node, _spatial(node, context), context.shape(node.inputs[1])[2:])


def read_pool(node: Node, context: NodeContext) -> Window:
    """Return the window of a MaxPool or AveragePool; raises like `read_conv`."""
    return window(node, _spatial(node, context))


def read_global_pool(node: Node, context: NodeContext) -> int:
    """Return the number of spatial axes; raises unless it is 1 to 3."""
    return len(_spatial(node, context))


def _spatial(node: Node, context: NodeContext) -> Shape:
    """Sizes of the image's 1 to 3 spatial axes."""
    sizes = context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    return sizes
