"""A synchronous parameter server: servers own the weights and their optimizer's state.

Imports NumPy, `d5suite.levels` and the orders only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d5suite.distributed.order import divided
from d5suite.distributed.schemes.common import Flat
from d5suite.distributed.schemes.ordered import Credit, OrderedScheme, OrderedSettings
from d5suite.errors import ConfigurationError
from d5suite.levels.distributed import Buffers, Request, segments
from d5suite.levels.network import Native

_PUSH, _PULL, _ORDER = 1, 2, 3


@dataclass(frozen=True)
class ParameterServerSettings(OrderedSettings):
    """Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014).

    Attributes
    ----------
    servers : int
        k: rank r < k owns the r-th of k `segments` of the weights. Servers are workers, too.
    credit_bytes : int
        Most bytes that a rank has in flight, unless one transfer is larger; 0: without a limit.
        Peng et al., "ByteScheduler" (SOSP 2019).
    """

    servers: int = 1
    credit_bytes: int = 0

    name: ClassVar[str] = "parameter_server"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.servers >= 1, f"there is at least one server, not {self.servers}")

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: gradients go to the servers, weights come back.

        The order itself, 4 bytes per tensor in each direction, is not counted.
        """
        return 2 * elements * itemsize * (size - 1)


class ParameterServer(OrderedScheme):
    """Average gradients and update weights on servers, from which the others take the weights.

    A server updates its segment with the native optimizer, whose state of other segments is never
    used; `finish` gathers the state. Clipping by the norm of all gradients needs one server.

    Without an order, a segment is one message. With one, every tensor or slice is a message. The
    sender first announces the order, and the receiver places the messages accordingly: an order
    that is not kept gives wrong weights.
    """

    name = "parameter_server"
    synchronous = True
    settings_type = ParameterServerSettings
    settings: ParameterServerSettings

    _gradients: Flat | None = None

    def _step(self, feed: Native) -> Native:
        came: Buffers = {}
        if self.settings.is_ordered:
            loss, gradients = self.replica.gradients_early(feed, came.__setitem__)
        else:
            loss, gradients = self.replica.gradients(feed)
        if self._gradients is None:
            self._prepare(Flat(gradients))
        assert self._gradients is not None
        rank, weights = self.communicator.rank, self._weights
        serves = rank < len(self._shards)
        order = self._in_order(tuple(came)) if came else ()
        with self.exposed():
            pushed = self._gradients.fill(gradients)
            sent = self._push_in_order(pushed, order) if order else self._push(pushed)
        if serves:
            self.replica.apply(self._mean.views)
            weights.fill(self.replica.weights())
        with self.exposed():
            if order:
                self._pull_in_order(order)
            else:
                self._pull(sent)
            for each in sent:
                each.wait()
        if self._shards[rank:] != [slice(0, weights.array.size)]:
            self.replica.load_weights(weights.views)
        return loss

    def _push(self, pushed: np.ndarray) -> list[Request]:
        """Send each server its segment of the gradients; a server adds up what it gets."""
        rank = self.communicator.rank
        sent = [
            self.communicator.isend(pushed[shard], server, _PUSH)
            for server, shard in enumerate(self._shards)
            if server != rank
        ]
        if rank < len(self._shards):
            self._gather(pushed[self._shards[rank]])
        return sent

    def _pull(self, sent: list[Request]) -> None:
        """Take the weights of all segments from their servers; a server sends its own."""
        rank, communicator, weights = self.communicator.rank, self.communicator, self._weights.array
        if rank < len(self._shards):
            own = weights[self._shards[rank]]
            sent += [communicator.isend(own, to, _PULL) for to in self._others]
        for server, shard in enumerate(self._shards):
            if server != rank:
                communicator.receive(weights[shard], server, _PULL)

    def _push_in_order(self, pushed: np.ndarray, order: Sequence[str]) -> list[Request]:
        """Do as `_push` does, tensor by tensor."""
        rank, servers = self.communicator.rank, range(len(self._shards))
        sent = self._announce(order, [server for server in servers if server != rank])
        taken: dict[int, np.ndarray] = {}
        coming: dict[int, list[tuple[slice, Request]]] = {}
        if rank in servers:
            start = self._shards[rank].start
            for source in self._others:
                taken[source] = np.empty_like(pushed[self._shards[rank]])
                coming[source] = self._expect(f"gradients of rank {source}", source, taken[source], start, rank, _PUSH)
        credit = Credit(self.communicator, self.settings.credit_bytes)
        for name in order:
            for server in servers:
                for part in self._parts(name, server) if server != rank else ():
                    credit.send(pushed[part], server, _PUSH)
        if rank in servers:
            self._mean.array[:] = 0
            total, own = self._mean.array[self._shards[rank]], pushed[self._shards[rank]]
            for source in range(self.communicator.size):
                if source == rank:
                    total += own
                else:
                    for part, request in coming[source]:
                        request.wait()
                        total[part] += taken[source][part]
            total /= self.communicator.size
        credit.wait()
        return sent

    def _pull_in_order(self, order: Sequence[str]) -> None:
        """Do as `_pull` does, tensor by tensor."""
        rank, weights, servers = self.communicator.rank, self._weights.array, range(len(self._shards))
        sent = self._announce(order, self._others if rank in servers else [])
        coming = [
            request
            for server in servers
            if server != rank
            for _, request in self._expect(f"weights of rank {server}", server, weights, 0, server, _PULL)
        ]
        credit = Credit(self.communicator, self.settings.credit_bytes)
        for name in order if rank in servers else ():
            for part in self._parts(name, rank):
                for to in self._others:
                    credit.send(weights[part], to, _PULL)
        for each in (*coming, *sent):
            each.wait()
        credit.wait()

    def _announce(self, order: Sequence[str], to: Sequence[int]) -> list[Request]:
        """Tell other ranks in which order the tensors come."""
        places = {name: place for place, name in enumerate(self._places)}
        numbers = np.array([places[name] for name in order], np.int32)
        return [self.communicator.isend(numbers, each, _ORDER) for each in to]

    def _expect(
        self, stream: str, source: int, into: np.ndarray, start: int, server: int, tag: int
    ) -> list[tuple[slice, Request]]:
        """Begin to receive a server's segment in the order that its sender announces.

        Parameters
        ----------
        stream : str
            Name of the order in `arrivals`.
        source : int
            The sender.
        into : numpy.ndarray
            Receives the segment.
        start : int
            Index, among the elements of all parameters, of the first element of ``into``.
        server, tag : int
            The server whose segment it is, and the messages' tag.
        """
        numbers = np.empty(len(self._places), np.int32)
        self.communicator.receive(numbers, source, _ORDER)
        names = list(self._places)
        order = [names[number] for number in numbers]
        parts = [(name, part) for name in order for part in self._parts(name, server)]
        self._arrived(stream, (name for name, _ in parts))
        found = [slice(part.start - start, part.stop - start) for _, part in parts]
        return [(part, self.communicator.ireceive(into[part], source, tag)) for part in found]

    def _parts(self, name: str, server: int) -> list[slice]:
        """Return a tensor's slices in a server's segment."""
        tensor, shard = self._places[name], self._shards[server]
        start, stop = max(tensor.start, shard.start), min(tensor.stop, shard.stop)
        itemsize = self._weights.array.itemsize
        found = divided(max(stop - start, 0) * itemsize, self.settings.slice_bytes, itemsize)
        return [slice(start + each.start, start + each.stop) for each in found]

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
        ends = itertools.accumulate(each.size for each in flat.views.values())
        self._places = {
            name: slice(end - flat.views[name].size, end) for name, end in zip(flat.views, ends, strict=True)
        }
        self._others = [rank for rank in range(self.communicator.size) if rank != self.communicator.rank]
        self._taken = np.empty_like(flat.array, shape=(self._shards[0].stop,))

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
