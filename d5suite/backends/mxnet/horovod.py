"""Horovod on MXNet: its all-reduce of gradients among the engine's other operations.

Imports Horovod, `d5suite.distributed.horovod`, `d5suite.levels` and the adapter's `runtime` and
`distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping

from d5suite.backends.mxnet.distributed import Replica
from d5suite.backends.mxnet.runtime import mx  # noqa: F401  before Horovod, which imports MXNet
from d5suite.distributed.horovod import HorovodScheme
from d5suite.levels.native import FrameworkScheme
from d5suite.levels.network import Native

import horovod.mxnet as hvd  # isort: skip


class Horovod(HorovodScheme):
    """As ``hvd.DistributedTrainer``, a scheme with Horovod in place of Gluon's reduction.

    MXNet's engine begins each all-reduce once its gradient is computed; gradients that the next
    forward pass needs first have priority. Each parameter's update, which divides the sum, begins
    once its all-reduce is done.
    """

    hvd = hvd
    replica: Replica

    def step(self, feed: Native) -> Native:
        trainer = self.replica.trainer
        answer = trainer.gradients(feed)
        for priority, name in enumerate(self.replica.names):
            small, context = self.compression.compress(answer[name])
            hvd.allreduce_(small, op=hvd.Sum, name=name, priority=-priority)
            if small is not answer[name]:
                answer[name][:] = self.compression.decompress(small, context)
        trainer.apply_sums(answer, hvd.size())
        _, loss = trainer.executor.network.require_loss()
        return {loss: answer[loss]}


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"horovod": Horovod}
