"""MPI through mpi4py's calls on buffers: nothing is pickled, and collectives work in place.

mpi4py uses the MPI that it was built against or finds: a system's, a site's, or the ``openmpi``
package. Arrays on a CUDA device work if that MPI reports support for them (untried).

Imports mpi4py, which initializes MPI, NumPy, `d5suite.errors`, `d5suite.levels`, the algorithms.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from d5suite.distributed.algorithms import ALGORITHMS, DEFAULTS
from d5suite.distributed.network import named_interface
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import ANY, Collective, Communicator, Request, segments

PIECE = 2**30
"""Most bytes, and most elements, of one MPI call: MPI 3 counts with 31 bits."""

HOST_BYTES = 256
IN_PLACE = MPI.IN_PLACE

SMALL = 2**16
"""Most bytes of an array to which a communicator keeps a reference until it gets another array."""

SEGMENT = re.compile(r"/(sm|vader)_segment\.\S+$")
"""End of a line of proc(5)'s maps that stands for Open MPI's shared memory."""

OWN_VARIABLES = ("OMPI_MCA_btl_tcp_if_include", "UCX_NET_DEVICES", "FI_TCP_IFACE")
"""Variables that tell Open MPI, UCX and libfabric which interface to use."""
Function = TypeVar("Function", bound=Callable[..., Any])


def _named(function: Function) -> Function:
    """Raise MPI's errors as `D5Error`, with the rank."""

    @functools.wraps(function)
    def call(self: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return function(self, *arguments, **more)
        except MPI.Exception as error:
            where = str(arguments[0]) if function.__name__ == "_native" else function.__name__.strip("_")
            raise _failed(self.rank, where, error) from error

    return call  # type: ignore[return-value]


def _failed(rank: int, where: str, error: MPI.Exception) -> D5Error:
    return D5Error(
        f"rank {rank}: MPI's {error.Get_error_string()}",
        where=where,
        hint="Another rank may have ended or called something else: see its log.",
    )


class _Pending(Request):
    def __init__(self, rank: int, peer: int, content: list[Any], requests: list[MPI.Request]) -> None:
        self.rank, self._peer, self._content, self._requests = rank, peer, content, requests

    @_named
    def _wait(self) -> int:
        for request in self._requests:
            request.Wait()
        self._requests = []
        return self._peer


class _PendingReceipt(_Pending):
    @_named
    def _wait(self) -> int:
        for (buffer, _), request in zip(self._content, self._requests, strict=False):
            status = MPI.Status()
            request.Wait(status)
            self._peer = _source(self.rank, status, buffer.nbytes)
        self._requests = []
        return self._peer


def _source(rank: int, status: MPI.Status, expected: int) -> int:
    source, received = status.source, status.Get_count(MPI.BYTE)
    if received != expected:
        raise D5Error(f"rank {rank} expects {expected} bytes of rank {source}, which sent {received}")
    return source


class MpiCommunicator(Communicator):
    """A duplicate of an MPI communicator, so that other code's messages never match ours."""

    name = "mpi"

    def __init__(self, algorithm: str, of: MPI.Comm = MPI.COMM_WORLD, hosts: Sequence[str] | None = None) -> None:
        self._comm = of.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._sums: dict[np.dtype, tuple[MPI.Datatype, MPI.Op]] = {}
        self._seen: tuple[Any, Any, Any, Any] = None, None, None, None
        self._reduced = self._comm.Allreduce
        names = np.zeros((self._comm.size, HOST_BYTES), np.uint8)
        own = MPI.Get_processor_name().encode()[:HOST_BYTES]
        names[self._comm.rank, : len(own)] = np.frombuffer(own, np.uint8)
        self._comm.Allgather(MPI.IN_PLACE, names)
        found = [name.tobytes().rstrip(b"\0").decode() for name in names]
        super().__init__(self._comm.rank, self._comm.size, hosts or found, algorithm, ALGORITHMS[algorithm])
        _unname_segments(self._comm)
        library = MPI.Get_library_version().partition(",")[0].partition("\n")[0].strip()
        self.network = {"transport": library, **named_interface(OWN_VARIABLES)}

    def close(self) -> None:
        """Free the duplicate communicator and the custom sum operations."""
        for datatype, op in self._sums.values():
            if not op.is_predefined:
                op.Free()
                datatype.Free()
        self._seen = None, None, None, None
        self._sums = {}
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()

    def all_reduce(self, array: np.ndarray) -> None:
        """See `Communicator.all_reduce`; reuses the MPI description of a repeated small array."""
        seen, dtype, buffer, op = self._seen
        if array is not seen or array.dtype is not dtype or self._outermost is not None:
            super().all_reduce(array)
            return
        traffic = self._begin("all_reduce", array.nbytes)
        traffic.opaque_calls += 1
        start = perf_counter()
        try:
            self._reduced(IN_PLACE, buffer, op)
        except MPI.Exception as error:
            raise _failed(self.rank, "all_reduce", error) from error
        finally:
            traffic.seconds += perf_counter() - start
            self._outermost = None

    @_named
    def _send(self, array: np.ndarray, to: int, tag: int) -> None:
        for piece in _pieces(array):
            self._comm.Send(piece, to, tag)

    @_named
    def _receive(self, array: np.ndarray, source: int, tag: int) -> int:
        status = MPI.Status()
        for piece in _pieces(array):
            self._comm.Recv(piece, MPI.ANY_SOURCE if source == ANY else source, tag, status)
            source = _source(self.rank, status, piece[0].nbytes)
        return source

    @_named
    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        pieces = _pieces(array)
        return _Pending(self.rank, to, pieces, [self._comm.Isend(piece, to, tag) for piece in pieces])

    @_named
    def _ireceive(self, array: np.ndarray, source: int, tag: int) -> Request:
        pieces = _pieces(array)
        if source == ANY:
            if len(pieces) > 1:
                raise D5Error(f"a message of any rank has at most {PIECE} bytes; receive it with `receive`")
            source = MPI.ANY_SOURCE
        requests = [self._comm.Irecv(piece, source, tag) for piece in pieces]
        return _PendingReceipt(self.rank, source, pieces, requests)

    def _chosen(self, call: str, array: np.ndarray) -> Collective | None:
        chosen = self._collectives.get(call)
        if chosen is None and array.nbytes > PIECE and call in ("reduce_scatter", "all_gather", "all_to_all"):
            return DEFAULTS[call]  # one call cannot be divided, nor count that far
        return chosen

    @_named
    def _native(self, call: str, array: np.ndarray, **more: Any) -> None:
        comm = self._comm
        if call == "all_reduce" and array.nbytes <= PIECE:
            datatype, op = self._sum(array)
            described = (_buffer(array), datatype)
            comm.Allreduce(IN_PLACE, described, op)
            if array.nbytes <= SMALL:
                self._seen = array, array.dtype, described, op
        elif call == "barrier":
            comm.Barrier()
        elif call == "broadcast":
            for piece in _pieces(array):
                comm.Bcast(piece, more["root"])
        elif call == "all_to_all":
            comm.Alltoall(_bytes(array), _bytes(more["taken"]))
        elif call == "all_gather":
            counts = [(s.stop - s.start) * array.itemsize for s in segments(array.size, self.size)]
            comm.Allgatherv(MPI.IN_PLACE, [_bytes(array)[0], counts, MPI.BYTE])
        else:
            datatype, op = self._sum(array)
            if call == "reduce_scatter":
                own = segments(array.size, self.size)
                counts, mine, flat = [s.stop - s.start for s in own], own[self.rank], array.reshape(-1)
                comm.Reduce_scatter(MPI.IN_PLACE, [_buffer(flat), datatype], counts, op)
                flat[mine] = flat[: mine.stop - mine.start]
                return
            for flat in [array] if array.nbytes <= PIECE else _divided(array.reshape(-1), PIECE // array.itemsize):
                buffer = [_buffer(flat), datatype]
                if call == "all_reduce":
                    comm.Allreduce(MPI.IN_PLACE, buffer, op)
                elif self.rank == more["root"]:
                    comm.Reduce(MPI.IN_PLACE, buffer, op, more["root"])
                else:
                    comm.Reduce(buffer, None, op, more["root"])

    def _sum(self, array: np.ndarray) -> tuple[MPI.Datatype, MPI.Op]:
        """Return MPI's type and its sum; NumPy's sum for a type that MPI lacks."""
        found = self._sums.get(array.dtype)
        if found is None:
            found = self._sums[array.dtype] = _known(array.dtype) or _own(array.dtype)
        return found


def _unname_segments(comm: MPI.Comm) -> None:
    """Remove the names of Open MPI's shared memory once all ranks of this host have opened it.

    Otherwise a killed job leaves 16 MiB per rank in /dev/shm.
    """
    local, found = comm.Split_type(MPI.COMM_TYPE_SHARED), _segments()
    all_open = np.array([len(found) >= local.size], np.uint8)
    local.Allreduce(MPI.IN_PLACE, all_open, MPI.MIN)
    own = [each for each in found if each.suffix == f".{local.rank}"]
    local.Free()
    for path in own if all_open[0] else ():
        path.unlink(missing_ok=True)


def _segments() -> list[Path]:
    """Return the files of shared memory that this process has opened and that have a name."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if SEGMENT.search(line)}
    return [path for path in paths if path.exists()]


def _known(dtype: np.dtype) -> tuple[MPI.Datatype, MPI.Op] | None:
    if dtype.kind not in "iufc":  # bfloat16 is of kind V
        return None
    try:
        datatype = MPI.Datatype.fromcode(dtype.char)
    except ValueError:
        return None
    return None if datatype == MPI.DATATYPE_NULL else (datatype, MPI.SUM)


def _own(dtype: np.dtype) -> tuple[MPI.Datatype, MPI.Op]:
    def add(given: Any, both: Any, _: MPI.Datatype) -> None:
        total = np.frombuffer(both, np.uint8).view(dtype)
        np.add(np.frombuffer(given, np.uint8).view(dtype), total, out=total)

    return MPI.BYTE.Create_contiguous(dtype.itemsize).Commit(), MPI.Op.Create(add, commute=True)


def _buffer(array: np.ndarray) -> np.ndarray:
    """Return the array in a type that has the buffer protocol."""
    return array.reshape(-1).view(np.uint8) if isinstance(array, np.ndarray) and array.dtype.kind == "V" else array


def _bytes(array: np.ndarray) -> list[Any]:
    if isinstance(array, np.ndarray):
        if not array.flags.c_contiguous:
            raise D5Error("a message needs a contiguous array", hint="Give it numpy.ascontiguousarray(array).")
        return [array.reshape(-1).view(np.uint8), MPI.BYTE]
    if not takes_device_arrays():
        raise D5Error(
            "this MPI does not report CUDA support",
            hint="Build MPI with CUDA and mpi4py against it, or use --communicator nccl.",
        )
    return [array, MPI.BYTE]


def _pieces(array: np.ndarray) -> list[Any]:
    """Return the array's bytes, in messages that MPI can count."""
    whole, datatype = _bytes(array)
    if array.nbytes <= PIECE:
        return [[whole, datatype]]
    return [[piece, datatype] for piece in _divided(whole, PIECE)]


def _divided(flat: np.ndarray, length: int) -> list[np.ndarray]:
    return [flat[start : start + length] for start in range(0, len(flat), length)]


@functools.cache
def takes_device_arrays() -> bool:
    """Return whether ``MPIX_Query_cuda_support`` reports that MPI takes arrays on a CUDA device."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query and query())


def connect(
    algorithm: str,
    rank: int | None,
    size: int | None,
    meeting: Path | None,
    timeout_s: float,
    hosts: Sequence[str] | None,
) -> Communicator:
    """Open the communicator; see `d5suite.distributed.communicators.open_communicator`."""
    world = MPI.COMM_WORLD
    if (rank, size) not in ((None, None), (world.rank, world.size)):
        raise ConfigurationError(
            f"this is to be rank {rank} of {size}, but MPI says {world.rank} of {world.size}",
            hint="Start all ranks with mpiexec, of the MPI that mpi4py uses.",
        )
    return MpiCommunicator(algorithm, world, hosts)
