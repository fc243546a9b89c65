"""The optimizers' formulas in NumPy: the reference of every native optimizer.

`d5suite.optimizers.settings` states them. Imports NumPy, the contract and `d5suite.optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from d5suite.levels.training import LEARNING_RATE, STEPS
from d5suite.optimizers.settings import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from d5suite.validate.norms import whole_norm

OptimizerState = dict[str, np.ndarray]
"""As in `d5suite.levels.training.Trainer.state`; empty before the first step."""


def update(
    optimizer: Optimizer,
    parameters: dict[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    state: OptimizerState,
    *,
    learning_rate: float | None = None,
) -> None:
    """Make one step in place.

    Parameters
    ----------
    optimizer : Optimizer
    parameters : dict of str to numpy.ndarray
        float64; updated.
    gradients : mapping of str to numpy.ndarray
        Gradients of the mean loss over all batches of the step, by parameter.
    state : dict of str to numpy.ndarray
        The optimizer's state; updated.
    learning_rate : float, optional
        The optimizer's own by default.
    """
    rate = optimizer.learning_rate if learning_rate is None else learning_rate
    if not state:
        for slot in optimizer.slots:
            state.update({f"{slot}/{name}": np.full_like(v, optimizer.initial) for name, v in parameters.items()})
        state[STEPS] = np.array(0)
    state[STEPS] = np.array(state[STEPS] + 1)
    state[LEARNING_RATE] = np.array(rate)
    clipped = _clip(optimizer, {name: gradients[name] for name in parameters})
    for name, value in parameters.items():
        gradient, decayed = clipped[name], value
        if isinstance(optimizer, AdamW):
            decayed = value - rate * optimizer.weight_decay * value
        else:
            gradient = gradient + optimizer.weight_decay * value
        slots = {slot: state[f"{slot}/{name}"] for slot in optimizer.slots}
        direction = _DIRECTIONS[type(optimizer)](optimizer, gradient, slots, int(state[STEPS]))
        parameters[name] = decayed - rate * direction
        state.update({f"{slot}/{name}": array for slot, array in slots.items()})


def _clip(optimizer: Optimizer, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if optimizer.clip_value:
        limit = optimizer.clip_value
        gradients = {name: np.clip(value, -limit, limit) for name, value in gradients.items()}
    if optimizer.clip_norm:
        norm = whole_norm(gradients.values())
        if norm > optimizer.clip_norm:
            gradients = {name: value * (optimizer.clip_norm / norm) for name, value in gradients.items()}
    return gradients


def _sgd(optimizer: SGD, gradient: np.ndarray, slots: OptimizerState, step: int) -> np.ndarray:
    if not optimizer.momentum:
        return gradient
    slots["velocity"] = optimizer.momentum * slots["velocity"] + gradient
    return gradient + optimizer.momentum * slots["velocity"] if optimizer.nesterov else slots["velocity"]


def _rmsprop(optimizer: RMSProp, gradient: np.ndarray, slots: OptimizerState, step: int) -> np.ndarray:
    slots["square"] = optimizer.decay * slots["square"] + (1 - optimizer.decay) * gradient**2
    direction: np.ndarray = gradient / np.sqrt(slots["square"] + optimizer.epsilon)
    if optimizer.momentum:
        direction = slots["velocity"] = optimizer.momentum * slots["velocity"] + direction
    return direction


def _adagrad(optimizer: Adagrad, gradient: np.ndarray, slots: OptimizerState, step: int) -> np.ndarray:
    slots["square"] = slots["square"] + gradient**2
    direction: np.ndarray = gradient / (np.sqrt(slots["square"]) + optimizer.epsilon)
    return direction


def _adam(optimizer: Adam, gradient: np.ndarray, slots: OptimizerState, step: int) -> np.ndarray:
    slots["moment"] = optimizer.beta1 * slots["moment"] + (1 - optimizer.beta1) * gradient
    slots["square"] = optimizer.beta2 * slots["square"] + (1 - optimizer.beta2) * gradient**2
    moment = slots["moment"] / (1 - optimizer.beta1**step)
    direction: np.ndarray = moment / (np.sqrt(slots["square"] / (1 - optimizer.beta2**step)) + optimizer.epsilon)
    return direction


_DIRECTIONS: dict[type[Optimizer], Callable[[Any, np.ndarray, OptimizerState, int], np.ndarray]] = {
    SGD: _sgd,
    RMSProp: _rmsprop,
    Adagrad: _adagrad,
    Adam: _adam,
    AdamW: _adam,
}
"""By optimizer: computes the direction that the learning rate multiplies, and updates the slots."""
