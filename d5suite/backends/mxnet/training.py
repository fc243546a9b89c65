"""Level 2 on MXNet: a Gluon trainer on an executor's parameters. Imports MXNet, NumPy and `d5suite.levels`."""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.backends.mxnet.network import Executor
from d5suite.backends.mxnet.runtime import mx
from d5suite.levels import training
from d5suite.levels.network import Native
from d5suite.levels.training import Optimizer


class Trainer(training.Trainer):
    """`gluon.Trainer` with MXNet's ``sgd`` or, for Nesterov momentum, ``nag``.

    Both have the learning rate inside the velocity, which is the same while it does not change, and decay every
    parameter (``wd_mult`` is 1 unless set).
    """

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        _, self._loss = executor.network.require_loss()
        # MXNet updates several tensors in one kernel, as long as the longest of them: with neighbours of one size the
        # update of ResNet-50 takes half as long as in the network's own order.
        weights = [executor.weights[name] for name in executor.network.parameters]
        self._trainer = mx.gluon.Trainer(
            sorted(weights, key=lambda weight: int(np.prod(weight.shape)), reverse=True),
            _optimizer(optimizer, exact=executor.precision == "fp64"),
            kvstore=None,
        )
        self._unused = [weight.data() for weight in executor.unused_parameters]

    def step(self, feed: Native) -> Native:
        loss = self.executor.loss(feed)
        loss.backward()
        for weight in self._unused:  # whose gradients stay zero, but weight decay applies to every parameter
            weight._fresh_grad = True
        self._trainer.step(1)  # the loss is the batch's mean already
        for weight in self._unused:  # of which no backward pass rids the decay
            weight.grad[:] = 0
        return {self._loss: loss}


def _optimizer(settings: Optimizer, *, exact: bool) -> Any:
    common = {"learning_rate": settings.learning_rate, "momentum": settings.momentum}
    if exact:
        return (_ExactNAG if settings.nesterov else _ExactSGD)(decay=settings.weight_decay, **common)
    if settings.nesterov:
        return _NAG(decay=settings.weight_decay, **common)
    return mx.optimizer.SGD(wd=settings.weight_decay, **common)


class _NAG(mx.optimizer.NAG):
    """MXNet's, with the weight decay that its formula has.

    Its kernel stores the new weights before it moves the velocity, so that the velocity takes its decay from the new
    ones. Here the decay goes into the gradient beforehand.
    """

    def __init__(self, *, decay: float, **settings: float) -> None:
        super().__init__(**settings)
        self.decay = decay

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """Update one parameter."""
        if self.decay:
            grad += self.decay * weight
        super().update_multi_precision(index, weight, grad, state)


class _ExactNAG(_NAG):
    """Likewise in float64, where settings that the kernel rounds to float32 shall act exactly."""

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """Update one parameter."""
        grad += self.decay * weight
        _compensate(self, grad, state)
        mx.optimizer.NAG.update_multi_precision(self, index, weight, grad, state)
        weight += (self.momentum - _rounded(self.momentum)) * state


class _ExactSGD(mx.optimizer.SGD):
    """MXNet's in float64, with settings that its kernel rounds to float32 acting exactly."""

    def __init__(self, *, decay: float, **settings: float) -> None:
        super().__init__(**settings)
        self.decay = decay
        self.aggregate_num = 0  # one parameter at a time

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """Update one parameter."""
        grad += self.decay * weight
        _compensate(self, grad, state)
        super().update_multi_precision(index, weight, grad, state)


def _compensate(optimizer: Any, grad: Any, state: Any) -> None:
    """Scale gradient and velocity, so that the kernel's rounded learning rate and momentum act as the exact ones."""
    grad *= optimizer.lr / _rounded(optimizer.lr)
    if state is not None:
        state *= optimizer.momentum / _rounded(optimizer.momentum)


def _rounded(setting: float) -> float:
    return float(np.float32(setting))
