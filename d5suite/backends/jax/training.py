"""Level 2 on JAX: an Optax optimizer on an executor's parameters. Imports JAX, Optax and `d5suite.levels`."""

from __future__ import annotations

from typing import Any

import jax
import optax

from d5suite.backends.jax.network import Executor
from d5suite.levels import training
from d5suite.levels.network import Native
from d5suite.levels.training import Optimizer


class Trainer(training.Trainer):
    """`optax.sgd`, whose formulas are the neutral ones, after the decay; forward, backward and update are one program.

    The program takes over the memory of parameters, running statistics and velocities.
    """

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self._label, self._loss = executor.network.require_loss()
        decay = [optax.add_decayed_weights(optimizer.weight_decay)] if optimizer.weight_decay else []
        self._optimizer = optax.chain(
            *decay, optax.sgd(optimizer.learning_rate, optimizer.momentum or None, optimizer.nesterov)
        )
        with executor.scope():
            velocities = executor.compiled(self._optimizer.init)(executor.trained)
            # Like the parameters bound to their device, or the second step would be compiled anew.
            self._velocities = jax.device_put(velocities, executor.native_device)
        self._step = executor.compiled(self._update, donate=(0, 1, 2))

    def _update(self, trained: Any, state: Any, velocities: Any, images: jax.Array, labels: jax.Array) -> Any:
        (loss, state), gradients = jax.value_and_grad(self.executor.loss, has_aux=True)(trained, state, images, labels)
        updates, velocities = self._optimizer.update(gradients, velocities, trained)
        return loss, optax.apply_updates(trained, updates), state, velocities

    def step(self, feed: Native) -> Native:
        executor = self.executor
        with executor.scope():
            loss, executor.trained, executor.state, self._velocities = self._step(
                executor.trained, executor.state, self._velocities, feed[executor.network.input], feed[self._label]
            )
        executor.issued(loss)
        return {self._loss: loss}
