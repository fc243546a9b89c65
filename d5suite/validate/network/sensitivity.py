"""How far roundings move a network's gradients, and each gradient held to its own movement.

A rounding that flips a ReLU moves the gradients of all tensors before it by a step. The tolerance
of the whole gradient of a deep network is therefore some percent, although most gradients are far
closer to float64, and those behind the last ReLU are always close. So each tensor is also held to
its own sensitivity, in error and in length. Flips are rare and occur elsewhere at other weights: a
tensor that is off is compared again at a few neighbouring weights, and fails if it is off at each.
So is the whole gradient (`d5suite.validate.network.gradient`).

Imports the contract and NumPy; no framework.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from d5suite.levels.network import Arrays, Executor
from d5suite.validate.check import Check
from d5suite.validate.network.reference import NEGLIGIBLE
from d5suite.validate.norms import UNIT_ROUNDOFF, inner, norm, relative_l2, whole_norm

SENSITIVITY_NOISE = 32.0
"""Relative noise on the weights, in units of roundoff, that represents all roundings of a pass. It
must be large enough to flip some ReLUs in every layer: a float32 pass flips about one in a million,
and a single flip in ResNet-18's last stage (8 images of 64 px) moves a gradient by 2%. Noise of one
unit often flips none."""

SENSITIVITY_DRAWS = 2
"""Draws of that noise. The draw that moves the gradient most counts, because flips are rare and
vary in size."""

CANCELLED = 4
"""Roundoffs of the whole gradient that may remain where large terms cancel, as in a bias before
BatchNormalization. MXNet left 3.3 in float32."""

CANCELLED_16 = 2
"""The same in 16 bits, where one roundoff is up to 0.4% of the whole; no framework needed more."""

FINE = 5e-4
"""Error of a tensor's float32 gradient that is always accepted. Without a flip, errors are about
1e-6; rounding a gradient to bfloat16 makes one of 1.5e-3."""

FINE_LENGTH = 2.5e-3
"""Relative change of a gradient's length that is always accepted. Flips move a gradient in random
directions, and its length little."""

POINTS = 6
"""Weights at which a tensor may be off before it fails: those of the proof and their neighbours.
One in five float32 passes of ResNet-50 has a flip that moves some gradient by more than its own
sensitivity."""

FEW = 16
"""Elements of a tensor below which chance may make its own sensitivity small; the median over all
tensors counts, too."""


@dataclass(frozen=True)
class Sensitivity:
    """How far noise on the weights moves loss and gradients, relative to their norms.

    Attributes
    ----------
    gradient : float
        How far the most sensitive tensor's gradient moves.
    loss : float
    own : mapping of str to float
        How far each tensor's gradient moves.
    lengths : mapping of str to float
        How far the length of each tensor's gradient moves.
    """

    gradient: float
    loss: float
    own: Mapping[str, float] = field(default_factory=dict)
    lengths: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measure(
        cls, proved: Executor, arrays: Arrays, expected: Arrays, precision: str, roundings: float = 1.0
    ) -> Sensitivity:
        """Measure the sensitivity in float64, with noise of some roundoffs on the weights.

        Parameters
        ----------
        proved : Executor
            In float64; it keeps its weights.
        arrays : mapping of str to numpy.ndarray
            The batch.
        expected : mapping of str to numpy.ndarray
            The batch's loss and gradients.
        precision : str
        roundings : float
            Factor on the usual noise; see `Tolerance`.
        """
        network, roundoff = proved.network, UNIT_ROUNDOFF[precision]
        loss = network.require_loss()[1]
        noise = SENSITIVITY_NOISE * roundings * roundoff
        own = dict.fromkeys(network.parameters, 0.0)
        lengths, losses = dict(own), 0.0
        for _ in disturbed(proved, noise):
            moved = differentiate(proved, arrays)
            losses = max(losses, relative_l2(moved[loss], expected[loss]))
            for name, (error, length) in tensor_errors(moved, expected, network.parameters, roundoff).items():
                own[name], lengths[name] = max(own[name], error), max(lengths[name], length)
        return cls(max(noise, *own.values()), losses, own, lengths)

    def limits(self, sizes: Mapping[str, int]) -> dict[str, tuple[float, float]]:
        """Return each tensor's accepted error and change of length, given its size."""
        median = float(np.median(list(self.own.values())))
        found = {}
        for name, size in sizes.items():
            error = max(self.own[name], median if size < FEW else 0.0)
            length = max(self.lengths[name], error / 10, error / math.sqrt(max(size, 1)))
            found[name] = max(FINE, error), max(FINE_LENGTH, 2 * length)
        return found


def check_each_gradient(
    name: str,
    executor: Executor,
    proved: Executor,
    batches: tuple[Arrays, Arrays],
    answers: tuple[Arrays, Arrays],
    sensitivity: Sensitivity,
    roundings: float = 1.0,
) -> Check:
    """Hold each tensor of a float32 gradient to its own sensitivity, in error and in length.

    Parameters
    ----------
    name : str
        What is compared with what.
    executor, proved : Executor
        As timed, and in float64, with the same weights, which they keep.
    batches : tuple of mapping
        The batch of each executor.
    answers : tuple of mapping
        Loss and gradients of each executor.
    sensitivity : Sensitivity
    roundings : float
        Factor on the noise that represents the executor's roundings, used if the usual noise does
        not suffice.
    """
    names, roundoff = executor.network.parameters, UNIT_ROUNDOFF[executor.precision]
    sizes = {each: executor.network.initializers[each].size for each in names}
    limits = sensitivity.limits(sizes)
    best: dict[str, Check] = {}

    def all_close(found: Arrays, expected: Arrays) -> bool:
        for each, errors in tensor_errors(found, expected, names, roundoff).items():
            kinds = zip(errors, limits[each], (each, f"length of {each}"), strict=True)
            worst = max((Check(name, *kind) for kind in kinds), key=_ratio)
            best[each] = min(best.get(each, worst), worst, key=_ratio)
        return all(check.passed for check in best.values())

    points = 1
    if not all_close(*answers):
        with contextlib.closing(neighbours(executor, proved, batches)) as around:
            for found, expected in around:
                points += 1
                if all_close(found, expected):
                    break
    if roundings > 1 and not all(check.passed for check in best.values()):
        wider = Sensitivity.measure(proved, batches[1], answers[1], executor.precision, roundings)
        limits, points = wider.limits(sizes), 1
        best.clear()
        all_close(*answers)
        name += f", roundings {roundings:g} times the usual ones"
    worst = max(best.values(), key=_ratio)
    detail = f"{worst.detail}, least error at {points} weights" if points > 1 else worst.detail
    return replace(worst, name=f"{name}, {len(names)} tensors", detail=f"worst: {detail}")


def neighbours(
    executor: Executor, proved: Executor, batches: tuple[Arrays, Arrays], draws: int = POINTS - 1
) -> Generator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]], None, None]:
    """Differentiate both executors at neighbouring weights; restore the weights at the end.

    Parameters
    ----------
    executor, proved : Executor
        As timed, and in float64, with the same weights.
    batches : tuple of mapping
        The batch of each executor.
    draws : int
        Number of neighbouring weights.

    Yields
    ------
    tuple of dict
        Loss and gradients of each executor.
    """
    start = executor.parameters()
    noise = SENSITIVITY_NOISE * UNIT_ROUNDOFF[executor.precision]
    try:
        for moved in disturbed(proved, noise, draws=draws, dtype=np.float32):
            executor.load_parameters({each: value.astype(start[each].dtype) for each, value in moved.items()})
            yield differentiate(executor, batches[0]), differentiate(proved, batches[1])
    finally:
        executor.load_parameters(start)


def _ratio(check: Check) -> float:
    return check.error / check.tolerance if math.isfinite(check.error) else math.inf


def gradient_errors(found: Arrays, expected: Arrays, roundoff: float) -> dict[str, float]:
    """Return each gradient's error, relative to its norm or a small fraction of the whole norm.

    Parameters
    ----------
    found, expected : mapping of str to numpy.ndarray
        Gradients by parameter.
    roundoff : float
        Unit roundoff of the precision of ``found``.
    """
    return {name: error for name, (error, _) in tensor_errors(found, expected, expected, roundoff).items()}


def tensor_errors(
    found: Arrays, expected: Arrays, names: Iterable[str], roundoff: float
) -> dict[str, tuple[float, float]]:
    """Return each gradient's error as in `gradient_errors`, and the part of it along the gradient.

    The second says by how much a gradient is too long or too short.

    Parameters
    ----------
    found, expected : mapping of str to numpy.ndarray
        Gradients by parameter; other entries are ignored.
    names : iterable of str
        The parameters.
    roundoff : float
        Unit roundoff of the precision of ``found``.
    """
    names = list(names)
    whole = whole_norm(expected[name] for name in names)
    remainder = (CANCELLED if roundoff < UNIT_ROUNDOFF["fp16"] else CANCELLED_16) * roundoff * whole
    errors = {}
    for name in names:
        difference = found[name] - expected[name]
        length, distance = norm(expected[name]), norm(difference)
        scale = max(length, NEGLIGIBLE * whole) or 1.0
        along = abs(inner(difference, expected[name])) / (length or 1.0)
        errors[name] = max(distance - remainder, 0.0) / scale, max(along - remainder, 0.0) / scale
    return errors


def disturbed(
    proved: Executor, noise: float, *, draws: int = SENSITIVITY_DRAWS, dtype: type[np.floating] = np.float64
) -> Iterator[dict[str, np.ndarray]]:
    """Put relative noise on an executor's weights, one draw after another; restore them at the end.

    Parameters
    ----------
    proved : Executor
    noise : float
        Largest relative change of a weight.
    draws : int
    dtype : type
        The weights with noise are numbers of this type.

    Yields
    ------
    dict of str to numpy.ndarray
        The weights with noise.
    """
    start = proved.parameters()
    generator = np.random.default_rng(0xD5)
    try:
        for _ in range(draws):
            moved = {}
            for name in proved.network.parameters:
                value = start[name] * generator.uniform(1 - noise, 1 + noise, start[name].shape)
                moved[name] = value.astype(dtype, copy=False).astype(value.dtype, copy=False)
            proved.load_parameters(moved)
            yield moved
    finally:
        proved.load_parameters(start)


def differentiate(
    executor: Executor,
    arrays: Arrays,
    *,
    before: dict[str, np.ndarray] | None = None,
    after: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Return loss and gradients; restore the running statistics, all that a pass changes.

    ``before`` and ``after`` receive the running statistics before and after the pass.
    """
    start = _statistics(executor)
    answer = executor.fetch(executor.forward_backward(executor.feed(arrays)))
    if before is not None:
        before.update(start)
    if after is not None:
        after.update(_statistics(executor))
    executor.load_parameters(start)
    return answer


def _statistics(executor: Executor) -> dict[str, np.ndarray]:
    """Copy the running statistics to NumPy."""
    names = executor.network.statistics
    values = executor.parameters() if names else {}
    return {name: values[name] for name in names}
