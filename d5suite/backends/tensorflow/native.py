"""TensorFlow's own scheme: MultiWorkerMirroredStrategy, whose collectives go over gRPC or NCCL.

Imports TensorFlow, `d5suite.levels` and this adapter's `distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from d5suite.backends.tensorflow.distributed import AveragedGradients
from d5suite.levels.native import FrameworkScheme, Meeting, NativeSettings

_TRANSPORTS = {"cpu": "RING", "cuda": "NCCL"}


class MultiWorkerMirrored(AveragedGradients):
    """A scheme that averages the gradients by ``ReplicaContext.all_reduce``.

    The strategy's own variables are not used: it makes them only to broadcast initial values, and
    the executor's are equal on all ranks already.
    """

    strategy: ClassVar[Any]
    """One per process, as TensorFlow's server cannot be started again."""

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """See `FrameworkScheme.meet`: every rank runs a server, and rank 0 coordinates."""
        spec = tf.train.ClusterSpec({"worker": meeting.addresses()})
        cls.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(spec, "", "worker", meeting.rank, rpc_layer="grpc"),
            tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=settings.to_dict()["pack_bytes"],
                implementation=tf.distribute.experimental.CommunicationImplementation[_TRANSPORTS[meeting.device]],
            ),
        )
        return lambda: None

    def _average(self, gradients: list[Any]) -> list[Any]:
        return list(self.strategy.run(_mean, (gradients,)))


def _mean(gradients: list[Any]) -> list[Any]:
    placed = [tf.identity(each) for each in gradients]  # a function's arguments have no device
    return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, placed))


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"multi_worker_mirrored": MultiWorkerMirrored}
