"""Level 3: ranks that train together, with communicators, replicas and schemes.

A `Communicator` moves arrays between ranks and counts what it sends. A `Replica` is one rank's copy
of the network: a trainer whose gradients and weights lie in arrays that a communicator can move. A
`Scheme` says how replicas agree; it is written once, against these two.

One file, because the three are one contract: each is written in terms of the others.

Imports NumPy, `d5suite.errors`, `d5suite.optimizers` and `d5suite.levels.training` only.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from d5suite.errors import D5Error
from d5suite.levels.network import Native
from d5suite.levels.training import Trainer
from d5suite.optimizers.named import NamedSettings

Buffers = dict[str, np.ndarray]
"""Contiguous arrays by parameter name, in the framework's own layout and order."""

Collective = Callable[..., None]
"""An in-place collective over single messages: ``function(communicator, array, **more)``."""

ANY = -1
"""As a source: any rank; the first message to arrive is taken."""


@dataclass
class Traffic:
    """Traffic of one rank in one kind of call.

    Attributes
    ----------
    calls : int
    payload_bytes : int
        Bytes of the arrays passed to the calls.
    bytes_sent, bytes_received : int
    messages_sent, messages_received : int
        Point-to-point messages. A message of zero bytes counts.
    seconds : float
        Time spent in the calls.
    opaque_calls : int
        Calls that the transport carried out by itself; their messages and bytes are not counted.
    """

    calls: int = 0
    payload_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0
    opaque_calls: int = 0


class _Counting:
    """The context of `Communicator.counted`; a generator would take a microsecond longer."""

    __slots__ = ("_bytes", "_call", "_communicator", "_start")

    def __init__(self, communicator: Communicator, call: str, payload_bytes: int) -> None:
        self._communicator, self._call, self._bytes, self._start = communicator, call, payload_bytes, 0.0

    def __enter__(self) -> Traffic:
        of = self._communicator
        if of._outermost is not None:
            return of._outermost
        traffic = of._begin(self._call, self._bytes)
        self._start = time.perf_counter()
        return traffic

    def __exit__(self, *_: object) -> None:
        if self._start:
            of = self._communicator
            assert of._outermost is not None
            of._outermost.seconds += time.perf_counter() - self._start
            of._outermost = None


class Request(ABC):
    """A nonblocking send or receive; a subclass implements ``_wait``."""

    _of: Communicator | None = None
    _traffic: Traffic

    def wait(self) -> int:
        """Wait until the array may be used again, and return the rank at the other end.

        The time counts toward the call that began the message.
        """
        of = self._of
        if of is None or of._outermost is not None:
            return self._wait()
        of._outermost = self._traffic
        start = time.perf_counter()
        try:
            return self._wait()
        finally:
            self._traffic.seconds += time.perf_counter() - start
            of._outermost = None

    @abstractmethod
    def _wait(self) -> int:
        """See `wait`."""

    def _begun(self, of: Communicator, traffic: Traffic) -> Request:
        """Record the communicator and the traffic that the message counts toward."""
        self._of, self._traffic = of, traffic
        return self


def segments(length: int, parts: int) -> list[slice]:
    """Divide a length into consecutive parts; the first ``length % parts`` are one longer."""
    starts = [segment_start(length, parts, part) for part in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(starts)]


def segment_start(length: int, parts: int, part: int) -> int:
    """Return where one of the `segments` begins."""
    short, longer = divmod(length, parts)
    return part * short + min(part, longer)


class Communicator(ABC):
    """One rank's end of the messages between ranks. Only one thread at a time may use it.

    Arrays are C-contiguous NumPy arrays of any shape; both ends of a message expect the same number
    of bytes. All ranks call a collective in the same order, with arrays of equal shape and dtype,
    and its result is equal to the last bit on all ranks. Collectives named ``native`` are the
    transport's own; others are algorithms over point-to-point messages
    (`d5suite.distributed.algorithms`).

    The constructor takes rank, size, hosts, the algorithm's name and its functions by collective; a
    collective without one is the transport's own. A subclass implements ``_send``, ``_receive``,
    ``_isend``, ``_ireceive`` and ``_native``; the public methods count the traffic.

    Attributes
    ----------
    name : str
    rank, size : int
    hosts : sequence of str
        The name of each rank's host, by rank; hierarchical algorithms group ranks by it.
    algorithm : str
        Name of the collectives' algorithm; ``native`` if they are the transport's own.
    traffic : dict of str to Traffic
        Traffic by the outermost call, such as ``all_reduce`` or ``send``.
    network : mapping of str to str
        This rank's ``transport``, in words, its ``interface`` and the ``address`` there; None where
        the transport does not say.
    """

    name: ClassVar[str]

    def __init__(
        self, rank: int, size: int, hosts: Sequence[str], algorithm: str, collectives: Mapping[str, Collective]
    ) -> None:
        self.rank, self.size, self.hosts, self.algorithm = rank, size, tuple(hosts), algorithm
        self._collectives = collectives
        self.traffic: dict[str, Traffic] = {}
        self.network: dict[str, str | None] = {"transport": self.name, "interface": None, "address": None}
        self._outermost: Traffic | None = None

    @property
    def activity(self) -> tuple[int, bool]:
        """The number of calls, and whether one is still running; any thread may read it."""
        return sum(each.calls for each in tuple(self.traffic.values())), self._outermost is not None

    # Point to point

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        """Send an array, and return once it may be overwritten, perhaps before it has arrived."""
        with self.counted("send", array) as traffic:
            traffic.messages_sent += 1
            traffic.bytes_sent += array.nbytes
            self._send(array, to, tag)

    def receive(self, array: np.ndarray, source: int = ANY, tag: int = 0) -> int:
        """Overwrite the array with a message, and return the rank that sent it."""
        with self.counted("receive", array) as traffic:
            traffic.messages_received += 1
            traffic.bytes_received += array.nbytes
            return self._receive(array, source, tag)

    def isend(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        """Begin to send; the array must not change until `Request.wait` returns."""
        with self.counted("send", array) as traffic:
            traffic.messages_sent += 1
            traffic.bytes_sent += array.nbytes
            return self._isend(array, to, tag)._begun(self, traffic)

    def ireceive(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        """Begin to receive; the array holds the message once `Request.wait` returns."""
        with self.counted("receive", array) as traffic:
            traffic.messages_received += 1
            traffic.bytes_received += array.nbytes
            return self._ireceive(array, source, tag)._begun(self, traffic)

    # Collectives, all in place

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Overwrite the array with the one of rank ``root``."""
        self._collective("broadcast", array, root=root)

    def reduce(self, array: np.ndarray, root: int = 0) -> None:
        """Sum the arrays of all ranks on rank ``root``; the others' are undefined afterwards."""
        self._collective("reduce", array, root=root)

    def all_reduce(self, array: np.ndarray) -> None:
        """Sum the arrays of all ranks, on every rank."""
        self._collective("all_reduce", array)

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """Sum the arrays of all ranks; each rank gets its own segment (`segments`).

        Returns
        -------
        numpy.ndarray
            A view of the rank's segment of the flat array; the rest is undefined afterwards.
        """
        self._collective("reduce_scatter", array)
        return array.reshape(-1)[segments(array.size, self.size)[self.rank]]

    def all_gather(self, array: np.ndarray) -> None:
        """Fill the flat array: each rank contributes its own segment (`segments`)."""
        self._collective("all_gather", array)

    def all_to_all(self, given: np.ndarray, taken: np.ndarray) -> None:
        """Send segment ``r`` to rank ``r``, which stores it in segment ``rank`` of its ``taken``.

        Both arrays have the same size, a multiple of the number of ranks.
        """
        self._collective("all_to_all", given, taken=taken)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._collective("barrier", np.empty(0, np.uint8))

    @abstractmethod
    def close(self) -> None:
        """Release all connections and files. Collective."""

    def counted(self, call: str, array: np.ndarray) -> _Counting:
        """Return a context that counts a call and its time, unless another call contains it."""
        return _Counting(self, call, array.nbytes)

    def _collective(self, call: str, array: np.ndarray, **more: Any) -> None:
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            raise D5Error(f"{call} needs a contiguous array", hint="Give it numpy.ascontiguousarray(array).")
        outermost = self._outermost  # counts like `counted`, without the microsecond that a context costs
        traffic = self._begin(call, array.nbytes) if outermost is None else outermost
        start = time.perf_counter()
        try:
            chosen = self._chosen(call, array)
            if chosen is None:
                traffic.opaque_calls += 1
                self._native(call, array, **more)
            else:
                chosen(self, array, **more)
        finally:
            if outermost is None:
                traffic.seconds += time.perf_counter() - start
                self._outermost = None

    def _begin(self, call: str, payload_bytes: int) -> Traffic:
        """Count the outermost call, and return its traffic."""
        traffic = self.traffic.get(call)
        if traffic is None:
            traffic = self.traffic[call] = Traffic()
        self._outermost = traffic
        traffic.calls += 1
        traffic.payload_bytes += payload_bytes
        return traffic

    def _chosen(self, call: str, array: np.ndarray) -> Collective | None:
        """Return the algorithm of a collective, or None for the transport's own."""
        return self._collectives.get(call)

    @abstractmethod
    def _send(self, array: np.ndarray, to: int, tag: int) -> None:
        """See `send`."""

    @abstractmethod
    def _receive(self, array: np.ndarray, source: int, tag: int) -> int:
        """See `receive`."""

    @abstractmethod
    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        """See `isend`."""

    @abstractmethod
    def _ireceive(self, array: np.ndarray, source: int, tag: int) -> Request:
        """See `ireceive`."""

    @abstractmethod
    def _native(self, call: str, array: np.ndarray, **more: Any) -> None:
        """Carry out a collective, by its name, with the transport's own implementation."""


def owned(arrays: Mapping[str, np.ndarray]) -> Buffers:
    """Copy arrays that are read-only, not C-contiguous, or overlap another one; keep the others.

    Gradients may overlap: two parameters that are added share one gradient.
    """
    found = {name: np.require(array, requirements=["C", "W"]) for name, array in arrays.items()}
    end = 0
    for name in sorted(found, key=lambda name: found[name].ctypes.data):
        array = found[name]
        if array.ctypes.data < end:
            found[name] = array.copy()
        else:
            end = array.ctypes.data + array.nbytes
    return found


class Replica(ABC):
    """One rank's copy of the network and its optimizer; the constructor takes ``(trainer)``.

    Arrays are the framework's own memory where it allows that, else copies. They have the native
    layout, so that nothing is transposed; only replicas of the same backend and mode exchange them.

    Attributes
    ----------
    trainer : Trainer
    names : sequence of str
        The network's parameters, in the order of all buffers.
    shares_memory : bool
        Whether `gradients` returns the framework's own memory.
    """

    shares_memory = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.names = tuple(trainer.executor.network.parameters)

    def gradients(self, feed: Native) -> tuple[Native, Buffers]:
        """Return the loss and the gradients of the mean loss of a batch; nothing is updated.

        The arrays are writable, and valid until the next call of `gradients` or `apply`. Running
        statistics are updated with the batch.
        """
        return self.parted(self.trainer.gradients(feed))

    def parted(self, answer: Native, given: Buffers | None = None) -> tuple[Native, Buffers]:
        """Split what `Trainer.gradients` has returned into the loss and the gradients.

        ``given`` holds the gradients, in any order, if they are arrays already.
        """
        _, loss = self.trainer.executor.network.require_loss()
        found = self.buffers({name: answer[name] for name in self.names}) if given is None else given
        return {loss: answer[loss]}, {name: found[name] for name in self.names}

    def apply(self, gradients: Mapping[str, np.ndarray]) -> None:
        """Make one update with the given gradients, clipped as the optimizer's settings say.

        The arrays may be those of `gradients` or others. They may be overwritten, but no reference
        to them is kept.
        """
        self.trainer.apply(self.native(gradients))

    def gradients_early(self, feed: Native, ready: Callable[[str, np.ndarray], None]) -> tuple[Native, Buffers]:
        """Do as `gradients` does, and hand each gradient to ``ready`` once, as early as possible.

        ``ready`` may change the array. The order depends on the network only, so that it is the
        same on all ranks; it is roughly the order of the backward pass. By default ``ready`` is
        called after the whole backward pass; `Backend.absent` then gives the reason under ``early
        gradients``.
        """
        loss, gradients = self.gradients(feed)
        for name in reversed(self.names):
            ready(name, gradients[name])
        return loss, gradients

    def gradients_across(
        self, feed: Native, means: Callable[[Sequence[str]], Mapping[str, np.ndarray]]
    ) -> tuple[Native, Buffers]:
        """Make the pending update, as `apply` does, and then do as `gradients` does.

        Where the framework runs node by node, a node waits for its own parameters only: transfers
        of the step before overlap the forward pass. By default all parameters are updated before
        it; `Backend.absent` then gives the reason under ``cross barrier``.

        Parameters
        ----------
        feed
        means : callable
            Takes names of parameters, waits for their mean gradients and returns them. Each
            parameter is asked for once.
        """
        self.apply(means(self.names))
        return self.gradients(feed)

    @abstractmethod
    def buffers(self, values: Native) -> Buffers:
        """Wait for native tensors, and return them as writable arrays."""

    @abstractmethod
    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        """Return arrays as native tensors, for `Trainer.apply`."""

    @abstractmethod
    def weights(self) -> Buffers:
        """Copy the parameters."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Overwrite the parameters with other replicas' `weights`; keep the optimizer's state."""


@dataclass(frozen=True)
class SchemeSettings(NamedSettings):
    """Settings of a scheme as a job states them (`NamedSettings.to_dict`); a scheme adds its own.

    Attributes
    ----------
    statistics : str
        Running statistics after `Scheme.finish`: ``local``, each rank's own, or ``averaged`` over
        the ranks that train.
    """

    statistics: str = field(default="local", kw_only=True)

    kind: ClassVar[str] = "scheme"

    def __post_init__(self) -> None:
        known = ("local", "averaged")
        self._require(self.statistics in known, f"statistics are {' or '.join(known)}, not {self.statistics!r}")

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float | None:
        """Return the bytes that all ranks together send in a step; the mean where steps differ.

        Collectives count as if the ring algorithm made them. ``elements`` is the number of elements
        of all parameters, ``size`` the number of ranks. None if the bytes cannot be known.
        """
        raise NotImplementedError(self.name)


CHOICES = 64
"""Number of steps whose choices of transfers are kept."""


class Scheme(ABC):
    """How replicas agree on weights. Every rank makes one, with equal settings and initial weights.

    A single rank sends nothing: its step is `Trainer.step`.

    Attributes
    ----------
    name : str
    synchronous : bool
        Whether each step equals one process's step on all ranks' batches together.
    compresses : bool
        Whether a step applies only part of the gradients; rounding may then decide which part.
    collective : str
        The collective that steps make, such as ``all_reduce``; empty if they make none, so that
        the algorithm of collectives changes nothing.
    refuses : mapping of str to str
        Settings of the order of transfers that it does not support, with the reason.
    settings_type : type
        The class of its settings.
    replica : Replica
    communicator : Communicator
    settings : SchemeSettings
    exposed_s : float
        Seconds, over all steps, in which this rank only communicated or waited for others.
    arrivals : dict of str to Counter
        By stream of transfers: the orders in which they arrived at this rank, each with its number
        of steps; empty if transfers have no order.
    chooses : bool
        Whether it chooses transfers while it runs, among those that are ready.
    choices : deque of sequence of (bool, tuple of str)
        If ``chooses``, on the rank that chooses, for each of the last `CHOICES` steps: the events
        in order, by names of parameters. True: their gradients became ready; False: their transfer
        was chosen.
    """

    name: str
    synchronous: bool = False
    compresses: ClassVar[bool] = False
    chooses = False
    collective: ClassVar[str] = ""
    refuses: ClassVar[Mapping[str, str]] = {}
    settings_type: ClassVar[type[SchemeSettings]]

    def __init__(self, replica: Replica, communicator: Communicator, settings: SchemeSettings) -> None:
        self.replica, self.communicator, self.settings = replica, communicator, settings
        self.exposed_s = 0.0
        self.arrivals: dict[str, Counter[tuple[str, ...]]] = {}
        self.choices: deque[Sequence[tuple[bool, tuple[str, ...]]]] = deque(maxlen=CHOICES)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Return a context whose time counts as `exposed_s`."""
        start = time.perf_counter()
        yield
        self.exposed_s += time.perf_counter() - start

    @property
    def serves(self) -> bool:
        """Whether this rank holds parameters for the others and trains nothing itself."""
        return False

    @abstractmethod
    def step(self, feed: Native) -> Native:
        """Make this rank's part of one step, and return the loss of this rank's batch."""

    def settle(self) -> None:
        """Make the update that the last step left to the next one; most schemes leave none.

        Collective: call it before the ranks exchange anything else.
        """
        return

    def weights(self) -> Buffers:
        """Copy the parameters that this rank trains, as `Replica.weights` does. Collective."""
        return self.replica.weights()

    def bytes_per_step(self, elements: int, itemsize: int) -> float | None:
        """See `SchemeSettings.bytes_per_step`."""
        return self.settings.bytes_per_step(elements, itemsize, self.communicator.size)

    def serve(self) -> None:
        """Answer the other ranks, on a rank that serves, until all have called `finish`."""
        raise NotImplementedError(self.name)

    def restart(self) -> None:
        """Drop the state of earlier steps, such as unsent gradients: the next step starts a run."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Bring all replicas to the final parameters, on which the run is evaluated.

        Collective: each rank calls it once, at the end; a rank that serves, after `serve`.
        """
