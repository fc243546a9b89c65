"""Level 3 in TensorFlow, whose tensors cannot be written: gradients and weights as copies.

Imports TensorFlow, NumPy, `d5suite.levels` and this adapter's `operators` and `training`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import native_device
from d5suite.backends.tensorflow.training import Trainer
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers, owned
from d5suite.levels.native import FrameworkScheme, NativeSettings
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """A replica whose buffers are copies: a function's results may share memory with constants."""

    trainer: Trainer

    def buffers(self, values: Native) -> Buffers:
        return owned({name: np.asarray(value) for name, value in values.items()})

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        with tf.device(native_device(self.trainer.executor.device)):
            return {name: tf.constant(array) for name, array in buffers.items()}

    def weights(self) -> Buffers:
        variables = self.trainer.executor.variables
        return {name: np.array(variables[name].numpy(), order="C") for name in self.names}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        for name in self.names:
            self.trainer.executor.variables[name].assign(weights[name])


class AveragedGradients(FrameworkScheme):
    """A scheme that averages the gradients within the traced step.

    XLA cannot compile TensorFlow's collectives, and outside a traced function the ranks would wait
    for them one by one. So in modes ``xla`` and ``eager``, a separate traced function runs all
    collectives between the gradients and the update.
    """

    replica: Replica

    def __init__(self, replica: distributed.Replica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._together = self.replica.trainer.executor.mode in ("graph", "stock")
        if self._together:
            self._step = self.replica.trainer.stepping(self._average)
        else:
            self._averaged = tf.function(self._average, autograph=False)

    @abstractmethod
    def _average(self, gradients: list[Any]) -> list[Any]:
        """Return the means of the gradients over all ranks."""

    def step(self, feed: Native) -> Native:
        trainer = self.replica.trainer
        _, loss = trainer.executor.network.require_loss()
        if self._together:
            return {loss: self._step(feed)}
        answer = trainer.gradients(feed)
        averaged = self._averaged([answer[name] for name in self.replica.names])
        trainer.apply(dict(zip(self.replica.names, averaged, strict=True)))
        return {loss: answer[loss]}
