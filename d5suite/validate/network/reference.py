"""Answers of ONNX's reference evaluator to a network and a batch, and the file that keeps them.

The evaluator is slow, and its answers do not depend on the backend: the first backend's worker
records them, the others read them. Imports ONNX, h5py and NumPy; no framework.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np

from d5suite.files import atomic_hdf5
from d5suite.levels.network import Arrays
from d5suite.network import Network
from d5suite.validate.arrays import read_arrays, write_arrays
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.norms import norm

DIRECTIONS = 2
"""Number of random directions. Each moves every parameter tensor; the second guards against errors
that cancel by chance."""

STEP = 5e-11
"""Step of the central difference along a direction whose derivative is about the root of the number
of tensors. Larger steps cross kinks of ReLU and max-pooling: on ResNet-50 with 8 images of 64 px
the error is 8e-4 at 2e-9 and none at 2e-10. Smaller steps lose digits of the loss: differences are
accurate to 1e-7 here and to 9e-7 at 1e-11."""

STEPS = tuple(STEP * 5.0**power for power in range(-1, 6))
"""Steps tried if differences at `STEP` do not confirm a gradient. Where BatchNormalization divides
by nearly zero (two values in a batch), rounding of the loss costs 1e-4 at `STEP` and nothing at
1000 times `STEP`."""

NEGLIGIBLE = 1e-3
"""A tensor's gradient error is relative to its own norm, or to this fraction of the whole
gradient's norm if its own is smaller: the gradient of a convolution bias before BatchNormalization
is mere rounding."""


@dataclass(frozen=True)
class NetworkReference:
    """The reference evaluator's answers to a network and a batch.

    Attributes
    ----------
    loss : numpy.ndarray
        Scalar.
    statistics : mapping of str to numpy.ndarray
        Running statistics after one pass.
    scales : mapping of str to float
        By parameter: standard deviation of the directions' noise.
    derivatives : sequence of float
        The loss's derivative along each direction.
    steps : sequence of float
        The step of each central difference.
    doubts : sequence of float
        How far each derivative is from those at neighbouring steps; 0 if only one step was tried.
    """

    loss: np.ndarray
    statistics: Arrays
    scales: Mapping[str, float]
    derivatives: Sequence[float]
    steps: Sequence[float] = (STEP,) * DIRECTIONS
    doubts: Sequence[float] = (0.0,) * DIRECTIONS

    @property
    def settled(self) -> bool:
        """Whether several steps were tried."""
        return any(self.doubts)

    def save(self, path: Path, key: str) -> None:
        """Write the answers atomically; `key` identifies network and batch."""
        with atomic_hdf5(path) as file:
            file.attrs["key"] = key
            file["loss"] = self.loss
            write_arrays(file.create_group("scales"), {name: np.array(value) for name, value in self.scales.items()})
            write_arrays(file.create_group("statistics"), self.statistics)
            for name in ("derivatives", "steps", "doubts"):
                file[name] = np.array(getattr(self, name))

    @classmethod
    def load(cls, path: Path, key: str) -> NetworkReference | None:
        """Read what `save` wrote; None without a file or with another key."""
        if not path.exists():
            return None
        with h5py.File(path, "r") as file:
            if file.attrs["key"] != key:
                return None
            statistics = read_arrays(file["statistics"])
            scales = {name: float(value) for name, value in read_arrays(file["scales"]).items()}
            differences = (file[name][()].tolist() for name in ("derivatives", "steps", "doubts"))
            return cls(file["loss"][()], statistics, scales, *differences)


def key(network: Network, images: np.ndarray, labels: np.ndarray) -> str:
    """Return a hash of a network and a batch."""
    digest = hashlib.sha256(network.model.SerializeToString(deterministic=True))
    for array in (images, labels):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def reference(network: Network, images: np.ndarray, labels: np.ndarray, gradients: Arrays) -> NetworkReference:
    """Evaluate a network on a batch.

    Parameters
    ----------
    network : Network
    images, labels : numpy.ndarray
        float32 (n, C, H, W) and int64 (n,).
    gradients : mapping of str to numpy.ndarray
        Gradients by parameter; their norms scale the directions.
    """
    oracle = NetworkOracle(network, training=True)
    scales = _scales({name: gradients[name] for name in network.parameters})
    loss, statistics = oracle.run(images, labels)
    along, step = (direction(network, scales, index) for index in range(DIRECTIONS)), STEP * _size(network, loss)
    derivatives = [oracle.derivative(images, labels, d, step) for d in along]
    return NetworkReference(loss, statistics, scales, derivatives, (step,) * DIRECTIONS)


def settled(expected: NetworkReference, network: Network, images: np.ndarray, labels: np.ndarray) -> NetworkReference:
    """Return the answers with each difference at the step whose two neighbours agree best with it.

    Small steps suffer from rounding of the loss, large ones from its curvature and kinks; in
    between, the step does not matter. No backend's answer has an influence.

    Parameters
    ----------
    expected : NetworkReference
        Differences at `STEP`; the scales are kept.
    network : Network
    images, labels : numpy.ndarray
        As in `reference`.
    """
    oracle, found = NetworkOracle(network, training=True), []
    tried = [step * _size(network, expected.loss) for step in STEPS]
    for index in range(DIRECTIONS):
        along = direction(network, expected.scales, index)
        slopes = [oracle.derivative(images, labels, along, step) for step in tried]
        apart = np.abs(np.diff(slopes))
        doubts = np.maximum(apart[:-1], apart[1:])
        best = int(np.argmin(doubts))
        found.append((slopes[best + 1], tried[best + 1], max(float(doubts[best]), np.finfo(float).tiny)))
    derivatives, steps, doubts_of = zip(*found, strict=True)
    return replace(expected, derivatives=derivatives, steps=steps, doubts=doubts_of)


def _size(network: Network, loss: np.ndarray) -> float:
    """Return the factor on steps: a squared error if above 1, whose rounding hides plain steps."""
    return max(1.0, abs(float(loss))) if network.has_targets else 1.0


def direction(network: Network, scales: Mapping[str, float], index: int) -> dict[str, np.ndarray]:
    """Draw normal noise with these deviations, by parameter; the same in every process."""
    generator = np.random.default_rng([0xD5, index])
    shapes = {name: network.initializers[name].shape for name in network.parameters}
    return {name: generator.standard_normal(shape) * scales[name] for name, shape in shapes.items()}


def _scales(gradients: Arrays) -> dict[str, float]:
    """Return the inverse of each gradient's norm, so that all tensors have equal weight."""
    norms = {name: norm(gradient) for name, gradient in gradients.items()}
    floor = NEGLIGIBLE * max(norms.values())
    return {name: 1.0 / max(length, floor or 1.0) for name, length in norms.items()}
