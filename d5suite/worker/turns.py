"""Samples in turn with other workers': this end of the channel to the session.

One JSON object a line. This worker says ``{"ready": KEY, "sample_s": S}`` when a step is proved and
warm; the session asks for ``{"take": COUNT}`` samples, answered by ``{"samples_s": [...], "took_s":
S}``, or says ``{"end": true}``, or ``{"leave": REASON}`` if the measurement is given up. With
``"wake": false`` the samples follow at once; otherwise calls that do not count come first. Between
its turns a worker is blocked on a read. `d5suite.launch.turns` is the other end.
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

    def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for a message.

        Raises
        ------
        JobError
            If the session has gone.
        """
        line = self._stream.readline()
        if not line:
            raise JobError("the session that gives turns has ended")
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
        Whether any sample was taken.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self.taken = False
        self._channel, self._key = channel, key
        self._is_ready = False

    def wait(self, sample_s: float) -> Turn | None:
        """Wait until it is this worker's turn; samples lately took `sample_s` seconds.

        Raises
        ------
        JobError
            If the measurement is given up.
        """
        if not self._is_ready:
            self._is_ready = True
            self._channel.say({"ready": self._key, "sample_s": sample_s})
        asked = self._channel.hear()
        if "leave" in asked:
            raise JobError(str(asked["leave"]))
        return Turn(int(asked["take"]), bool(asked.get("wake", True))) if "take" in asked else None

    def give(self, samples_s: list[float], took_s: float) -> None:
        """Hand over the samples of one turn."""
        self.taken = True
        self._channel.say({"samples_s": samples_s, "took_s": took_s})
