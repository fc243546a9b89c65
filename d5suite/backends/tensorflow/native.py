"""TensorFlow's own scheme: MultiWorkerMirroredStrategy, whose collectives go over gRPC or NCCL.

Imports TensorFlow, `d5suite.levels` and this adapter's `distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from d5suite.backends.tensorflow.distributed import Replica
from d5suite.levels.distributed import Replica as AnyReplica
from d5suite.levels.native import FrameworkScheme, Meeting, NativeSettings
from d5suite.levels.network import Native

_TRANSPORTS = {"cpu": "RING", "cuda": "NCCL"}


class MultiWorkerMirrored(FrameworkScheme):
    """``ReplicaContext.all_reduce`` of the gradients within the function of the step.

    The strategy would make variables of its own, equal on all ranks, only to broadcast their first
    values; the executor's are equal already. XLA cannot compile these collectives, and outside a
    function each would be waited for. In those modes all of them are a function of their own,
    between the gradients and the update.
    """

    strategy: ClassVar[Any]
    """One in a process: TensorFlow's server cannot be started again."""

    replica: Replica

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._together = self.replica.trainer.executor.mode in ("graph", "stock")
        if self._together:
            self._step = self.replica.trainer.stepping(self._average)
        else:
            self._averaged = tf.function(self._average, autograph=False)

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """See `FrameworkScheme.meet`: each rank has a server, rank 0 the coordination."""
        spec = tf.train.ClusterSpec({"worker": meeting.addresses()})
        cls.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(spec, "", "worker", meeting.rank, rpc_layer="grpc"),
            tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=settings.to_dict()["pack_bytes"],
                implementation=tf.distribute.experimental.CommunicationImplementation[_TRANSPORTS[meeting.device]],
            ),
        )
        return lambda: None

    def step(self, feed: Native) -> Native:
        """See `FrameworkScheme.step`."""
        trainer = self.replica.trainer
        _, loss = trainer.executor.network.require_loss()
        if self._together:
            return {loss: self._step(feed)}
        answer = trainer.gradients(feed)
        averaged = self._averaged([answer[name] for name in self.replica.names])
        trainer.apply(dict(zip(self.replica.names, averaged, strict=True)))
        return {loss: answer[loss]}

    def _average(self, gradients: list[Any]) -> list[Any]:
        return list(self.strategy.run(_mean, (gradients,)))


def _mean(gradients: list[Any]) -> list[Any]:
    placed = [tf.identity(each) for each in gradients]  # arguments of a function have no device
    return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, placed))


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"multi_worker_mirrored": MultiWorkerMirrored}
