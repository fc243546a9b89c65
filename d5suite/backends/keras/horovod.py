"""Horovod in Keras: its all-reduce between Keras's gradients and Keras's optimizer.

Imports Keras, the part of Horovod for the chosen backend, `d5suite.levels` and this adapter's
`distributed`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import keras

from d5suite.backends.keras.distributed import Replica
from d5suite.distributed.horovod import HorovodScheme
from d5suite.levels.native import FrameworkScheme, NativeSettings
from d5suite.levels.network import Native

hvd = importlib.import_module(f"horovod.{keras.backend.backend()}")


class Horovod(HorovodScheme):
    """A scheme that averages Keras's gradients by Horovod's part for the chosen backend.

    ``horovod.keras.DistributedOptimizer`` overrides methods that Keras 3 does not call: its ranks
    train alone (docs/findings.md). XLA, which compiles Keras's own step on TensorFlow, cannot
    compile Horovod's operations, so this step is a function compiled without XLA.
    """

    hvd = hvd
    replica: Replica

    def __init__(self, replica: Replica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._together = keras.backend.backend() == "tensorflow"
        if self._together:
            self._step = self.replica.trainer.stepping(self._average)

    def step(self, feed: Native) -> Native:
        trainer = self.replica.trainer
        _, loss = trainer.executor.network.require_loss()
        if self._together:
            return {loss: self._step(feed)}
        answer = dict(trainer.gradients(feed))
        answer.update(self._average_by_handles({name: answer[name] for name in self.replica.names}))
        trainer.apply(answer)
        return {loss: answer[loss]}

    def _average(self, gradients: list[Any]) -> list[Any]:
        return [
            hvd.allreduce(each, op=hvd.Average, compression=self.compression, name=name, ignore_name_scope=True)
            for name, each in zip(self.replica.trainer.executor.network.parameters, gradients, strict=True)
        ]

    def _average_by_handles(self, gradients: dict[str, Any]) -> dict[str, Any]:
        begun = {}
        for name, each in gradients.items():
            small, context = self.compression.compress(each.contiguous())  # Horovod takes no others
            begun[name] = hvd.allreduce_async_(small, op=hvd.Average, name=name), context
        return {
            name: self.compression.decompress(hvd.synchronize(handle), context)
            for name, (handle, context) in begun.items()
        }


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"horovod": Horovod}
