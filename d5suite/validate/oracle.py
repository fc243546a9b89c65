"""ONNX's reference evaluator, with corrections of the operators it gets wrong.

It is the independent reference of `network.oracle` and `operator.oracle`; no framework takes part.
Imports ONNX and NumPy, and SciPy inside functions: importing SciPy takes half as long as everything
else a recipe's collection imports.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_conv_transpose import ConvTranspose as OfficialConvTranspose
from onnx.reference.ops.op_grid_sample import GridSample as OfficialGridSample
from onnx.reference.ops.op_max_pool import MaxPool as OfficialMaxPool
from onnx.reference.ops.op_negative_log_likelihood_loss import NegativeLogLikelihoodLoss as OfficialLoss
from onnx.reference.ops.op_pad import Pad_18 as OfficialPad
from onnx.reference.ops.op_resize import Resize as OfficialResize

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.folding import gathered
from d5suite.network.nodes.windows import window


class ConvTranspose(OfficialConvTranspose):
    """ConvTranspose group by group; the evaluator's own (onnx 1.23) rejects most grouped ones."""

    op_domain = ""

    def _run(self, x: Any, w: Any, b: Any = None, **settings: Any) -> Any:  # type: ignore[override]
        groups = settings.pop("group", None) or 1
        if groups == 1:
            return super()._run(x, w, b, group=1, **settings)
        parts = [
            super(ConvTranspose, self)._run(image, weight, None, group=1, **settings)[0]
            for image, weight in zip(np.split(x, groups, 1), np.split(w, groups, 0), strict=True)
        ]
        y = np.concatenate(parts, 1)
        return (y if b is None else y + b.reshape(-1, *[1] * (y.ndim - 2)),)


class Erf(OpRun):
    """The error function. The evaluator's own (onnx 1.23) rounds it to float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        from scipy.special import erf

        return (np.asarray(erf(x), x.dtype),)


class GatherElements(OpRun):
    """GatherElements. The evaluator's own (onnx 1.23) refuses fewer indices than data."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        return (gathered(data, indices, axis=axis),)


class Gelu(OpRun):
    """Gelu(x) = x Φ(x), or x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) (ONNX operator specification).

    The evaluator's own implementation (onnx 1.23) has constants that are exact to float32 only.
    """

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        from scipy.special import erf

        return (x / 2 * (1 + erf(x / np.sqrt(2))),)


class GridSample(OfficialGridSample):
    """GridSample. The evaluator's own (onnx 1.23) rounds the points' positions to float32.

    It also clamps a cubic sample's point to the border before weighting the cells around it.
    PyTorch, which ONNX's text refers to, and onnxruntime clamp the cells. No node test covers this.
    """

    op_domain = ""

    def _run(self, x: Any, grid: Any, **settings: Any) -> Any:  # type: ignore[override]
        self._stays = settings.get("mode") == "cubic" and settings.get("padding_mode") == "border"
        return super()._run(x, grid, **settings)

    def _prepare_border(self, dims: Any, align_corners: bool) -> Any:
        if self._stays:
            return np.repeat([-np.inf, np.inf], len(dims))
        return super()._prepare_border(dims, align_corners)

    def _gs_denormalize_coordinates(self, n: Any, dims: Any, align_corners: bool) -> Any:
        places = [self._gs_denormalize(v, size, align_corners) for v, size in zip(n, dims, strict=True)]
        return np.array(places, np.float64)


class GroupNormalization(OpRun):
    """Group normalization, scaled and shifted per channel (ONNX operator specification).

    The evaluator (onnx 1.23) expands it into a function that computes in float32.
    """

    op_domain = ""

    def _run(
        self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray, epsilon: float, num_groups: int, **_: Any
    ) -> tuple[np.ndarray]:
        wide = x.astype(np.result_type(x, np.float32)).reshape(len(x), num_groups, -1)
        normal = (wide - wide.mean(2, keepdims=True)) / np.sqrt(wide.var(2, keepdims=True) + epsilon)
        column = (-1, *[1] * (x.ndim - 2))
        y = normal.reshape(x.shape) * scale.reshape(column) + bias.reshape(column)
        return (y.astype(x.dtype),)


class HardSwish(OpRun):
    """HardSwish(x) = x max(0, min(1, x/6 + 1/2)) (ONNX operator specification).

    The evaluator's own implementation (onnx 1.23) has constants that are exact to float32 only.
    """

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x * np.clip(x / 6 + 0.5, 0, 1),)


class LRN(OpRun):
    """Local response normalization over every channel.

    The evaluator's own (onnx 1.23) loops over the number of images instead of channels. y = x /
    (bias + alpha / size · Σ x²)^beta, the sum over channels c - ⌊(size - 1) / 2⌋ to
    c + ⌈(size - 1) / 2⌉ (ONNX operator specification).
    """

    op_domain = ""

    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> tuple[np.ndarray]:
        channels = x.shape[1]
        before, after = (size - 1) // 2, size // 2
        squares = np.pad(x**2, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
        total = sum(squares[:, offset : offset + channels] for offset in range(size))
        return (x / (bias + alpha / size * total) ** beta,)


class GlobalLpPool(OpRun):
    """The p-norm over all spatial axes (ONNX operator specification).

    The evaluator (onnx 1.23) lacks this operator.
    """

    op_domain = ""

    def _run(self, x: np.ndarray, p: int = 2) -> tuple[np.ndarray]:
        return ((np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class GlobalMaxPool(OpRun):
    """The maximum over all spatial axes (ONNX operator specification).

    The evaluator's own (onnx 1.23) fails for images of one axis.
    """

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class LpPool(OpRun):
    """The p-norm of each window (ONNX operator specification).

    Where ``ceil_mode`` extends a window beyond the end, the evaluator's own (onnx 1.23) multiplies
    the mean of the existing cells by the number of all cells.
    """

    op_domain = ""

    def _run(self, x: np.ndarray, **settings: Any) -> tuple[np.ndarray]:
        given = {key: value for key, value in settings.items() if value is not None}
        w, order = window(Node("", "LpPool", ("x",), ("y",), given), x.shape[2:]), given.get("p", 2)
        powers = np.pad(np.abs(x) ** order, [(0, 0), (0, 0), *w.pads])
        cells: list[Any] = [(..., *tap) for tap in w.taps()]
        return (sum(powers[cell] for cell in cells) ** (1 / order),)


class MaxPool(OfficialMaxPool):
    """The maximum of each window (ONNX operator specification).

    With strides of one the evaluator's own (onnx 1.23) confuses unequal pads.
    """

    op_domain = ""

    def _run(self, x: np.ndarray, **settings: Any) -> Any:  # type: ignore[override]
        if len(self.onnx_node.output) > 1:
            return super()._run(x, **settings)
        given = {key: value for key, value in settings.items() if value is not None}
        w = window(Node("", "MaxPool", ("x",), ("y",), given), x.shape[2:])
        least = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        padded = np.pad(x, [(0, 0), (0, 0), *w.pads], constant_values=least)
        cells: list[Any] = [(..., *tap) for tap in w.taps()]
        return (functools.reduce(np.maximum, (padded[cell] for cell in cells)),)


class LpNormalization(OpRun):
    """x divided by the p-norm along an axis; 0 stays 0 (ONNX operator specification).

    The evaluator's own (onnx 1.23) sums x instead of its absolute value for p = 1.
    """

    op_domain = ""

    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2) -> tuple[np.ndarray]:
        norm = (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p)
        return (np.divide(x, norm, out=np.zeros_like(x), where=norm != 0),)


class LogSoftmax(OpRun):
    """x - max - log Σ exp(x - max) along an axis (ONNX operator specification).

    The evaluator's own (onnx 1.23) takes the logarithm of a softmax, which is 0 in float64 for
    elements 746 or more below the maximum.
    """

    op_domain = ""

    def _run(self, x: np.ndarray, axis: int = -1) -> tuple[np.ndarray]:
        return (_log_softmax(x, axis),)


def _log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    lower = x - x.max(axis, keepdims=True)
    return np.asarray(lower - np.log(np.exp(lower).sum(axis, keepdims=True)), x.dtype)


class Mean(OpRun):
    """The mean of any number of tensors. The evaluator's own (onnx 1.23) does not broadcast."""

    op_domain = ""

    def _run(self, *xs: np.ndarray) -> tuple[np.ndarray]:
        return ((sum(xs[1:], xs[0]) / len(xs)).astype(xs[0].dtype),)


class Pad(OfficialPad):
    """Pad. The evaluator's own (onnx 1.23) rejects negative widths, which crop."""

    op_domain = ""

    def _run(
        self, data: np.ndarray, pads: np.ndarray, value: Any = None, axes: Any = None, mode: str = "constant"
    ) -> Any:
        if min(pads, default=0) < 0:
            places = range(data.ndim) if axes is None else [int(axis) for axis in axes]
            kept = [slice(None)] * data.ndim
            for axis, before, after in zip(places, pads[: len(places)], pads[len(places) :], strict=True):
                kept[axis] = slice(max(-int(before), 0), min(int(after), 0) or None)
            data, pads = data[tuple(kept)], np.maximum(pads, 0)
        return super()._run(data, pads, value, axes, mode=mode)


class Resize(OfficialResize):
    """Resize. The evaluator's own (onnx 1.23) uses a given cubic coefficient in float32.

    It also aligns corners by the output's length before rounding; by ONNX's text the length is the
    resized tensor's, as if sizes were given. And it computes the nearest cell's position in
    float64. All frameworks use float32, where other positions lie midway between two cells; ONNX's
    text states no precision.
    """

    op_domain = ""

    def _run(self, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, **settings: Any) -> Any:  # type: ignore[override]
        settings["cubic_coeff_a"] = float(settings["cubic_coeff_a"])
        coordinates, axes = settings["coordinate_transformation_mode"], settings.get("axes") or range(x.ndim)
        lengths = np.array([x.shape[axis] for axis in axes])
        if sizes is None:  # of float32: 1.4444444 times 9 is 13
            whole = np.floor(scales.astype(np.float32) * lengths.astype(np.float32)).astype(np.int64)
        if settings["mode"] == "nearest" and coordinates != "tf_crop_and_resize":
            if sizes is not None:
                scales, policy = sizes / lengths, settings["keep_aspect_ratio_policy"]
                if policy != "stretch":
                    scales = np.full(len(scales), scales.min() if policy == "not_larger" else scales.max())
                    sizes = scales * lengths + 0.5
            for axis, scale, size in zip(axes, scales, whole if sizes is None else sizes, strict=True):
                x = np.take(x, _nearest(x.shape[axis], int(size), scale, coordinates, settings["nearest_mode"]), axis)
            return (x,)
        if sizes is None and coordinates == "align_corners":
            scales, sizes = None, whole
        elif sizes is None:
            scales = np.where(scales * lengths < whole, (1 + 1e-15) * whole / lengths, scales)
        return super()._run(x, roi, scales, sizes, **settings)


def _nearest(length: int, size: int, wanted: float, coordinates: str, rounding: str) -> np.ndarray:
    """Return the nearest cell along an axis for every output index, by positions in float32.

    A position within 1e-6 of the middle between two cells counts as the middle, as in onnxruntime
    (1.31).
    """
    index, scale = np.arange(size, dtype=np.float32), np.float32(wanted)
    places = (index + np.float32(0.5)) / scale - np.float32(0.5)
    if coordinates == "asymmetric":
        places = index / scale
    elif coordinates == "align_corners":
        places = index * np.float32(length - 1) / np.float32(max(size - 1, 1))
    elif coordinates == "half_pixel_symmetric":
        shift = np.float32(length / 2) * (1 - np.float32(size) / (scale * np.float32(length)))
        places = (shift + (np.arange(size) + 0.5) / float(scale) - 0.5).astype(np.float32)
    elif coordinates == "pytorch_half_pixel" and size == 1:
        places = np.zeros_like(index)
    low = np.floor(places)
    beyond = places.astype(np.float64) - low
    up = {
        "floor": beyond > 1,
        "ceil": beyond > 0,
        "round_prefer_floor": beyond > 0.5 + 1e-6,
        "round_prefer_ceil": beyond >= 0.5 - 1e-6,
    }[rounding]
    return np.clip(low + up, 0, length - 1).astype(np.int64)


class SoftmaxCrossEntropyLoss(OfficialLoss):
    """The losses, their mean or sum. The evaluator's own (onnx 1.23) has `LogSoftmax`'s error."""

    op_domain = ""

    def _run(self, x: np.ndarray, target: np.ndarray, weight: Any = None, **settings: Any) -> Any:  # type: ignore[override]
        logarithms = _log_softmax(x, 1)
        if weight is None and settings.get("ignore_index") is not None:  # the official one counts all labels for -1
            weight = np.ones(x.shape[1], x.dtype)
        loss = super()._run(logarithms, target, weight, **settings)
        return (*loss, logarithms) if len(self.onnx_node.output) == 2 else loss


CORRECTED: list[type[OpRun]] = [
    ConvTranspose, Erf, GatherElements, Gelu, GlobalLpPool, GlobalMaxPool, GridSample, GroupNormalization, HardSwish,
    LRN, LogSoftmax, LpNormalization, LpPool, MaxPool, Mean, Pad, Resize, SoftmaxCrossEntropyLoss,
]  # fmt: skip
"""Operators that replace the evaluator's own."""


def evaluator(model: onnx.ModelProto, where: str) -> ReferenceEvaluator:
    """Return ONNX's reference evaluator for a model.

    Raises
    ------
    NetworkError
        If it does not implement one of the operators; ``where`` names the model.
    """
    try:
        return ReferenceEvaluator(model, new_ops=CORRECTED)
    except NotImplementedError as error:
        raise NetworkError(f"ONNX's reference evaluator does not support it: {error}", where=where) from error
