"""Level 3 on MXNet: gradients and weights as NumPy views of MXNet's memory.

Imports NumPy, `d5suite.levels` and the adapter's `runtime` and `training`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from d5suite.backends.mxnet.runtime import address
from d5suite.backends.mxnet.training import Trainer
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """A replica whose buffers are MXNet's memory on the CPU, and copies on the host for ``cuda``.

    No two parameters share an array. MXNet's engine does not see writes to buffers. That is safe: a
    buffer is returned once the backward pass has written it, and the engine does not use a gradient
    again before the update.
    """

    trainer: Trainer

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.shares_memory = trainer.executor.device == "cpu"
        self._weights = {name: trainer.executor.weights[name] for name in self.names}

    def gradients_early(self, feed: Native, ready: Callable[[str, np.ndarray], None]) -> tuple[Native, Buffers]:
        """Wait for one gradient after the other, while MXNet's backward pass continues."""
        answer = self.trainer.gradients(feed)
        found: Buffers = {}
        for name in reversed(self.names):
            found[name] = self._view(answer[name])
            ready(name, found[name])
        return self.parted(answer, found)

    def _view(self, value: Any) -> np.ndarray:
        if not self.shares_memory:
            return np.require(value.asnumpy(), requirements=["C", "W"])
        value.wait_to_read()
        number = ctypes.c_double if value.dtype == np.float64 else ctypes.c_float
        return np.ctypeslib.as_array(ctypes.cast(address(value), ctypes.POINTER(number)), value.shape)

    def buffers(self, values: Native) -> Buffers:
        return {name: self._view(value) for name, value in values.items()}

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        """Return MXNet's own gradient arrays; copy buffers into them that are not their memory."""
        found = {name: self._weights[name].grad() for name in buffers}
        for name, array in buffers.items():
            if not self.shares_memory or array.ctypes.data != address(found[name]):
                found[name][:] = array
        return found

    def weights(self) -> Buffers:
        return {name: np.array(self._view(weight.data())) for name, weight in self._weights.items()}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, weight in self._weights.items():
            weight.data()[:] = weights[name]
        self.trainer.executor.outdated = True
