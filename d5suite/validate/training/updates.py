"""Updates of parameters, compared with expected ones relative to the distance moved.

A parameter moves little in one step, so an error relative to its value would hide a missing update.
Arrays are `sampled`. Imports NumPy and the contract; no framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from d5suite.levels.network import Arrays, Executor
from d5suite.levels.training import Trainer
from d5suite.optimizers.settings import Optimizer
from d5suite.validate.check import Check
from d5suite.validate.network.gradient_references import GradientReference, sampled, scaled
from d5suite.validate.network.reference import NEGLIGIBLE
from d5suite.validate.norms import UNIT_ROUNDOFF, whole_norm
from d5suite.validate.training.formulas import OptimizerState, update

NARROW = (1 << 13) - 1
"""Mask of the significand bits that float32 has and float16 lacks."""

NARROW_SHARE = 0.5
"""Accepted share of numbers without these bits."""

FEWEST = 64
"""Fewest numbers from which `check_width` can tell their type."""

ROUNDINGS = 4
"""Least distance, in roundings, that decay must move the parameters to be checked: steps of less
than half a rounding change nothing."""

LEFT_OUT = 0.5
"""Accepted share of the decay that a step leaves out, or adds."""

SURE = 6.0
"""Accepted standard deviations of a random error's component along one direction."""

LEAST_MOVED = 0.5
"""Fraction of the float64 run's distance that the parameters of a network with Dropout must move.
Dropout's noise makes them move farther; one skipped update of three makes them move less."""


def check_update(
    name: str,
    trainer: Trainer,
    start: Arrays,
    state: OptimizerState,
    after: Arrays,
    reference: GradientReference,
    limit: float,
    *,
    rate: float | None = None,
) -> Iterator[Check]:
    """Compare one native update with the optimizer's formula.

    The error is relative to what the gradient alone changes: momentum from earlier steps is known
    exactly and hides nothing. Yields nothing if the optimizer clips both values and norms, because
    a sample of the gradient does not suffice then.

    Parameters
    ----------
    name : str
        The step, in words.
    trainer : Trainer
    start, after : mapping of str to numpy.ndarray
        Parameters before and after the step.
    state : mapping of str to numpy.ndarray
        The optimizer's state before the step, `sampled_state`.
    reference : GradientReference
        Loss and gradient at ``start``, in float64.
    limit : float
        Accepted error of a gradient.
    rate : float, optional
        The step's learning rate; the trainer's by default.
    """
    optimizer, executor = trainer.optimizer, trainer.executor
    if optimizer.clip_norm and optimizer.clip_value:
        return
    gradients = _clipped(optimizer, reference)
    expected, without = (
        _formula(optimizer, start, given, state, rate or trainer.learning_rate)
        for given in (gradients, {key: np.zeros_like(value) for key, value in gradients.items()})
    )
    distance = {key: expected[key] - without[key] for key in expected}
    # Momentum that dwarfs the gradient rounds it away.
    magnitudes = {key: np.abs(start[key]) + np.abs(without[key] - start[key]) for key in expected}
    yield check_parameters(name, executor, after, expected, distance, magnitudes, limit)


def check_decay(
    name: str,
    trainer: Trainer,
    start: Arrays,
    state: OptimizerState,
    after: Arrays,
    reference: GradientReference,
    rate: float,
) -> Iterator[Check]:
    """Check that a step has decayed vectors, and all other tensors.

    Decay is a small part of a step, less than the accepted error of an update. But a step that
    leaves it out has an error along the parameters, whereas rounding errors have random directions:
    over all vectors together, and over all other tensors, the share left out is exact. An error in
    random directions exceeds `SURE` less than once in a million steps. Yields nothing where decay
    moves parameters by less than a few roundings, or where a sample of the gradient does not
    suffice for clipping.

    Parameters
    ----------
    name : str
        The step, in words.
    trainer, start, state, after, reference, rate
        As `check_update` takes them.
    """
    optimizer, initial = trainer.optimizer, trainer.executor.network.initializers
    if not optimizer.weight_decay or (optimizer.clip_norm and optimizer.clip_value):
        return
    gradients = _clipped(optimizer, reference)
    expected, undecayed = (
        _formula(each, start, gradients, state, rate) for each in (optimizer, replace(optimizer, weight_decay=0.0))
    )
    roundoff = UNIT_ROUNDOFF["fp64" if trainer.executor.precision == "fp64" else "fp32"]
    for kind, are_vectors in (("vectors", True), ("matrices and filters", False)):
        keys = [key for key in expected if (initial[key].ndim <= 1) is are_vectors]
        decay = {key: undecayed[key] - expected[key] for key in keys}
        error = {key: after[key] - expected[key] for key in keys}
        moved = whole_norm(decay.values())
        if moved <= ROUNDINGS * roundoff * whole_norm(start[key] for key in keys):
            continue
        share = sum(float(np.vdot(error[key], decay[key])) for key in keys) / moved**2
        rest = whole_norm(error[key] - share * decay[key] for key in keys)
        chance = rest / moved / math.sqrt(sum(int(np.count_nonzero(value)) for value in decay.values()))
        sure = max(abs(share) - SURE * chance, 0.0) if math.isfinite(share) else math.inf
        yield Check(f"decay of {kind} left out by {name}", sure, LEFT_OUT, f"{share:.0%} of it")


def _clipped(optimizer: Optimizer, reference: GradientReference) -> dict[str, np.ndarray]:
    """Return a sampled gradient, clipped by the whole norm if the optimizer clips by norm."""
    factor = min(1.0, optimizer.clip_norm / reference.norm) if optimizer.clip_norm else 1.0
    return {key: factor * value for key, value in reference.gradients.items()}


def _formula(
    optimizer: Optimizer, start: Arrays, gradients: Arrays, state: OptimizerState, rate: float
) -> dict[str, np.ndarray]:
    """Return the parameters after one step with gradients that are clipped by norm already."""
    moved = {key: start[key] for key in gradients}
    update(replace(optimizer, clip_norm=0.0), moved, gradients, dict(state), learning_rate=rate)
    return moved


def check_width(name: str, state: OptimizerState) -> Check:
    """Check that an optimizer in float32 holds its state in float32.

    Numbers that were rounded to bfloat16 or float16 end in 13 zeros or more; of other numbers, one
    in 8,192 does.
    """
    arrays = [np.asarray(value, np.float32).ravel(order="K") for key, value in state.items() if "/" in key]
    bits = np.concatenate([value[value != 0].view(np.uint32) for value in arrays] or [np.zeros(0, np.uint32)])
    share = float((bits & NARROW == 0).mean()) if bits.size >= FEWEST else 0.0
    return Check(name, share, NARROW_SHARE, f"{share:.1%} of {bits.size} numbers end in 13 zeros")


def sampled_state(trainer: Trainer) -> OptimizerState:
    """Return the optimizer's state with its tensors `sampled`."""
    return {key: sampled({key: value})[key] if "/" in key else value for key, value in trainer.state().items()}


def sampled_parameters(executor: Executor) -> dict[str, np.ndarray]:
    """Return the executor's parameters, without running statistics, `sampled`."""
    values = executor.parameters()
    return sampled({name: values[name] for name in executor.network.parameters})


def check_parameters(
    name: str, executor: Executor, found: Arrays, expected: Arrays, moved: Arrays, magnitudes: Arrays, limit: float
) -> Check:
    """Compare parameters with expected ones, relative to the distance moved.

    Parameters
    ----------
    name : str
        What is compared with what.
    executor : Executor
        The executor whose precision was used.
    found, expected : mapping of str to numpy.ndarray
    moved : mapping of str to numpy.ndarray
        How far the expected parameters moved.
    magnitudes : mapping of str to numpy.ndarray
        Differences below the rounding of numbers of these magnitudes do not count.
    limit : float
        Accepted relative error.
    """
    apart = scaled(executor, {key: found[key] - value for key, value in expected.items()})
    magnitudes = scaled(executor, {key: magnitudes[key] for key in expected})
    return check_distances(name, executor.precision, apart, scaled(executor, moved), magnitudes, limit)


def check_distances(name: str, precision: str, apart: Arrays, moved: Arrays, magnitudes: Arrays, limit: float) -> Check:
    """Compare differences, beyond rounding, with the distance moved; see `check_parameters`."""
    roundoff = UNIT_ROUNDOFF["fp64" if precision == "fp64" else "fp32"]
    whole = whole_norm(moved.values())
    errors = {}
    for key, difference in apart.items():
        rounding = 4 * roundoff * float(np.linalg.norm(magnitudes[key])) + 2 * roundoff * whole
        scale = max(float(np.linalg.norm(moved[key])), NEGLIGIBLE * whole) or 1.0
        error = max(float(np.linalg.norm(difference)) - rounding, 0.0) / scale
        errors[key] = error if math.isfinite(error) else math.inf
    return Check.worst(name, errors, limit)


def check_moved(name: str, executor: Executor, found: Arrays, start: Arrays, moved: Arrays) -> Check:
    """Check that parameters moved at least `LEAST_MOVED` of the expected distance."""
    own = whole_norm(scaled(executor, {key: found[key] - value for key, value in start.items()}).values())
    expected = whole_norm(scaled(executor, moved).values())
    fraction = own / expected if expected else 1.0
    return Check(name, max(0.0, 1.0 - fraction) if math.isfinite(fraction) else math.inf, LEAST_MOVED)
