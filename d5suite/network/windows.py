"""The sliding windows of convolution and pooling, with automatic padding worked out.

Formulas: ONNX operator specification, Conv and MaxPool (``auto_pad``, ``ceil_mode``). Imports `d5suite.network.model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from d5suite.errors import NetworkError
from d5suite.network.model import Node


@dataclass(frozen=True)
class Window:
    """One window per spatial dimension.

    Attributes
    ----------
    kernel, strides, dilations : tuple of int
    pads_begin, pads_end : tuple of int
        Rows and columns added before and after; never negative.
    outputs : tuple of int
        Output size in each dimension.
    overhang : tuple of int
        How far the last window of a ceil-mode pool reaches past the padded input; 0 elsewhere.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    outputs: tuple[int, ...]
    overhang: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether both sides are padded alike."""
        return self.pads_begin == self.pads_end


def window(node: Node, image: Sequence[int | None], kernel: Sequence[int | None] | None = None) -> Window:
    """The window of a Conv, MaxPool or AveragePool node.

    Parameters
    ----------
    node : Node
    image : sequence of int
        Spatial dimensions of the node's input.
    kernel : sequence of int, optional
        Spatial dimensions of the weight, used where the node has no ``kernel_shape``.

    Raises
    ------
    NetworkError
        If a size is unknown or the window is larger than the padded image.
    """
    attributes = node.attributes
    sizes = tuple(attributes.get("kernel_shape") or kernel or ())
    rank = len(sizes)
    if rank != len(image) or any(n is None for n in (*image, *sizes)):
        raise NetworkError(f"the image size at this node is not known: {list(image)}", where=node.name)
    strides = tuple(attributes.get("strides") or (1,) * rank)
    dilations = tuple(attributes.get("dilations") or (1,) * rank)
    spans = [(k - 1) * d + 1 for k, d in zip(sizes, dilations, strict=True) if k is not None]
    inputs = [n for n in image if n is not None]
    automatic = attributes.get("auto_pad", "NOTSET")
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        totals = [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in zip(inputs, strides, spans, strict=True)]
        small = tuple(t // 2 for t in totals)
        large = tuple(t - t // 2 for t in totals)
        begin, end = (small, large) if automatic == "SAME_UPPER" else (large, small)
    else:
        pads = list(attributes.get("pads") or [0] * (2 * rank)) if automatic == "NOTSET" else [0] * (2 * rank)
        begin, end = tuple(pads[:rank]), tuple(pads[rank:])
    if min((*begin, *end), default=0) < 0:
        raise NetworkError(f"negative padding: {[*begin, *end]}", where=node.name)
    outputs, overhang = [], []
    for n, before, after, span, stride in zip(inputs, begin, end, spans, strides, strict=True):
        room = n + before + after - span
        if room < 0:
            raise NetworkError(
                f"a window of {span} does not fit an image of {n} with padding {before}+{after}", where=node.name
            )
        count = room // stride + 1
        # A further, partial window counts only if it starts inside the image or its leading padding.
        if attributes.get("ceil_mode") and room % stride and count * stride < n + before:
            count += 1
        outputs.append(count)
        overhang.append(max((count - 1) * stride - room, 0))
    return Window(
        tuple(k for k in sizes if k is not None), strides, dilations, begin, end, tuple(outputs), tuple(overhang)
    )
