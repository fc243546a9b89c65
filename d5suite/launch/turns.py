"""A worker that takes its samples in turn with others: the session's end of the channel.

`d5suite.worker.turns` defines the protocol. The worker runs only while this process waits for its
answer, and only that time counts towards its time limit. A worker that proves may run beside one
that imports its framework (`run_beside`). While one worker is to be alone, the other is stopped
(`TurnWorker.pause`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.instruments.settings import ALONE, BESIDE, SHARE_OF_LIMIT
from d5suite.job import Job
from d5suite.launch.base import Launch, worker_environment
from d5suite.launch.processes import is_running
from d5suite.launch.supervisor import POLL_S, Supervisor

REST_S, REST_POLL_S = 0.03, 0.001
"""Seconds to wait for a worker's threads to sleep after its turn, and between two checks. Some
threads spin for about 10 ms when their work is done, and would take a quarter of the next worker's
turn. Those that spin for longer are stopped until their next turn."""

STOP_S = 1.0
"""Longest wait in seconds for the threads of a stopped worker to leave the CPUs."""

LONGEST_LINE = 1 << 20
"""Most bytes of a worker's message; ten thousand samples take a fifth of that."""


class TurnWorker(Supervisor):
    """A worker that waits for its turns.

    Parameters
    ----------
    job, path, launch
        See `Supervisor`.
    beside : bool
        Whether the worker runs `BESIDE` others until it asks to run `ALONE`.

    Attributes
    ----------
    sample_s : float
        Seconds that a sample took lately; 0 if unknown. A kernel's sample consists of many calls.
    took_s : float
        Seconds that the last turn took, without the calls that do not count.
    how : str
        `ALONE` or `BESIDE`: how the worker runs, or ran before it asked.
    asks : str
        `ALONE` or `BESIDE`: how the worker asks to run, while it waits for `let`; else empty.

    Raises
    ------
    ConfigurationError
        If the command cannot be started.
    """

    def __init__(self, job: Job, path: Path, launch: Launch, *, beside: bool = False) -> None:
        super().__init__(job, path, launch)
        self.sample_s = self.took_s = 0.0
        self.how, self.asks, self._may_ask = BESIDE if beside else ALONE, "", beside
        self._received, self._is_closed, self._is_stopped = b"", False, False
        try:
            self._channel, theirs = socket.socketpair()
            self._held.callback(self._channel.close)
            with theirs:
                options = ["--turns", str(theirs.fileno()), *["--beside"] * beside]
                words = self.command(options=options)
                self.spawn(words, worker_environment(job, launch), self.log, pass_fds=[theirs.fileno()])
        except BaseException:
            self.close()
            raise

    def ready(self) -> str | None:
        """Run until the worker waits for a turn; return the measurement's key; None at its end.

        The key is empty if the worker `asks` to go on, or still runs beside others; this method
        does not wait for a worker beside others.
        """
        if self.asks or (self.how == BESIDE and not self._has_message(0.0)):
            return ""
        message = self._receive()
        if message is None:
            return None
        if self._may_ask and message == {"asks": BESIDE if self.how == ALONE else ALONE}:
            self.asks = message["asks"]
            self.rest()
            return ""
        if not isinstance(message.get("ready"), str):
            self._break_off("it is not ready, but says", message)
            return None
        if self.how != ALONE:
            self._break_off("it did not ask to be alone when it was measured, and says", message)
            return None
        lately = message.get("sample_s", 0.0)
        self.sample_s = float(lately) if _is_time(lately) else 0.0
        if self._may_ask:  # others are prepared alone meanwhile
            self.rest()
        return str(message["ready"])

    def let(self) -> None:
        """Let the worker run as it asks."""
        self.how, self.asks = self.asks, ""
        self._send({"go": self.how})

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
        """Wait until none of the worker's threads runs; stop them after `REST_S` seconds.

        Threads may spin for as long as the process lives, as with ``OMP_WAIT_POLICY=active``. Two
        checks in a row must find no running thread: while one thread passes a lock to another, a
        single check may see both asleep.
        """
        end, asleep = time.monotonic() + REST_S, 0
        while True:
            asleep = 0 if is_running(self.processes[0].pid) else asleep + 1
            if asleep == 2:
                return
            if time.monotonic() > end:
                self._signal(signal.SIGSTOP)
                self._is_stopped = True
                return
            time.sleep(REST_POLL_S)

    def pause(self) -> None:
        """Stop all threads of the worker until `resume`."""
        self._signal(signal.SIGSTOP)
        self._is_stopped, end = True, time.monotonic() + STOP_S
        while is_running(self.processes[0].pid) and time.monotonic() < end:
            time.sleep(REST_POLL_S)

    def resume(self) -> None:
        """Let the threads of the worker run again, if they were stopped."""
        if self._is_stopped:
            self._is_stopped = False
            self._signal(signal.SIGCONT)

    def spend(self, seconds: float) -> None:
        """Count seconds towards the time limit, check the limits, and show the progress."""
        self._ran_s += seconds
        reason = self.check(self._ran_s)
        if reason is not None:
            self.kill(reason)
        elif self.launch.watch is not None:
            self.launch.watch()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.processes[0].pid, number)

    def finish(self) -> None:
        """Tell the worker that all samples are taken."""
        self._send({"end": True})

    def leave(self, reason: str) -> None:
        """Tell the worker to give up this measurement."""
        self._send({"leave": reason})

    def _send(self, message: Mapping[str, Any]) -> None:
        self.resume()
        with contextlib.suppress(OSError):  # the worker has ended; `_receive` returns None
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any] | None:
        """Let the worker run until its next message; return None if it ended."""
        if not self.run_until(self._has_message):
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

    def _has_message(self, patience_s: float = POLL_S) -> bool:
        """Wait at most `patience_s` seconds for a message or the worker's end."""
        if b"\n" in self._received or len(self._received) > LONGEST_LINE:
            return True
        if self._is_closed:
            return self.has_ended()
        if not select.select([self._channel], [], [], patience_s)[0]:
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

    def fileno(self) -> int:
        """Return the file descriptor of the channel, to wait for messages."""
        return self._channel.fileno()


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def run_beside(workers: Sequence[TurnWorker]) -> None:
    """Let workers run until one says something or ends, for at most `POLL_S` seconds.

    `TurnWorker.ready` then returns what it says.
    """
    start = time.monotonic()
    select.select(workers, [], [], POLL_S)
    for worker in workers:
        worker.spend(time.monotonic() - start)


def require_same(taken: Sequence[float], samples: Sequence[float]) -> None:
    """Check that a worker's result holds the samples that it sent in its turns.

    Raises
    ------
    JobError
        If it holds others.
    """
    if list(taken) != list(samples):
        raise JobError("the worker's result holds other samples than it handed over in its turns")
