"""Replaces the functions that a step and its communicator call by functions that record calls.

Functions are replaced only during a recording, so other steps have no overhead.
Imports `d5suite.instruments.recorder`, `d5suite.levels.distributed`, `d5suite.measurements` and
`d5suite.traces.events`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from d5suite.instruments.recorder import Recorder
from d5suite.levels.distributed import ANY, Communicator, Request
from d5suite.measurements.base import Phase
from d5suite.traces.events import COLLECTIVES, EventKind

MPI = "MPI"
"""Source file of the regions that trace analysers treat as MPI calls."""

_MESSAGES = {
    "send": "MPI_Send", "receive": "MPI_Recv", "isend": "MPI_Isend", "ireceive": "MPI_Irecv", "wait": "MPI_Wait",
}  # fmt: skip

ROOTED = ("broadcast", "reduce")
"""Collectives with a root, which is the second argument."""

T = TypeVar("T")

_MISSING = object()


class Replaced:
    """Attributes that are replaced for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, holder: Any, attribute: str, value: Any) -> None:
        """Replace an attribute of an object, or an item of a dict."""
        own = holder if isinstance(holder, dict) else vars(holder)
        self._before.append((holder, attribute, own.get(attribute, _MISSING)))
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)

    def restore(self) -> None:
        """Restore all replaced attributes."""
        for holder, attribute, value in reversed(self._before):
            if isinstance(holder, dict):
                holder[attribute] = value
            elif value is _MISSING:
                delattr(holder, attribute)
            else:
                setattr(holder, attribute, value)
        self._before.clear()


@contextlib.contextmanager
def recorded(recorder: Recorder, phases: Iterable[Phase], communicator: Communicator | None) -> Iterator[None]:
    """Record phases of a step, and the calls of a communicator, while the context lasts.

    Parameters
    ----------
    recorder : Recorder
    phases : iterable of Phase
    communicator : Communicator or None
    """
    replaced = Replaced()
    try:
        for phase in phases:
            _record(recorder, phase, replaced)
        if communicator is not None and communicator.size > 1:
            _Calls(recorder, communicator).put(replaced)
        yield
    finally:
        replaced.restore()


def _record(recorder: Recorder, phase: Phase, replaced: Replaced) -> None:
    holder, name = phase.holder, phase.attribute
    found = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
    if found is None:
        return
    region = recorder.region(phase.name, phase.role)
    if phase.kind == "iterator":
        replaced.put(holder, name, _Iterator(found, recorder, region))
    elif phase.kind == "context":
        replaced.put(holder, name, lambda: _both(recorder.inside(region), found()))
    elif phase.kind == "loader":
        found(_LoaderProcesses(recorder, region))
    else:
        replaced.put(holder, name, recorder.recorded(found, region))


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


class _Iterator:
    """An iterator that records every item as a region."""

    def __init__(self, items: Iterator[Any], recorder: Recorder, region: int) -> None:
        self._items, self._next = items, recorder.recorded(items.__next__, region)

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self._next()


class _LoaderProcesses:
    """Records the work of loader processes, which the loader reports when their answers arrive."""

    def __init__(self, recorder: Recorder, region: int) -> None:
        self._recorder, self._region = recorder, region
        self._streams: dict[int, Any] = {}

    def __call__(self, worker: int, begin_ns: int, end_ns: int) -> None:
        if worker not in self._streams:
            self._streams[worker] = self._recorder.stream(f"loader process {worker}")
        self._streams[worker].span(self._region, begin_ns, end_ns)


class _Calls:
    """The calls of a communicator.

    A collective of the transport is recorded as one MPI call. A collective that d5suite composes
    from messages is recorded as a region with the algorithm's name, and the messages are the MPI
    calls.
    """

    def __init__(self, recorder: Recorder, communicator: Communicator) -> None:
        self._recorder, self._of = recorder, communicator
        self._number = recorder.communicator(f"{communicator.name} of d5suite", communicator.rank, communicator.size)
        self._requests = itertools.count(1)
        self._regions = {
            key: recorder.region(name, "point2point", is_mpi=True, file=MPI) for key, name in _MESSAGES.items()
        }
        self._native = {
            call: recorder.region(name, role, is_mpi=True, file=MPI) for call, (name, _, role) in COLLECTIVES.items()
        }
        self._made = {
            call: recorder.region(f"{call} by {communicator.algorithm}", role)
            for call, (_, _, role) in COLLECTIVES.items()
        }

    def put(self, replaced: Replaced) -> None:
        """Record the communicator's calls from now on."""
        of = self._of
        for name in COLLECTIVES:
            replaced.put(of, name, self._collective(name, getattr(of, name)))
        messages: dict[str, Callable[[Any], Callable[..., Any]]] = {
            "send": self._send, "receive": self._receive, "isend": self._isend, "ireceive": self._ireceive,
        }  # fmt: skip
        for name, noted in messages.items():
            replaced.put(of, name, self._recorder.recorded(noted(getattr(of, name)), self._regions[name]))

    def _collective(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        recorder, of, number = self._recorder, self._of, self._number
        native, operation = self._native[name], COLLECTIVES[name][1]
        made = recorder.recorded(function, self._made[name])
        nothing = np.empty(0, np.uint8)

        def call(array: np.ndarray = nothing, *given: Any, **more: Any) -> T:
            arguments = () if array is nothing else (array, *given)
            if of._chosen(name, array) is not None:
                return made(*arguments, **more)
            root = (given[0] if given else more.get("root", 0)) if name in ROOTED else -1
            sent, received = _bytes(name, of, array.nbytes, root)
            stream = recorder.stream()
            stream.enter(native)
            try:
                answer = function(*arguments, **more)
                stream.note(EventKind.COLLECTIVE, number, root, -1, sent, received, number=operation)
            finally:
                stream.leave(native)
            return answer

        return call

    def _send(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(array: np.ndarray, to: int, tag: int = 0) -> None:
            self._recorder.stream().note(EventKind.SEND, self._number, to, tag, array.nbytes)
            function(array, to, tag)

        return call

    def _receive(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(array: np.ndarray, source: int = ANY, tag: int = 0) -> int:
            sender = function(array, source, tag)
            self._recorder.stream().note(EventKind.RECV, self._number, sender, tag, 0, array.nbytes)
            return sender

        return call

    def _isend(self, function: Callable[..., Request]) -> Callable[..., Request]:
        def call(array: np.ndarray, to: int, tag: int = 0) -> Request:
            request = next(self._requests)
            self._recorder.stream().note(EventKind.ISEND, self._number, to, tag, array.nbytes, request=request)
            return _Recorded(self, function(array, to, tag), request, None)

        return call

    def _ireceive(self, function: Callable[..., Request]) -> Callable[..., Request]:
        def call(array: np.ndarray, source: int, tag: int = 0) -> Request:
            request = next(self._requests)
            self._recorder.stream().note(EventKind.IRECV_REQUEST, -1, request=request)
            return _Recorded(self, function(array, source, tag), request, (tag, array.nbytes))

        return call

    def wait(self, pending: Request, request: int, receives: tuple[int, int] | None) -> int:
        """Record the completion of a message."""
        stream, region = self._recorder.stream(), self._regions["wait"]
        stream.enter(region)
        try:
            other = pending.wait()
            if receives is None:
                stream.note(EventKind.ISEND_COMPLETE, -1, request=request)
            else:
                stream.note(EventKind.IRECV, self._number, other, receives[0], 0, receives[1], request)
        finally:
            stream.leave(region)
        return other


class _Recorded(Request):
    """A message under way; the first completion is recorded."""

    def __init__(self, calls: _Calls, pending: Request, request: int, receives: tuple[int, int] | None) -> None:
        self._calls, self._pending, self._request, self._receives = calls, pending, request, receives
        self._other: int | None = None

    def _wait(self) -> int:
        """See `Request.wait`."""
        if self._other is None:
            self._other = self._calls.wait(self._pending, self._request, self._receives)
        return self._other


def _bytes(name: str, of: Communicator, size: int, root: int) -> tuple[int, int]:
    """Return the bytes that a rank sends to and receives from a collective operation."""
    if name == "barrier":
        return 0, 0
    if name == "broadcast":
        return (size, 0) if of.rank == root else (0, size)
    if name == "reduce":
        return (size, size) if of.rank == root else (size, 0)
    if name == "reduce_scatter":
        return size, size // of.size
    if name == "all_gather":
        return size // of.size, size
    return size, size
