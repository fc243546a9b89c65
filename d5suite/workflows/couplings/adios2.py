"""Streams of ADIOS2 (SST): one stream per channel, one step per message.

SST with ``QueueFullPolicy=Block`` holds a writer back while ``QueueLimit`` steps wait. Its calls
keep Python's interpreter to themselves while they wait, and the rank would seem to hang. So the
reader says through the communicator which messages it has taken, and the writer waits for that
before it begins a step. ``QueueLimit`` has one step more, for the message that says that none
follows.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from d5suite.levels.distributed import Request
from d5suite.workflows.couplings import base
from d5suite.workflows.couplings.base import END, HEADER, Channel, CouplingError
from d5suite.workflows.couplings.messages import TAKEN, tag

HEAD = "header"
"""The variable that holds a message's header; the others have the names of its arrays."""

TIMEOUT_S = 60
"""Seconds in which the reader must find the writer."""


@contextlib.contextmanager
def _named(channel: Channel) -> Iterator[None]:
    """Turn errors of ADIOS2 into `CouplingError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        told = str(error).strip().partition("\n")[0]
        raise CouplingError(f"coupling {channel.coupling!r}: ADIOS2 says: {told}") from error


class _Stream:
    """A stream as one of its ends sees it; opening it waits for the other end."""

    def __init__(self, channel: Channel, *, writes: bool) -> None:
        self.library = importlib.import_module("adios2")
        self._adios = self.library.Adios()
        self.io = self._adios.declare_io(channel.name)
        self.io.set_engine("SST")
        alone = len(set(channel.communicator.hosts)) == 1
        self.io.set_parameters({
            "RendezvousReaderCount": "1", "QueueLimit": str(channel.capacity + 1), "QueueFullPolicy": "Block",
            "OpenTimeoutSecs": str(TIMEOUT_S), **({"NetworkInterface": "lo"} if alone else {}),
        })  # fmt: skip
        mode = self.library.bindings.Mode
        self.engine = self.io.open(str(channel.folder / channel.name), mode.Write if writes else mode.Read)


class Writer(base.Writer):
    """The end that makes steps."""

    def connect(self) -> None:
        self._room = 0  # the reader gives it
        with _named(self.channel):
            self._stream = _Stream(self.channel, writes=True)
            self._head = self._defined(HEAD, np.zeros(HEADER.itemsize // 8, np.int64))
            self._variables = {
                name: self._defined(name, np.zeros(each.shape, each.dtype))
                for name, each in self.channel.fields.items()
            }

    def _defined(self, name: str, array: np.ndarray) -> Any:
        shape = list(array.shape)
        return self._stream.io.define_variable(name, array, shape, [0] * len(shape), shape, True)

    def await_room(self) -> None:
        while self._room < 1:
            self._take_room()

    def _take_room(self) -> None:
        given = np.zeros(1, np.int64)
        self.channel.communicator.receive(given, self.channel.reader_rank, tag(self.channel, TAKEN))
        self._room += int(given[0])

    def write(self, header: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        self._room -= 1
        put, deferred = self._stream.engine.put, self._stream.library.bindings.Mode.Deferred
        head = np.ascontiguousarray(header.view(np.int64))
        held = {name: np.ascontiguousarray(arrays[name]) for name in self._variables if name in arrays}
        with _named(self.channel):
            self._stream.engine.begin_step()
            put(self._head, head, deferred)
            for name, array in held.items():
                put(self._variables[name], array, deferred)
            self._stream.engine.end_step()

    def end(self) -> None:
        self.write(np.full(1, END, HEADER), {})

    def finish(self) -> None:
        while self._room < self.capacity:  # the reader has taken all, and SST waits for nothing
            self._take_room()
        with _named(self.channel):
            self._stream.engine.close()


class Reader(base.Reader):
    """The end that takes steps."""

    def connect(self) -> None:
        with _named(self.channel):
            self._stream = _Stream(self.channel, writes=False)
        self._begun = False
        self._given: list[tuple[Request, np.ndarray]] = []
        self._give_room(self.channel.capacity)

    def _give_room(self, messages: int) -> None:
        of, told = self.channel.communicator, np.array([messages], np.int64)
        self._given.append((of.isend(told, self.channel.writer_rank, tag(self.channel, TAKEN)), told))
        while len(self._given) > self.channel.capacity + 1:  # the writer has received this one
            self._given.pop(0)[0].wait()

    def is_ready(self) -> bool:
        if not self._begun:
            of = self._stream.library.bindings
            with _named(self.channel):
                status = self._stream.engine.begin_step(of.StepMode.Read, 0.0)
            self._begun = status == of.StepStatus.OK
            if not self._begun and status != of.StepStatus.NotReady:
                raise CouplingError(f"coupling {self.channel.coupling!r}: the writer has closed its stream")
        return self._begun

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        if not self.is_ready():
            return None
        stream, mode = self._stream, self._stream.library.bindings.Mode
        head = np.empty(HEADER.itemsize // 8, np.int64)
        arrays: dict[str, np.ndarray] = {}
        with _named(self.channel):
            stream.engine.get(stream.io.inquire_variable(HEAD), head, mode.Sync)
            if head[0] != END:
                for name, each in self.channel.fields.items():
                    arrays[name] = np.empty(each.shape, each.dtype)
                    stream.engine.get(stream.io.inquire_variable(name), arrays[name], mode.Deferred)
            stream.engine.end_step()
        self._begun = False
        self._give_room(1)
        self.ended = bool(head[0] == END)
        return None if self.ended else (head.view(HEADER), arrays)

    def finish(self) -> None:
        for request, _ in self._given:
            request.wait()
        with _named(self.channel):
            self._stream.engine.close()
