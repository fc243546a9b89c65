"""Synchronous data parallelism: every rank applies the mean of all ranks' gradients.

Imports NumPy, `d5suite.levels`, `d5suite.errors` and the orders only.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from d5suite.distributed.order import divided
from d5suite.distributed.schemes.common import Flat, mean
from d5suite.distributed.schemes.ordered import OrderedScheme, OrderedSettings
from d5suite.errors import D5Error
from d5suite.levels.distributed import Buffers, Communicator, Replica, SchemeSettings
from d5suite.levels.network import Native

MIB = 2**20

TOLD, TOLD_BYTES = 64, MIB // 4
"""Most buckets that are chosen at once, and the bytes after which no further bucket is chosen: each
choice costs a message, and a chosen bucket cannot be overtaken."""


AVERAGE = "average gradients"
"""Name of `AllReduce.average` in a trace."""


@dataclass(frozen=True)
class AllReduceSettings(OrderedSettings):
    """Gradients in buckets: Li et al., "PyTorch Distributed" (VLDB 2020), section 3.2.3.

    Attributes
    ----------
    bucket_bytes, first_bucket_bytes : int
        A bucket is full once it holds this many bytes. The first, with the last layers' gradients,
        is smaller, so that communication begins early. The defaults are DistributedDataParallel's,
        25 MiB and 1 MiB; with an order, each tensor is a bucket of its own.
    overlap : bool
        Whether a full bucket is sent while the backward pass goes on, where the replica hands out
        gradients early.
    cross_barrier : bool
        Whether a step ends once its gradients are computed: they are averaged during the next
        forward pass, whose nodes wait for their own parameters, where the replica runs node by
        node. The order is ``forward``, if no other one is given. Peng et al., "ByteScheduler"
        (SOSP 2019), section 3.
    """

    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None
    overlap: bool = True
    cross_barrier: bool = False

    name: ClassVar[str] = "all_reduce"

    def __post_init__(self) -> None:
        if self.cross_barrier and not self.order:
            object.__setattr__(self, "order", "forward")
        super().__post_init__()
        for what, default in (("bucket_bytes", 25 * MIB), ("first_bucket_bytes", MIB)):
            size = getattr(self, what)
            if size is None:
                size = 1 if self.is_ordered else default
                object.__setattr__(self, what, size)
            self._require(size > 0, f"a bucket has at least one byte, not {size}")

    def to_dict(self) -> dict[str, Any]:
        """See `NamedSettings.to_dict`; what is not set is left out."""
        found = super().to_dict()
        return found if self.cross_barrier else {name: found[name] for name in found if name != "cross_barrier"}

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: each rank sends 2 n (p - 1) / p of n bytes.

        Where rank 0 chooses transfers, the 256 bytes of each choice are not counted.
        """
        return 2 * elements * itemsize * (size - 1)


class Bucket:
    """Some parameters' gradients, which are averaged together.

    Attributes
    ----------
    names : tuple of str
    nbytes : int
    parts : list of slice
        Slices of all elements; each slice is a collective of its own.
    """

    def __init__(self, gradients: Buffers, slice_bytes: int = 0) -> None:
        self.names, self.needed = tuple(gradients), frozenset(gradients)
        self.nbytes = sum(each.nbytes for each in gradients.values())
        itemsize = next(iter(gradients.values())).itemsize
        self.parts = divided(self.nbytes, slice_bytes, itemsize) or [slice(0, 0)]
        self._flat = Flat(gradients) if len(gradients) > 1 else None

    def mean(self, communicator: Communicator, gradients: Buffers, parts: Sequence[slice] = ()) -> Buffers:
        """Average gradients over ranks, and return the means by name.

        A single gradient is averaged in place. If only some of `parts` are given, the others are
        left for later calls; the call with the first part gathers the gradients.
        """
        parts = parts or self.parts
        if self._flat is not None and parts[0] is self.parts[0]:
            self._flat.fill(gradients)
        flat = (gradients[self.names[0]] if self._flat is None else self._flat.array).reshape(-1)
        for part in parts:
            mean(communicator, flat[part])
        return self._flat.views if self._flat is not None else {self.names[0]: gradients[self.names[0]]}


def divide(gradients: Buffers, settings: AllReduceSettings) -> list[Bucket]:
    """Divide gradients into buckets, in this order."""
    buckets: list[Buffers] = [{}]
    room = settings.first_bucket_bytes or 0
    for name, value in gradients.items():
        if room <= 0:
            buckets.append({})
            room = settings.bucket_bytes or 0
        buckets[-1][name] = value
        room -= value.nbytes
    return [Bucket(each, settings.slice_bytes) for each in buckets]


class Waiting:
    """The buckets of a step that are ready and not yet sent; two threads use it.

    Rank 0 chooses those that come first in the order; a bucket that is not ready delays no other.

    Parameters
    ----------
    buckets : sequence of Bucket
        In the order of transfers.

    Attributes
    ----------
    events : list of (bool, tuple of str)
        In time order: whose gradients became ready (True), and which bucket was chosen (False).
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.events: list[tuple[bool, tuple[str, ...]]] = []
        self._buckets = buckets
        self._number = {name: number for number, each in enumerate(buckets) for name in each.names}
        self._came: Buffers = {}
        self._left = [list(each.parts) for each in buckets]
        self._ready: set[int] = set()
        self._changed = threading.Condition()
        self._given_up = False

    def add(self, name: str, gradient: np.ndarray) -> None:
        """Add a gradient that is ready."""
        number = self._number[name]
        with self._changed:
            self._came[name] = gradient
            if self._buckets[number].needed <= self._came.keys():
                self._ready.add(number)
                self.events.append((True, self._buckets[number].names))
                self._changed.notify_all()

    def give_up(self) -> None:
        """Let no thread wait any longer: the backward pass has failed."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def choose(self) -> list[int]:
        """Wait until a bucket is ready; return the numbers that go next, about `TOLD_BYTES`.

        A bucket's number is repeated for each of its parts that go.
        """
        chosen: list[int] = []
        nbytes = 0
        with self._changed:
            self._wait(lambda: bool(self._ready))
            for number in sorted(self._ready):
                left = self._left[number]
                while left and (not chosen or nbytes < TOLD_BYTES) and len(chosen) < TOLD:
                    part = left.pop(0)
                    nbytes += self._buckets[number].nbytes * (part.stop - part.start) // max(self._size(number), 1)
                    chosen.append(number)
                    self.events.append((False, self._buckets[number].names))
                if left:
                    break
                self._ready.remove(number)
                if nbytes >= TOLD_BYTES or len(chosen) == TOLD:
                    break
        return chosen

    def some(self) -> None:
        """Wait until a bucket is ready that is not sent."""
        with self._changed:
            self._wait(lambda: bool(self._ready))

    def sent(self, number: int) -> None:
        """Note that all of a bucket is sent."""
        with self._changed:
            self._ready.discard(number)

    def take(self, number: int) -> Buffers:
        """Wait until a bucket is ready, and return its gradients."""
        bucket = self._buckets[number]
        with self._changed:
            self._wait(lambda: bucket.needed <= self._came.keys())
            return {name: self._came[name] for name in bucket.names}

    def _size(self, number: int) -> int:
        return self._buckets[number].parts[-1].stop

    def _wait(self, until: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._given_up or until())
        if self._given_up:
            raise D5Error("the backward pass failed, so that its gradients are not sent")


class _Courier:
    """A thread that makes calls in order while its owner computes."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Buffers] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Buffers, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls, self._answers), daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def send(self, call: Callable[[], Buffers]) -> None:
        self._calls.put(call)

    def answer(self) -> Buffers:
        """Return the next call's answer, or raise its error."""
        answer, error = self._answers.get()
        if error is not None:
            raise error
        return answer


def _work(
    calls: queue.SimpleQueue[Callable[[], Buffers] | None],
    answers: queue.SimpleQueue[tuple[Buffers, BaseException | None]],
) -> None:
    while (call := calls.get()) is not None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put(({}, error))
        del call  # it refers to the thread's owner


class AllReduce(OrderedScheme):
    """Average gradients by all-reduce, then make one update on each rank.

    Buckets hold gradients in the order of their arrival in the first step, or in the requested
    order. All ranks send buckets in the same order. Without a requested order this is always the
    order of the first step, so a bucket waits for those before it. With one, rank 0 chooses the
    first ready bucket whenever the link is free, and tells the other ranks, as ByteScheduler's
    master does for all-reduce; so a bucket that is not ready delays no other.
    """

    name = "all_reduce"
    collective = "all_reduce"
    synchronous = True
    settings_type = AllReduceSettings
    settings: AllReduceSettings
    refuses: ClassVar[Mapping[str, str]] = {
        "credit_bytes": "ranks make one collective after the other, so that only one is on its way"
    }

    buckets: Sequence[Bucket] = ()
    _courier: _Courier | None = None

    def __init__(self, replica: Replica, communicator: Communicator, settings: SchemeSettings) -> None:
        super().__init__(replica, communicator, settings)
        self._sent: list[str] = []
        self._early = type(replica).gradients_early is not Replica.gradients_early and self.settings.overlap
        self.chooses = self._early and self.settings.order not in ("", "framework") and not self.settings.cross_barrier
        self._due: Buffers | None = None  # the previous step's means that have arrived
        self._rate = 0.0  # learning rate of the update that is due

    def _step(self, feed: Native) -> Native:
        if self.settings.cross_barrier:
            return self._across(feed)
        early = self._choosing if self.chooses else self._overlapping
        loss, averaged = (early if self.buckets and self._early else self._plain)(feed)
        self.replica.apply(averaged)
        if self.settings.is_ordered:
            self._arrived("means", self._sent)
            self._sent = []
        return loss

    def _plain(self, feed: Native) -> tuple[Native, Buffers]:
        """Average the gradients after the whole backward pass."""
        if self.buckets:
            loss, gradients = self.replica.gradients(feed)
        else:
            came: Buffers = {}
            loss, gradients = self.replica.gradients_early(feed, came.__setitem__)
            order = self._in_order(tuple(came)) if self.settings.is_ordered else came
            self.buckets = divide({name: gradients[name] for name in order}, self.settings)
        with self.exposed():
            averaged: Buffers = {}
            for bucket in self.buckets:
                averaged.update(self.average(bucket, gradients))
        return loss, averaged

    def _overlapping(self, feed: Native) -> tuple[Native, Buffers]:
        """Average each bucket in a thread as soon as its gradients are computed."""
        courier = self._courier = self._courier or _Courier()
        came: Buffers = {}
        left = iter(self.buckets)
        bucket = next(left, None)

        def ready(name: str, gradient: np.ndarray) -> None:
            nonlocal bucket
            came[name] = gradient
            while bucket is not None and bucket.needed <= came.keys():
                full = {each: came[each] for each in bucket.names}
                courier.send(functools.partial(self.average, bucket, full))
                bucket = next(left, None)

        loss, _ = self.replica.gradients_early(feed, ready)
        with self.exposed():
            averaged: Buffers = {}
            for _ in self.buckets:
                averaged.update(courier.answer())
        return loss, averaged

    def average(self, bucket: Bucket, gradients: Buffers, parts: Sequence[slice] = ()) -> Buffers:
        """Average a bucket, or parts of it; a trace shows this call."""
        averaged = bucket.mean(self.communicator, gradients, parts)
        if self.settings.is_ordered:
            self._sent += bucket.names
        return averaged

    def _choosing(self, feed: Native) -> tuple[Native, Buffers]:
        """Average buckets in a thread: always the first of those that are ready."""
        courier = self._courier = self._courier or _Courier()
        waiting = Waiting(self.buckets)
        courier.send(functools.partial(self._chosen_means, waiting))
        try:
            loss, _ = self.replica.gradients_early(feed, waiting.add)
        except BaseException:
            waiting.give_up()
            raise
        with self.exposed():
            averaged = courier.answer()
        if self.communicator.rank == 0:
            self.choices.append(tuple(waiting.events))
        return loss, averaged

    def _chosen_means(self, waiting: Waiting) -> Buffers:
        averaged: Buffers = {}
        begun: dict[int, tuple[Buffers, Iterator[slice]]] = {}
        left = len(self.buckets)
        while left:
            for number in self.agree(waiting):
                bucket = self.buckets[number]
                if number not in begun:
                    begun[number] = waiting.take(number), iter(bucket.parts)
                gradients, parts = begun[number]
                part = next(parts)
                averaged.update(self.average(bucket, gradients, (part,)))
                if part is bucket.parts[-1]:
                    waiting.sent(number)
                    left -= 1
        return averaged

    def agree(self, waiting: Waiting) -> list[int]:
        """Return the numbers of the buckets that go next, the same on all ranks. Collective."""
        told = np.full(TOLD, -1, np.int32)
        if self.communicator.rank == 0:
            chosen = waiting.choose()
            told[: len(chosen)] = chosen
        else:
            waiting.some()  # so that the broadcast waits only for other ranks
        self.communicator.broadcast(told)
        return [number for number in told.tolist() if number >= 0]

    # Across the barrier between steps

    def _across(self, feed: Native) -> Native:
        """Make the update that is due and compute gradients, whose means the next step applies."""
        if self._due is None:
            loss, gradients = self.replica.gradients(feed)
        else:
            with self._at_its_rate():
                loss, gradients = self.replica.gradients_across(feed, self._means)
        if not self.buckets:
            order = self._in_order(tuple(reversed(self.replica.names)))
            self.buckets = divide({name: gradients[name] for name in order}, self.settings)
        courier = self._courier = self._courier or _Courier()
        self._due, self._rate = {}, self.replica.trainer.learning_rate
        for bucket in self.buckets:  # copies: the next pass may overwrite the framework's own
            kept = {name: gradients[name].copy() for name in bucket.names}
            courier.send(functools.partial(self.average, bucket, kept))
        return loss

    def _means(self, names: Sequence[str]) -> Buffers:
        """Wait for the means of these gradients."""
        due, courier = self._due, self._courier
        assert due is not None and courier is not None
        with self.exposed():
            while any(name not in due for name in names):
                due.update(courier.answer())
        if self._sent and len(due) == len(self.replica.names):
            self._arrived("means", self._sent)
            self._sent = []
        return {name: due[name] for name in names}

    @contextlib.contextmanager
    def _at_its_rate(self) -> Iterator[None]:
        """Make the update that is due with the learning rate of its own step."""
        trainer = self.replica.trainer
        rate = trainer.learning_rate
        if rate != self._rate:
            trainer.set_learning_rate(self._rate)
        yield
        if rate != self._rate:
            trainer.set_learning_rate(rate)

    def settle(self) -> None:
        """See `Scheme.settle`."""
        if self._due is not None:
            with self._at_its_rate():
                self.replica.apply(self._means(self.replica.names))
            self._due = None

    def weights(self) -> Buffers:
        """See `Scheme.weights`."""
        self.settle()
        return super().weights()

    def restart(self) -> None:
        """See `Scheme.restart`."""
        if self._due is not None:
            self._means(self.replica.names)  # they are on their way
            self._due = None

    def _finish(self) -> None:
        self.settle()
