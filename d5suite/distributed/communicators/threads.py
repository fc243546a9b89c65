"""Ranks that are threads of one process: for notebooks and tests, not for measurements.

Imports NumPy, `d5suite.errors`, `d5suite.levels` and the algorithms.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from d5suite.distributed.algorithms import ALGORITHMS, DEFAULTS
from d5suite.errors import D5Error
from d5suite.levels.distributed import ANY, Communicator, Request

PATIENCE_S = 60.0
"""Seconds after which a rank that waits for a message gives up."""


class _Sent(Request):
    def __init__(self, to: int) -> None:
        self._to = to

    def _wait(self) -> int:
        return self._to


class _Receiving(Request):
    def __init__(self, receive: Callable[[], int]) -> None:
        self._receive, self._source = receive, -1

    def _wait(self) -> int:
        if self._source < 0:
            self._source = self._receive()
        return self._source


class _Box:
    """Messages to one rank, in the order of their arrival."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: list[tuple[int, int, bytes]] = []

    def put(self, source: int, tag: int, content: bytes) -> None:
        with self._arrived:
            self._messages.append((source, tag, content))
            self._arrived.notify_all()

    def take(self, source: int, tag: int) -> tuple[int, bytes]:
        def find() -> int | None:
            waiting = enumerate(self._messages)
            return next((i for i, (of, tagged, _) in waiting if source in (of, ANY) and tagged == tag), None)

        with self._arrived:
            if not self._arrived.wait_for(lambda: find() is not None, PATIENCE_S):
                raise D5Error(f"no message of rank {source} with tag {tag} in {PATIENCE_S:g} s")
            index = find()
            assert index is not None
            sender, _, content = self._messages.pop(index)
            return sender, content


class ThreadCommunicator(Communicator):
    """Communicator of one thread; `run` makes one per rank."""

    name = "threads"

    def __init__(self, rank: int, boxes: list[_Box], algorithm: str, hosts: Sequence[str]) -> None:
        super().__init__(rank, len(boxes), hosts, algorithm, {**DEFAULTS, **ALGORITHMS[algorithm]})
        self._boxes = boxes

    def _send(self, array: np.ndarray, to: int, tag: int) -> None:
        self._boxes[to].put(self.rank, tag, array.tobytes())

    def _receive(self, array: np.ndarray, source: int, tag: int) -> int:
        sender, content = self._boxes[self.rank].take(source, tag)
        if len(content) != array.nbytes:
            raise D5Error(f"rank {self.rank} expects {array.nbytes} bytes of rank {sender}, which sent {len(content)}")
        array.reshape(-1)[:] = np.frombuffer(content, array.dtype)
        return sender

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        self._send(array, to, tag)
        return _Sent(to)

    def _ireceive(self, array: np.ndarray, source: int, tag: int) -> Request:
        return _Receiving(lambda: self._receive(array, source, tag))

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def _native(self, call: str, array: np.ndarray, **more: Any) -> None:
        raise AssertionError(f"an algorithm carries out {call}")


def run(
    size: int, work: Callable[[Communicator], Any], algorithm: str = "native", hosts: Sequence[str] | None = None
) -> list[Any]:
    """Run a function once per rank, each in a thread, and return what they return by rank.

    Threads have no collectives of their own: ``native`` is the default algorithm of each.

    Raises
    ------
    Exception
        The first exception that a rank raised.
    """
    boxes = [_Box() for _ in range(size)]
    answers: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def one(rank: int) -> None:
        try:
            answers.put((rank, work(ThreadCommunicator(rank, boxes, algorithm, hosts or ["here"] * size)), None))
        except BaseException as error:
            answers.put((rank, None, error))

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    found: dict[int, Any] = {}
    for _ in threads:
        rank, answer, error = answers.get()
        if error is not None:
            raise error
        found[rank] = answer
    return [found[rank] for rank in range(size)]
