"""Resize nodes: by axis, the rows to take or the weights of the interpolation.

Formulas: ONNX operator specification, Resize (operator sets 11 to 19). Imports NumPy,
`d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext


@dataclass(frozen=True)
class Resize:
    """A Resize, applied to one axis after the other.

    Attributes
    ----------
    rows : dict of int to numpy.ndarray
        For ``nearest``, by axis: the input index of every output index, int64.
    weights : dict of int to numpy.ndarray
        For ``linear`` and ``cubic``, by axis: (output size, input size), float64.
    shape, sizes : tuple of int or None
        Shapes of input and output.
    mode : str
        ``nearest``, ``linear`` or ``cubic``.
    aligned : bool or None
        True for aligned corners, False for aligned pixel centres. None for variants that kernels
        lack: other coordinates, scales other than the ratio of sizes, other settings, or axes that
        are not an image's.
    """

    rows: dict[int, np.ndarray]
    weights: dict[int, np.ndarray]
    shape: tuple[int | None, ...]
    sizes: tuple[int | None, ...]
    mode: str
    aligned: bool | None

    def factors(self) -> dict[int, int] | None:
        """Return how often ``nearest`` repeats a cell, by axis; None if cells differ."""
        found = {}
        for axis, rows in self.rows.items():
            count, rest = divmod(len(rows), int(rows.max()) + 1)
            if rest or rows.max() + 1 != self.shape[axis] or (rows != np.arange(len(rows)) // count).any():
                return None
            found[axis] = count
        return found


def read_resize(node: Node, context: NodeContext) -> Resize:
    """Read a Resize.

    Raises
    ------
    NetworkError
        If a resized axis has an unknown size, or the coordinates are those of
        ``tf_crop_and_resize``.
    """
    a, shape, outputs = node.attributes, context.shape(node.inputs[0]), context.shape(node.outputs[0])
    kind, coordinates = a["mode"], a["coordinate_transformation_mode"]
    if coordinates == "tf_crop_and_resize":
        raise NetworkError("Resize with 'tf_crop_and_resize' is not implemented", where=node.name)
    exclude, antialias, cubic = bool(a["exclude_outside"]), bool(a["antialias"]), a["cubic_coeff_a"]
    scales = _scales(node, context)
    rows, weights, whole = {}, {}, True
    for axis, scale in scales.items():
        size, output = shape[axis], outputs[axis]
        if scale is None or scale == 1:
            continue
        if size is None or output is None:
            raise NetworkError(f"Resize of an unknown size along axis {axis}", where=node.name)
        whole &= coordinates == "align_corners" or output == scale * size
        if kind == "nearest":  # float32, like the frameworks: 3 must not become 2.9999999, a different cell
            places = _places(coordinates, size, output, np.float32(scale)).astype(np.float64)
            rows[axis] = np.clip(_ROUND[a["nearest_mode"]](places), 0, size - 1).astype(np.int64)
        else:
            places = _places(coordinates, size, output, np.float64(scale))
            shrink = min(scale, 1.0) if antialias else 1.0
            weights[axis] = _weights(places, size, shrink, cubic if kind == "cubic" else None, exclude)
    plain = whole and not exclude and not antialias and min(weights, default=2) > 1 and cubic == -0.75
    centred = coordinates == "half_pixel" or (
        coordinates == "pytorch_half_pixel" and all((outputs[axis] or 0) > 1 for axis in weights)
    )
    aligned = None if not plain else True if coordinates == "align_corners" else False if centred else None
    return Resize(rows, weights, shape, outputs, kind, aligned)


def _scales(node: Node, context: NodeContext) -> dict[int, float | None]:
    """Return the scale by axis; None for an axis of open size, which is not resized."""
    shape = context.shape(node.inputs[0])
    axes = [axis % len(shape) for axis in node.attributes.get("axes") or range(len(shape))]
    scales, sizes = context.constant(node, 2), context.constant(node, 3)
    if scales is not None and scales.size:
        return dict(zip(axes, map(float, scales), strict=True))
    if sizes is None:
        raise NetworkError("Resize has neither scales nor sizes", where=node.name)
    ratios = {
        axis: None if shape[axis] is None else int(wanted) / (shape[axis] or 1)
        for axis, wanted in zip(axes, sizes, strict=True)
    }
    policy = node.attributes["keep_aspect_ratio_policy"]
    if policy == "stretch":
        return ratios
    known = [ratio for ratio in ratios.values() if ratio is not None]
    return dict.fromkeys(axes, min(known) if policy == "not_larger" else max(known))


def _places(coordinates: str, size: int, output: int, scale: np.floating[Any]) -> np.ndarray:
    """Return the input position of every output index, computed in the scale's precision."""
    index, exact = np.arange(output, dtype=scale.dtype), scale * size
    if coordinates == "align_corners":  # by the rounded output size; ONNX's evaluator does not round it
        return index * (size - 1) / max(output - 1, 1)
    if coordinates == "asymmetric":
        return index / scale
    if coordinates == "pytorch_half_pixel" and output == 1:
        return index * 0
    if coordinates == "half_pixel_symmetric":  # onnxruntime adds in float64
        return (size / 2 * (1 - output / exact) + (np.arange(output) + 0.5) / scale - 0.5).astype(scale.dtype)
    return (index + 0.5) / scale - 0.5


_TIE = 1e-6
"""Positions this close to the middle of two cells count as the middle, as in onnxruntime (1.31)."""

_ROUND: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5 - _TIE),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5 + _TIE),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _weights(places: np.ndarray, size: int, shrink: float, cubic: float | None, exclude: bool) -> np.ndarray:
    """Return the interpolation's matrix; ``shrink`` widens the kernel against aliasing."""
    reach = (1 if cubic is None else 2) / shrink
    low = np.floor(places).astype(np.int64)
    cells = low[:, None] + np.arange(math.floor(-reach) + 1, math.ceil(reach) + 1)
    d = np.abs(cells - places[:, None]) * shrink
    if cubic is None:
        kernel = np.clip(1 - d, 0, None)
    else:
        near = ((cubic + 2) * d - (cubic + 3)) * d * d + 1
        far = ((cubic * d - 5 * cubic) * d + 8 * cubic) * d - 4 * cubic
        kernel = np.where(d <= 1, near, np.where(d < 2, far, 0.0))
    if shrink < 1:
        kernel = kernel / kernel.sum(1, keepdims=True)
    if exclude:
        kernel = np.where((cells >= 0) & (cells < size), kernel, 0.0)
        kernel = kernel / kernel.sum(1, keepdims=True)
    matrix = np.zeros((len(places), size))
    np.add.at(matrix, (np.arange(len(places))[:, None], np.clip(cells, 0, size - 1)), kernel)
    return matrix
