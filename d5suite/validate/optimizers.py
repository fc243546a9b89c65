"""The neutral optimizers' formulas in NumPy: what every framework's native optimizer is checked against.

The formulas stand in `d5suite.levels.training`. Imports NumPy and the contract.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from d5suite.levels.training import Optimizer


def update(
    optimizer: Optimizer,
    parameters: dict[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    state: dict[str, np.ndarray],
) -> None:
    """One step of `SGD`, in place.

    Parameters
    ----------
    optimizer : SGD
    parameters : dict of str to numpy.ndarray
        float64; replaced by the updated values.
    gradients : mapping of str to numpy.ndarray
        Of the mean loss, for every parameter.
    state : dict of str to numpy.ndarray
        Velocities; empty before the first step.
    """
    for name, value in parameters.items():
        gradient = gradients[name] + optimizer.weight_decay * value
        velocity = optimizer.momentum * state.get(name, np.zeros_like(value)) + gradient
        state[name] = velocity
        applied = gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
        parameters[name] = value - optimizer.learning_rate * applied
