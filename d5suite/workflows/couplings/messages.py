"""Messages of the job's communicator: MPI, or d5suite's own transports.

A message is a header and its arrays. The reader acknowledges every message that it has taken, so
that at most ``capacity`` are under way. Nothing is sent blocking: a transport may end a send only
when it is received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from d5suite.levels.distributed import ANY, Request
from d5suite.workflows.couplings import base
from d5suite.workflows.couplings.base import END, HEADER, Channel

FIRST_TAG, HEADERS, ARRAYS, TAKEN, TAGS = 1000, 0, 1, 2, 3
"""Tags of a coupling: of headers, arrays and acknowledgements, after those of earlier couplings."""


def tag(channel: Channel, what: int) -> int:
    """Return the tag of a channel's headers, arrays or acknowledgements."""
    return FIRST_TAG + TAGS * channel.number + what


class Writer(base.Writer):
    """The end that sends."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._under_way: deque[tuple[Request, Request, np.ndarray, np.ndarray]] = deque()
        self._last: tuple[Request, np.ndarray] | None = None

    def await_room(self) -> None:
        if len(self._under_way) >= self.capacity:
            self._await_taken()

    def _await_taken(self) -> None:
        of, taken = self.channel.communicator, np.zeros(1, np.int64)
        of.receive(taken, self.channel.reader_rank, tag(self.channel, TAKEN))
        one, other, *_ = self._under_way.popleft()
        one.wait()
        other.wait()

    def write(self, header: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        of, to = self.channel.communicator, self.channel.reader_rank
        head, row = header.view(np.int64).copy(), self.channel.packed(arrays)
        self._under_way.append(
            (of.isend(head, to, tag(self.channel, HEADERS)), of.isend(row, to, tag(self.channel, ARRAYS)), head, row)
        )

    def end(self) -> None:
        last = np.full(HEADER.itemsize // 8, END, np.int64)
        of, to = self.channel.communicator, self.channel.reader_rank
        self._last = of.isend(last, to, tag(self.channel, HEADERS)), last

    def finish(self) -> None:
        while self._under_way:
            self._await_taken()
        if self._last is not None:
            self._last[0].wait()


class Reader(base.Reader):
    """The end that receives."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._header: np.ndarray | None = None
        self._taken: list[tuple[Request, np.ndarray]] = []

    def await_message(self) -> None:
        if self._header is None:
            receive_header([self], self.channel.writer_rank)

    def is_ready(self) -> bool:
        return self._header is not None

    def arrived(self, header: np.ndarray) -> None:
        """Note a header that has come."""
        self._header = header

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        assert self._header is not None
        header, self._header = self._header.view(HEADER), None
        if header["number"][0] == END:
            self.ended = True
            return None
        of, source = self.channel.communicator, self.channel.writer_rank
        row = np.empty(self.channel.nbytes, np.uint8)
        of.receive(row, source, tag(self.channel, ARRAYS))
        number = header["number"].copy()
        self._taken.append((of.isend(number, source, tag(self.channel, TAKEN)), number))
        while len(self._taken) > self.channel.capacity:  # the writer has received this one
            self._taken.pop(0)[0].wait()
        return header, self.channel.unpacked(row)

    def finish(self) -> None:
        for request, _ in self._taken:
            request.wait()


def receive_header(readers: Sequence[Reader], source: int = ANY) -> Reader:
    """Receive the next header of a coupling, from any of its writers, and return its reader."""
    channel = readers[0].channel
    header = np.empty(HEADER.itemsize // 8, np.int64)
    sender = channel.communicator.receive(header, source, tag(channel, HEADERS))
    reader = next(each for each in readers if each.channel.writer_rank == sender)
    reader.arrived(header)
    return reader
