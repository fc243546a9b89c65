"""Keras's own scheme on TensorFlow: MultiWorkerMirroredStrategy between gradients and optimizer.

Imports TensorFlow late, `d5suite.levels` and this adapter's `distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from d5suite.backends.keras.distributed import Replica
from d5suite.levels.distributed import Replica as AnyReplica
from d5suite.levels.native import FrameworkScheme, Meeting, NativeSettings
from d5suite.levels.network import Native

_TRANSPORTS = {"cpu": "RING", "cuda": "NCCL"}


class MultiWorkerMirrored(FrameworkScheme):
    """A scheme that averages Keras's gradients by ``ReplicaContext.all_reduce`` in the step.

    Keras's ``fit`` and ``train_on_batch`` fail under this strategy (docs/semantics.md). Its
    optimizers add gradients over ranks, but after each rank has clipped and decayed its own.
    """

    strategy: ClassVar[Any]
    """One per process, as TensorFlow's server cannot be started again."""

    replica: Replica

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._step = self.replica.trainer.stepping(self._average)

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """See `FrameworkScheme.meet`: every rank runs a server, and rank 0 coordinates."""
        import tensorflow as tf

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
        _, loss = self.replica.trainer.executor.network.require_loss()
        return {loss: self._step(feed)}

    def _average(self, gradients: list[Any]) -> list[Any]:
        return list(self.strategy.run(_mean, (gradients,)))


def _mean(gradients: list[Any]) -> list[Any]:
    import tensorflow as tf

    placed = [tf.identity(each) for each in gradients]  # a function's arguments have no device
    return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, placed))


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"multi_worker_mirrored": MultiWorkerMirrored}
