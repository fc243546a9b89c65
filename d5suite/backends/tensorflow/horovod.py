"""Horovod in TensorFlow: its all-reduce of gradients within the function of the step.

Imports Horovod, TensorFlow, `d5suite.distributed.horovod`, `d5suite.levels` and the adapter's
`distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from d5suite.backends.tensorflow.distributed import Replica
from d5suite.distributed.horovod import HorovodScheme
from d5suite.levels.native import FrameworkScheme, NativeSettings
from d5suite.levels.network import Native


class Horovod(HorovodScheme):
    """As ``hvd.DistributedGradientTape`` does: each all-reduce begins with its gradient.

    XLA cannot compile Horovod's operations, and outside a function each would be waited for. In
    those modes all of them are a function of their own, between the gradients and the update.
    """

    hvd = hvd
    replica: Replica

    def __init__(self, replica: Replica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._together = replica.trainer.executor.mode in ("graph", "stock")
        if self._together:
            self._step = replica.trainer.stepping(self._average)
        else:
            self._averaged = tf.function(self._average, autograph=False)

    def step(self, feed: Native) -> Native:
        trainer = self.replica.trainer
        _, loss = trainer.executor.network.require_loss()
        if self._together:
            return {loss: self._step(feed)}
        answer = trainer.gradients(feed)
        averaged = self._averaged([answer[name] for name in self.replica.names])
        trainer.apply(dict(zip(self.replica.names, averaged, strict=True)))
        return {loss: answer[loss]}

    def _average(self, gradients: list[Any]) -> list[Any]:
        return [
            hvd.allreduce(gradient, op=hvd.Average, compression=self.compression, name=name, ignore_name_scope=True)
            for name, gradient in zip(self.replica.names, gradients, strict=True)
        ]


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"horovod": Horovod}
