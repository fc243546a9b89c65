"""Level 2 on deep500: its reference optimizers on an executor's training graph.

Imports deep500 (through `repairs`), NumPy and `d5suite.levels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.backends.deep500.network import Executor
from d5suite.backends.deep500.repairs import optimizers
from d5suite.levels import training
from d5suite.levels.network import Native
from d5suite.levels.training import Optimizer


class DecayedMomentum(optimizers.MomentumOptimizer):
    """deep500's momentum with coupled weight decay and, if asked for, Nesterov's step, which it has not."""

    def __init__(self, executor: Any, loss: str, settings: Optimizer) -> None:
        super().__init__(executor, loss, lr=settings.learning_rate, momentum=settings.momentum)
        self._decay, self._nesterov = settings.weight_decay, settings.nesterov

    def update_rule(self, grad: np.ndarray, old_param: np.ndarray, param_name: str) -> np.ndarray:
        """One parameter's new value."""
        if self._decay:
            grad = grad + self._decay * old_param
        moved: np.ndarray = super().update_rule(grad, old_param, param_name)
        if not self._nesterov:
            return moved
        return old_param - self.lr * (grad + self.momentum * self.accumulation[param_name])


class Trainer(training.Trainer):
    """deep500's gradient descent and momentum, whose formulas are the neutral ones; for the rest `DecayedMomentum`."""

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self._label, self._loss = executor.network.require_loss()
        rate, momentum = optimizer.learning_rate, optimizer.momentum
        if optimizer.weight_decay or optimizer.nesterov:
            self._optimizer = DecayedMomentum(executor.training, self._loss, optimizer)
        elif momentum:
            self._optimizer = optimizers.MomentumOptimizer(executor.training, self._loss, lr=rate, momentum=momentum)
        else:
            self._optimizer = optimizers.GradientDescent(executor.training, self._loss, lr=rate)

    @np.errstate(all="ignore")
    def step(self, feed: Native) -> Native:
        self.executor.trained()
        loss: Native = self._optimizer.step({name: feed[name] for name in (self.executor.network.input, self._label)})
        return loss
