"""Level 3 on JAX, whose arrays cannot be written: gradients and weights as copies.

Imports JAX, NumPy, `d5suite.levels` and the adapter's `training`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from d5suite.backends.jax.training import Trainer
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers, owned
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """A replica whose buffers are copies: JAX's arrays are immutable, and may still be in use."""

    trainer: Trainer

    def buffers(self, values: Native) -> Buffers:
        return owned({name: np.asarray(value) for name, value in values.items()})

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        executor = self.trainer.executor
        with executor.scope():  # JAX may keep the copy as its own memory
            return {name: jax.device_put(np.array(array), executor.native_device) for name, array in buffers.items()}

    def weights(self) -> Buffers:
        trained = self.trainer.executor.trained
        return {name: np.array(trained[name], order="C") for name in self.names}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        loaded = self.native({name: weights[name] for name in self.names})
        self.trainer.executor.trained = {name: loaded[name] for name in self.trainer.executor.trained}
