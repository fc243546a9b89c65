"""Synchronous data parallelism: every rank applies the mean of all ranks' gradients.

Imports NumPy and `d5suite.levels` only.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d5suite.distributed.schemes.common import Common, Flat, mean
from d5suite.levels.distributed import Buffers, Communicator, Replica, SchemeSettings
from d5suite.levels.network import Native

MIB = 2**20


@dataclass(frozen=True)
class AllReduceSettings(SchemeSettings):
    """Gradients in buckets: Li et al., "PyTorch Distributed" (VLDB 2020), section 3.2.3.

    Attributes
    ----------
    bucket_bytes, first_bucket_bytes : int
        A bucket is full once it holds this many bytes. The first, with the last layers' gradients,
        is smaller, so that communication begins early. The defaults are DistributedDataParallel's.
    overlap : bool
        Whether a full bucket is sent while the backward pass goes on, where the replica hands out
        gradients early.
    """

    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB
    overlap: bool = True

    name: ClassVar[str] = "all_reduce"

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in (self.bucket_bytes, self.first_bucket_bytes):
            self._require(size > 0, f"a bucket has at least one byte, not {size}")

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: each rank sends 2 n (p - 1) / p of n bytes."""
        return 2 * elements * itemsize * (size - 1)


class _Bucket:
    """Some parameters' gradients, which are averaged together."""

    def __init__(self, gradients: Buffers) -> None:
        self.names = frozenset(gradients)
        self._flat = Flat(gradients) if len(gradients) > 1 else None

    def mean(self, communicator: Communicator, gradients: Buffers) -> Buffers:
        """Return the mean over ranks; a single array is averaged in its own place."""
        if self._flat is None:
            (name,) = self.names
            mean(communicator, gradients[name])
            return {name: gradients[name]}
        mean(communicator, self._flat.fill(gradients))
        return self._flat.views


def divide(gradients: Buffers, settings: AllReduceSettings) -> list[_Bucket]:
    """Divide gradients into buckets, in the order in which the backward pass returns them."""
    buckets: list[Buffers] = [{}]
    room = settings.first_bucket_bytes
    for name, value in gradients.items():
        if room <= 0:
            buckets.append({})
            room = settings.bucket_bytes
        buckets[-1][name] = value
        room -= value.nbytes
    return [_Bucket(each) for each in buckets]


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


class AllReduce(Common):
    """Mean gradients by all-reduce, one update on each rank.

    Buckets hold gradients in the order in which the first step's came.
    """

    name = "all_reduce"
    collective = "all_reduce"
    synchronous = True
    settings_type = AllReduceSettings
    settings: AllReduceSettings

    _buckets: Sequence[_Bucket] = ()
    _courier: _Courier | None = None

    def _step(self, feed: Native) -> Native:
        early = type(self.replica).gradients_early is not Replica.gradients_early
        loss, averaged = (self._overlapping if self._buckets and early and self.settings.overlap else self._plain)(feed)
        self.replica.apply(averaged)
        return loss

    def _plain(self, feed: Native) -> tuple[Native, Buffers]:
        """Average the gradients after the whole backward pass."""
        if self._buckets:
            loss, gradients = self.replica.gradients(feed)
        else:
            came: Buffers = {}
            loss, gradients = self.replica.gradients_early(feed, came.__setitem__)
            self._buckets = divide({name: gradients[name] for name in came}, self.settings)
        with self.exposed():
            averaged: Buffers = {}
            for bucket in self._buckets:
                averaged.update(self._mean(bucket, gradients))
        return loss, averaged

    def _overlapping(self, feed: Native) -> tuple[Native, Buffers]:
        """Average each bucket in a thread as soon as its gradients are computed."""
        courier = self._courier = self._courier or _Courier()
        came: Buffers = {}
        left = iter(self._buckets)
        bucket = next(left, None)

        def ready(name: str, gradient: np.ndarray) -> None:
            nonlocal bucket
            came[name] = gradient
            while bucket is not None and bucket.names <= came.keys():
                full = {each: came[each] for each in bucket.names}
                courier.send(functools.partial(self._mean, bucket, full))
                bucket = next(left, None)

        loss, _ = self.replica.gradients_early(feed, ready)
        with self.exposed():
            averaged: Buffers = {}
            for _ in self._buckets:
                averaged.update(courier.answer())
        return loss, averaged

    def _mean(self, bucket: _Bucket, gradients: Buffers) -> Buffers:
        return bucket.mean(self.communicator, gradients)
