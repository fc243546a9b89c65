"""Convolution and pooling nodes: their sliding windows.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.graph import Node, Shape
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.windows import TransposedWindow, Window, transposed_window, window


def read_conv(node: Node, context: NodeContext) -> Window:
    """Return the window of a Conv; raises like `window`, or for other than 1 to 3 spatial axes."""
    return window(node, _spatial(node, context), context.shape(node.inputs[1])[2:])


def read_conv_transpose(node: Node, context: NodeContext) -> TransposedWindow:
    """Return the windows of a ConvTranspose; raises like `transposed_window` and `read_conv`."""
    return transposed_window(node, _spatial(node, context), context.shape(node.inputs[1])[2:])


def read_pool(node: Node, context: NodeContext) -> Window:
    """Return the window of a MaxPool, AveragePool or LpPool; raises like `read_conv`."""
    return window(node, _spatial(node, context))


@dataclass(frozen=True)
class Columns:
    """A Col2Im: sums columns into an image; a column holds the cells of one window.

    Attributes
    ----------
    window : Window
        The window of the convolution that extracts such columns from the image.
    channels : int
    """

    window: Window
    channels: int

    @property
    def cells(self) -> np.ndarray:
        """Indices of the image cells that a channel's columns are added to, row by row: int64.

        Cells of the padding have an index past the image's end.
        """
        w = self.window
        numbers = np.pad(np.arange(math.prod(w.image)).reshape(w.image), w.pads, constant_values=math.prod(w.image))
        return np.stack([numbers[tap].reshape(-1) for tap in w.taps()]).reshape(-1)


def read_columns(node: Node, context: NodeContext) -> Columns:
    """Read a Col2Im; raises like `window`, and if the number of channels is unknown."""
    image, block = context.constant(node, 1), context.constant(node, 2)
    assert image is not None and block is not None  # ONNX has no default
    rows = context.shape(node.inputs[0])[1]
    if rows is None:
        raise NetworkError("Col2Im to an unknown number of channels", where=node.name)
    kernel = tuple(map(int, block))
    return Columns(window(node, tuple(map(int, image)), kernel), rows // math.prod(kernel))


@dataclass(frozen=True)
class Unpool:
    """A MaxUnpool: writes each maximum back to the cell of the image that it came from.

    Attributes
    ----------
    channels : int
    image : tuple of int
        Spatial sizes of the image; indices address all images and channels, flattened.
    padding : tuple of (int, int)
        Zeros to add before and after each axis of the image, batch and channels included.
    overlapping : bool
        Whether windows overlap, so that indices may repeat.
    """

    channels: int
    image: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    overlapping: bool

    @property
    def padded(self) -> bool:
        """Whether `padding` changes anything."""
        return any(map(any, self.padding))


def read_unpool(node: Node, context: NodeContext) -> Unpool:
    """Read a MaxUnpool; raises if the image's size or number of channels is unknown."""
    _, channels, *sizes = context.shape(node.inputs[0])
    a, shape = node.attributes, context.constant(node, 2)
    kernel, rank = a["kernel_shape"], len(a["kernel_shape"])
    known = [n for n in sizes if n is not None]
    if channels is None or len(known) < rank:
        raise NetworkError("MaxUnpool of an image of unknown size", where=node.name)
    strides, pads = a.get("strides") or [1] * rank, a.get("pads") or [0] * 2 * rank
    image = tuple(
        (n - 1) * stride - begin - end + k
        for n, stride, begin, end, k in zip(known, strides, pads[:rank], pads[rank:], kernel, strict=True)
    )
    wanted = image if shape is None else tuple(map(int, shape[2:]))
    padding = ((0, 0), (0, 0), *((0, after - before) for before, after in zip(image, wanted, strict=True)))
    overlapping = any(stride < k for stride, k in zip(strides, kernel, strict=True))
    return Unpool(channels, image, padding, overlapping)


def read_global_pool(node: Node, context: NodeContext) -> int:
    """Return the number of spatial axes; raises unless it is 1 to 3."""
    return len(_spatial(node, context))


def _spatial(node: Node, context: NodeContext) -> Shape:
    """Return the sizes of the image's 1 to 3 spatial axes."""
    sizes = context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    return sizes
