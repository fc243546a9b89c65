"""Samples taken in turn with other workers: the worker's end of the channel to the session.

Messages are JSON objects, one per line:

1. Only with ``--beside``: other workers may run while this worker imports its framework and while
   it proves. Before it measures anything, the worker sends ``{"asks": "alone"}``; before it proves,
   ``{"asks": "beside"}``. Then it waits for the answer ``{"go": WORD}`` with the same word.
2. When a step is proved and warm, the worker sends ``{"ready": KEY, "sample_s": S}``.
3. The session asks for samples with ``{"take": COUNT}``, and the worker answers ``{"samples_s":
   [...], "took_s": S}``. The turn begins with calls that do not count, unless the session adds
   ``"wake": false``.
4. The session ends the turns with ``{"end": true}``, or gives up the measurement with ``{"leave":
   REASON}``.

Between its turns a worker is blocked on a read. `d5suite.launch.turns` is the session's end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from d5suite.errors import JobError
from d5suite.instruments.settings import ALONE, BESIDE, Turn
from d5suite.instruments.threads import limit_threads


class TurnChannel:
    """The channel to the session.

    Parameters
    ----------
    descriptor : int
        Descriptor of a connected stream socket, which child processes will not inherit.
    beside : bool
        Whether other workers may run until this worker asks to run alone.
    """

    def __init__(self, descriptor: int, *, beside: bool = False) -> None:
        os.set_inheritable(descriptor, False)
        self._stream = socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8", newline="\n")
        self._asks, self._how = beside, BESIDE if beside else ALONE

    def run(self, how: str) -> None:
        """Run `ALONE` or `BESIDE` others from now on; wait until the session permits it."""
        if self._asks and how != self._how:
            self.send({"asks": how})
            message = self.receive()
            if message != {"go": how}:
                raise JobError(f"the session answers {message} to a worker that asks to run {how}")
            self._how = how

    @contextlib.contextmanager
    def proving(self, threads: int, set_threads: Callable[[int], None] | None) -> Iterator[None]:
        """Run beside other workers, with one thread in libraries whose threads spin; then alone.

        Parameters
        ----------
        threads : int
            The worker's thread budget.
        set_threads : callable, optional
            ``runtime.set_threads`` of the backend.
        """
        self.run(BESIDE)
        with contextlib.ExitStack() as limited:
            if self._how == BESIDE:
                limited.enter_context(limit_threads(1))
                if set_threads is not None:
                    set_threads(1)
                    limited.callback(set_threads, threads)
            yield
        self.run(ALONE)

    def require_alone(self, what: str) -> None:
        """Check that no other worker runs.

        Raises
        ------
        JobError
            If other workers may run: times and memory measured now would not count.
        """
        if self._how != ALONE:
            raise JobError(f"{what} was to be measured while other workers run")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises
        ------
        JobError
            If the session has ended.
        """
        line = self._stream.readline()
        if not line:
            raise JobError("the session has ended during the turns")
        message: dict[str, Any] = json.loads(line)
        return message


class MeasurementTurns:
    """The turns of one measurement, an implementation of `d5suite.instruments.settings.Turns`.

    Parameters
    ----------
    channel : TurnChannel
    key : str
        ``case/measurement``.

    Attributes
    ----------
    taken : bool
        Whether samples were taken.
    """

    def __init__(self, channel: TurnChannel, key: str) -> None:
        self.taken = False
        self._channel, self._key = channel, key
        self._is_ready = False

    def wait(self, sample_s: float) -> Turn | None:
        """Wait for the next turn; return None after the last turn.

        Parameters
        ----------
        sample_s : float
            Seconds that a sample took lately.

        Raises
        ------
        JobError
            If the session gives up the measurement.
        """
        if not self._is_ready:
            self._is_ready = True
            self._channel.send({"ready": self._key, "sample_s": sample_s})
        message = self._channel.receive()
        if "leave" in message:
            raise JobError(str(message["leave"]))
        return Turn(int(message["take"]), bool(message.get("wake", True))) if "take" in message else None

    def give(self, samples_s: list[float], took_s: float) -> None:
        """Send the samples of one turn to the session."""
        self.taken = True
        self._channel.send({"samples_s": samples_s, "took_s": took_s})
