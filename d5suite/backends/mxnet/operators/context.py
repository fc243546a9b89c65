"""Common parts of MXNet's operator factories: their context, and native helpers.

Imports NumPy and `d5suite.network`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from d5suite.network import Network, Node
from d5suite.network.nodes.context import NodeContext

Call = Callable[..., Any]
Factory = Callable[[Node, "Context"], Call]


ARRAY_TYPES = frozenset({"float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool"})
"""Types that MXNet's arrays on the CPU fully support."""


class Packed(NamedTuple):
    """Inputs that a kernel takes as one vector, with NumPy functions that pack and unpack them.

    Attributes
    ----------
    names : sequence of str
        The inputs. The operator gets the vector in place of the first and None for the others.
    pack, unpack : callable
    """

    names: Sequence[str]
    pack: Callable[[Sequence[np.ndarray]], np.ndarray]
    unpack: Callable[[np.ndarray], Sequence[np.ndarray]]


@dataclass(kw_only=True)
class Context(NodeContext):
    """What a factory knows about its node and the network around it.

    Attributes
    ----------
    dtype : str
        Type of parameters and activations.
    kept : dict of str to numpy.ndarray
        The array that an operator gets after its inputs, by node.
    packed : list of Packed
        Inputs that a kernel takes as one vector; level 0 only.
    in_blocks : frozenset of str
        Tensors whose gradient oneDNN may store in blocks of channels; see `stored_in_blocks`.
    """

    dtype: str = "float32"
    in_blocks: frozenset[str] = frozenset()
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    packed: list[Packed] = field(default_factory=list)

    def type_of(self, name: str) -> str:
        """Return the type in which a tensor is computed: Booleans are 0 and 1 in `dtype`."""
        dtype = self.dtypes.get(name)
        return self.dtype if dtype is None or dtype == np.bool_ else dtype.name

    def numbers(self, name: str) -> Call:
        """Return a function of `F` and a tensor that casts Booleans to numbers."""
        if name in self.constants and self.constants[name].ndim == 0:
            return lambda F, x: x if isinstance(x, int | float) and not isinstance(x, bool) else float(x)
        if self.dtypes.get(name) == np.bool_:
            return lambda F, x: F.cast(x, self.dtype)
        return lambda F, x: x

    def keep(self, node: Node, array: np.ndarray) -> None:
        """Pass this array to the node's operator after the node's inputs."""
        self.kept[node.name] = array


_KEEPS_BLOCKS = frozenset({
    "Abs", "Acos", "Acosh", "Add", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "Cast", "Cos", "Cosh",
    "Dropout", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LRN", "LeakyRelu", "Log", "Mean",
    "Mish", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign",
    "Sqrt", "Sub", "Sum", "Tan", "Tanh",
})  # fmt: skip
"""Operators whose input's gradient may be computed in the memory of their output's gradient."""


def stored_in_blocks(network: Network) -> frozenset[str]:
    """Return a network's tensors whose gradient oneDNN may store in blocks of channels.

    Such a gradient comes from a convolution, maybe through element-wise operators. Most other
    operators, such as a product of two tensors, a pool or a transpose, write gradients in order.
    """
    numbers = {name for name in network.constants if network.initializers[name].ndim == 0}
    found: set[str] = set()
    for node in reversed(network.nodes):
        scaled = node.op_type in ("Div", "Mul") and not numbers.isdisjoint(node.inputs)
        if node.op_type in ("Conv", "ConvTranspose"):
            found.add(node.inputs[0])
        elif (scaled or node.op_type in _KEEPS_BLOCKS) and not found.isdisjoint(node.outputs):
            found.update(node.inputs)
    return frozenset(
        name for name in found if len(shape := network.shapes.get(name, ())) > 2 and (shape[1] or 0) % 8 == 0
    )


def in_order(F: Any, x: Any) -> Any:
    """Copy a tensor, so that the nodes before get its gradient in order, not in blocks.

    MXNet computes element-wise gradients in place, in such blocks, but not a slice's gradient.
    """
    return F.slice_axis(x, axis=0, begin=0, end=None)


def places(F: Any, x: Any, axis: int, rank: int) -> Any:
    """Return each cell's own index along an axis."""
    along = F.cast(F.contrib.arange_like(x, axis=axis), dtype="int64")
    return F.broadcast_like(F.reshape(along, shape=[-1 if a == axis else 1 for a in range(rank)]), x)


def rounded(F: Any, x: Any) -> Any:
    """Round to whole numbers, halves to the even one; MXNet rounds them down."""
    near = F.rint(x)
    return F.where(F.abs(x - near) == 0.5, 2 * F.rint(x / 2), near)


def padded(F: Any, x: Any, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Any:
    """Pad every axis by its cells before and after; negative widths crop.

    MXNet's operator pads the spatial axes of 4-D and 5-D arrays. On other axes, blocks are
    concatenated.
    """
    for axis, (before, after) in enumerate(widths):
        if before < 0 or after < 0:
            x = F.slice_axis(x, axis=axis, begin=max(-before, 0), end=min(after, 0) or None)
    widths = [(max(before, 0), max(after, 0)) for before, after in widths]
    native = 2 if len(widths) in (3, 4, 5) else len(widths)  # the first axis that MXNet pads
    for axis, (before, after) in enumerate(widths[:native]):
        if before or after:
            cell = F.zeros_like(F.slice_axis(x, axis=axis, begin=0, end=1)) + value
            ahead, behind = ([F.broadcast_axis(cell, axis=axis, size=n)] if n else [] for n in (before, after))
            x = F.concat(*ahead, x, *behind, dim=axis)
    spatial = tuple(itertools.chain(*widths[native:]))
    if not any(spatial):
        return x
    settings = {"mode": "constant", "constant_value": value}
    if len(widths) == 3:
        x = F.pad(F.expand_dims(x, axis=2), pad_width=(*[0] * 6, *spatial), **settings)
        return F.squeeze(x, axis=2)
    return F.pad(x, pad_width=(*[0] * 4, *spatial), **settings)
