"""Samples taken in turn with other workers: the worker's end of the channel to the session.

Messages are JSON objects, one per line:

1. When a step is proved and warm, the worker sends ``{"ready": KEY, "sample_s": S}``.
2. The session asks for samples with ``{"take": COUNT}``, and the worker answers ``{"samples_s":
   [...], "took_s": S}``. The worker begins with calls that do not count, unless the session adds
   ``"wake": false``.
3. The session ends the turns with ``{"end": true}``, or gives up the measurement with ``{"leave":
   REASON}``.

Between its turns a worker is blocked on a read. `d5suite.launch.turns` is the session's end.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from d5suite.errors import JobError
from d5suite.instruments.settings import Turn


class Channel:
    """The channel to the session.

    Parameters
    ----------
    descriptor : int
        A connected stream socket, which child processes do not inherit.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._stream = socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8", newline="\n")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises
        ------
        JobError
            If the session has gone.
        """
        line = self._stream.readline()
        if not line:
            raise JobError("the session has ended during the turns")
        message: dict[str, Any] = json.loads(line)
        return message


class MeasurementTurns:
    """The turns of one measurement: `d5suite.instruments.settings.Turns`.

    Parameters
    ----------
    channel : Channel
    key : str
        ``case/measurement``.

    Attributes
    ----------
    taken : bool
        Whether samples were taken.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self.taken = False
        self._channel, self._key = channel, key
        self._is_ready = False

    def wait(self, sample_s: float) -> Turn | None:
        """Wait for the next turn; samples lately took `sample_s` seconds. Return None at the end.

        Raises
        ------
        JobError
            If the measurement is given up.
        """
        if not self._is_ready:
            self._is_ready = True
            self._channel.send({"ready": self._key, "sample_s": sample_s})
        message = self._channel.receive()
        if "leave" in message:
            raise JobError(str(message["leave"]))
        return Turn(int(message["take"]), bool(message.get("wake", True))) if "take" in message else None

    def give(self, samples_s: list[float], took_s: float) -> None:
        """Hand over the samples of one turn."""
        self.taken = True
        self._channel.send({"samples_s": samples_s, "took_s": took_s})
