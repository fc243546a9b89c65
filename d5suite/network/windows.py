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


@dataclass(frozen=True)
class TransposedWindow:
    """The windows of a transposed convolution.

    Attributes
    ----------
    kernel, strides, dilations : tuple of int
    pads_begin, pads_end : tuple of int
        Rows and columns of the whole result that are cut off.
    output_padding : tuple of int
        Rows and columns added after the whole result, before it is cut.
    outputs : tuple of int
        Output size in each dimension.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    output_padding: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether both sides are cut alike."""
        return self.pads_begin == self.pads_end


def transposed_window(node: Node, image: Sequence[int | None], kernel: Sequence[int | None]) -> TransposedWindow:
    """The windows of a ConvTranspose node; parameters as for `window`.

    Raises
    ------
    NetworkError
        If a size is unknown or the padding is larger than the result.
    """
    attributes = node.attributes
    sizes = tuple(attributes.get("kernel_shape") or kernel)
    rank = len(sizes)
    if rank != len(image) or any(n is None for n in (*image, *sizes)):
        raise NetworkError(f"the image size at this node is not known: {list(image)}", where=node.name)
    strides = tuple(attributes.get("strides") or (1,) * rank)
    dilations = tuple(attributes.get("dilations") or (1,) * rank)
    extra = tuple(attributes.get("output_padding") or (0,) * rank)
    inputs = [n for n in image if n is not None]
    kernels = tuple(k for k in sizes if k is not None)
    whole = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(inputs, strides, kernels, dilations, extra, strict=True)
    ]
    automatic, wanted = attributes.get("auto_pad", "NOTSET"), attributes.get("output_shape")
    if wanted or automatic in ("SAME_UPPER", "SAME_LOWER"):
        asked = list(wanted)[-rank:] if wanted else [n * s for n, s in zip(inputs, strides, strict=True)]
        # What the result lacks of the size asked for is added behind it.
        more = [max(a - w, 0) for a, w in zip(asked, whole, strict=True)]
        extra = tuple(e + m for e, m in zip(extra, more, strict=True))
        totals = [max(w - a, 0) for a, w in zip(asked, whole, strict=True)]
        small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        begin, end = (small, large) if automatic == "SAME_UPPER" else (large, small)
        whole = [w + m for w, m in zip(whole, more, strict=True)]
    else:
        pads = list(attributes.get("pads") or [0] * (2 * rank)) if automatic == "NOTSET" else [0] * (2 * rank)
        begin, end = tuple(pads[:rank]), tuple(pads[rank:])
    outputs = tuple(w - b - e for w, b, e in zip(whole, begin, end, strict=True))
    if min((*begin, *end, *outputs), default=0) < 0:
        raise NetworkError(f"the padding {[*begin, *end]} does not fit a result of {whole}", where=node.name)
    return TransposedWindow(kernels, strides, dilations, begin, end, extra, outputs)
