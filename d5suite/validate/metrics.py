"""Metrics of a trained network: accuracy, and average precision for partly known labels.

They are computed in float64 on the host from the logits (N, C) of a whole evaluation set, in the
same way for every framework. Imports NumPy, and scikit-learn lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from d5suite.errors import ConfigurationError, ValidationError


@dataclass(frozen=True)
class Metric:
    """A figure of merit; ``dataclasses.replace(metric, bound=0.97)`` sets an acceptance bound.

    Attributes
    ----------
    name : str
        The printed name.
    better : {"higher", "lower"}
        Which values are better.
    unit : str
        The unit, such as ``"1"`` for a fraction.
    compute : callable
        Computes the figure from ``(logits, labels)`` of an evaluation set; see `top_k_accuracy`,
        `mean_average_precision`.
    bound : float, optional
        The worst accepted value; by default, any value is accepted.
    """

    name: str
    better: Literal["higher", "lower"]
    unit: str
    compute: Callable[[np.ndarray, np.ndarray], float]
    bound: float | None = None

    def accepts(self, value: float) -> bool:
        """Tell whether a value is as good as the bound; NaN never is."""
        if self.bound is None:
            return not np.isnan(value)
        return value >= self.bound if self.better == "higher" else value <= self.bound


def top_k_accuracy(logits: np.ndarray, labels: np.ndarray, k: int = 1) -> float:
    """Return the fraction of images whose class has one of the k largest logits.

    Parameters
    ----------
    logits : numpy.ndarray
        Floating point (N, C), N > 0.
    labels : numpy.ndarray
        Integer (N,): the class of each image.
    k : int
        From 1 to C. Equal logits rank by class number, the smaller first, as in ``numpy.argmax``.

    Returns
    -------
    float
        From 0 to 1.

    Raises
    ------
    ConfigurationError
        If shapes, `k` or a class number do not fit.
    ValidationError
        If a logit is not finite.
    """
    logits = _checked(logits)
    count, classes = logits.shape
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigurationError(f"labels are {labels.dtype}{labels.shape}, not integers of shape ({count},)")
    if not (labels.min() >= 0 and labels.max() < classes):
        raise ConfigurationError(f"labels must be from 0 to {classes - 1}, not {labels.min()} to {labels.max()}")
    if not 1 <= k <= classes:
        raise ConfigurationError(f"k is {k}; it must be from 1 to the number of classes, {classes}")
    own = logits[np.arange(count), labels, None]
    before = (logits > own) | ((logits == own) & (np.arange(classes) < labels[:, None]))
    return float(np.mean(before.sum(axis=1) < k))


def mean_average_precision(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over classes of the average precision on each class's verified images.

    For labels that are verified as present, verified as absent or unverified (Open Images;
    Kuznetsova et al., "The Open Images Dataset V4", IJCV 2020): a class is evaluated on its
    verified images, and skipped if it is present in none. Average precision is the sum of precision
    over recall steps, without interpolation, by ``sklearn.metrics.average_precision_score``; equal
    logits have one rank.

    Parameters
    ----------
    logits : numpy.ndarray
        Floating point (N, C), N > 0. An increasing function of them, such as a sigmoid, gives the
        same figure.
    labels : numpy.ndarray
        Integer (N, C): 1 present, 0 verified as absent, -1 not verified.

    Returns
    -------
    float
        From 0 (excluded) to 1.

    Raises
    ------
    ConfigurationError
        If shapes or label values do not fit, or no class is present in any image.
    ValidationError
        If a logit is not finite.
    """
    from sklearn.metrics import average_precision_score

    logits = _checked(logits)
    if labels.shape != logits.shape or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigurationError(f"labels are {labels.dtype}{labels.shape}, not integers of shape {logits.shape}")
    if not (labels.min() >= -1 and labels.max() <= 1):
        raise ConfigurationError(f"labels must be -1, 0 or 1, not {labels.min()} to {labels.max()}")
    present = np.flatnonzero((labels == 1).any(axis=0))
    if not len(present):
        raise ConfigurationError("no class is present in any image")
    precisions = []
    for number in present:
        verified = labels[:, number] >= 0
        precisions.append(average_precision_score(labels[verified, number], logits[verified, number]))
    return float(np.mean(precisions))


def _checked(logits: np.ndarray) -> np.ndarray:
    if logits.ndim != 2 or not logits.size:
        raise ConfigurationError(f"logits have shape {logits.shape}, not (images, classes)")
    if not np.isfinite(logits).all():
        raise ValidationError(
            "some logits are not finite",
            hint="Training may have diverged; lower the learning rate.",
        )
    return logits.astype(np.float64)


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("top-1 accuracy", "higher", "1", top_k_accuracy),
        Metric("top-5 accuracy", "higher", "1", partial(top_k_accuracy, k=5)),
        Metric("mean average precision", "higher", "1", mean_average_precision),
    )
}
"""Metrics by name."""
