"""Run a worker that takes its samples in turn with others: this end of the channel to it.

`d5suite.worker.turns` says what is exchanged. Only while this process waits for an answer does the
worker run, and only that counts towards its time limit. Imports its neighbours in
``d5suite.launch``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.files import locked
from d5suite.job import log_path
from d5suite.launch.base import (
    POLL_S,
    Limits,
    Outcome,
    cannot_start,
    group_memory,
    is_running,
    kill_group,
    said_of,
    tail_of,
    worker_environment,
)

REST_S, REST_POLL_S = 0.1, 0.001
"""Longest wait for a worker's threads to sleep after its turn, and between two looks: some spin for
about 10 ms when their work is done, and would take a quarter of the next worker's turn."""

LONGEST_LINE = 1 << 20
"""Bytes of a worker's message; ten thousand samples are a fifth of that."""


class TurnWorker:
    """A worker that waits for its turns; `end` it, whatever happens.

    Parameters
    ----------
    job : Path
        The job file, locked as by `d5suite.launch.local.run_worker`.
    threads : int
    device : str
    limits : Limits
    python : str, optional
        Interpreter; this one by default.
    wrap : str, optional
        A command to prepend.
    environment : mapping of str to str
        Further variables of the worker.
    folder : Path, optional
        Where it runs.
    watch : callable, optional
        Called periodically while it runs, to show progress.

    Attributes
    ----------
    sample_s : float
        How long a sample has lately taken; that of a kernel is many calls. 0 if it has not said.
    took_s : float
        How long its last turn took, without the calls that do not count.
    memory_bytes : int
        Its limit.
    peak_bytes : int
        Most resident memory seen of it and its descendants; it is looked at every `POLL_S`.
    outgrew : bool
        Whether it was killed because it used more memory than its limit.

    Raises
    ------
    ConfigurationError
        If the command cannot be started.
    """

    def __init__(
        self,
        job: Path,
        *,
        threads: int,
        device: str,
        limits: Limits,
        python: str | None = None,
        wrap: str | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._limits, self._watch, self._log = limits, watch, log_path(job)
        self.sample_s = self.took_s = 0.0
        self.memory_bytes, self.peak_bytes, self.outgrew = limits.memory_bytes, 0, False
        self._ran_s = 0.0
        self._killed: str | None = None
        self._heard = b""
        self._held = contextlib.ExitStack()
        try:
            self._held.enter_context(locked(job))
            self._channel, theirs = socket.socketpair()
            self._held.callback(self._channel.close)
            number = theirs.fileno()
            worker = ["-m", "d5suite.worker", "--session", str(os.getpid()), "--turns", str(number), str(job)]
            command = [*shlex.split(wrap or ""), python or sys.executable, *worker]
            with theirs, self._log.open("w", encoding="utf-8") as output:
                try:
                    self._process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
                        env=worker_environment(threads, device, limits) | dict(environment or {}),
                        pass_fds=(number,), start_new_session=True,
                    )  # fmt: skip
                except OSError as error:
                    raise cannot_start(command[0], error) from error
        except BaseException:
            self._held.close()
            raise

    def ready(self) -> str | None:
        """Run until it waits for a turn; return the measurement's key, None if it ended."""
        said = self._hear()
        if said is None:
            return None
        if not isinstance(said.get("ready"), str):
            self._break_off("it is not ready, but says", said)
            return None
        lately = said.get("sample_s", 0.0)
        self.sample_s = float(lately) if _is_time(lately) else 0.0
        return str(said["ready"])

    def take(self, count: int, *, wakes: bool = True) -> list[float] | None:
        """Take this many samples; return them in seconds, or None if it ended.

        Parameters
        ----------
        count : int
        wakes : bool
            Whether calls that do not count come first.
        """
        self._say({"take": count} if wakes else {"take": count, "wake": False})
        said = self._hear()
        if said is None:
            return None
        samples, took_s = said.get("samples_s"), said.get("took_s", 0)
        if not isinstance(samples, list) or len(samples) != count or not all(map(_is_time, [*samples, took_s])):
            self._break_off(f"instead of {count} positive samples it gives", said)
            return None
        self.took_s = float(took_s)
        self.sample_s = self.took_s / count
        return list(map(float, samples))

    def rest(self) -> None:
        """Wait until no thread of it runs, at most `REST_S`: some spin when their work is done."""
        end = time.monotonic() + REST_S
        while is_running(self._process.pid) and time.monotonic() < end:
            time.sleep(REST_POLL_S)

    def finish(self) -> None:
        """Tell it that it has taken all samples."""
        self._say({"end": True})

    def leave(self, reason: str) -> None:
        """Tell it to abandon this measurement."""
        self._say({"leave": reason})

    def resident_bytes(self) -> int:
        """Return its resident memory in bytes, descendants included."""
        used = group_memory(self._process.pid)
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def end(self, interrupt: BaseException | None = None) -> Outcome:
        """End it, whatever it does, and say how it ended.

        Parameters
        ----------
        interrupt : BaseException, optional
            What ended the wait for it.
        """
        if self._killed is None and (interrupt is not None or self._process.poll() is None):
            self._killed = "the worker was interrupted"
        kill_group(self._process.pid)
        self._process.wait()
        self._held.close()
        if self._killed is not None:
            return Outcome(False, self._killed, tail_of(self._log), interrupt)
        code = self._process.returncode
        return Outcome(0 <= code <= 2, f"the worker {said_of(code)}", tail_of(self._log))

    def _say(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, as the answer will tell
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _hear(self) -> dict[str, Any] | None:
        """Run until its next message; return it, or None if it ended."""
        start = time.monotonic()
        try:
            while b"\n" not in self._heard:
                if not select.select([self._channel], [], [], POLL_S)[0]:
                    if self._is_over(self._ran_s + time.monotonic() - start):
                        return None
                    continue
                try:
                    part = self._channel.recv(1 << 16)
                except OSError:
                    part = b""
                self._heard += part
                if not part:
                    self._await_end(start)
                    return None
                if len(self._heard) > LONGEST_LINE:
                    self._break_off("its message is too long:", self._heard[:100])
                    return None
        finally:
            self._ran_s += time.monotonic() - start
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if isinstance(said, dict):
            return said
        self._break_off("it says", line[:100])
        return None

    def _await_end(self, start: float) -> None:
        """Wait for a process that has closed the channel."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
            if self._is_over(self._ran_s + time.monotonic() - start):
                return

    def _is_over(self, ran_s: float) -> bool:
        """Return whether it has ended, or must end because of a limit."""
        if self._process.poll() is not None:
            return True
        used = self.resident_bytes()
        if ran_s > self._limits.seconds:
            return self._kill(self._limits.over_time())
        if used > self._limits.memory_bytes:
            self.outgrew = True
            return self._kill(self._limits.over_memory(used))
        if self._watch is not None:
            self._watch()
        return False

    def _kill(self, reason: str) -> bool:
        self._killed = reason
        kill_group(self._process.pid)
        return True

    def _break_off(self, what: str, said: object) -> None:
        self._kill(f"the worker does not keep to its turns, {what} {str(said)[:100]!r}, and was killed")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def require_same(blocks: Sequence[float], samples: Sequence[float]) -> None:
    """Check that the result of a worker holds the samples that it has handed over.

    Raises
    ------
    JobError
        If it holds others.
    """
    if list(blocks) != list(samples):
        raise JobError("the worker's result holds other samples than it handed over in its turns")
