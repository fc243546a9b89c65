"""Gloo, torch's transport between CPUs. Ranks meet in a file; on one host they need no network.

Arrays are viewed as tensors, without copies. The process group is a separate object: torch's global
one stays free for its users.

Imports torch, as a transport only, NumPy, `d5suite.errors`, `d5suite.levels` and the algorithms.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import FileStore, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.algorithms.ring import RING
from d5suite.distributed.loops import loops_give_way
from d5suite.distributed.network import networks
from d5suite.errors import D5Error
from d5suite.levels.distributed import ANY, Collective, Communicator, Request

# Gloo only reads what is sent, so an array may be read-only.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

SUMS = {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"}
"""Types that Gloo itself can add; others are moved as bytes."""

SMALL = 2**16
"""Most bytes of an array to which a communicator keeps a reference until it gets another array."""

CLOSES = timedelta(seconds=5)
"""Timeout for the others when a rank closes; they may have failed."""

Function = TypeVar("Function", bound=Callable[..., Any])
_opened = itertools.count()


def named(function: Function) -> Function:
    """Raise torch's errors as `D5Error` with the rank."""

    @functools.wraps(function)
    def call(self: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return function(self, *arguments, **more)
        except RuntimeError as error:
            where = str(arguments[0]) if function.__name__ == "_native" else function.__name__.strip("_")
            raise failed(self, where, error) from error

    return call  # type: ignore[return-value]


def failed(of: Any, where: str, error: RuntimeError) -> D5Error:
    """Report torch's message about a rank's call."""
    return D5Error(
        f"rank {of.rank}: {type(of).__module__.rpartition('.')[2]}: {str(error).splitlines()[0]}",
        where=where,
        hint="Another rank may have ended or called something else: see its log.",
    )


def met(file: Path, rank: int, size: int, timeout_s: float) -> tuple[FileStore, list[str]]:
    """Wait for all ranks in a shared file, and return the names of their hosts."""
    try:
        store = FileStore(str(file), size)
        store.set_timeout(timedelta(seconds=timeout_s))
        store.set(f"host{rank}", socket.gethostname())
        return store, [store.get(f"host{other}").decode() for other in range(size)]
    except RuntimeError as error:
        raise D5Error(
            f"rank {rank} could not reach all {size} ranks within {timeout_s:g} s: {str(error).splitlines()[0]}",
            where=str(file),
        ) from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let only one rank of this host at a time close its store.

    A store counts the ranks that have closed and those that are left, and the last one removes the
    file. If two ranks count at the same time, neither may be the last.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the folder is gone, or its file system has no locks
            opened = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


class _Pending(Request):
    def __init__(self, rank: int, peer: int, tensor: torch.Tensor, work: Any) -> None:
        self.rank, self._peer, self._tensor, self._work = rank, peer, tensor, work

    @named
    def _wait(self) -> int:
        if self._work is not None:
            self._work.wait()
            if self._peer == ANY:
                self._peer = self._work._source_rank()
            self._work = None
        return self._peer


class GlooCommunicator(Communicator):
    """A process group of Gloo."""

    name = "gloo"

    def __init__(
        self, algorithm: str, rank: int, size: int, meeting: Path, timeout_s: float, hosts: Sequence[str] | None = None
    ) -> None:
        # A folder may see several groups, which every rank opens in the same order.
        self._meeting = meeting
        store, found = met(meeting / f"gloo{next(_opened)}", rank, size, timeout_s)
        super().__init__(rank, size, hosts or found, algorithm, ALGORITHMS[algorithm])
        self._seen: tuple[Any, Any, list[torch.Tensor]] = None, None, []
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        own = networks(found, "GLOO_SOCKET_IFNAME")
        options._devices = [ProcessGroupGloo.create_device(hostname=each.address) for each in own]
        self.network = {
            "transport": "TCP",
            "interface": ",".join(each.interface for each in own),
            "address": ",".join(each.address for each in own),
        }
        self._connect(store, options)
        loops_give_way(self.hosts, self.rank)  # Gloo's threads have their names only once they have worked

    def _connect(self, store: FileStore, options: Any) -> None:
        try:
            self._store, self._group = store, ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise D5Error(
                f"rank {self.rank}: gloo: could not connect to all {self.size} ranks from {self.network['address']} "
                f"({self.network['interface']}): {str(error).splitlines()[0]}",
                hint="Another rank may have ended: see its log. Or packets are dropped between the hosts: choose "
                "another network with --interface.",
            ) from error

    def close(self) -> None:
        """Close the connections when all ranks do; the last rank's store removes the file."""
        if self._store is not None:
            # A connection that closes early may lose a message that another rank waits for.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"closes{self.rank}", "")
                self._store.wait([f"closes{other}" for other in range(self.size)], CLOSES)
        self._group = None
        with alone_in(self._meeting):
            self._store = None
        self._seen = None, None, []

    def all_reduce(self, array: np.ndarray) -> None:
        """See `Communicator.all_reduce`; the traffic of a repeated array is counted meanwhile."""
        if array is not self._seen[0] or array.dtype is not self._seen[1] or self._outermost is not None:
            super().all_reduce(array)
            return
        start = time.perf_counter()
        traffic = None
        try:
            work = self._group.allreduce(self._seen[2])
            traffic = self._begin("all_reduce", array.nbytes)
            traffic.opaque_calls += 1
            work.wait()
        except RuntimeError as error:
            raise failed(self, "all_reduce", error) from error
        finally:
            if traffic is not None:
                traffic.seconds += time.perf_counter() - start
            self._outermost = None

    @named
    def _send(self, array: np.ndarray, to: int, tag: int) -> None:
        self._group.send([as_bytes(array)], to, tag).wait()

    @named
    def _receive(self, array: np.ndarray, source: int, tag: int) -> int:
        return self._ireceive(array, source, tag)._wait()

    @named
    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        tensor = as_bytes(array)
        return _Pending(self.rank, to, tensor, self._group.send([tensor], to, tag))

    @named
    def _ireceive(self, array: np.ndarray, source: int, tag: int) -> Request:
        tensor = as_bytes(array)
        if source == ANY:
            return _Pending(self.rank, source, tensor, self._group.recv_anysource([tensor], tag))
        return _Pending(self.rank, source, tensor, self._group.recv([tensor], source, tag))

    def _chosen(self, call: str, array: np.ndarray) -> Collective | None:
        chosen = self._collectives.get(call)
        if chosen is None and call in ("reduce_scatter", "all_gather") and array.size % self.size:
            return RING[call]  # Gloo's segments are equal
        return chosen

    def _native(self, call: str, array: np.ndarray, **more: Any) -> None:
        try:
            if call == "all_reduce":
                self._group.allreduce(self._tensors(array)).wait()
            else:
                self._rarer(call, array, **more)
        except RuntimeError as error:
            raise failed(self, call, error) from error

    def _tensors(self, array: np.ndarray) -> list[torch.Tensor]:
        """View an array as `as_tensor` does; the view of a repeated small array is reused."""
        if array is self._seen[0] and array.dtype is self._seen[1]:
            return self._seen[2]
        tensors = [as_tensor(array)]
        if array.nbytes <= SMALL:
            self._seen = array, array.dtype, tensors
        return tensors

    def _rarer(self, call: str, array: np.ndarray, **more: Any) -> None:
        group = self._group
        if call == "reduce":
            options = c10d.ReduceOptions()
            options.rootRank = more["root"]
            work = group.reduce([as_tensor(array)], options)
        elif call == "broadcast":
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = more["root"], 0
            work = group.broadcast([as_bytes(array)], options)
        elif call == "reduce_scatter":
            flat = as_tensor(array).reshape(-1)
            own = flat.chunk(self.size)[self.rank]
            total = torch.empty_like(own)
            group._reduce_scatter_base(total, flat).wait()
            own.copy_(total)
            return
        elif call == "all_gather":
            flat = as_bytes(array)
            work = group._allgather_base(flat, flat.chunk(self.size)[self.rank])
        elif call == "all_to_all":
            work = group.alltoall_base(as_bytes(more["taken"]), as_bytes(array), [], [])
        else:
            work = group.barrier()
        work.wait()


def as_bytes(array: np.ndarray) -> torch.Tensor:
    """View an array as a tensor of bytes."""
    if not array.flags.c_contiguous:
        raise D5Error("a message needs a contiguous array", hint="Give it numpy.ascontiguousarray(array).")
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """View an array as a tensor that torch can add."""
    summed = _summed(array.dtype)
    if summed is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(summed)


@functools.cache
def _summed(dtype: np.dtype) -> torch.dtype | None:
    """Return torch's type in which to view an array; None if torch knows NumPy's type."""
    if dtype.name == "bfloat16":
        return torch.bfloat16
    if dtype.name not in SUMS:
        raise D5Error(f"torch's transports cannot add {dtype}", hint="Choose an algorithm, such as ring.")
    return None


connect = GlooCommunicator
