"""Level 2 in Keras: Keras's own compiled training step, with its SGD.

Imports Keras, NumPy, `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from d5suite.backends.keras.network import Executor
from d5suite.levels import training as levels
from d5suite.levels.network import Native
from d5suite.levels.training import Optimizer


def _sgd(optimizer: Optimizer, variables: Sequence[Any]) -> Any:
    """Keras's SGD, with the weight decay coupled; its own would be decoupled.

    Keras's velocity has the learning rate in it: while the rate is constant, it is -r times the neutral one.
    """
    native = type(keras.optimizers.SGD())  # on PyTorch, a class that updates all variables in a few calls
    decay = optimizer.weight_decay

    class CoupledSGD(native):  # type: ignore[misc, valid-type]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            decayed = list(variables if trainable_variables is None else trainable_variables)
            return super().apply(_with_decay(list(grads), decayed, decay), trainable_variables)

    sgd = (CoupledSGD if decay else native)(
        learning_rate=optimizer.learning_rate,
        momentum=np.float64(optimizer.momentum),  # Keras on TensorFlow takes Python's own float by way of float32
        nesterov=optimizer.nesterov,
    )
    sgd.build(list(variables))
    return sgd


def _with_decay(gradients: list[Any], variables: list[Any], decay: float) -> list[Any]:
    if keras.backend.backend() == "torch":
        import torch

        return list(torch._foreach_add(gradients, [variable.value for variable in variables], alpha=decay))
    return [ops.add(g, ops.multiply(v, decay)) for g, v in zip(gradients, variables, strict=True)]


class Trainer(levels.Trainer):
    """The step that ``Model.fit`` repeats, without its progress bar and callbacks."""

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self._label, self._loss = executor.network.require_loss()
        with executor.scope():
            self._model = executor.loss_model()
            sgd = _sgd(optimizer, self._model.trainable_variables)
            self._model.compile(optimizer=sgd, jit_compile="auto")
            self._model.make_train_function()
            self._variables = [
                self._model.trainable_variables,
                self._model.non_trainable_variables,
                sgd.variables,
                self._model.metrics_variables,
            ]
        self._state: Any = None
        self._run = {"tensorflow": self._run_in_place, "torch": self._run_in_place, "jax": self._run_stateless}[
            executor.mode
        ]
        self._taken_back = self._take_back

    def step(self, feed: Native) -> Native:
        batch = ([feed[self.executor.network.input], feed[self._label]],)
        with self.executor.scope():
            return {self._loss: self._run(batch)["loss"]}

    def _run_in_place(self, batch: Any) -> Any:
        return self._model.train_function([batch])

    def _run_stateless(self, batch: Any) -> Any:
        """As ``fit`` on JAX: the state goes from step to step, and into the variables only when these are read."""
        self.executor.hold(self._taken_back)
        if self._state is None:
            self._state = tuple([variable.value for variable in group] for group in self._variables)
        logs, self._state = self._model.train_function(self._state, iter([batch]))
        self.executor.pending((logs, self._state))
        return logs

    def _take_back(self) -> None:
        for group, values in zip(self._variables, self._state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
        self._state = None
