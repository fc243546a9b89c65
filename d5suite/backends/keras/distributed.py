"""Level 3 in Keras: gradients and weights as arrays of the chosen backend.

Imports Keras, the chosen backend late, NumPy, `d5suite.levels` and this adapter's `training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from keras import ops

from d5suite.backends.keras.training import Trainer
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers, owned
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """A replica whose buffers are PyTorch's memory, or copies of TensorFlow's and JAX's tensors.

    Tensors of those two cannot be written. On ``cuda``, PyTorch's are copied to the host.
    """

    trainer: Trainer

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        executor = trainer.executor
        self._variables = {name: executor.variables[name] for name in self.names}
        self._torch = executor.mode == "torch"
        self.shares_memory = self._torch and executor.device == "cpu"

    def _view(self, value: Any) -> np.ndarray:
        array: np.ndarray = value.detach().cpu().numpy() if self._torch else ops.convert_to_numpy(value)
        return array

    def buffers(self, values: Native) -> Buffers:
        return owned({name: self._view(value) for name, value in values.items()})

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        with self.trainer.executor.scope():
            if self._torch:
                import torch

                devices = {name: self._variables[name].value.device for name in buffers}
                return {name: torch.from_numpy(array).to(devices[name]) for name, array in buffers.items()}
            # JAX may keep the copy as its own memory.
            return {name: ops.convert_to_tensor(np.array(array)) for name, array in buffers.items()}

    def weights(self) -> Buffers:
        self.trainer.executor.hold(None)
        with self.trainer.executor.scope():
            return {name: np.array(self._view(each.value), order="C") for name, each in self._variables.items()}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.trainer.executor.hold(None)
        with self.trainer.executor.scope():
            for name, variable in self._variables.items():
                variable.assign(np.array(weights[name]))
