"""What holds on every communicator; as a script, one rank of a transport that checks it.

``python checks.py NAME MEETING RANK SIZE`` (mpi knows rank and size by itself).
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.algorithms.costs import Cost, cost
from d5suite.distributed.communicators import open_communicator
from d5suite.errors import D5Error
from d5suite.levels.distributed import ANY, Communicator, segments

DTYPES = [np.dtype(name) for name in ("float16", ml_dtypes.bfloat16, "float32", "float64", "int32", "int64")]
LENGTHS = (0, 1, 2, 5, 12, 1000)


def values(rank: int, length: int, dtype: np.dtype) -> np.ndarray:
    """Small integers, which every type adds exactly in any order."""
    return np.random.default_rng([rank, length]).integers(-3, 4, length).astype(dtype)


def total(size: int, length: int, dtype: np.dtype) -> np.ndarray:
    """The sum over ranks."""
    return np.sum([values(rank, length, np.dtype(np.float64)) for rank in range(size)], 0).astype(dtype)


def same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert found.tobytes() == expected.tobytes(), f"{what}: {found} is not {expected}"


def check_collectives(c: Communicator, length: int, dtype: np.dtype, root: int) -> None:
    """Every collective gives the sum or the copy that it says, in place."""
    own, expected, what = (
        values(c.rank, length, dtype),
        total(c.size, length, dtype),
        f"rank {c.rank}, {length} {dtype}",
    )
    mine = segments(length, c.size)[c.rank]

    array = own.copy()
    c.all_reduce(array)
    same(array, expected, f"all_reduce, {what}")

    array = own.copy()
    c.reduce(array, root)
    if c.rank == root:
        same(array, expected, f"reduce, {what}")

    array = own.copy()
    c.broadcast(array, root)
    same(array, values(root, length, dtype), f"broadcast, {what}")

    array = own.copy()
    view = c.reduce_scatter(array)
    same(view, expected[mine], f"reduce_scatter, {what}")
    assert np.shares_memory(view, array) or not view.size

    array = np.zeros(length, dtype)
    array[mine] = expected[mine]
    c.all_gather(array)
    same(array, expected, f"all_gather, {what}")

    given = np.arange(c.size * length).astype(dtype) + dtype.type(c.rank)
    taken = np.empty_like(given)
    c.all_to_all(given, taken)
    back = np.empty_like(given)
    c.all_to_all(taken, back)
    same(back, given, f"all_to_all there and back, {what}")
    c.barrier()


def check_equal_bits(c: Communicator, length: int, dtype: np.dtype) -> None:
    """Sums that are rounded are rounded alike everywhere."""
    array = np.random.default_rng(c.rank).standard_normal(length).astype(dtype)
    c.all_reduce(array)
    digest = np.frombuffer(hashlib.sha256(array.tobytes()).digest(), np.uint8)
    of_all = np.zeros(c.size * digest.size, np.uint8)
    of_all[segments(of_all.size, c.size)[c.rank]] = digest
    c.all_gather(of_all)
    assert (of_all.reshape(c.size, -1) == digest).all(), f"{c.algorithm}, {length} {dtype}"


def check_arrays_again(c: Communicator) -> None:
    """What an array holds counts, however often it was given before."""
    for turn in (1, 2, 3):
        own = np.empty(3, np.float32)  # freed in each turn: the next may lie in its place
        for array in (own, own, own.view(np.int32), own.reshape(3, 1), np.empty(3, np.int32)):
            array[...] = -turn * (c.rank + 1)  # of int32 the bits of NaN
            c.all_reduce(array)
            assert (array == -turn * c.size * (c.size + 1) // 2).all(), f"turn {turn}: {array}"


def check_costs(c: Communicator, length: int, dtype: np.dtype, root: int) -> None:
    """Messages and bytes are counted, and equal those of the formulas."""
    calls: dict[str, tuple[int, dict[str, Any]]] = {
        "all_reduce": (length, {}),
        "reduce": (length, {"root": root}),
        "broadcast": (length, {"root": root}),
        "reduce_scatter": (length, {}),
        "all_gather": (length, {}),
        "all_to_all": (length * c.size, {"taken": np.empty(length * c.size, dtype)}),
        "barrier": (0, {}),
    }
    for name, (elements, more) in calls.items():
        c.traffic.clear()
        array = values(c.rank, elements, dtype)
        getattr(c, name)(*([] if name == "barrier" else [array]), **more)
        assert list(c.traffic) == [name]
        traffic, given = c.traffic[name], 0 if name == "barrier" else array.nbytes
        assert (traffic.calls, traffic.payload_bytes) == (1, given) and traffic.seconds > 0
        place: dict[str, Any] = {"rank": c.rank, "size": c.size, "length": elements, "itemsize": dtype.itemsize}
        expected = cost(c.algorithm, name, **place, root=more.get("root", 0), hosts=c.hosts)
        if traffic.opaque_calls:
            assert expected is None and c.name != "threads", f"{name} is the transport's own, not {c.algorithm}"
            expected = Cost()
        elif expected is None:
            expected = cost("default", name, **place, root=more.get("root", 0))
        found = Cost(*(getattr(traffic, field.name) for field in fields(Cost)))
        assert found == expected, f"{c.algorithm} {name}, {place}: {found}"


def check_messages(c: Communicator) -> None:
    """Messages of every kind arrive whole and in order, and are counted."""
    if c.size == 1:
        return
    c.traffic.clear()
    to, source = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    for dtype in DTYPES:
        given, taken = values(c.rank, 7, dtype), np.empty((7, 1), dtype)
        receipt = c.ireceive(taken, source)
        assert c.isend(given, to).wait() == to
        assert receipt.wait() == source
        same(taken, values(source, 7, dtype), "ireceive")
    # Messages with one tag keep their order; one with another tag does not get in between.
    pair = [np.empty(3), np.empty(3)]
    requests = [c.isend(np.full(3, number), to, tag) for number, tag in ((1.0, 5), (2.0, 5), (3.0, 6))]
    other = np.empty(3)
    assert c.receive(other, source, 6) == source
    for array in pair:
        c.receive(array, source, 5)
    assert [float(array[0]) for array in (*pair, other)] == [1.0, 2.0, 3.0]
    for request in requests:
        request.wait()
    # Rank 0 hears the others in any order.
    if c.rank == 0:
        heard = {}
        for _ in range(1, c.size):
            array = np.empty(2, np.int64)
            sender = c.receive(array, ANY, 9)
            heard[sender] = int(array[1])
        assert heard == {rank: rank * rank for rank in range(1, c.size)}
    else:
        c.send(np.array([0, c.rank * c.rank]), 0, 9)
    empty = np.empty(0)
    receipt = c.ireceive(empty, source, 11)
    c.isend(empty, to, 11).wait()
    receipt.wait()
    of_types = sum(7 * dtype.itemsize for dtype in DTYPES)
    sent, received = c.traffic["send"], c.traffic["receive"]
    at_root = c.size - 1 if c.rank == 0 else 0
    assert (sent.messages_sent, sent.bytes_sent) == (10 + (c.rank > 0), of_types + 72 + 16 * (c.rank > 0))
    assert (received.messages_received, received.bytes_received) == (10 + at_root, of_types + 72 + 16 * at_root)
    assert sent.calls == sent.messages_sent and sent.seconds > 0


def check_mpi(c: Communicator) -> None:
    """MPI's errors name the rank; messages in pieces are one message; a device needs CUDA."""
    from d5suite.distributed.communicators import mpi

    if c.rank == 1:
        c.send(np.zeros(2), 0)
        c.send(np.zeros(2), 0)
    elif c.rank == 0:
        with pytest.raises(D5Error, match="rank 0 expects 24 bytes of rank 1, which sent 16"):
            c.receive(np.zeros(3), 1)
        with pytest.raises(D5Error, match=r"receive: rank 0: MPI's MPI_ERR_TRUNCATE(.|\n)*see its log"):
            c.receive(np.zeros(1), 1)
    c.barrier()
    with pytest.raises(D5Error, match="does not report CUDA support"):
        c.send(cast(np.ndarray, SimpleNamespace(nbytes=8, __cuda_array_interface__={})), 0)
    whole, mpi.PIECE = mpi.PIECE, 48
    try:
        check_messages(c)
        for dtype in DTYPES:
            check_collectives(c, 100, dtype, root=1)
            check_costs(c, 100, dtype, root=1)
    finally:
        mpi.PIECE = whole


def check_nccl(meeting: Path, rank: int | None, size: int | None) -> None:
    """NCCL's communicator with Gloo in its place: the same calls of torch."""
    from d5suite.distributed.communicators.nccl import NcclCommunicator

    assert rank is not None and size is not None
    for algorithm in ("native", "ring", "parameter_server"):
        c = NcclCommunicator(algorithm, rank, size, meeting, 60, backend="gloo", device="cpu")
        for dtype in DTYPES[1:3]:
            for length in (0, 5, 12):
                check_collectives(c, length, dtype, root=1)
                check_costs(c, length, dtype, root=1)
        with pytest.raises(D5Error, match="a named rank only"):
            c.receive(np.zeros(1))
        c.close()


def check_lost_ranks(meeting: Path, rank: int, size: int) -> None:
    """A rank that does not come, or ends, is an error of the others."""
    meeting.mkdir(exist_ok=True)
    with pytest.raises(D5Error, match=f"rank {rank} could not reach all {size + 1} ranks within 0.5 s"):
        open_communicator("gloo", rank=rank, size=size + 1, meeting=meeting, timeout_s=0.5)

    def lose() -> None:
        c = open_communicator("gloo", rank=rank, size=size, meeting=meeting, timeout_s=60)
        if rank == size - 1:
            print("held", flush=True)
            os._exit(0)
        c.all_reduce(np.zeros(100))

    with pytest.raises(D5Error, match=f"rank {rank}: gloo: "):  # by then, or while connecting
        lose()


def main(name: str, meeting: str, rank: int | None = None, size: int | None = None) -> None:
    for algorithm in ALGORITHMS:
        hosts = ["a", "b", "a"] if algorithm == "hierarchical" else None
        c = open_communicator(name, algorithm, rank=rank, size=size, meeting=Path(meeting), timeout_s=60, hosts=hosts)
        native = algorithm == "native"
        if native:
            check_messages(c)
            check_arrays_again(c)
            if name == "mpi":
                check_mpi(c)
        for dtype in DTYPES if native else DTYPES[1:3]:
            for length in LENGTHS if native else LENGTHS[::2]:
                check_collectives(c, length, dtype, root=length % c.size)
            check_equal_bits(c, 1000, dtype)
            check_costs(c, 13, dtype, root=c.size - 1)
        c.close()
    if name == "gloo":
        check_nccl(Path(meeting), rank, size)
        assert rank is not None and size is not None
        check_lost_ranks(Path(meeting).with_name("lost"), rank, size)
    print("held")


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # MPI would wait for the other ranks, which wait for this one
