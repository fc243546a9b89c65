"""GridSample nodes: the cells around every point of a grid, and their weights.

Formulas: ONNX operator specification, GridSample. Imports NumPy, `d5suite.errors` and
`d5suite.network`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext

_CUBIC = -0.75
"""The coefficient of cubic convolution, which ONNX fixes for GridSample."""


@dataclass(frozen=True)
class Sampling:
    """A GridSample.

    Attributes
    ----------
    mode : str
        ``linear``, ``nearest`` or ``cubic``.
    padding : str
        Values beyond the image: ``zeros``, its ``border``, or its ``reflection``.
    aligned : bool
        Whether -1 and 1 are the centres of the outermost cells instead of their outer edges.
    sizes : tuple of int
        Spatial sizes of the image.
    outputs : tuple of int
        Spatial sizes of the grid.
    channels : int
    """

    mode: str
    padding: str
    aligned: bool
    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    channels: int

    @property
    def strides(self) -> list[int]:
        """Stride of every axis in the flattened image, in cells."""
        return [math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]


def read_grid_sample(node: Node, context: NodeContext) -> Sampling:
    """Read a GridSample.

    Raises
    ------
    NetworkError
        If a size of image or grid other than the batch is unknown.
    """
    (_, *image), (_, *grid) = (context.shape(name) for name in node.inputs[:2])
    known = [n for n in (*image, *grid) if n is not None]
    if len(known) < len(image) + len(grid):
        raise NetworkError("GridSample of an unknown size", where=node.name)
    a, (channels, *sizes), outputs = node.attributes, known[: len(image)], known[len(image) : -1]
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(a["mode"], a["mode"])  # before operator set 20
    return Sampling(mode, a["padding_mode"], bool(a["align_corners"]), tuple(sizes), tuple(outputs), channels)


@dataclass(frozen=True)
class SamplingFunctions:
    """A framework's functions that `taps` needs besides ``+``, ``-`` and ``*``.

    Attributes
    ----------
    floor, round, absolute : callable
        Functions of a tensor; ``round`` rounds half to even.
    clip : callable
        Called with (tensor, least, greatest).
    whole : callable
        Conversion to integers.
    """

    floor: Callable[[Any], Any]
    round: Callable[[Any], Any]
    absolute: Callable[[Any], Any]
    clip: Callable[[Any, float, float], Any]
    whole: Callable[[Any], Any]


@dataclass(frozen=True)
class Tap:
    """One cell near every point.

    Attributes
    ----------
    cell : tensor
        Index in the flattened image.
    weight : tensor
        Weight of the cell; 0 beyond an image padded by zeros.
    factors, slopes : tuple of tensor
        By axis, the factors of the weight, and their derivatives by the point's position in cells.
    """

    cell: Any
    weight: Any
    factors: tuple[Any, ...]
    slopes: tuple[Any, ...]


def taps(plan: Sampling, f: SamplingFunctions, coordinates: Sequence[Any]) -> list[Tap]:
    """Return the cells whose weighted sums are the samples.

    Parameters
    ----------
    plan : Sampling
    f : SamplingFunctions
    coordinates : sequence of tensor
        The components of the grid's last axis; the first is for the image's last axis.
    """
    by_axis = []
    for axis, (coordinate, stride) in enumerate(zip(reversed(coordinates), plan.strides, strict=True)):
        near = _along(plan, f, place(plan, f, coordinate, axis), axis)
        by_axis.append([(f.whole(index) * stride, factor, slope) for index, factor, slope in near])
    found = []
    for several in itertools.product(*by_axis):
        cells, factors, slopes = zip(*several, strict=True)
        found.append(Tap(reduce(operator.add, cells), reduce(operator.mul, factors), factors, slopes))
    return found


def place(plan: Sampling, f: SamplingFunctions, coordinate: Any, axis: int) -> Any:
    """Return a coordinate's position along an axis in cells, after clipping or reflection.

    A cubic sample may lie beyond the border, because its cells are clipped one by one, as in
    onnxruntime and in PyTorch, to which ONNX's text refers.
    """
    size = plan.sizes[axis]
    found = (coordinate + 1) * ((size - 1) / 2) if plan.aligned else ((coordinate + 1) * size - 1) * 0.5
    if plan.mode == "nearest":
        found = f.round(found)
    if plan.padding == "border" and plan.mode != "cubic":
        return f.clip(found, 0, size - 1)
    return _reflected(f, found, *_bounds(plan, size)) if plan.padding == "reflection" else found


def _bounds(plan: Sampling, size: int) -> tuple[float, float]:
    return (0, size - 1) if plan.aligned else (-0.5, size - 0.5)


def _reflected(f: SamplingFunctions, x: Any, least: float, greatest: float) -> Any:
    """Reflect at both bounds until the value lies between them."""
    span = greatest - least
    if not span:
        return x * 0 + least
    away = f.absolute(x - least)
    away = away - f.floor(away * (0.5 / span)) * (2 * span)
    return span - f.absolute(away - span) + least


def _along(plan: Sampling, f: SamplingFunctions, x: Any, axis: int) -> list[tuple[Any, Any, Any]]:
    """Return the cells along an axis, with factors and slopes of factors."""
    size = plan.sizes[axis]
    first = f.floor(x)
    t = x - first
    one, none = t * 0 + 1, t * 0
    if plan.mode == "nearest":
        near = [(first, one, none)]
    elif plan.mode == "linear":
        near = [(first, 1 - t, -one), (first + 1, t, one)]
    else:
        near = [(first + n, *_cubic(t + 1 if n < 0 else t if n == 0 else n - t, -1 if n > 0 else 1, 0 <= n < 2))
                for n in (-1, 0, 1, 2)]  # fmt: skip
    found = []
    for cell, factor, slope in near:
        if plan.padding == "reflection":
            inside = f.clip(f.floor(_reflected(f, cell, *_bounds(plan, size))), 0, size - 1)
        else:
            inside = f.clip(cell, 0, size - 1)
        if plan.padding == "zeros":
            kept = 1 - f.clip(f.absolute(cell - inside), 0, 1)
            factor, slope = factor * kept, slope * kept
        found.append((inside, factor, slope))
    return found


def _cubic(d: Any, sign: int, near: bool) -> tuple[Any, Any]:
    """Return the weight of a cell at a distance, and its derivative by the point's position."""
    a = _CUBIC
    if near:
        return ((a + 2) * d - (a + 3)) * d * d + 1, (3 * (a + 2) * d - 2 * (a + 3)) * d * sign
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a, ((3 * a * d - 10 * a) * d + 8 * a) * sign
