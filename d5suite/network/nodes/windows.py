"""The sliding windows of convolution and pooling, with automatic padding resolved.

Formulas: ONNX operator specification, Conv and MaxPool (``auto_pad``, ``ceil_mode``). Imports
NumPy, `d5suite.errors` and `d5suite.network.graph`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.graph import Node, Shape


@dataclass(frozen=True)
class _Sliding:
    """A kernel that slides over an image, per spatial dimension."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether the pads before and after are equal, ignoring overhang."""
        return self.pads_begin == self.pads_end

    @property
    def spans(self) -> tuple[int, ...]:
        """Size of a window in cells, dilation included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))


@dataclass(frozen=True)
class Window(_Sliding):
    """One window per spatial dimension.

    Attributes
    ----------
    image, kernel, strides, dilations : tuple of int
    pads_begin, pads_end : tuple of int
        Rows and columns added before and after; never negative.
    outputs : tuple of int
        Output size in each dimension.
    overhang : tuple of int
        How far the last window reaches past the padded input; 0 except in ceil mode.
    """

    outputs: tuple[int, ...]
    overhang: tuple[int, ...]

    @property
    def dilated(self) -> bool:
        """Whether any dilation exceeds 1."""
        return max(self.dilations) > 1

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """Padding before and after, overhang included, so that every window fits."""
        ends = (end + more for end, more in zip(self.pads_end, self.overhang, strict=True))
        return tuple(zip(self.pads_begin, ends, strict=True))

    @property
    def padded(self) -> bool:
        """Whether `pads` adds anything."""
        return any(map(any, self.pads))

    @property
    def same(self) -> bool:
        """Whether `pads` equals ``SAME_UPPER``: the least for ⌈size / stride⌉ outputs."""
        totals = _same_totals(self.image, self.strides, self.spans)
        return self.pads == tuple((total // 2, total - total // 2) for total in totals)

    def counts(self, *, include_pad: bool) -> np.ndarray:
        """Return the divisor of every window of an AveragePool: int64, shape `outputs`.

        It is the number of cells; padding counts if ``include_pad``, overhang never. An empty
        window has divisor 1, because its sum is 0.
        """
        counts = []
        for axis, size in enumerate(self.image):
            starts = np.arange(self.outputs[axis]) * self.strides[axis] - self.pads_begin[axis]
            cells = starts[:, None] + np.arange(self.kernel[axis]) * self.dilations[axis]
            low, high = (-self.pads_begin[axis], size + self.pads_end[axis]) if include_pad else (0, size)
            counts.append(np.maximum(((cells >= low) & (cells < high)).sum(1), 1))
        product: np.ndarray = reduce(np.multiply.outer, counts)
        return product

    def divisor_correction(self, *, include_pad: bool) -> np.ndarray:
        """Return kernel size / `counts`, float64: it corrects averages over whole windows."""
        return math.prod(self.kernel) / self.counts(include_pad=include_pad)

    def taps(self) -> Iterator[tuple[slice, ...]]:
        """Yield, by kernel cell in row-major order, the cells of the padded image under it."""
        for cell in itertools.product(*map(range, self.kernel)):
            yield tuple(
                slice(place * dilation, place * dilation + (count - 1) * stride + 1, stride)
                for place, dilation, count, stride in zip(cell, self.dilations, self.outputs, self.strides, strict=True)
            )

    def cell_strides(self, *, column_major: bool) -> tuple[int, ...]:
        """Return the stride of every axis in a MaxPool's indices (``storage_order``)."""
        sizes, rank = self.image, len(self.image)
        return tuple(math.prod(sizes[:i]) if column_major else math.prod(sizes[i + 1 :]) for i in range(rank))


@dataclass(frozen=True)
class TransposedWindow(_Sliding):
    """The windows of a transposed convolution.

    Attributes
    ----------
    image, kernel, strides, dilations : tuple of int
    pads_begin, pads_end : tuple of int
        Rows and columns to cut off the full result.
    output_padding : tuple of int
        Rows and columns added at the end of the full result, before the cut.
    outputs : tuple of int
        Output size in each dimension.
    """

    output_padding: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def tail(self) -> tuple[int, ...]:
        """Rows and columns to add at the end of the full result; negative values cut."""
        return tuple(more - end for more, end in zip(self.output_padding, self.pads_end, strict=True))

    @property
    def convolution(self) -> Window:
        """The convolution whose gradient this is; it maps `outputs` to `image`."""
        return Window(
            image=self.outputs,
            kernel=self.kernel,
            strides=self.strides,
            dilations=self.dilations,
            pads_begin=self.pads_begin,
            pads_end=self.pads_end,
            outputs=self.image,
            overhang=(0,) * len(self.image),
        )


def window(node: Node, image: Shape, kernel: Shape = ()) -> Window:
    """Return the window of a Conv, MaxPool or AveragePool node.

    Parameters
    ----------
    node : Node
    image : tuple of int
        Spatial dimensions of the node's input.
    kernel : tuple of int, optional
        Spatial dimensions of the weight, for a node without ``kernel_shape``.

    Raises
    ------
    NetworkError
        If a size is unknown or the window is larger than the padded image.
    """
    a = node.attributes
    inputs, sizes, strides, dilations = _sizes(node, image, kernel)
    spans = [(k - 1) * d + 1 for k, d in zip(sizes, dilations, strict=True)]
    automatic = a.get("auto_pad", "NOTSET")
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = _halves(_same_totals(inputs, strides, spans), automatic)
    else:
        begin, end = _given_pads(node, len(sizes))
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
        # A partial window counts only if it starts inside the image or its leading padding.
        if a.get("ceil_mode") and room % stride and count * stride < n + before:
            count += 1
        outputs.append(count)
        overhang.append(max((count - 1) * stride - room, 0))
    return Window(inputs, sizes, strides, dilations, begin, end, tuple(outputs), tuple(overhang))


def transposed_window(node: Node, image: Shape, kernel: Shape) -> TransposedWindow:
    """Return the windows of a ConvTranspose node; parameters as for `window`.

    Raises
    ------
    NetworkError
        If a size is unknown or the padding is larger than the result.
    """
    a = node.attributes
    inputs, sizes, strides, dilations = _sizes(node, image, kernel)
    rank = len(sizes)
    extra = tuple(a.get("output_padding") or (0,) * rank)
    whole = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(inputs, strides, sizes, dilations, extra, strict=True)
    ]
    automatic, wanted = a.get("auto_pad", "NOTSET"), a.get("output_shape")
    if wanted or automatic in ("SAME_UPPER", "SAME_LOWER"):
        requested = list(wanted)[-rank:] if wanted else [n * s for n, s in zip(inputs, strides, strict=True)]
        # Missing rows and columns are added at the end.
        more = [max(n - w, 0) for n, w in zip(requested, whole, strict=True)]
        extra = tuple(e + m for e, m in zip(extra, more, strict=True))
        begin, end = _halves([max(w - n, 0) for n, w in zip(requested, whole, strict=True)], automatic)
        whole = [w + m for w, m in zip(whole, more, strict=True)]
    else:
        begin, end = _given_pads(node, rank)
    outputs = tuple(w - b - e for w, b, e in zip(whole, begin, end, strict=True))
    if min((*begin, *end, *outputs), default=0) < 0:
        raise NetworkError(f"the padding {[*begin, *end]} does not fit a result of {whole}", where=node.name)
    return TransposedWindow(inputs, sizes, strides, dilations, begin, end, extra, outputs)


def _sizes(node: Node, image: Shape, kernel: Shape) -> tuple[tuple[int, ...], ...]:
    """Return image, kernel, strides and dilations."""
    a = node.attributes
    wanted: Sequence[int | None] = a.get("kernel_shape") or kernel
    rank = len(wanted)
    inputs, sizes = (tuple(n for n in part if n is not None) for part in (image, wanted))
    if not rank == len(inputs) == len(image) == len(sizes):
        raise NetworkError(f"the image size at this node is not known: {list(image)}", where=node.name)
    return inputs, sizes, tuple(a.get("strides") or (1,) * rank), tuple(a.get("dilations") or (1,) * rank)


def _same_totals(image: Sequence[int], strides: Sequence[int], spans: Sequence[int]) -> list[int]:
    """Return the least padding for ⌈size / stride⌉ outputs, by axis."""
    return [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in zip(image, strides, spans, strict=True)]


def _halves(totals: Sequence[int], automatic: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split padding between both sides; ``SAME_UPPER`` puts an odd cell at the end."""
    small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (small, large) if automatic == "SAME_UPPER" else (large, small)


def _given_pads(node: Node, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    a = node.attributes
    given = a.get("pads") if a.get("auto_pad", "NOTSET") == "NOTSET" else None
    pads = tuple(given or (0,) * (2 * rank))
    return pads[:rank], pads[rank:]
