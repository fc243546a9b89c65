"""A ring of messages in memory that both processes map: for ranks of one host.

It is a file in the folder in which the ranks meet, which lies in memory (``/dev/shm``) where there
is such a folder, and is removed with it, however the job ends. A lock of the file orders all
accesses; the system releases it if a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from d5suite.workflows.couplings import BLOCK, KEEP_LATEST, base
from d5suite.workflows.couplings.base import HEADER, Channel

FIRST, NEXT, OVER, WORDS = 0, 1, 2, 8
"""Places in the head of the ring: the oldest message, the next one, whether none follows; and the
number of places, 64 bits each."""


class _Ring:
    """The ring as one process sees it."""

    def __init__(self, channel: Channel, *, make: bool) -> None:
        self.channel = channel
        self.capacity = 1 if channel.policy == KEEP_LATEST else channel.capacity
        self._slot = HEADER.itemsize + -(-channel.nbytes // 8) * 8
        path = Path(channel.folder, f"{channel.name}.ring")
        size = 8 * WORDS + self.capacity * self._slot
        self._file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
        if make:
            os.posix_fallocate(self._file, 0, size)  # a full memory is seen now
        self._map = mmap.mmap(self._file, size)
        self.head = np.frombuffer(self._map, np.int64, WORDS)
        self._slots = np.frombuffer(self._map, np.uint8, offset=8 * WORDS).reshape(self.capacity, self._slot)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def waiting(self) -> int:
        """Messages in the ring."""
        with self.locked():
            return int(self.head[NEXT] - self.head[FIRST])

    def slot(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return header and bytes of a message."""
        row = self._slots[number % self.capacity]
        return row[: HEADER.itemsize].view(HEADER), row[HEADER.itemsize : HEADER.itemsize + self.channel.nbytes]

    def close(self) -> None:
        del self.head, self._slots
        self._map.close()
        os.close(self._file)


class Writer(base.Writer):
    """The end that writes into the ring."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._ring = self._move(lambda: _Ring(channel, make=True))

    def is_full(self) -> bool:
        return self._ring.waiting >= self.capacity

    def make_room(self) -> int:
        with self._ring.locked():
            more = int(self._ring.head[NEXT] - self._ring.head[FIRST]) - self.capacity + 1
            self._ring.head[FIRST] += max(0, more)
        return max(0, more)

    def write(self, header: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        ring = self._ring
        place, row = ring.slot(int(header["number"][0]))
        place[:] = header
        self.channel.packed(arrays, row)  # nobody reads this slot before the next line
        with ring.locked():
            ring.head[NEXT] += 1

    def end(self) -> None:
        with self._ring.locked():
            self._ring.head[OVER] = 1

    def finish(self) -> None:
        self._ring.close()


class Reader(base.Reader):
    """The end that takes out of the ring."""

    def connect(self) -> None:
        self._ring = _Ring(self.channel, make=False)

    def is_ready(self) -> bool:
        return self._ring.waiting > 0 or bool(self._ring.head[OVER])

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        ring = self._ring
        with ring.locked():
            first, is_empty = int(ring.head[FIRST]), ring.head[FIRST] == ring.head[NEXT]
            if is_empty:
                self.ended = bool(ring.head[OVER])
                return None
            if self.channel.policy != BLOCK:  # the writer may discard what is being read
                header, row = (each.copy() for each in ring.slot(first))
                ring.head[FIRST] = first + 1
                return header, self.channel.unpacked(row)
        header, row = (each.copy() for each in ring.slot(first))
        with ring.locked():
            ring.head[FIRST] = first + 1
        return header, self.channel.unpacked(row)

    def finish(self) -> None:
        self._ring.close()
