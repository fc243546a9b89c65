"""Fits with few constants that are not negative, and how far they are off on what was left out.

Imports `d5suite.errors`, NumPy and, late, SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from d5suite.errors import ConfigurationError


class OfNetwork(Protocol):
    """A measured point of a network."""

    @property
    def network(self) -> str:
        """Its name."""


Point = TypeVar("Point", bound=OfNetwork)
Model = TypeVar("Model")

COVERED = 0.9
"""Part of the points that an interval is to hold."""

FEWEST_NETWORKS = 3
"""Networks without which no model is fitted: one is left out, and its interval needs two."""

FEWEST_RATIOS = 2
"""Networks that a model must have predicted, so that it can say how far it is off."""


class Judged(NamedTuple):
    """A prediction of a point that its model has not seen.

    Attributes
    ----------
    predicted, measured : float
    factor : float
        The interval is from predicted / factor to predicted · factor.
    network : str
    """

    predicted: float
    measured: float
    factor: float
    network: str = ""

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.measured - 1

    @property
    def covered(self) -> bool:
        """Whether the interval holds what was measured."""
        return abs(math.log(max(self.predicted, 1e-300) / self.measured)) <= math.log(self.factor)


def nonnegative(
    features: Sequence[Sequence[float]],
    targets: Sequence[float],
    weights: Sequence[float],
) -> np.ndarray:
    """Return the constants, none negative, whose weighted errors have the least squares.

    Parameters
    ----------
    features : sequence of sequence of float
        A row for each target.
    targets, weights : sequence of float

    Returns
    -------
    numpy.ndarray
        One constant for each column (Lawson and Hanson, "Solving least squares problems", 23).
    """
    from scipy.optimize import nnls

    rows, wanted, weight = (np.asarray(each, np.float64) for each in (features, targets, weights))
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(rows / scale * weight[:, None], wanted * weight, maxiter=100 * rows.shape[1])
    return np.asarray(found / scale)


def covering_factor(ratios: Sequence[float]) -> float:
    """Return the factor that is to hold `COVERED` of the ratios of prediction and measurement.

    Parameters
    ----------
    ratios : sequence of float
        One of each network, which are independent of each other.

    Notes
    -----
    With n ratios it is the ⌈0.9 (n + 1)⌉-th largest, as in split conformal prediction (Vovk et al.,
    "Algorithmic learning in a random world"). Fewer than nine have no such rank: then their
    logarithms are taken to be normal around 0, and it is Student's t of n degrees of freedom times
    their root mean square.
    """
    sizes = sorted(abs(math.log(max(each, 1e-300))) for each in ratios)
    if not sizes:
        return math.inf
    place = math.ceil(COVERED * (len(sizes) + 1))
    if place <= len(sizes):
        return math.exp(sizes[place - 1])
    from scipy.special import stdtrit

    widest = float(stdtrit(len(sizes), (1 + COVERED) / 2)) * math.sqrt(sum(each**2 for each in sizes) / len(sizes))
    return math.exp(widest) if widest < math.log(np.finfo(np.float64).max) else math.inf


def leave_out(
    groups: Mapping[str, Sequence[Point]],
    fit: Callable[[list[Point]], Model],
    predict: Callable[[Model, Point], float | None],
) -> list[tuple[Point, float | None]]:
    """Return each point with its prediction by a model of all other groups.

    Parameters
    ----------
    groups : mapping of str to sequence of Point
        Points that are left out together, such as those of one network. At least two.
    fit, predict : callable
        A prediction may be None: the model says nothing of this point.
    """
    found = []
    for name, own in groups.items():
        model = fit([each for other, points in groups.items() if other != name for each in points])
        found += [(each, predict(model, each)) for each in own]
    return found


def left_out_factor(
    points: Iterable[Point],
    fit: Callable[[list[Point]], Model],
    predict: Callable[[Model, Point], float | None],
    measured: Callable[[Point], float],
    what: str,
) -> float:
    """Return the factor by which a model is off on networks that were left out.

    Raises
    ------
    ConfigurationError
        With fewer than `FEWEST_NETWORKS`, or if fewer than `FEWEST_RATIOS` were predicted.
    """
    groups = networks_for(points, what)
    ratios = _worst(leave_out(groups, fit, predict), measured)
    if len(ratios) < FEWEST_RATIOS:
        raise ConfigurationError(
            f"only {len(ratios)} of {len(groups)} measured networks {'has' if len(ratios) == 1 else 'have'} operators "
            f"that others have, too, so nothing tells how far a model of {what} is off",
            hint="Measure others with --passes layers,memory, and give their files, too.",
        )
    return covering_factor(ratios)


def _worst(left: Iterable[tuple[Point, float | None]], measured: Callable[[Point], float]) -> list[float]:
    """Return the ratio of each network that is farthest off."""
    worst: dict[str, float] = {}
    for point, guess in left:
        if guess is not None:
            ratio = max(guess, 1e-300) / measured(point)
            known = worst.get(point.network, 1.0)
            worst[point.network] = max(ratio, known, key=lambda each: abs(math.log(each)))
    return list(worst.values())


def judge(
    groups: Mapping[str, Sequence[Point]],
    fit: Callable[[list[Point]], Model],
    predict: Callable[[Model, Point], float | None],
    measured: Callable[[Point], float],
) -> list[Judged]:
    """Judge a model on each group, with an interval that only the other groups have made.

    Points of which a model says nothing, or not how far it is off, are left out. Needs three
    groups.
    """
    found = []
    for name, own in groups.items():
        rest = {other: points for other, points in groups.items() if other != name}
        ratios = _worst(leave_out(rest, fit, predict), measured)
        if len(ratios) < FEWEST_RATIOS:
            continue
        factor = covering_factor(ratios)
        model = fit([each for points in rest.values() for each in points])
        for each in own:
            guess = predict(model, each)
            if guess is not None:
                found.append(Judged(guess, measured(each), factor, name))
    return found


def by_network(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Return points by their ``network``."""
    found: dict[str, list[Point]] = {}
    for each in points:
        found.setdefault(each.network, []).append(each)
    return found


def networks_for(points: Iterable[Point], what: str) -> dict[str, list[Point]]:
    """Return points by network, if there are enough networks for a model.

    Raises
    ------
    ConfigurationError
        With fewer than `FEWEST_NETWORKS`.
    """
    groups = by_network(points)
    if len(groups) < FEWEST_NETWORKS:
        raise ConfigurationError(
            f"{len(groups)} measured network{'s' * (len(groups) != 1)} are too few for a model of {what}: it needs "
            f"{FEWEST_NETWORKS}",
            hint="Measure others with --passes layers,memory, and give their files, too.",
        )
    return groups
