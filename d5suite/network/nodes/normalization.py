"""Normalization nodes.

Imports `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.layouts import Layout

LEAST_NORM = 2.0**-63
"""Least norm that a vector is divided by, so that zeros stay zeros as in ONNX. Its square is the
least normal float32."""


@dataclass(frozen=True)
class LayerNormalization:
    """A LayerNormalization.

    Attributes
    ----------
    axes : tuple of int
        The last axes, which are normalised together.
    sizes : tuple
        Sizes of these axes.
    epsilon : float
    full : bool
        Whether scale and bias have exactly ``sizes``, without broadcasting.
    """

    axes: tuple[int, ...]
    sizes: Shape
    epsilon: float
    full: bool


def read_layer_normalization(node: Node, context: NodeContext) -> LayerNormalization:
    """Read a LayerNormalization."""
    shape = context.shape(node.inputs[0])
    axes = tuple(range(node.attributes["axis"] % len(shape), len(shape)))
    sizes = shape[axes[0] :]
    full = all(context.shape(name) == sizes for name in node.inputs[1:] if name)
    return LayerNormalization(axes, sizes, node.attributes["epsilon"], full)


@dataclass(frozen=True)
class GroupNormalization:
    """A GroupNormalization of a tensor in storage order.

    Attributes
    ----------
    groups : int
    place : int
        The stored axis of channels.
    axes : tuple of int
        Axes that are normalised together, after the channels are split into groups.
    along_channel : tuple of int
        Shape of a vector with one value per channel.
    """

    groups: int
    place: int
    axes: tuple[int, ...]
    along_channel: tuple[int, ...]

    def split(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a stored shape with its channels split into groups."""
        before, channels, after = shape[: self.place], shape[self.place], shape[self.place + 1 :]
        return (*before, self.groups, channels // self.groups, *after)


def read_group_normalization(node: Node, layout: Layout) -> GroupNormalization:
    """Read a GroupNormalization of a tensor stored in a layout."""
    place, batch = layout.index(1), layout.index(0)
    kept = {place, batch + (batch > place)}
    axes = tuple(axis for axis in range(len(layout) + 1) if axis not in kept)
    along = tuple(-1 if axis == 1 else 1 for axis in layout)
    return GroupNormalization(node.attributes["num_groups"], place, axes, along)


@dataclass(frozen=True)
class Lrn:
    """An LRN: ``x / (bias + alpha / size Σ x²)^beta``, summed over a window of channels.

    Attributes
    ----------
    size : int
        Channels in the window.
    before, after : int
        Channels before and after the centre; an even window has one more after it.
    alpha, beta, bias : float
    """

    size: int
    before: int
    after: int
    alpha: float
    beta: float
    bias: float


def read_lrn(node: Node) -> Lrn:
    """Read an LRN."""
    a = node.attributes
    size = a["size"]
    return Lrn(size, (size - 1) // 2, size // 2, a["alpha"], a["beta"], a["bias"])
