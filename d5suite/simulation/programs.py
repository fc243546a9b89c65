"""What a rank does in a step: operations in streams. The engine plays them.

A stream is a thread of a rank. It computes, begins messages, waits for them, and waits for
operations of the rank's other streams. A collective is noted as one call; `expanded` replaces it by
the messages of its algorithm, which runs against a communicator that only notes them.

Imports NumPy, `d5suite.distributed`, `d5suite.levels` and `d5suite.errors`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from d5suite.distributed.algorithms import ALGORITHMS, DEFAULTS
from d5suite.levels.distributed import ANY, Communicator, Request

LAST = -2
"""As a peer: whichever rank's message the stream's last receive from `ANY` has taken."""


class OpKind(IntEnum):
    """The kind of an operation; the engine knows the same numbers, but for COLLECTIVE."""

    COMPUTE = 0
    ISEND = 1
    IRECV = 2
    WAIT = 3
    AFTER = 4
    COLLECTIVE = 5


class Op(NamedTuple):
    """One operation.

    Attributes
    ----------
    kind : int
        `OpKind`.
    peer : int
        For messages: the other rank, `ANY` or `LAST`. For AFTER: the rank's other stream.
    tag : int
        For messages.
    nbytes : int
    ref : int
        For WAIT: the operation of this stream that began the message. For AFTER: the operation of
        the other stream that must have ended. For COLLECTIVE: the root, or -1.
    seconds : float
        For COMPUTE.
    label : str
        What computes, or the collective's name.
    dtype : numpy.dtype or None
        For COLLECTIVE.
    """

    kind: int
    peer: int = -1
    tag: int = 0
    nbytes: int = 0
    ref: int = -1
    seconds: float = 0.0
    label: str = ""
    dtype: np.dtype | None = None


ARRAYS = "arrays"
"""Label of the copying and adding of arrays."""

Streams = list[list[Op]]
"""A rank's program; the first stream is its main thread."""


_touched = threading.local()

_moved: dict[int, list[tuple[int, int]]] = {}
"""By thread: bytes that it has read and written since it last said anything to a communicator, each
with the last operation of the main stream that it depends on."""


def touch(array: object) -> None:
    """Note that this thread has read an array: what follows depends on where it was computed."""
    if isinstance(array, Hollow):
        _touched.born = max(getattr(_touched, "born", -1), array.born)


def move(nbytes: int) -> None:
    """Note that this thread has read and written so many bytes of arrays."""
    _moved.setdefault(threading.get_ident(), []).append((getattr(_touched, "born", -1), nbytes))


def sized(value: object) -> int:
    """Return the bytes of an array; of a number, 0."""
    return value.nbytes if isinstance(value, Hollow | np.ndarray) else 0


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Keep what this thread has moved apart from what it moves in here."""
    thread = threading.get_ident()
    before = _moved.pop(thread, None)
    try:
        yield
    finally:
        _moved.pop(thread, None)
        if before:
            _moved[thread] = before


class Hollow:
    """An array without memory: shape and type only. Arithmetic notes the bytes that it would move.

    Supports the NumPy functions that schemes and algorithms use.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    born : int
        The operation of the main stream that computes it, or -1.
    """

    __slots__ = ("born", "dtype", "shape", "size")

    def __init__(self, shape: Sequence[int], dtype: Any, born: int = -1) -> None:
        self.shape, self.dtype, self.born = tuple(shape), np.dtype(dtype), born
        self.size = math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it would take."""
        return self.size * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Hollow]:
        return (Hollow(self.shape[1:], self.dtype, self.born) for _ in range(len(self)))

    def reshape(self, *shape: Any) -> Hollow:
        """Return the array in another shape."""
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return Hollow((self.size,) if tuple(wanted) == (-1,) else wanted, self.dtype, self.born)

    def copy(self) -> Hollow:
        """Return another one."""
        touch(self)
        move(2 * self.nbytes)
        return Hollow(self.shape, self.dtype, self.born)

    def __getitem__(self, key: Any) -> Hollow:
        if isinstance(key, slice):
            return Hollow((len(range(self.shape[0])[key]), *self.shape[1:]), self.dtype, self.born)
        if isinstance(key, int):
            return Hollow(self.shape[1:], self.dtype, self.born)
        return NotImplemented

    def __setitem__(self, key: Any, value: Any) -> None:
        touch(value)
        if value is not getattr(_touched, "result", None):  # NumPy copies nothing for a[i:j] += b
            move(self[key].nbytes + sized(value))

    def _in_place(self, other: Any) -> Hollow:
        touch(other)
        move(2 * self.nbytes + sized(other))
        _touched.result = self
        return self

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _in_place

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any, **more: Any) -> Any:
        for each in given:
            touch(each)
        out = more.get("out")
        found = out[0] if out else Hollow(self.shape, self.dtype, self.born)
        move(sum(map(sized, given)) + found.nbytes)
        return found

    def __array_function__(self, function: Any, types: Any, given: Any, more: Mapping[str, Any]) -> Any:
        if function is np.copyto:
            touch(given[1])
            move(2 * sized(given[0]))
            return None
        if function in (np.empty_like, np.zeros_like):
            shape = more.get("shape")
            return Hollow(self.shape if shape is None else np.atleast_1d(shape).tolist(), self.dtype)
        return NotImplemented


class _Noted(Request):
    """A message of which only the beginning is noted; to wait for it is another operation."""

    __slots__ = ("_at", "_by", "_ops", "_other")

    def __init__(self, by: NotingCommunicator, ops: list[Op], other: int) -> None:
        self._by, self._ops, self._at, self._other = by, ops, len(ops) - 1, other

    def wait(self) -> int:
        self._by.work()
        self._ops.append(Op(3, -1, 0, 0, self._at))
        return self._other

    _wait = wait


class Served(Exception):
    """Raised once all steps are noted, to stop a server that would serve forever."""


class NotingCommunicator(Communicator):
    """A rank's end of a communicator that moves nothing: it notes what is asked of it.

    Threads have a stream each. A thread other than the first waits, before a message, a collective
    or work on arrays, for the operation that computed what it has read since.

    Parameters
    ----------
    rank, size : int
    hosts : sequence of str
    algorithm : str
    bytes_per_s : float
        With which arrays are copied and added; infinite: that takes no time.
    """

    name = "noting"

    def __init__(
        self, rank: int, size: int, hosts: Sequence[str], algorithm: str, bytes_per_s: float = math.inf
    ) -> None:
        super().__init__(rank, size, hosts, algorithm, {**DEFAULTS, **ALGORITHMS[algorithm]})
        self.streams: Streams = [[]]
        self._bytes_per_s = bytes_per_s
        self._threads = {threading.get_ident(): 0}
        self._seen: list[int] = [-1]  # by stream: of the main stream, what it has waited for
        self._joined: dict[int, int] = {}
        self._base = 0  # operations of the main stream that are forgotten
        self.left = -1  # headers that a server still takes; -1: any number
        self.said: dict[int, np.ndarray] = {}  # arrays with memory that were sent, by tag
        self.heard: Callable[[int], Mapping[int, np.ndarray]] | None = None  # what another rank says
        self._turn = size - 1  # whose message a receive from anyone takes next, while noting
        self._last = -1

    def stream(self) -> int:
        """Return the number of this thread's stream."""
        number = self._threads.setdefault(threading.get_ident(), len(self.streams))
        if number == len(self.streams):
            self.streams.append([])
            self._seen.append(-1)
        return number

    def compute(self, seconds: float, label: str) -> int:
        """Note computing on the main stream, and return the operation's number."""
        self.work()
        self.streams[0].append(Op(OpKind.COMPUTE, seconds=seconds, label=label))
        return self._base + len(self.streams[0]) - 1

    def spend(self, seconds: float, label: str) -> None:
        """Note computing of this thread on what it has read."""
        if seconds > 0:
            self._ops(None).append(Op(OpKind.COMPUTE, seconds=seconds, label=label))

    def work(self) -> None:
        """Note, as computing, what this thread has moved since its last operation."""
        self._work(threading.get_ident(), self.stream())

    def _work(self, thread: int, number: int) -> None:
        moved = _moved.pop(thread, None)
        if not moved or self._bytes_per_s == math.inf:
            return
        seen = self._seen[number] if number else math.inf
        for ready in (True, False):
            own = [(born - self._base, nbytes) for born, nbytes in moved if (born - self._base <= seen) == ready]
            if own:
                self._after(number, max(own)[0])
                seconds = sum(nbytes for _, nbytes in own) / self._bytes_per_s
                self.streams[number].append(Op(OpKind.COMPUTE, seconds=seconds, label=ARRAYS))

    def _after(self, number: int, born: int) -> None:
        """Note that another stream waits for what the main stream has computed."""
        if number and born > self._seen[number]:
            self._seen[number] = born
            self.streams[number].append(Op(OpKind.AFTER, peer=0, ref=born))

    def join(self) -> None:
        """Note that the main stream waits for all operations of the other streams."""
        for thread, number in tuple(self._threads.items()):
            self._work(thread, number)
        for number, ops in enumerate(self.streams[1:], 1):
            if len(ops) > self._joined.get(number, 0):
                self._joined[number] = len(ops)
                self.streams[0].append(Op(OpKind.AFTER, peer=number, ref=len(ops) - 1))

    def forget(self) -> None:
        """Forget all that was noted, but not the threads."""
        self.join()
        self._base += len(self.streams[0])
        for ops in self.streams:
            ops.clear()
        self._joined.clear()
        self._seen = [-1] * len(self.streams)

    def _ops(self, array: object) -> list[Op]:
        touch(array)
        self.work()
        number = self.stream()
        self._after(number, getattr(_touched, "born", -1) - self._base)
        return self.streams[number]

    def _peer(self, peer: int) -> int:
        return LAST if peer == self._last and peer >= 0 else peer

    def isend(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        """See `Communicator.isend`."""
        ops = self._ops(array)
        if isinstance(array, np.ndarray):
            self.said[tag] = array.copy()
        ops.append(Op(OpKind.ISEND, self._peer(to), tag, array.nbytes))
        return _Noted(self, ops, to)

    def ireceive(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        """See `Communicator.ireceive`."""
        self.work()
        number = self.stream()
        ops = self.streams[number]
        ops.append(Op(OpKind.IRECV, self._peer(source), tag, array.nbytes))
        return _Noted(self, ops, source)

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        """See `Communicator.send`: it returns once the message has arrived."""
        self.isend(array, to, tag).wait()

    def receive(self, array: np.ndarray, source: int = ANY, tag: int = 0) -> int:
        """See `Communicator.receive`.

        An array with memory gets what this rank has said with the tag, or else what the other one
        says.
        """
        if isinstance(array, np.ndarray):
            if self.left == 0:
                raise Served
            self.left -= 1
            said = self.said.get(tag)
            if said is None and self.heard is not None:
                said = self.heard(1 if source == ANY else source).get(tag)
            if said is not None:
                array[...] = said
        if source != ANY:
            return self.ireceive(array, source, tag).wait()
        self._last = -1
        self.ireceive(array, ANY, tag).wait()
        self._turn = self._turn % (self.size - 1) + 1  # ranks 1, 2, …: rank 0 serves
        self._last = self._turn
        return self._turn

    def _collective(self, call: str, array: np.ndarray, **more: Any) -> None:
        self._ops(array).append(
            Op(OpKind.COLLECTIVE, nbytes=array.nbytes, ref=more.get("root", -1), label=call, dtype=array.dtype)
        )

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the public methods note everything")

    _send = _receive = _isend = _ireceive = _native = _unused


class _Expanding(NotingCommunicator):
    """Carries out collectives, in one stream."""

    def __init__(self, *given: Any, ops: list[Op]) -> None:
        super().__init__(*given)
        self.streams, self.ops = [ops], ops

    def _ops(self, array: object) -> list[Op]:
        self.work()
        return self.ops

    def work(self) -> None:
        if _moved:
            self._work(threading.get_ident(), 0)

    def stream(self) -> int:
        return 0

    def isend(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        self._ops(array).append(Op(1, to, tag, array.nbytes))
        return _Noted(self, self.ops, to)

    def ireceive(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        self._ops(array).append(Op(2, source, tag, array.nbytes))
        return _Noted(self, self.ops, source)

    def receive(self, array: np.ndarray, source: int = ANY, tag: int = 0) -> int:
        return self.ireceive(array, source, tag).wait()

    def _collective(self, call: str, array: np.ndarray, **more: Any) -> None:
        self._collectives[call](self, array, **more)


@dataclass(frozen=True)
class Noted:
    """A rank's program.

    Attributes
    ----------
    streams : Streams
    marks : list of int
        How many operations of the main stream precede the end of each step; none on a rank that
        serves.
    """

    streams: Streams
    marks: list[int]


def expanded(
    noted: Noted, rank: int, size: int, hosts: Sequence[str], algorithm: str, multiple: int = 1, *,
    bytes_per_s: float = math.inf,
) -> Noted:  # fmt: skip
    """Replace collectives by the messages of their algorithm on one rank.

    Parameters
    ----------
    noted : Noted
    rank, size : int
    hosts : sequence of str
        By rank; empty for one host each.
    algorithm : str
    multiple : int
        Arrays are lengthened to a multiple of so many elements, so that all segments are equal.
    bytes_per_s : float
        With which arrays are copied and added.
    """
    found: Streams = []
    moved: list[dict[int, int]] = []
    for ops in noted.streams:
        made: list[Op] = []
        places: dict[int, int] = {}
        communicator = _Expanding(rank, size, hosts, algorithm, bytes_per_s, ops=made)
        for index, op in enumerate(ops):
            if op.kind == OpKind.COLLECTIVE:
                assert op.dtype is not None
                length = -(-op.nbytes // op.dtype.itemsize)
                array: Any = Hollow((-(-length // multiple) * multiple,), op.dtype)
                communicator._collective(op.label, array, **({"root": op.ref} if op.ref >= 0 else {}))
                communicator.work()
            else:
                made.append(op._replace(ref=places[op.ref]) if op.kind == OpKind.WAIT else op)
            places[index] = len(made) - 1
        found.append(made)
        moved.append(places)
    for number, made in enumerate(found):
        found[number] = [op._replace(ref=moved[op.peer][op.ref]) if op.kind == OpKind.AFTER else op for op in made]
    return Noted(found, [moved[0][mark - 1] + 1 for mark in noted.marks])


@dataclass
class Programs:
    """The programs of all ranks that are simulated.

    Attributes
    ----------
    streams : list of Streams
        By simulated rank; peers are simulated ranks.
    ranks : list of int
        How many real ranks each stands for.
    members : list of int
        By real rank: the simulated one.
    lengthened : bool
        Whether arrays were lengthened, so that segments are equal.
    marks : list of list of int
        By simulated rank: how many operations of its main stream precede the end of each step.
    """

    streams: list[Streams]
    ranks: list[int]
    members: Sequence[int]
    lengthened: bool = False
    marks: list[list[int]] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """Messages that are simulated."""
        return sum(op[0] == 1 for rank in self.streams for ops in rank for op in ops)  # ISEND, which compares slowly
