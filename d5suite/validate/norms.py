"""Error norms of an answer against its reference, and units of roundoff. Imports NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding to nearest (IEEE 754; bfloat16 has 8 significant bits,
float16 11)."""

FLOAT64 = 1e-8
"""Accepted relative L2 error between two float64 computations of the same quantity."""

ROUNDING = 1e-6
"""A tensor's error after training is relative to its own norm, or to this fraction of all tensors'
norm if that is larger: a convolution bias before BatchNormalization is mere rounding, about 1e-16
of the other tensors."""


def relative_l2(answer: np.ndarray, reference: np.ndarray, *, floor: float = 0.0) -> float:
    """Return ``norm(answer - reference) / max(norm(reference), floor)`` in float64.

    Infinity if the shapes differ or the answer is not finite; 0 if both are zero.
    """
    a, b = np.asarray(answer, np.float64), np.asarray(reference, np.float64)
    if a.shape != b.shape:
        return float("inf")
    with np.errstate(invalid="ignore", over="ignore"):  # the answer may be infinite
        difference, scale = norm(a - b), max(norm(b), floor)
    if not math.isfinite(difference):
        return float("inf")
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))


def norm(array: np.ndarray) -> float:
    """Return the L2 norm of all elements of an array of any shape.

    Reading them in their order in memory is 40 times faster for a transposed convolution kernel.
    """
    return float(np.linalg.norm(array.ravel(order="K")))


def inner(a: np.ndarray, b: np.ndarray) -> float:
    """Return the inner product of two arrays of one shape; `numpy.vdot` copies transposed ones."""
    with np.errstate(invalid="ignore", over="ignore"):  # gradients may be infinite
        return float(np.sum(a * b))


def whole_norm(arrays: Iterable[np.ndarray]) -> float:
    """Return the norm of all arrays together, in float64."""
    return math.hypot(*(norm(np.asarray(array, np.float64)) for array in arrays))


def relative_errors(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], small: float
) -> dict[str, float]:
    """Return each expected tensor's error, relative to its norm or to ``small`` of all tensors'."""
    floor = small * whole_norm(expected.values())
    return {name: relative_l2(found[name], value, floor=floor) for name, value in expected.items()}


@dataclass(frozen=True)
class Accuracy:
    """Errors of an answer.

    Attributes
    ----------
    relative_l2 : float
        ``norm(answer - reference) / norm(reference)``.
    l_inf : float
        Largest absolute difference.
    ulp_max, ulp_median : float
        Differences in units in the last place of the reference, in the answer's type (Goldberg,
        "What every computer scientist should know about floating-point arithmetic", 1991). Large
        if sums cancel.
    """

    relative_l2: float
    l_inf: float
    ulp_max: float
    ulp_median: float


def accuracy(answer: np.ndarray, reference: np.ndarray) -> Accuracy:
    """Compare an answer, in its own type, with a float64 reference."""
    if answer.shape != reference.shape or not np.isfinite(answer.astype(np.float64)).all():
        return Accuracy(math.inf, math.inf, math.inf, math.inf)
    if not answer.size:
        return Accuracy(0.0, 0.0, 0.0, 0.0)
    difference = np.abs(answer.astype(np.float64) - reference)
    rounded = np.abs(reference).astype(answer.dtype)
    unit = np.spacing(np.maximum(rounded, _smallest(answer.dtype))).astype(np.float64)
    ulps = difference / unit
    return Accuracy(relative_l2(answer, reference), float(difference.max()), float(ulps.max()), float(np.median(ulps)))


def _smallest(dtype: np.dtype) -> Any:
    import ml_dtypes

    return ml_dtypes.finfo(dtype).smallest_normal
