"""What all couplings share: fields, messages, the two ends of a channel, and their accounts.

A channel joins one rank of a component to one rank of another. Its messages arrive in order, each
once; only a policy may discard some, and the writer counts those. Times are seconds of
`time.perf_counter_ns`. Imports NumPy, `d5suite.errors` and its package.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from d5suite.errors import D5Error
from d5suite.levels.distributed import Communicator
from d5suite.workflows.couplings import BLOCK, KEEP_LATEST

SHORTEST_S, LONGEST_S = 20e-6, 1e-3
"""Shortest and longest time between two looks for a message or for room."""

HEADER = np.dtype([("number", "<i8"), ("step", "<i8"), ("sent_ns", "<i8"), ("bytes", "<i8")])
"""What precedes the arrays of a message: its number in the channel (`END` after the last one), the
writer's step, when it was written, and how many bytes follow."""

END = -1


class CouplingError(D5Error):
    """Raised where a coupling cannot move its data."""


class Field(NamedTuple):
    """One array of a message.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        NumPy's name, such as ``float64``.
    unit : str
        Such as ``K``; ``1`` without a unit.
    """

    shape: tuple[int, ...]
    dtype: str = "float64"
    unit: str = "1"

    def __str__(self) -> str:
        """Return such as ``float64 (32, 32) in K``."""
        return f"{self.dtype} ({', '.join(map(str, self.shape))}) in {self.unit}"

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


Fields = Mapping[str, Field]
"""The arrays of a message by name, in order."""


class Message(NamedTuple):
    """What a reader takes.

    Attributes
    ----------
    source : int
        The rank of the writer in its component.
    number : int
        In its channel, from 0; discarded messages count.
    step : int
        The writer's.
    sent_ns : int
        When the writer began to write it, by the clock of rank 0.
    arrays : dict of str to numpy.ndarray
    """

    source: int
    number: int
    step: int
    sent_ns: int
    arrays: dict[str, np.ndarray]


@dataclass
class Account:
    """What one end of a coupling has moved, and how long that took.

    Attributes
    ----------
    messages, bytes, dropped : int
    wait_s, move_s : float
        Seconds in which it waited for the other side, and in which it copied.
    latencies_s : list of float
        For the reader, by message: from the start of writing to the end of reading.
    moves_s : list of float
        Seconds of copying, by message.
    """

    messages: int = 0
    bytes: int = 0
    dropped: int = 0
    wait_s: float = 0.0
    move_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    moves_s: list[float] = field(default_factory=list)


class Marks:
    """What both ends of a coupling do on one rank; a recording puts its own functions here.

    Attributes
    ----------
    proving : bool
        Whether ends keep a checksum of every message.
    """

    def __init__(self) -> None:
        self.proving = False

    def wait(self, function: Callable[[], Any]) -> Any:
        """Call what waits for the other side."""
        return function()

    def move(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call what copies data."""
        return function(*given)


@dataclass(frozen=True)
class Channel:
    """One channel as both of its ends know it.

    Attributes
    ----------
    coupling : str
    number : int
        Number of the coupling in the workflow; it makes tags and names unique.
    fields : mapping of str to Field
    writer, reader : int
        Ranks in their components.
    writer_rank, reader_rank : int
        Ranks in the job.
    capacity : int
        Messages that fit into the buffer.
    policy : str
    folder : Path
        That both ends see; for files, on a disk.
    communicator : Communicator
    marks : Marks
    """

    coupling: str
    number: int
    fields: Fields
    writer: int
    reader: int
    writer_rank: int
    reader_rank: int
    capacity: int
    policy: str
    folder: Path
    communicator: Communicator
    marks: Marks = field(default_factory=lambda: Marks())

    @property
    def name(self) -> str:
        """A name for files, unique in the workflow."""
        return f"{self.coupling}-{self.writer}-{self.reader}"

    @property
    def nbytes(self) -> int:
        """Bytes of a message without its header."""
        return sum(each.nbytes for each in self.fields.values())

    def packed(self, arrays: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Copy arrays into one row of bytes, as they follow a header."""
        out = np.empty(self.nbytes, np.uint8) if out is None else out
        at = 0
        for name, each in self.fields.items():
            out[at : at + each.nbytes].view(each.dtype)[:] = arrays[name].reshape(-1)
            at += each.nbytes
        return out

    def unpacked(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of a row of bytes; they share its memory."""
        found, at = {}, 0
        for name, each in self.fields.items():
            found[name] = row[at : at + each.nbytes].view(each.dtype).reshape(each.shape)
            at += each.nbytes
        return found


def poll(ready: Callable[[], Any]) -> None:
    """Look again and again until something is true; sleep in between, longer each time."""
    pause = SHORTEST_S
    while not ready():
        time.sleep(pause)
        pause = min(LONGEST_S, 1.5 * pause)


class End:
    """One end of a channel.

    Attributes
    ----------
    channel : Channel
    waits : bool
        Whether it waits for the other side; another thread may ask.
    calls : int
        Puts or gets begun.
    digests : list of tuple of int
        While proving: number and checksum of every message.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.account = Account()
        self.waits = False
        self.calls = 0
        self.digests: list[tuple[int, int]] = []

    def connect(self) -> None:
        """Connect with the other end, once both exist."""

    def finish(self) -> None:
        """Release all resources, once the other end no longer needs them."""

    def _note(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        if self.channel.marks.proving:
            self.digests.append((number, zlib.crc32(self.channel.packed(arrays).tobytes())))

    def _await(self, function: Callable[[], Any]) -> Any:
        """Call what waits for the other side, and count its time."""
        self.waits, start = True, time.perf_counter_ns()
        try:
            return self.channel.marks.wait(function)
        finally:
            self.account.wait_s += (time.perf_counter_ns() - start) * 1e-9
            self.waits = False

    def _move(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call what copies data, and count its time."""
        start = time.perf_counter_ns()
        try:
            return self.channel.marks.move(function, *given)
        except OSError as error:
            raise CouplingError(
                f"coupling {self.channel.coupling!r} cannot move its data: {error.strerror or error}",
                where=str(error.filename or self.channel.folder),
                hint="Free some space, or choose another coupling.",
            ) from error
        finally:
            self.account.move_s += (time.perf_counter_ns() - start) * 1e-9


class Writer(End, ABC):
    """The end that gives."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.capacity = 1 if channel.policy == KEEP_LATEST else channel.capacity
        self._number = 0

    def put(self, step: int, arrays: Mapping[str, np.ndarray], offset_ns: int = 0) -> None:
        """Give a message; see `d5suite.workflows.ports.Out.put`."""
        self.calls += 1
        if self.channel.policy == BLOCK:
            self._await(self.await_room)
        else:
            self.account.dropped += self._move(self.make_room)
        sent_ns = time.perf_counter_ns() + offset_ns
        header = np.array([(self._number, step, sent_ns, self.channel.nbytes)], HEADER)
        self._note(self._number, arrays)
        before = self.account.move_s
        self._move(self.write, header, arrays)
        self.account.moves_s.append(self.account.move_s - before)
        self._number += 1
        self.account.messages += 1
        self.account.bytes += self.channel.nbytes

    def await_room(self) -> None:
        """Return when the buffer has room."""
        poll(lambda: not self.is_full())

    def is_full(self) -> bool:
        """Return whether the buffer has no room."""
        raise NotImplementedError

    def make_room(self) -> int:
        """Discard the oldest messages until there is room; return how many."""
        raise NotImplementedError

    @abstractmethod
    def write(self, header: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Put a message into the buffer, which has room."""

    @abstractmethod
    def end(self) -> None:
        """Tell the reader that no message follows."""


class Reader(End, ABC):
    """The end that takes."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.ended = False

    def get(self, offset_ns: int = 0) -> Message | None:
        """Take the next message; None after the last one."""
        while not self.ended:
            self._await(self.await_message)
            found = self.get_ready(offset_ns)
            if found is not None:  # it may have been discarded at the last moment
                return found
        return None

    def get_ready(self, offset_ns: int = 0) -> Message | None:
        """Take the message that is there; None if it was discarded, or none follows."""
        self.calls += 1
        before = self.account.move_s
        found = self._move(self.take)
        if found is None:
            return None
        (number, step, sent_ns, _), arrays = found[0][0].tolist(), found[1]
        self._note(number, arrays)
        self.account.messages += 1
        self.account.bytes += self.channel.nbytes
        self.account.latencies_s.append((time.perf_counter_ns() + offset_ns - sent_ns) * 1e-9)
        self.account.moves_s.append(self.account.move_s - before)
        return Message(self.channel.writer, number, step, sent_ns, arrays)

    def await_message(self) -> None:
        """Return when there is a message or none follows."""
        poll(self.is_ready)

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether `take` has something to say."""

    @abstractmethod
    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        """Take a message out of the buffer: header and arrays. None sets `ended`, or try again."""
