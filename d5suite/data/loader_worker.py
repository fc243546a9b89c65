"""What a loader's worker process runs: take the next few images, decode, transform, write them into shared memory.

Started by `d5suite.data.loader`, never by hand. Imports NumPy and Pillow and whatever the transform's module imports,
so that a worker is ready quickly. The protocol:

- File descriptors, inherited: the shared memory, the task socket that all workers read (whoever is free takes the next
  message whole), and this worker's own reply socket.
- Messages are JSON, one per packet. The first on the reply socket is a `Setup`. Then each task is ``[batch number,
  slot, samples]`` with samples ``[row, epoch, index, location]``, answered by ``[batch number, rows done, failures]``
  with failures ``[row, *DataError's arguments]``.
- A closed socket means the end.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import mmap
import os
import socket
from typing import Any, NamedTuple

import numpy as np

from d5suite.data.decode import decode_image
from d5suite.data.reading import Location, Reader, name_of
from d5suite.data.transforms import Transform, sample_rng
from d5suite.errors import ConfigurationError, DataError

MESSAGE_BYTES = 1 << 18
HEADER_BYTES = 1 << 16
"""Start of the shared memory: one int64 per worker, 1 + the index of the image it is working on, or 0."""


class Setup(NamedTuple):
    """What a worker must know before its first task."""

    transform: dict[str, Any]
    seed: int
    batch_shape: tuple[int, int, int, int]
    slot_bytes: int
    number: int
    parent: int


def describe(transform: Transform) -> dict[str, Any]:
    """Describe a transform by its class and settings, for `restore` in another process."""
    kind = type(transform)
    if not dataclasses.is_dataclass(kind) or "<" in kind.__qualname__ or kind.__module__ == "__main__":
        raise ConfigurationError(
            f"{kind.__qualname__} cannot be sent to worker processes",
            hint="Make it a dataclass at the top level of an importable module, or use workers=0.",
        )
    settings = {field.name: getattr(transform, field.name) for field in dataclasses.fields(kind) if field.init}
    return {"module": kind.__module__, "name": kind.__qualname__, "settings": settings}


def restore(description: dict[str, Any]) -> Transform:
    """Make the transform that `describe` described."""
    transform: Transform = getattr(importlib.import_module(description["module"]), description["name"])(
        **description["settings"]
    )
    return transform


def load_sample(
    location: Location, reader: Reader, transform: Transform, seed: int, epoch: int, index: int, out: np.ndarray
) -> None:
    """Decode one image and write its transform to `out`, float32 (3, size, size)."""
    if isinstance(location, str):
        image = decode_image(location)
    else:
        image = decode_image(reader.read(location, index), where=name_of(location))
    transform(image, sample_rng(seed, epoch, index), out)


def slot_array(memory: int, slot: int, slot_bytes: int, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Map one slot of the shared memory (a file descriptor) as float32 of `shape`; lives as long as the array."""
    mapped = mmap.mmap(memory, slot_bytes, offset=HEADER_BYTES + slot * slot_bytes)
    return np.frombuffer(mapped, np.float32, int(np.prod(shape))).reshape(shape)


def serve(memory: int, tasks_fd: int, replies_fd: int) -> None:
    """Serve tasks until the sockets are closed or the parent is gone."""
    tasks = socket.socket(fileno=tasks_fd)
    replies = socket.socket(fileno=replies_fd)
    message = replies.recv(MESSAGE_BYTES)
    if not message:  # closed before it began
        return
    setup = Setup(*json.loads(message))
    transform = restore(setup.transform)
    current = np.frombuffer(mmap.mmap(memory, HEADER_BYTES), np.int64)
    slots: dict[int, np.ndarray] = {}
    reader = Reader()
    while True:
        try:
            message = tasks.recv(MESSAGE_BYTES)
        except BlockingIOError:  # the receive timeout: a forked copy of the parent may hold the socket open
            if os.getppid() != setup.parent:
                return
            continue
        if not message:
            return
        batch, slot, samples = json.loads(message)
        if slot not in slots:
            slots[slot] = slot_array(memory, slot, setup.slot_bytes, setup.batch_shape)
        failures = []
        for row, epoch, index, location in samples:
            current[setup.number] = index + 1
            try:
                load_sample(location, reader, transform, setup.seed, epoch, index, slots[slot][row])
            except DataError as error:
                failures.append((row, error.what, error.where, error.hint))
            except Exception as error:
                what = f"the transform failed: {type(error).__name__}: {error}"[:2000]
                failures.append((row, what, name_of(location), None))
        current[setup.number] = 0
        try:
            replies.send(json.dumps((batch, len(samples), failures)).encode())
        except OSError:  # the loader was closed meanwhile
            return
