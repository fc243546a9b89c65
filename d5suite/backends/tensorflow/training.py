"""Level 2 in TensorFlow: a training step with TensorFlow's native optimizer kernels.

Imports TensorFlow, `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.network import Executor
from d5suite.levels import training as levels
from d5suite.levels.network import Native
from d5suite.levels.training import Optimizer


class Trainer(levels.Trainer):
    """Stochastic gradient descent through ``ResourceApplyMomentum``; see `d5suite.levels.training.Trainer`.

    The kernel's formula is the neutral one: accumulator = momentum × accumulator + gradient, and then variable minus
    learning rate × accumulator, or for Nesterov variable minus learning rate × (gradient + momentum × accumulator).
    ``tf.keras.optimizers.SGD`` has the learning rate inside the velocity instead.
    """

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self._label, self._loss = executor.network.require_loss()
        self._velocities = [
            tf.Variable(tf.zeros_like(p), trainable=False) for p in executor.trained if optimizer.momentum
        ]
        self._step = executor.compiled(self._update)

    def _update(self, image: Any, label: Any) -> Any:
        loss, gradients = self.executor.loss_and_gradients(image, label)
        settings = self.optimizer
        for i, (parameter, gradient) in enumerate(zip(self.executor.trained, gradients, strict=True)):
            if settings.weight_decay:
                gradient = gradient + settings.weight_decay * parameter
            rate = tf.constant(settings.learning_rate, parameter.dtype)
            if settings.momentum:
                tf.raw_ops.ResourceApplyMomentum(
                    var=parameter.handle,
                    accum=self._velocities[i].handle,
                    lr=rate,
                    grad=gradient,
                    momentum=tf.constant(settings.momentum, parameter.dtype),
                    use_nesterov=settings.nesterov,
                )
            else:
                tf.raw_ops.ResourceApplyGradientDescent(var=parameter.handle, alpha=rate, delta=gradient)
        return loss

    def step(self, feed: Native) -> Native:
        return {self._loss: self._step(feed[self.executor.network.input], feed[self._label])}
