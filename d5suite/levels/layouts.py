"""Arrays and factories of adapters that store some tensors in another axis order than ONNX.

Imports NumPy, `d5suite.network` and, of its own folder, `network`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d5suite.levels.network import Executor
from d5suite.network import Node
from d5suite.network.nodes.elementwise import with_attributes
from d5suite.network.nodes.layouts import Conversion, Layout, LayoutContext, identity

Function = Callable[..., Any]


def arranged(array: np.ndarray, layout: Layout | None) -> np.ndarray:
    """Return an array of ONNX's layout in a storage layout; None is ONNX's own."""
    return array.transpose(layout) if layout else array


def restored(array: np.ndarray, layout: Layout | None) -> np.ndarray:
    """Undo `arranged`."""
    return array.transpose(np.argsort(layout)) if layout else array


class LayoutExecutor(Executor):
    """An executor that stores some tensors in another axis order.

    A subclass sets ``_layouts``: the storage layout by tensor, ONNX's own if absent.
    """

    _layouts: dict[str, Layout]

    def stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return an array of a tensor in its storage layout."""
        return arranged(array, self._layouts.get(name))

    def restored(self, name: str, array: np.ndarray) -> np.ndarray:
        """Undo `stored`."""
        return restored(array, self._layouts.get(name))


def same(x: Any, *_: Any) -> Any:
    """Return the first argument."""
    return x


def converting(function: Function, converters: Sequence[Function]) -> Function:
    """Return a function that converts each of its arguments first."""
    if set(converters) == {same}:
        return function
    return lambda *xs: function(*[convert(x) for convert, x in zip(converters, xs, strict=True)])


@dataclass(kw_only=True)
class ConvertingContext(LayoutContext):
    """A context whose factories move tensors into the layouts that they need."""

    def moved(self, how: Conversion) -> Function:
        """Return the native function that makes a conversion."""
        raise NotImplementedError

    def convert(self, name: str, wanted: Layout) -> Function:
        """Return a function that brings a tensor into a layout; see `conversion`."""
        how = self.conversion(name, wanted)
        return same if how is None else self.moved(how)

    def to_onnx(self, name: str) -> Function:
        """Return a function that brings a tensor into ONNX's layout."""
        return self.convert(name, identity(self.rank(name)))

    def inputs_to_onnx(self, node: Node) -> list[Function]:
        """Return, for each input, a function that brings it into ONNX's layout."""
        return [self.to_onnx(name) if name else same for name in node.inputs]

    def aligned(self, node: Node) -> list[Function]:
        """Return, for each input, a function that brings it into the layout that they broadcast in.

        The output gets this layout.
        """
        return [self.convert(*pair) for pair in zip(node.inputs, self.broadcast_layouts(node), strict=True)]


def in_onnx(factory: Callable[[Node, Any], Function]) -> Callable[[Node, Any], Function]:
    """Return a factory whose function gets its inputs in ONNX's layout."""
    return lambda node, context: converting(factory(node, context), context.inputs_to_onnx(node))


def unary(function: Function, *names: str, **renamed: str) -> Callable[[Node, Any], Function]:
    """Return a factory for a function of one tensor in any layout, and of attributes of its node.

    See `d5suite.network.nodes.elementwise.with_attributes` for the parameters.
    """

    def factory(node: Node, context: Any) -> Function:
        context.keep_layout(node)
        return with_attributes(function, node, *names, **renamed)

    return factory
