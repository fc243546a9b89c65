"""JAX's own scheme: one program over all processes' devices, with its collectives.

Imports JAX, NumPy, `d5suite.levels` and this adapter's `distributed` and `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d5suite.backends.jax.distributed import Replica
from d5suite.levels.distributed import Buffers
from d5suite.levels.distributed import Replica as AnyReplica
from d5suite.levels.native import FrameworkScheme, Meeting, NativeSettings
from d5suite.levels.network import Native

_AXIS = "ranks"
_ALIKE = PartitionSpec()


class ShardMap(FrameworkScheme):
    """Data parallelism under ``jit``: `jax.shard_map` over a mesh of all processes' devices.

    The batch is divided among ranks, and ``lax.pmean`` averages the gradients. The mapped function
    sees only its own rank's shard, so that BatchNormalization normalises by the shard. The scheme
    has its own copies of the parameters, the running statistics and the optimizer's arrays;
    `finish` gives the executor the first two.
    """

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        assert isinstance(replica, Replica)
        self._trainer = trainer = replica.trainer
        executor = self._executor = trainer.executor
        _, self._loss = executor.network.require_loss()
        devices = [next(d for d in jax.devices() if d.process_index == rank) for rank in range(jax.process_count())]
        mesh = Mesh(np.array(devices), (_AXIS,))
        self._alike, self._parted = (NamedSharding(mesh, spec) for spec in (_ALIKE, PartitionSpec(_AXIS)))
        self._rate: tuple[Any, Any] = (None, None)
        with executor.scope():
            self._held = jax.tree.map(
                lambda own: self._of_all(own.copy(), self._alike), (executor.trained, executor.state, trainer.slots)
            )
            # Unchecked, as not all outputs are alike: each rank has its own running statistics and
            # loss.
            body = jax.shard_map(
                self._body,
                mesh=mesh,
                in_specs=(_ALIKE, _ALIKE, PartitionSpec(_AXIS)),
                out_specs=_ALIKE,
                check_vma=False,
            )
            self._step = jax.jit(body, donate_argnums=() if executor.mode == "stock" else 0)

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """See `FrameworkScheme.meet`: the coordinator runs on rank 0."""
        if meeting.device == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(meeting.addresses()[0], meeting.size, meeting.rank)
        return jax.distributed.shutdown

    def _of_all(self, own: jax.Array, sharding: NamedSharding) -> jax.Array:
        """View this rank's array as its shard of a global array, without a copy."""
        parts = jax.process_count() if sharding is self._parted else 1
        shape = (own.shape[0] * parts, *own.shape[1:]) if parts > 1 else own.shape
        return jax.make_array_from_single_device_arrays(shape, sharding, [own])

    def _body(self, held: Any, rate: jax.Array, inputs: Any) -> Any:
        trained, state, slots = held
        (loss, state), gradients = self._executor.gradient(trained, state, inputs)
        trained, slots, _ = self._trainer.move(trained, slots, rate, lax.pmean(gradients, _AXIS))
        return loss, (trained, state, slots)

    def step(self, feed: Native) -> Native:
        """See `FrameworkScheme.step`."""
        executor, rate = self._executor, self._trainer.rate
        inputs = executor.training_inputs(feed)
        with executor.scope():
            if rate is not self._rate[0]:
                self._rate = rate, self._of_all(rate, self._alike)
            fed = {name: self._of_all(value, self._parted) for name, value in inputs.items()}
            loss, self._held = self._step(self._held, self._rate[1], fed)
        own = loss.addressable_data(0)
        executor.issued(own)
        return {self._loss: own}

    def weights(self) -> Buffers:
        """See `FrameworkScheme.weights`."""
        trained = self._held[0]
        return {name: np.array(trained[name].addressable_data(0), order="C") for name in self.replica.names}

    def finish(self) -> None:
        """See `FrameworkScheme.finish`: the executor gets copies, as steps may donate arrays."""
        executor = self._executor
        with executor.scope():
            executor.trained, executor.state = jax.tree.map(
                lambda array: array.addressable_data(0).copy(), self._held[:2]
            )


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"sharded": ShardMap}
