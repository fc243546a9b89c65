"""What a loader's worker process runs: take the next few images, decode, transform, write them into shared memory.

Started by `d5suite.data.loader`, never by hand. Imports NumPy and Pillow and whatever the transform's module imports, so
that a worker is ready quickly. The protocol:

- File descriptors, inherited: the shared memory, the task socket that all workers read (whoever is free takes the next
  message whole), and this worker's own reply socket.
- The first message on the reply socket is a `Setup`. Then each task is ``(batch number, slot, samples)`` with samples
  ``(row, epoch, index, file)``, answered by ``(batch number, rows done, failures)`` with failures ``(row, DataError
  arguments)``.
- A closed socket means the end.

Messages are pickled: both ends are processes of the same program, joined by private sockets, and nothing that was read
from a file is ever unpickled.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import sys
from typing import NamedTuple

import numpy as np

from d5suite.data.decode import decode_image
from d5suite.data.transforms import Transform, sample_rng
from d5suite.errors import DataError

MESSAGE_BYTES = 1 << 18
HEADER_BYTES = 1 << 16
"""Start of the shared memory: one int64 per worker, 1 + the index of the image it is working on, or 0."""


class Setup(NamedTuple):
    """What a worker must know before its first task."""

    transform: bytes
    seed: int
    batch_shape: tuple[int, int, int, int]
    slot_bytes: int
    number: int
    parent: int


def load_sample(file: str, transform: Transform, seed: int, epoch: int, index: int, out: np.ndarray) -> None:
    """Decode one file and write its transform to `out`, float32 (3, size, size)."""
    transform(decode_image(file), sample_rng(seed, epoch, index), out)


def slot_array(memory: int, slot: int, slot_bytes: int, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Map one slot of the shared memory (a file descriptor) as float32 of `shape`; lives as long as the array."""
    mapped = mmap.mmap(memory, slot_bytes, offset=HEADER_BYTES + slot * slot_bytes)
    return np.frombuffer(mapped, np.float32, int(np.prod(shape))).reshape(shape)


def main(memory: int, tasks_fd: int, replies_fd: int) -> None:
    """Serve tasks until the sockets are closed or the parent is gone."""
    tasks = socket.socket(fileno=tasks_fd)
    replies = socket.socket(fileno=replies_fd)
    setup: Setup = pickle.loads(replies.recv(MESSAGE_BYTES))
    transform: Transform = pickle.loads(setup.transform)
    current = np.frombuffer(mmap.mmap(memory, HEADER_BYTES), np.int64)
    slots: dict[int, np.ndarray] = {}
    while True:
        try:
            message = tasks.recv(MESSAGE_BYTES)
        except BlockingIOError:  # the receive timeout: a forked copy of the parent may hold the socket open
            if os.getppid() != setup.parent:
                return
            continue
        if not message:
            return
        batch, slot, samples = pickle.loads(message)
        if slot not in slots:
            slots[slot] = slot_array(memory, slot, setup.slot_bytes, setup.batch_shape)
        failures = []
        for row, epoch, index, file in samples:
            current[setup.number] = index + 1
            try:
                load_sample(file, transform, setup.seed, epoch, index, slots[slot][row])
            except DataError as error:
                failures.append((row, error.what, error.where, error.hint))
            except Exception as error:
                failures.append((row, f"the transform failed: {type(error).__name__}: {error}"[:2000], file, None))
        current[setup.number] = 0
        try:
            replies.send(pickle.dumps((batch, len(samples), failures)))
        except OSError:  # the loader was closed meanwhile
            return


def run(arguments: list[str]) -> None:
    """Entry point of the process; the parent has put its own ``sys.path`` in place already."""
    memory, tasks, replies = (int(text) for text in arguments)
    try:
        main(memory, tasks, replies)
    except (EOFError, ConnectionError):  # closed before it began
        sys.exit(0)
