"""The answers of timed calls, and to a batch never fed before, against float64 references.

A network that was right before it was timed may be wrong while it is: code that replays a captured
graph, or a cache, answers without looking at its input. The references are made before timing, with
the float64 executor just proved, and are kept as a sample of each tensor, which is small. They do
not depend on the backend: the first one records them, the others read them.

Imports h5py, NumPy and the contract; no framework.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np

from d5suite.errors import ValidationError
from d5suite.files import atomic_hdf5
from d5suite.levels.contract import require_answer
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.optimizers.settings import Optimizer
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import SATURATION, differentiate, gradient_errors
from d5suite.validate.network.reference import NEGLIGIBLE
from d5suite.validate.norms import UNIT_ROUNDOFF, relative_l2
from d5suite.validate.training.formulas import State, update

ELEMENTS = 4096
"""Elements, drawn at random, that stand for a larger tensor. A wrong input or a missing update
changes all; the whole tensors were compared before."""

OTHER_BATCHES = 3.0
"""Widens tolerances that were measured on the proof's batch for other batches and for several
steps: a few flipped ReLUs make most of a gradient's, and their number varies."""

ONE_FLIP = 0.05
"""The least tolerance for them. One flipped ReLU moves a gradient of ResNet by 2% (8 images of
64 px), and the proof's batch may have none; a replayed answer or a missing update is off by far
more."""


@dataclass(frozen=True)
class Answer:
    """Loss and gradients in float64 for one batch.

    Attributes
    ----------
    loss : float
    gradients : mapping of str to numpy.ndarray
        By parameter: `sampled`.
    norm : float
        Of the whole gradient.
    """

    loss: float
    gradients: Arrays
    norm: float

    @classmethod
    def of(cls, values: Arrays, loss: str) -> Answer:
        """Take an executor's loss, of this name, and gradients."""
        gradients = {name: value for name, value in values.items() if name != loss}
        norm = math.sqrt(sum(float(np.vdot(value, value)) for value in gradients.values()))
        return cls(float(values[loss]), sampled(gradients), norm)


@dataclass(frozen=True)
class References:
    """References of timed gradients and steps.

    Attributes
    ----------
    answers : sequence of Answer
        Of the batches in rotation, then of the one that is fed after timing.
    source : str
        Whose float64 executor gave them.
    limit, loss_limit : float
        Accepted errors of a gradient and of a loss; see
        `d5suite.validate.network.gradient.check_gradient`. They are a backend's own, and not
        recorded.
    """

    answers: Sequence[Answer]
    source: str
    limit: float
    loss_limit: float

    def save(self, path: Path, key: str) -> None:
        """Write the answers atomically, under the `key` of the network and its batches."""
        with atomic_hdf5(path) as file:
            file.attrs.update(key=key, source=self.source)
            file.attrs["names"] = list(self.answers[0].gradients)
            for number, answer in enumerate(self.answers):
                group = file.create_group(str(number), track_order=True)
                group.attrs.update(loss=answer.loss, norm=answer.norm)
                for index, name in enumerate(self.answers[0].gradients):
                    group[str(index)] = answer.gradients[name]

    @classmethod
    def load(cls, path: Path, key: str, limit: float, loss_limit: float) -> References | None:
        """Read what `save` wrote; None without a file, or for another key."""
        if not path.exists():
            return None
        with h5py.File(path, "r") as file:
            if file.attrs["key"] != key:
                return None
            names = list(file.attrs["names"])
            answers = [
                Answer(
                    float(group.attrs["loss"]),
                    {name: group[str(index)][()] for index, name in enumerate(names)},
                    float(group.attrs["norm"]),
                )
                for group in (file[str(number)] for number in range(len(file)))
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
) -> References:
    """Return the references of several batches, from an executor that is already proved.

    Parameters
    ----------
    proved : Executor
        In float64, with the weights of ``network``; keeps them.
    first : mapping of str to numpy.ndarray
        Its loss and gradients for the first batch.
    others : sequence
        Images and labels of the other batches; the last is fed after timing.
    network : Network
    limit, loss_limit : float
        See `References`.
    recorded : Path, optional
        A file that keeps them for the next backend.

    Raises
    ------
    ValidationError
        If the last batch has the loss of another: then nothing tells them apart.
    """
    label, loss = network.require_loss()
    digest = hashlib.sha256()
    for array in (*sampled({name: network.initializers[name] for name in network.parameters}).values(),
                  *itertools.chain.from_iterable(others)):  # fmt: skip
        digest.update(np.ascontiguousarray(array).tobytes())
    known = References.load(recorded, digest.hexdigest(), limit, loss_limit) if recorded is not None else None
    if known is not None:
        return known
    answers = [Answer.of(first, loss)]
    for images, labels in others:
        answers.append(Answer.of(differentiate(proved, {**network.arrays(images), label: labels}), loss))
    if any(answers[-1].loss == each.loss for each in answers[:-1]):
        raise ValidationError(
            f"loss ({proved.mode} {proved.precision}): the same for different batches",
            hint="Either the executor ignores its input, or all images of the dataset are alike.",
        )
    found = References(answers, f"{proved.backend}:{proved.mode}", limit, loss_limit)
    if recorded is not None:
        found.save(recorded, digest.hexdigest())
    return found


def sampled(values: Arrays) -> dict[str, np.ndarray]:
    """Return up to `ELEMENTS` of each tensor's elements, float64; the same in every process."""
    found = {}
    for name, value in values.items():
        drawn = value[_drawn(value.shape)] if value.size > ELEMENTS else value.reshape(-1)
        found[name] = drawn.astype(np.float64)
    return found


@functools.cache
def _drawn(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Return indices along each axis, which select elements without a copy in any layout."""
    size = math.prod(shape)
    return np.unravel_index(np.random.default_rng(size).integers(0, size, ELEMENTS), shape)


def check_losses(name: str, found: Mapping[int, Sequence[float]], references: References) -> Check:
    """Compare the losses of timed calls, by number of their batch."""
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
    """Check losses without a reference: they must be finite."""
    found = [float(loss) for each in losses.values() for loss in each]
    return Check("loss of timed calls is finite", 0.0 if np.isfinite(found).all() else math.inf, 0.0)


def fetch_sampled(executor: Executor, native: Native) -> dict[str, np.ndarray]:
    """Fetch loss and gradients one by one, and keep a sample of each.

    Together they are as large as the network: fresh memory for all of them takes longer than a step
    of some networks.

    Parameters
    ----------
    executor : Executor
    native : mapping
        What its ``forward_backward`` returned, on the device.

    Returns
    -------
    dict of str to numpy.ndarray
        The loss, scalar, and of each parameter's gradient `sampled` elements, float64.

    Raises
    ------
    ContractError
        One is missing or malformed.
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


def check_answer(name: str, executor: Executor, values: Arrays, references: References, number: int) -> list[Check]:
    """Compare loss and gradients, as timed, with the reference of one batch.

    Parameters
    ----------
    name : str
        Of the batch.
    executor : Executor
    values : mapping of str to numpy.ndarray
        Its answer, of `fetch_sampled`.
    references : References
    number : int
        Of the batch among the references.
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
    """Return the error limit of a gradient on other batches and weights than the proof's."""
    return min(max(OTHER_BATCHES * limit, ONE_FLIP), SATURATION)


def scaled(executor: Executor, values: Arrays) -> dict[str, np.ndarray]:
    """Scale samples so that their norms estimate those of the whole tensors."""
    sizes = {name: executor.network.initializers[name].size for name in values}
    return {name: value * math.sqrt(sizes[name] / max(value.size, 1)) for name, value in values.items()}


def check_update(
    name: str,
    trainer: Trainer,
    start: Arrays,
    state: State,
    after: Arrays,
    answer: Answer,
    limit: float,
) -> Iterator[Check]:
    """Compare one native update with the optimizer's formula.

    The error counts in parts of what the gradient alone changes: momentum from earlier steps is
    known exactly and hides nothing. Without a check if the optimizer clips both values and norms,
    for which the sample does not suffice.

    Parameters
    ----------
    name : str
        Of the step.
    trainer : Trainer
    start, state : mapping of str to numpy.ndarray
        Parameters and optimizer's state before it, `sampled`.
    after : mapping of str to numpy.ndarray
        Parameters after it, `sampled`.
    answer : Answer
        Loss and gradient at ``start``, in float64.
    limit : float
        Accepted error of a gradient.
    """
    optimizer, executor = trainer.optimizer, trainer.executor
    if optimizer.clip_norm and optimizer.clip_value:
        return
    gradients = dict(answer.gradients)
    if optimizer.clip_norm:
        factor = min(1.0, optimizer.clip_norm / answer.norm)
        gradients = {key: factor * value for key, value in gradients.items()}
    whole: Optimizer = replace(optimizer, clip_norm=0.0)
    ends = []
    for given in (gradients, {key: np.zeros_like(value) for key, value in gradients.items()}):
        moved = {key: start[key] for key in gradients}
        update(whole, moved, given, dict(state), learning_rate=trainer.learning_rate)
        ends.append(moved)
    wanted, still = ends
    way = {key: wanted[key] - still[key] for key in wanted}
    # Momentum that dwarfs the gradient rounds it away.
    heights = {key: np.abs(start[key]) + np.abs(still[key] - start[key]) for key in wanted}
    yield displacement(name, executor, after, wanted, way, heights, limit)


def displacement(
    name: str, executor: Executor, found: Arrays, wanted: Arrays, way: Arrays, heights: Arrays, limit: float
) -> Check:
    """Compare parameters with their expected values, relative to the distance moved.

    All are `sampled`. Differences below the precision of numbers of these heights are not counted.
    """
    apart = scaled(executor, {key: found[key] - value for key, value in wanted.items()})
    heights = scaled(executor, {key: heights[key] for key in wanted})
    return apart_of_way(name, executor.precision, apart, scaled(executor, way), heights, limit)


def apart_of_way(name: str, precision: str, apart: Arrays, long: Arrays, heights: Arrays, limit: float) -> Check:
    """Compare distances, beyond rounding, with the distance moved; see `displacement`."""
    roundoff = UNIT_ROUNDOFF["fp64" if precision == "fp64" else "fp32"]
    whole = math.sqrt(sum(float(np.vdot(value, value)) for value in long.values()))
    errors = {}
    for key, distance in apart.items():
        rounding = 4 * roundoff * float(np.linalg.norm(heights[key])) + 2 * roundoff * whole
        scale = max(float(np.linalg.norm(long[key])), NEGLIGIBLE * whole) or 1.0
        error = max(float(np.linalg.norm(distance)) - rounding, 0.0) / scale
        errors[key] = error if math.isfinite(error) else math.inf
    return Check.worst(name, errors, limit)


LEAST_WAY = 0.5
"""Part of the float64 run's way that the parameters of a network with Dropout must go: dropping
adds noise, which makes the way longer, and a skipped update of three leaves less."""


def check_moved(name: str, executor: Executor, found: Arrays, start: Arrays, way: Arrays) -> Check:
    """Compare the distance that parameters moved with the expected one: all are `sampled`."""
    went = {key: found[key] - value for key, value in start.items()}
    lengths = [
        math.sqrt(sum(float(np.vdot(value, value)) for value in scaled(executor, each).values()))
        for each in (went, way)
    ]
    part = lengths[0] / lengths[1] if lengths[1] else 1.0
    return Check(name, max(0.0, 1.0 - part) if math.isfinite(part) else math.inf, LEAST_WAY)
