"""Error norms between an answer and its reference. Imports NumPy only."""

from __future__ import annotations

import numpy as np


def relative_l2(answer: np.ndarray, reference: np.ndarray, *, floor: float = 0.0) -> float:
    """``norm(answer - reference) / max(norm(reference), floor)`` in float64.

    Infinity where shapes differ or the answer holds a number that is not finite; 0 where both are zero.
    """
    a, b = np.asarray(answer, np.float64), np.asarray(reference, np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    difference = float(np.linalg.norm((a - b).ravel()))
    scale = max(float(np.linalg.norm(b.ravel())), floor)
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))
