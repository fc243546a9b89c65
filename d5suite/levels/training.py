"""Level 2: a training step with the framework's native optimizer.

The optimizer settings are neutral; their formulas are the definition, and an adapter makes its framework's own
optimizer follow them. Imports `d5suite.levels.network` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.levels.network import Executor, Native


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum and coupled (L2) weight decay.

    With parameter p, gradient g, velocity v (zero at the start), learning rate r, momentum m and weight decay d::

        g <- g + d p
        v <- m v + g
        p <- p - r v               (momentum; plain SGD when m = 0)
        p <- p - r (g + m v)       (Nesterov)

    The learning rate multiplies the velocity instead of entering it, unlike in Sutskever et al., "On the importance of
    initialization and momentum in deep learning" (ICML 2013); the forms differ only when the learning rate changes.
    Weight decay applies to every parameter, BatchNormalization's and biases included, as in He et al. (CVPR 2016).
    Gradients are of the mean loss over the batch.

    Attributes
    ----------
    learning_rate : float
        r > 0.
    momentum : float
        0 <= m < 1.
    nesterov : bool
        Needs momentum.
    weight_decay : float
        d >= 0.
    """

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigurationError(f"the learning rate must be positive, not {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ConfigurationError("Nesterov momentum needs a momentum above 0")
        if not self.weight_decay >= 0:
            raise ConfigurationError(f"weight decay must not be negative: {self.weight_decay}")

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-able names and numbers, with the optimizer's name under ``name``."""
        return {"name": "sgd", **asdict(self)}


Optimizer = SGD
"""Every neutral optimizer; a union as more are added."""


def optimizer_from_dict(settings: dict[str, Any]) -> Optimizer:
    """Rebuild an optimizer from `SGD.to_dict`.

    Raises
    ------
    ConfigurationError
        For an unknown optimizer or setting.
    """
    settings = dict(settings)
    name = settings.pop("name", None)
    if name != "sgd":
        raise ConfigurationError(f"unknown optimizer {name!r}", hint="Known optimizers: sgd.")
    try:
        return SGD(**settings)
    except TypeError as error:
        raise ConfigurationError(f"bad settings for optimizer {name!r}: {error}") from error


class Trainer(ABC):
    """A training step on an executor's parameters with the framework's native optimizer.

    A constructor takes ``(executor, optimizer)``; the executor belongs to the same adapter. Optimizer state starts at
    zero. A step may run forward, backward and update as one compiled unit.
    """

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        self.executor = executor
        self.optimizer = optimizer

    @abstractmethod
    def step(self, feed: Native) -> Native:
        """One update from one batch in training mode.

        Parameters
        ----------
        feed : mapping
            Image and label batch from ``executor.feed``.

        Returns
        -------
        mapping
            The loss before the update under `Network.loss`, a scalar, possibly still pending on the device.
        """
