"""A synchronous parameter server: servers own the weights and their optimizer's state.

Imports NumPy and `d5suite.levels` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d5suite.distributed.schemes.common import Common, Flat
from d5suite.errors import ConfigurationError
from d5suite.levels.distributed import SchemeSettings, segments
from d5suite.levels.network import Native

_PUSH, _PULL = 1, 2


@dataclass(frozen=True)
class ParameterServerSettings(SchemeSettings):
    """Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014).

    Attributes
    ----------
    servers : int
        k: rank r < k owns the r-th of k `segments` of the weights. Servers are workers, too.
    """

    servers: int = 1

    name: ClassVar[str] = "parameter_server"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.servers >= 1, f"there is at least one server, not {self.servers}")

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: gradients go to the servers, weights come back."""
        return 2 * elements * itemsize * (size - 1)


class ParameterServer(Common):
    """Mean gradients and the update on servers, from which the others take the weights.

    A server updates its segment with the native optimizer, whose state of other segments is never
    used; `finish` gathers the state. Clipping by the norm of all gradients needs one server.
    """

    name = "parameter_server"
    synchronous = True
    settings_type = ParameterServerSettings
    settings: ParameterServerSettings

    _gradients: Flat | None = None

    def _step(self, feed: Native) -> Native:
        loss, gradients = self.replica.gradients(feed)
        if self._gradients is None:
            self._prepare(Flat(gradients))
        assert self._gradients is not None
        rank, communicator, weights = self.communicator.rank, self.communicator, self._weights
        serves = rank < len(self._shards)
        with self.exposed():
            pushed = self._gradients.fill(gradients)
            sent = [
                communicator.isend(pushed[shard], server, _PUSH)
                for server, shard in enumerate(self._shards)
                if server != rank
            ]
            if serves:
                self._gather(pushed[self._shards[rank]])
        if serves:
            self.replica.apply(self._mean.views)
            weights.fill(self.replica.weights())
        with self.exposed():
            if serves:
                own = weights.array[self._shards[rank]]
                sent += [communicator.isend(own, to, _PULL) for to in range(communicator.size) if to != rank]
            for server, shard in enumerate(self._shards):
                if server != rank:
                    communicator.receive(weights.array[shard], server, _PULL)
            for each in sent:
                each.wait()
        if self._shards[rank:] != [slice(0, weights.array.size)]:
            self.replica.load_weights(weights.views)
        return loss

    def _prepare(self, flat: Flat) -> None:
        servers = self.settings.servers
        if servers > self.communicator.size:
            raise ConfigurationError(f"{servers} servers need as many ranks, not {self.communicator.size}")
        if servers > 1 and self.replica.trainer.optimizer.clip_norm:
            raise ConfigurationError(
                f"norm clipping needs one server: none of {servers} sees all gradients",
                hint="Use one server or no clip_norm.",
            )
        self._gradients, self._mean, self._weights = flat, Flat(flat.views), Flat(flat.views)
        self._shards = segments(flat.array.size, servers)
        self._taken = np.empty(self._shards[0].stop, flat.array.dtype)

    def _gather(self, own: np.ndarray) -> None:
        """Put the mean of all ranks' gradients of this server's segment into `_mean`."""
        self._mean.array[:] = 0  # also of the other segments: an update may overwrite gradients
        total = self._mean.array[self._shards[self.communicator.rank]]
        taken = self._taken[: total.size]
        for source in range(self.communicator.size):
            if source == self.communicator.rank:
                total += own
            else:
                self.communicator.receive(taken, source, _PUSH)
                total += taken
        total /= self.communicator.size

    def _finish(self) -> None:
        """Give every rank the whole state of the optimizer, so that any rank's checkpoint will do.

        A server has the state of its own segment only, and other ranks have none.
        """
        if self._gradients is None:
            return
        replica, communicator = self.replica, self.communicator
        trainer, weights, own = replica.trainer, replica.weights(), Flat(self._gradients.views)
        own.array[:] = 0
        for shard in self._shards[communicator.rank : communicator.rank + 1]:
            own.array[shard] = 1
        replica.load_weights(own.views)  # in the native layout; a state has the neutral one
        masks = trainer.executor.parameters()
        replica.load_weights(weights)
        state = {name: np.array(value, order="C") for name, value in trainer.state().items()}
        for name, value in sorted(state.items()):  # a rank that never updated may have another order
            slot, _, parameter = name.partition("/")
            if slot in trainer.optimizer.slots:
                value[masks[parameter] == 0] = 0
                communicator.all_reduce(value)
            else:
                communicator.broadcast(value)
        trainer.load_state(state)
