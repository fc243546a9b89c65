"""Latency and time per byte, fitted to times of messages by size. Imports NumPy; SciPy lazily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from d5suite.errors import ConfigurationError

SOFT = 0.1
"""Relative error above which an error counts less than its square: the transport may change its
protocol at some size, or a sample may be disturbed."""


class LatencyModel(NamedTuple):
    """The model ``time = alpha + beta * bytes``.

    Attributes
    ----------
    alpha_s : float
        Seconds of an empty message; not negative.
    beta_s_per_byte : float
        Not negative.
    residual : float
        Root mean square of the relative errors ``model / time - 1``.
    """

    alpha_s: float
    beta_s_per_byte: float
    residual: float

    def seconds(self, size: float) -> float:
        """Return the model's time for a message of ``size`` bytes."""
        return self.alpha_s + self.beta_s_per_byte * size

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON-able values."""
        return self._asdict()


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> LatencyModel:
    """Fit latency and time per byte, by least squares of the relative errors.

    Errors are relative because times span six orders of magnitude, and the largest would decide
    alone. Errors beyond `SOFT` count with the soft L1 norm.

    Parameters
    ----------
    sizes : sequence of float
        Bytes; at least two that differ.
    seconds : sequence of float
        The times, positive.

    Raises
    ------
    ConfigurationError
        If the times do not determine the model.
    """
    size, time = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    usable = size.shape == time.shape and size.ndim == 1 and np.isfinite([size, time]).all()
    if not usable or (time <= 0).any() or (size < 0).any() or len(np.unique(size)) < 2:
        raise ConfigurationError(
            f"no latency and bandwidth of {len(sizes)} sizes and {len(seconds)} times",
            hint="Give finite, positive times of at least two sizes.",
        )
    from scipy.optimize import least_squares

    start = max(float(time[np.argmin(size)]), 1e-300), float((time / np.maximum(size, 1)).min())
    parts = np.stack([start[0] / time, start[1] * size / time])
    fit = least_squares(
        lambda factors: factors @ parts - 1, [1.0, 1.0], jac=lambda factors: parts.T, bounds=(0, np.inf),
        loss="soft_l1", f_scale=SOFT, xtol=1e-12, ftol=1e-12, gtol=1e-12,
    )  # fmt: skip
    errors = fit.x @ parts - 1
    return LatencyModel(start[0] * fit.x[0], start[1] * fit.x[1], float(np.sqrt(np.mean(errors**2))))


def line_intervals(
    times: Mapping[float, Sequence[float]], *, draws: int = 200, confidence: float = 0.95, seed: int = 0
) -> tuple[LatencyModel, tuple[float, float], tuple[float, float]]:
    """Fit a line to the medians of times by size; return it with intervals of alpha and beta.

    The intervals are those of a bootstrap: the times of each size are drawn again, with
    repetition, their medians fitted, and the percentiles of the fits taken (Efron and Tibshirani,
    "An Introduction to the Bootstrap", chapter 13).

    Parameters
    ----------
    times : mapping of float to sequence of float
        Seconds by bytes.
    draws : int
        Number of bootstrap fits.
    confidence : float
    seed : int

    Raises
    ------
    ConfigurationError
        As `fit_line`.
    """
    rng, sizes = np.random.default_rng(seed), list(times)
    line = fit_line(sizes, [float(np.median(times[size])) for size in sizes])
    fits = np.array([
        fit_line(sizes, [float(np.median(rng.choice(times[size], len(times[size])))) for size in sizes])[:2]
        for _ in range(draws)
    ])  # fmt: skip
    ends = np.quantile(fits, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    alpha, beta = ((float(low), float(high)) for low, high in ends.T)
    return line, alpha, beta
