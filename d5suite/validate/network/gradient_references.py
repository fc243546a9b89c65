"""Float64 losses and gradients of several batches, and how timed answers compare with them.

A network that was right before timing may be wrong during it: code that replays a captured graph,
or a cache, ignores its input. The references are computed before timing, by the float64 executor
just proved. A sample of each tensor is kept, which is small. They do not depend on the backend: the
first one records them, the others read them.

Imports h5py, NumPy and the contract; no framework.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from d5suite.errors import ValidationError
from d5suite.files import atomic_hdf5
from d5suite.levels.contract import require_answer
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.network import Network
from d5suite.validate.arrays import read_arrays, write_arrays
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import SATURATION
from d5suite.validate.network.sensitivity import differentiate, gradient_errors
from d5suite.validate.norms import UNIT_ROUNDOFF, relative_l2, whole_norm

ELEMENTS = 4096
"""Elements, drawn at random, that represent a larger tensor. A wrong input or a missing update
changes all elements, and the proof before timing compared whole tensors."""

OTHER_BATCHES = 3.0
"""Factor on tolerances measured on the proof's batch, for other batches and for several steps: a
few flipped ReLUs cause most of a gradient's error, and their number varies."""

ONE_FLIP = 0.05
"""Smallest tolerance on other batches. One flipped ReLU moves a gradient of ResNet by 2% (8 images
of 64 px), and the proof's batch may have none. A replayed answer or a missing update is off by far
more."""


@dataclass(frozen=True)
class GradientReference:
    """Loss and gradients in float64 for one batch.

    Attributes
    ----------
    loss : float
    gradients : mapping of str to numpy.ndarray
        Gradients by parameter, `sampled`.
    norm : float
        Norm of the whole gradient.
    """

    loss: float
    gradients: Arrays
    norm: float

    @classmethod
    def of(cls, values: Arrays, loss: str) -> GradientReference:
        """Split an executor's answer into the loss, under this name, and the gradients."""
        gradients = {name: value for name, value in values.items() if name != loss}
        return cls(float(values[loss]), sampled(gradients), whole_norm(gradients.values()))


@dataclass(frozen=True)
class GradientReferences:
    """References for timed gradients and steps.

    Attributes
    ----------
    answers : sequence of GradientReference
        References for the batches in rotation, then for the batch fed after timing.
    source : str
        Backend and mode of the float64 executor that computed the answers.
    limit, loss_limit : float
        Accepted errors of a gradient and of a loss; see
        `d5suite.validate.network.gradient.check_gradient`. They are specific to a backend, and not
        recorded.
    """

    answers: Sequence[GradientReference]
    source: str
    limit: float
    loss_limit: float

    def save(self, path: Path, key: str) -> None:
        """Write the answers atomically; `key` identifies the network and its batches."""
        with atomic_hdf5(path) as file:
            file.attrs.update(key=key, source=self.source)
            for number, answer in enumerate(self.answers):
                group = file.create_group(str(number))
                group.attrs.update(loss=answer.loss, norm=answer.norm)
                write_arrays(group, answer.gradients)

    @classmethod
    def load(cls, path: Path, key: str, limit: float, loss_limit: float) -> GradientReferences | None:
        """Read what `save` wrote; None without a file or with another key."""
        if not path.exists():
            return None
        with h5py.File(path, "r") as file:
            if file.attrs["key"] != key:
                return None
            groups = [file[str(number)] for number in range(len(file))]
            answers = [
                GradientReference(float(group.attrs["loss"]), read_arrays(group), float(group.attrs["norm"]))
                for group in groups
            ]
            return cls(answers, str(file.attrs["source"]), limit, loss_limit)


def references(
    proved: Executor,
    first: Arrays,
    others: Sequence[tuple[np.ndarray, np.ndarray]],
    network: Network,
    limit: float,
    loss_limit: float,
    recorded: Path | None = None,
) -> GradientReferences:
    """Compute the references of several batches with an executor that is already proved.

    Parameters
    ----------
    proved : Executor
        In float64, with the weights of ``network``, which it keeps.
    first : mapping of str to numpy.ndarray
        Loss and gradients of ``proved`` for the first batch.
    others : sequence
        Images and labels of the other batches; the last one is fed after timing.
    network : Network
    limit, loss_limit : float
        See `GradientReferences`.
    recorded : Path, optional
        A file that keeps the references for the next backend.

    Raises
    ------
    ValidationError
        If the last batch has the same loss as another batch, which would hide a replayed answer.
    """
    label, loss = network.require_loss()
    digest = hashlib.sha256()
    for array in (*sampled({name: network.initializers[name] for name in network.parameters}).values(),
                  *itertools.chain.from_iterable(others)):  # fmt: skip
        digest.update(np.ascontiguousarray(array).tobytes())
    known = GradientReferences.load(recorded, digest.hexdigest(), limit, loss_limit) if recorded is not None else None
    if known is not None:
        return known
    answers = [GradientReference.of(first, loss)]
    for images, labels in others:
        answers.append(GradientReference.of(differentiate(proved, {**network.arrays(images), label: labels}), loss))
    if any(answers[-1].loss == each.loss for each in answers[:-1]):
        raise ValidationError(
            f"loss ({proved.mode} {proved.precision}): the same for different batches",
            hint="Either the executor ignores its input, or all images of the dataset are alike.",
        )
    found = GradientReferences(answers, f"{proved.backend}:{proved.mode}", limit, loss_limit)
    if recorded is not None:
        found.save(recorded, digest.hexdigest())
    return found


def sampled(values: Arrays) -> dict[str, np.ndarray]:
    """Draw up to `ELEMENTS` elements of each tensor, as float64; the same in every process."""
    found = {}
    for name, value in values.items():
        drawn = value[_drawn(value.shape)] if value.size > ELEMENTS else value.reshape(-1)
        found[name] = drawn.astype(np.float64)
    return found


@functools.cache
def _drawn(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Draw indices, one array per axis; they select elements without copying the tensor."""
    size = math.prod(shape)
    return np.unravel_index(np.random.default_rng(size).integers(0, size, ELEMENTS), shape)


def check_losses(name: str, found: Mapping[int, Sequence[float]], references: GradientReferences) -> Check:
    """Compare losses of timed calls with the references; keys are numbers of batches."""
    errors = {
        f"batch {number + 1}, answer {index + 1} of {len(losses)}": relative_l2(
            np.array(loss), np.array(references.answers[number].loss)
        )
        for number, losses in sorted(found.items())
        for index, loss in enumerate(losses)
    }
    worst = max(errors, key=lambda key: errors[key])
    text = f"loss of timed calls {name} vs {references.source} fp64"
    return Check(text, errors[worst], references.loss_limit, f"worst: {worst}")


def check_finite(losses: Mapping[int, Sequence[float]]) -> Check:
    """Check that losses are finite, where no reference exists."""
    found = [float(loss) for each in losses.values() for loss in each]
    return Check("loss of timed calls is finite", 0.0 if np.isfinite(found).all() else math.inf, 0.0)


def fetch_sampled(executor: Executor, native: Native) -> dict[str, np.ndarray]:
    """Fetch loss and gradients one by one, and keep a sample of each.

    All gradients together are as large as the network: allocating memory for them takes longer than
    a step of some networks.

    Parameters
    ----------
    executor : Executor
    native : mapping
        What ``forward_backward`` returned, on the device.

    Returns
    -------
    dict of str to numpy.ndarray
        The scalar loss, and each gradient, `sampled`.

    Raises
    ------
    ContractError
        If the loss or a gradient is missing or malformed.
    """
    network = executor.network
    loss = network.require_loss()[1]
    found = {}
    for name in (loss, *network.parameters):
        values = executor.fetch({name: native[name]}) if name in native else {}
        shape = () if name == loss else network.initializers[name].shape
        require_answer(executor, "executor.forward_backward", values, {name: shape})
        found.update({loss: values[loss]} if name == loss else sampled(values))
    return found


def check_answer(
    name: str, executor: Executor, values: Arrays, references: GradientReferences, number: int
) -> list[Check]:
    """Compare loss and gradients, as timed, with the reference of one batch.

    Parameters
    ----------
    name : str
        The batch, in words.
    executor : Executor
    values : mapping of str to numpy.ndarray
        The executor's answer, from `fetch_sampled`.
    references : GradientReferences
    number : int
        The batch's number among the references.
    """
    network, expected = executor.network, references.answers[number]
    loss = network.require_loss()[1]
    errors = gradient_errors(
        scaled(executor, {each: values[each] for each in network.parameters}),
        scaled(executor, expected.gradients),
        UNIT_ROUNDOFF[executor.precision],
    )
    text = f"of {name} ({executor.mode} {executor.precision}) vs {references.source} fp64"
    return [
        Check(f"loss {text}", relative_l2(values[loss], np.array(expected.loss)), references.loss_limit, loss),
        Check.worst(f"gradient {text}", errors, widened(references.limit)),
    ]


def widened(limit: float) -> float:
    """Return the error limit of a gradient on batches and weights other than the proof's."""
    return min(max(OTHER_BATCHES * limit, ONE_FLIP), SATURATION)


def scaled(executor: Executor, values: Arrays) -> dict[str, np.ndarray]:
    """Scale samples so that their norms estimate the whole tensors' norms."""
    sizes = {name: executor.network.initializers[name].size for name in values}
    return {name: value * math.sqrt(sizes[name] / max(value.size, 1)) for name, value in values.items()}
