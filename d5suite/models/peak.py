"""Peak memory of a step, from a network's counts: base, parameters, activations, code.

peak = base + p · held + a · activations + n · nodes. ``base`` is the framework's, p how often it
holds the parameters, their gradients and the optimizer's state, a how much of the counted
activations, n what building and compiling a node takes. Constants are fitted for a backend and
measurement, not negative. Imports its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from d5suite.models.fitting import left_out_factor, nonnegative


@dataclass(frozen=True)
class MeasuredPeak:
    """A peak that was measured, and what is counted of its network.

    Attributes
    ----------
    network : str
    held_bytes, activation_bytes : float
        Of parameters, gradients and the optimizer's state, and of `d5suite.network.held.Held`:
        ``forward`` of inference, ``step`` of training.
    nodes : int
    bytes : float
        The peak.
    """

    network: str
    held_bytes: float
    activation_bytes: float
    nodes: int
    bytes: float


@dataclass(frozen=True)
class PeakModel:
    """A fitted model of one backend and measurement.

    Attributes
    ----------
    base_bytes, parameters, activations, node_bytes : float
        See the module.
    factor : float
        Nine in ten of the networks that were left out were within this factor, either way.
    """

    base_bytes: float
    parameters: float
    activations: float
    node_bytes: float
    factor: float = math.inf

    def bytes(self, held_bytes: float, activation_bytes: float, nodes: int) -> float:
        """Return the peak."""
        held = self.parameters * held_bytes + self.activations * activation_bytes
        return self.base_bytes + held + self.node_bytes * nodes


def fit_once(points: Sequence[MeasuredPeak]) -> PeakModel:
    """Fit the constants by least squares of relative errors."""
    rows = [(1.0, each.held_bytes, each.activation_bytes, float(each.nodes)) for each in points]
    peaks = [each.bytes for each in points]
    return PeakModel(*map(float, nonnegative(rows, peaks, [1 / each for each in peaks])))


def predicted_bytes(model: PeakModel, point: MeasuredPeak) -> float:
    """Return the peak that a model predicts for a measured point, in bytes."""
    return model.bytes(point.held_bytes, point.activation_bytes, point.nodes)


def fit_peaks(points: Sequence[MeasuredPeak]) -> PeakModel:
    """Fit a model, and find out how far it may be trusted by leaving out each network.

    Raises
    ------
    ConfigurationError
        With fewer than `d5suite.models.fitting.FEWEST_NETWORKS` networks.
    """
    factor = left_out_factor(points, fit_once, predicted_bytes, lambda each: each.bytes, "memory")
    return replace(fit_once(points), factor=factor)
