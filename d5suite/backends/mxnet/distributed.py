"""Level 3 on MXNet: gradients and weights as NumPy views of MXNet's memory.

Imports MXNet, NumPy, `d5suite.levels` and the adapter's `runtime` and `training`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from d5suite.backends.mxnet.runtime import mx
from d5suite.backends.mxnet.training import Trainer
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """On the CPU the arrays are MXNet's own, one per parameter; on ``cuda`` copies in the host's.

    MXNet's engine does not see writes to them. That is safe: each array waits for the backward
    pass, and the engine does not use a gradient again before the update.
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
        _, loss = self.trainer.executor.network.require_loss()
        return {loss: answer[loss]}, {name: found[name] for name in self.names}

    def _view(self, value: Any) -> np.ndarray:
        if not self.shares_memory:
            return np.require(value.asnumpy(), requirements=["C", "W"])
        value.wait_to_read()
        number = ctypes.c_double if value.dtype == np.float64 else ctypes.c_float
        return np.ctypeslib.as_array(ctypes.cast(_pointer(value), ctypes.POINTER(number)), value.shape)

    def buffers(self, values: Native) -> Buffers:
        return {name: self._view(value) for name, value in values.items()}

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        """Return MXNet's own gradients, overwritten by arrays that are not their memory."""
        found = {name: self._weights[name].grad() for name in buffers}
        for name, array in buffers.items():
            if not self.shares_memory or array.ctypes.data != _pointer(found[name]).value:
                found[name][:] = array
        return found

    def weights(self) -> Buffers:
        return {name: np.array(self._view(weight.data())) for name, weight in self._weights.items()}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, weight in self._weights.items():
            weight.data()[:] = weights[name]
        self.trainer.executor.outdated = True


def _pointer(value: Any) -> ctypes.c_void_p:
    """Return where an array on the CPU lies in memory."""
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(value.handle, ctypes.byref(pointer)))
    return pointer
