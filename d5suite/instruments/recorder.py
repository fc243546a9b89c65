"""A recorder of events: what the threads of a process did, and when.

Each thread writes into a file of its own, which is mapped into memory and has its full size from
the start. To record an event is to write two numbers. The system keeps what was written when the
process is killed, so nothing has to be flushed. A full disk is seen at the start, and memory is
bounded: a thread whose file is full counts the events that it drops.

A recording is a folder. ``NAME.jsonl`` describes a process, a line per definition;
``NAME.N.events`` holds the events of its thread N. `d5suite.traces.recorded` reads it. Imports the
standard library and `d5suite.errors`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from d5suite.errors import D5Error

T = TypeVar("T")

WORDS = 8
"""Numbers of an event, 64 bits each: time, code, communicator, peer, tag, bytes sent, bytes
received, request. Entries and exits use the first two, metrics the first three."""

EVENTS = 1 << 17
"""Events of a thread that are kept by default: 8 MiB."""

MOST_STREAMS = 64
"""Threads that are recorded; events of further ones are dropped and counted."""

ENTER, LEAVE, METRIC = 0, 1, 31
"""Kinds that the recorder knows itself; `d5suite.traces.events.EventKind` has all but the last."""

FORMAT = 1
"""Version of the files."""


class RecorderError(D5Error):
    """Raised where events cannot be recorded."""


def code(kind: int, number: int = 0) -> int:
    """Return the second number of an event; it is never 0, which stands for "not written".

    Parameters
    ----------
    kind : int
    number : int
        Number of the region or metric, or code of a collective; -1 where there is none.
    """
    return kind + 1 | (number + 1) << 8


class EventStream:
    """The events of one thread; only that thread may write them.

    Parameters
    ----------
    path : Path
        Must not exist.
    events : int
        Events that fit.
    clock : callable
        Returns nanoseconds.

    Attributes
    ----------
    dropped : int
        Events that did not fit.
    """

    __slots__ = ("_at", "_clock", "_end", "_lost", "_map", "_path", "_words", "dropped")

    def __init__(self, path: Path, events: int, clock: Callable[[], int]) -> None:
        size = 8 * WORDS * events
        try:
            with path.open("xb+") as file:
                _reserve(file.fileno(), size)
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            with contextlib.suppress(OSError):
                if not isinstance(error, FileExistsError):
                    path.unlink()
            raise RecorderError(
                f"no room for the events of a thread ({size >> 20} MiB): {error.strerror or error}", where=str(path)
            ) from error
        self._path, self._clock = path, clock
        self._words = memoryview(self._map).cast("q")
        self._at, self._end = 0, WORDS * (events - 1)
        self._lost = self.dropped = 0

    def enter(self, region: int) -> None:
        """Record that a region is entered, unless there is no room for its entry and its exit."""
        at = self._at
        if at >= self._end:
            self._lost += 1
            self.dropped += 1
            return
        words = self._words
        words[at] = self._clock()
        words[at + 1] = 1 | (region + 1) << 8
        self._at = at + WORDS
        self._end -= WORDS

    def leave(self, region: int) -> None:
        """Record that a region is left, unless its entry was dropped."""
        if self._lost:
            self._lost -= 1
            self.dropped += 1
            return
        at, words = self._at, self._words
        words[at] = self._clock()
        words[at + 1] = 2 | (region + 1) << 8
        self._at = at + WORDS
        self._end += WORDS

    def note(
        self, kind: int, communicator: int, peer: int = -1, tag: int = -1, sent: int = 0, received: int = 0,
        request: int = -1, *, number: int = -1, time_ns: int | None = None,
    ) -> None:  # fmt: skip
        """Record another event: a message, or the end of a collective operation.

        Parameters
        ----------
        kind : int
            `d5suite.traces.events.EventKind`.
        communicator, peer, tag, sent, received, request : int
            As in `d5suite.traces.events.Events`.
        number : int
            For a collective operation: which operation.
        time_ns : int, optional
            By default now.
        """
        at = self._at
        if at > self._end or self._lost:
            self.dropped += 1
            return
        words = self._words
        words[at] = self._clock() if time_ns is None else time_ns
        words[at + 2], words[at + 3], words[at + 4] = communicator, peer, tag
        words[at + 5], words[at + 6], words[at + 7] = sent, received, request
        words[at + 1] = code(kind, number)
        self._at = at + WORDS

    def read(self, metric: int, value: float, time_ns: int | None = None) -> None:
        """Record the value of a metric."""
        self.note(METRIC, struct.unpack("q", struct.pack("d", value))[0], number=metric, time_ns=time_ns)

    def span(self, region: int, begin_ns: int, end_ns: int) -> None:
        """Record a region that another process has entered and left, by the same clock."""
        self.note(ENTER, -1, number=region, time_ns=begin_ns)
        self.note(LEAVE, -1, number=region, time_ns=end_ns)

    def close(self) -> None:
        """Release the memory, and shorten the file to what it holds."""
        used = 8 * self._at
        self._words.release()
        self._map.close()
        os.truncate(self._path, used)


def _reserve(descriptor: int, size: int) -> None:
    """Give a file its size; a disk that is full must be seen now, not at a write into memory."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.write(descriptor, bytes(size))


class Recorder:
    """The recording of one process.

    Parameters
    ----------
    folder : Path
        Is made if needed. The processes of a run share it.
    process : str
        Name of the process, such as ``rank 0``; also the name of its files.
    run : str
        Equal for all processes of a run, and different for other runs.
    host : str
        Where the process runs.
    events : int
        Events of a thread that are kept.
    clock : callable
        Returns nanoseconds. `time.perf_counter_ns` is one clock for all processes of a host.

    Raises
    ------
    RecorderError
        If the folder has a recording of this process already, or the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        process: str,
        *,
        run: str,
        host: str = "",
        events: int = EVENTS,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.folder, self.process, self.clock = folder, process, clock
        self._name = process.replace(" ", "")
        self._events = events
        self._regions: dict[tuple[str, str, bool, str], int] = {}
        self._metrics: dict[tuple[str, str], int] = {}
        self._communicators = 0
        self._streams: list[EventStream] = []
        self._of_thread: dict[int, EventStream] = {}
        self._lock = threading.Lock()
        self._nowhere: EventStream | None = None
        path = folder / f"{self._name}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise RecorderError(
                f"holds a recording of {process} already", where=str(folder), hint="Record each run into a new folder."
            ) from error
        except OSError as error:
            raise RecorderError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
        self._say(
            recording=FORMAT, run=run, process=process, host=host or platform.node(), pid=os.getpid(),
            boot=boot(), words=WORDS, time_ns=clock(), epoch_ns=time.time_ns(),
        )  # fmt: skip
        self.stream()  # the thread that makes the recorder is the main one

    def _say(self, **facts: Any) -> None:
        try:
            self._file.write(json.dumps(facts) + "\n")
            self._file.flush()  # survives if the process is killed
        except OSError as error:
            raise RecorderError(
                f"cannot be written: {error.strerror or error}", where=str(self.folder / f"{self._name}.jsonl")
            ) from error

    def region(self, name: str, role: str = "function", *, is_mpi: bool = False, file: str = "") -> int:
        """Return the number of a region; see `d5suite.traces.events.Region`."""
        with self._lock:
            key = name, role, is_mpi, file
            if key not in self._regions:
                self._regions[key] = len(self._regions)
                self._say(region=self._regions[key], name=name, role=role, is_mpi=is_mpi, file=file)
            return self._regions[key]

    def metric(self, name: str, unit: str) -> int:
        """Return the number of a metric."""
        with self._lock:
            if (name, unit) not in self._metrics:
                self._metrics[name, unit] = len(self._metrics)
                self._say(metric=self._metrics[name, unit], name=name, unit=unit)
            return self._metrics[name, unit]

    def communicator(self, name: str, rank: int, size: int) -> int:
        """Return the number of a communicator in which this process has a rank.

        All of its processes define their communicators in the same order.
        """
        with self._lock:
            number, self._communicators = self._communicators, self._communicators + 1
            self._say(communicator=number, name=name, rank=rank, size=size)
            return number

    def say_clock(self, at_ns: int, offset_ns: int, error_ns: int) -> None:
        """Note by how much this process's clock lags behind that of rank 0.

        Parameters
        ----------
        at_ns : int
            By this process's clock.
        offset_ns : int
            The other clock less this one.
        error_ns : int
            By how much that may be wrong.
        """
        with self._lock:
            self._say(clock_ns=at_ns, offset_ns=offset_ns, error_ns=error_ns)

    def stream(self, name: str | None = None) -> EventStream:
        """Return this thread's stream; with a name a new one, such as for another process's spans.

        Raises
        ------
        RecorderError
            If the disk is full.
        """
        if name is None:
            found = self._of_thread.get(threading.get_ident())
            if found is not None:
                return found
        with self._lock:
            number = len(self._streams)
            if number >= MOST_STREAMS:
                return self._without_room()
            is_main = number == 0
            label = name or ("main" if is_main else threading.current_thread().name)
            made = EventStream(self.folder / f"{self._name}.{number}.events", self._events, self.clock)
            self._streams.append(made)
            self._say(stream=number, name=label, is_main=is_main)
            if name is None:
                self._of_thread[threading.get_ident()] = made
            return made

    def _without_room(self) -> EventStream:
        """Return a stream that drops all events."""
        if self._nowhere is None:
            self._nowhere = EventStream(self.folder / f"{self._name}.none.events", 1, self.clock)
            self._nowhere._at = WORDS
            self._nowhere._end = 0
        return self._nowhere

    @property
    def dropped(self) -> int:
        """Events that did not fit, of all threads."""
        streams = [*self._streams, *([self._nowhere] if self._nowhere is not None else [])]
        return sum(each.dropped for each in streams)

    @contextlib.contextmanager
    def inside(self, region: int) -> Iterator[None]:
        """Return a context that is recorded as a region."""
        stream = self.stream()
        stream.enter(region)
        try:
            yield
        finally:
            stream.leave(region)

    def recorded(self, function: Callable[..., T], region: int) -> Callable[..., T]:
        """Return the function, each call of which is recorded as a region."""
        known, make, thread = self._of_thread, self.stream, threading.get_ident

        @functools.wraps(function)
        def call(*given: Any, **more: Any) -> T:
            stream = known.get(thread()) or make()
            stream.enter(region)
            try:
                return function(*given, **more)
            finally:
                stream.leave(region)

        return call

    def close(self) -> None:
        """End the recording: say how many events were dropped, and release the memory."""
        with self._lock:
            try:
                self._say(closed_ns=self.clock(), dropped=self.dropped)
            finally:
                self._file.close()
                for each in [*self._streams, *([self._nowhere] if self._nowhere is not None else [])]:
                    each.close()
                if self._nowhere is not None:
                    (self.folder / f"{self._name}.none.events").unlink(missing_ok=True)


def boot() -> str:
    """Return the id of this machine's boot, "" if unknown: processes with one id share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
