"""A loader's worker process: decode and transform images into shared memory.

`d5suite.data.loader` starts it. It may import only NumPy, Pillow and the transform's module, so
that it starts quickly. The protocol:

- Inherited file descriptors: the shared memory, the task socket that all workers read (a free
  worker takes the next message whole), and this worker's own reply socket.
- Messages are JSON, one per packet. The first one on the reply socket is a `LoaderSetup`. Then each
  task is ``[batch number, slot, samples]`` with samples ``[row, epoch, index, location]``. The
  answer is ``[batch number, rows done, failures, begin, end]`` with failures ``[row, *DataError's
  arguments]``, and begin and end of the work by `time.perf_counter_ns`.
- A closed socket ends the worker.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import mmap
import os
import socket
import time
from typing import Any, NamedTuple

import numpy as np

from d5suite.data.decode import decode_image
from d5suite.data.reading import FileLocation, ImageReader, name_of
from d5suite.data.transforms import Transform, sample_rng
from d5suite.errors import ConfigurationError, DataError

MESSAGE_BYTES = 1 << 18
HEADER_BYTES = 1 << 16
"""Head of the shared memory: one int64 per worker, 1 + the index of its current image, or 0."""


class LoaderSetup(NamedTuple):
    """The settings that a worker receives before its first task."""

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
    """Rebuild a transform from `describe`."""
    transform: Transform = getattr(importlib.import_module(description["module"]), description["name"])(
        **description["settings"]
    )
    return transform


def load_sample(
    location: FileLocation,
    reader: ImageReader,
    transform: Transform,
    seed: int,
    epoch: int,
    index: int,
    out: np.ndarray,
) -> None:
    """Decode one image and write its transform to `out`, float32 (3, size, size)."""
    if isinstance(location, str):
        image = decode_image(location)
    else:
        image = decode_image(reader.read(location, index), where=name_of(location))
    transform(image, sample_rng(seed, epoch, index), out)


def slot_array(memory: int, slot: int, slot_bytes: int, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Map one slot of the shared memory (a file descriptor) as float32 of `shape`."""
    mapped = mmap.mmap(memory, slot_bytes, offset=HEADER_BYTES + slot * slot_bytes)
    return np.frombuffer(mapped, np.float32, int(np.prod(shape))).reshape(shape)


def serve(memory: int, tasks_fd: int, replies_fd: int) -> None:
    """Serve tasks until the sockets close or the parent ends."""
    tasks = socket.socket(fileno=tasks_fd)
    replies = socket.socket(fileno=replies_fd)
    message = replies.recv(MESSAGE_BYTES)
    if not message:  # closed before the start
        return
    setup = LoaderSetup(*json.loads(message))
    transform = restore(setup.transform)
    current = np.frombuffer(mmap.mmap(memory, HEADER_BYTES), np.int64)
    slots: dict[int, np.ndarray] = {}
    reader = ImageReader()
    while True:
        try:
            message = tasks.recv(MESSAGE_BYTES)
        except BlockingIOError:  # timeout: a fork of the parent may hold the socket open
            if os.getppid() != setup.parent:
                return
            continue
        if not message:
            return
        begin = time.perf_counter_ns()
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
            replies.send(json.dumps((batch, len(samples), failures, begin, time.perf_counter_ns())).encode())
        except OSError:  # the loader was closed
            return
