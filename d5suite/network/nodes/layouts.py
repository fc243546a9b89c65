"""Storage layouts, for adapters that store some tensors in another axis order than ONNX.

Imports `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from d5suite.network import Network, Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.context import NodeContext

Layout = tuple[int, ...]
"""ONNX axes in storage order: (0, 2, 3, 1) is an image stored as N, H, W, C."""


def identity(rank: int) -> Layout:
    """Return ONNX's own layout."""
    return tuple(range(rank))


def channels_last(rank: int) -> Layout:
    """Return N, spatial axes, C; ONNX's own layout for fewer than two axes."""
    return (0, *range(2, rank), 1) if rank > 1 else identity(rank)


def kernel_last(rank: int) -> Layout:
    """Return the layout of a convolution weight: spatial axes, then inputs, then outputs."""
    return (*range(2, rank), 1, 0)


def grouped_channels_last(rank: int) -> Layout:
    """Return N, spatial axes, groups, channels of a group, for (N, groups, channels, spatial)."""
    return (0, *range(3, rank), 1, 2)


def without(layout: Layout, axes: Sequence[int]) -> Layout:
    """Return the layout after some ONNX axes are removed."""
    return tuple(axis - sum(gone < axis for gone in axes) for axis in layout if axis not in axes)


def weight_layout(node: Node, index: int, rank: int, *, kernels: Sequence[str] = ("Conv",)) -> Layout:
    """Return the fastest layout of a weight: input features before output features.

    Parameters
    ----------
    node : Node
    index : int
        The weight's input number.
    rank : int
    kernels : sequence of str
        Operators whose kernels are stored with the spatial axes first.
    """
    if node.op_type in kernels and index == 1:
        return kernel_last(rank)
    if node.op_type == "Gemm" and index == 1 and node.attributes["transB"]:
        return (1, 0)
    if node.op_type in ("GRU", "LSTM") and index in (1, 2):
        return (0, 2, 1)
    return identity(rank)


def weight_layouts(network: Network, *, kernels: Sequence[str] = ("Conv",)) -> dict[str, Layout]:
    """Return `weight_layout` for every parameter whose layout is not ONNX's own."""
    layouts: dict[str, Layout] = {}
    for node in network.nodes:
        for index, name in enumerate(node.inputs):
            if name in network.parameters and name not in layouts:
                layout = weight_layout(node, index, len(network.shapes[name]), kernels=kernels)
                if layout != identity(len(layout)):
                    layouts[name] = layout
    return layouts


def arrange(layout: Layout, spatial: Sequence[Any], rest: Any) -> tuple[Any, ...]:
    """Return values per axis in storage order: ``spatial`` from axis 2 on, ``rest`` before."""
    return tuple(rest if axis < 2 else spatial[axis - 2] for axis in layout)


class Conversion(NamedTuple):
    """How to convert a tensor to another layout.

    Attributes
    ----------
    added : int
        Number of leading axes of size 1 to add first.
    order : tuple of int
        Permutation of the axes, including the added ones.
    reshape : tuple of int or None
        Target shape if a reshape suffices, because only axes of size 1 change places; -1 is an
        unknown size. None if data must move.
    """

    added: int
    order: tuple[int, ...]
    reshape: tuple[int, ...] | None


@dataclass(kw_only=True)
class LayoutContext(NodeContext):
    """A context that tracks storage layouts.

    Attributes
    ----------
    layouts : dict of str to tuple
        Storage layout by tensor; ONNX's own if absent. A factory reads the layouts of inputs and
        sets the layouts of outputs.
    """

    layouts: dict[str, Layout] = field(default_factory=dict)

    def layout(self, name: str) -> Layout:
        """Return the storage layout of a tensor."""
        return self.layouts.get(name) or identity(self.rank(name))

    def keep_layout(self, node: Node) -> Layout:
        """Give the first output the first input's layout, and return it."""
        layout = self.layouts[node.outputs[0]] = self.layout(node.inputs[0])
        return layout

    def conversion(self, name: str, wanted: Layout) -> Conversion | None:
        """Return how to convert a tensor to a layout of at least its rank; None if not needed."""
        shape, layout = self.shape(name), self.layout(name)
        added = len(wanted) - len(shape)
        if layout == wanted or not shape:
            return None
        shape = (1,) * added + shape
        layout = (*range(added), *(axis + added for axis in layout))
        order = tuple(layout.index(axis) for axis in wanted)
        sizes = [shape[axis] for axis in wanted]
        still = [a for a in layout if shape[a] != 1] == [a for a in wanted if shape[a] != 1]
        reshape = tuple(-1 if n is None else n for n in sizes) if still and sizes.count(None) <= 1 else None
        return Conversion(added, order, reshape)

    def broadcast_layouts(self, node: Node) -> list[Layout]:
        """Return layouts in which the inputs broadcast as in ONNX; set the output's layout."""
        rank = max(self.rank(name) for name in node.inputs)
        full = [self.layout(name) for name in node.inputs if self.rank(name) == rank]
        layout = next((x for x in full if x != identity(rank)), identity(rank))
        self.layouts[node.outputs[0]] = layout
        plain = layout == identity(rank)
        return [identity(self.rank(name)) if plain else layout for name in node.inputs]


def splits_channels(shape: Shape, split: Shape) -> bool:
    """Return whether (N, C, spatial) becomes (N, a, b, spatial), with two or more spatial axes."""
    if len(shape) < 4 or len(split) != len(shape) + 1 or None in (*shape[1:], *split[1:]):
        return False
    apart = (split[1] or 0) * (split[2] or 0)
    return split[0] == shape[0] and shape[1] == apart and split[3:] == shape[2:]
