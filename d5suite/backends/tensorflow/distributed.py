"""Level 3 in TensorFlow, whose tensors cannot be written: gradients and weights as copies.

Imports TensorFlow, NumPy, `d5suite.levels` and this adapter's `training`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import native_device
from d5suite.backends.tensorflow.training import Trainer
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers, owned
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """The arrays are copies: a function's results may share memory with its constants."""

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
