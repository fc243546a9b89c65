"""A worker that takes its samples in turn with others: the session's end of the channel.

`d5suite.worker.turns` defines the protocol. The worker runs only while this process waits for its
answer, and only that time counts towards its time limit.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.instruments.settings import SHARE_OF_LIMIT
from d5suite.job import Job
from d5suite.launch.base import Launch, worker_environment
from d5suite.launch.processes import is_running
from d5suite.launch.supervisor import POLL_S, Supervisor

REST_S, REST_POLL_S = 0.1, 0.001
"""Seconds to wait for a worker's threads to sleep after its turn, and between two checks. Some
threads spin for about 10 ms when their work is done, and would take a quarter of the next worker's
turn."""

LONGEST_LINE = 1 << 20
"""Most bytes of a worker's message; ten thousand samples take a fifth of that."""


class TurnWorker(Supervisor):
    """A worker that waits for its turns.

    Attributes
    ----------
    sample_s : float
        Seconds that a sample took lately; 0 if unknown. A kernel's sample consists of many calls.
    took_s : float
        Seconds that the last turn took, without the calls that do not count.

    Raises
    ------
    ConfigurationError
        If the command cannot be started.
    """

    def __init__(self, job: Job, path: Path, launch: Launch) -> None:
        super().__init__(job, path, launch)
        self.sample_s = self.took_s = 0.0
        self._received, self._is_closed = b"", False
        try:
            self._channel, theirs = socket.socketpair()
            self._held.callback(self._channel.close)
            with theirs:
                words = self.command(options=["--turns", str(theirs.fileno())])
                self.spawn(words, worker_environment(job, launch), self.log, pass_fds=[theirs.fileno()])
        except BaseException:
            self.close()
            raise

    def ready(self) -> str | None:
        """Run until the worker waits for a turn; return the measurement's key; None at its end."""
        message = self._receive()
        if message is None:
            return None
        if not isinstance(message.get("ready"), str):
            self._break_off("it is not ready, but says", message)
            return None
        lately = message.get("sample_s", 0.0)
        self.sample_s = float(lately) if _is_time(lately) else 0.0
        return str(message["ready"])

    def take(self, count: int, *, wakes: bool = True) -> list[float] | None:
        """Take `count` samples; return them in seconds, or None if the worker ended.

        Parameters
        ----------
        count : int
        wakes : bool
            Whether to begin with calls that do not count.
        """
        self._send({"take": count} if wakes else {"take": count, "wake": False})
        message = self._receive()
        if message is None:
            return None
        samples, took_s = message.get("samples_s"), message.get("took_s", 0)
        if not isinstance(samples, list) or len(samples) != count or not all(map(_is_time, [*samples, took_s])):
            self._break_off(f"instead of {count} positive samples it gives", message)
            return None
        self.took_s = float(took_s)
        self.sample_s = self.took_s / count
        return list(map(float, samples))

    @property
    def is_late(self) -> bool:
        """Whether the rest of the time limit is needed to prove what was timed."""
        return self._ran_s > SHARE_OF_LIMIT * self.launch.limits.seconds

    def rest(self) -> None:
        """Wait until none of the worker's threads runs, at most `REST_S` seconds."""
        end = time.monotonic() + REST_S
        while is_running(self.processes[0].pid) and time.monotonic() < end:
            time.sleep(REST_POLL_S)

    def finish(self) -> None:
        """Tell the worker that all samples are taken."""
        self._send({"end": True})

    def leave(self, reason: str) -> None:
        """Tell the worker to give up this measurement."""
        self._send({"leave": reason})

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the worker has ended; `_receive` returns None
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any] | None:
        """Let the worker run until its next message; return None if it ended."""
        if b"\n" not in self._received and not self.run_until(self._has_message):
            return None
        line, newline, self._received = self._received.partition(b"\n")
        if len(line) > LONGEST_LINE:
            self._break_off("its message is too long:", line)
        if not newline:
            return None
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            return message
        self._break_off("it says", line)
        return None

    def _has_message(self) -> bool:
        """Wait at most `POLL_S` seconds for a message or the worker's end."""
        if self._is_closed:
            return self.has_ended()
        if not select.select([self._channel], [], [], POLL_S)[0]:
            return self.processes[0].poll() is not None
        try:
            part = self._channel.recv(1 << 16)
        except OSError:
            part = b""
        self._received += part
        self._is_closed = not part
        return b"\n" in self._received or len(self._received) > LONGEST_LINE

    def _break_off(self, what: str, message: object) -> None:
        self.kill(f"broke the turn protocol: {what} {str(message)[:100]!r}, and was killed")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def require_same(taken: Sequence[float], samples: Sequence[float]) -> None:
    """Check that a worker's result holds the samples that it sent in its turns.

    Raises
    ------
    JobError
        If it holds others.
    """
    if list(taken) != list(samples):
        raise JobError("the worker's result holds other samples than it handed over in its turns")
