"""Supervision of a job's processes: start, progress, limits on time and memory, end.

`Supervisor` supervises one worker. `d5suite.launch.turns.TurnWorker` adds turns, and
`d5suite.launch.ranks.RankSupervisor` several ranks. Imports `d5suite.files` and `d5suite.job`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.files import locked
from d5suite.job import Job, log_path
from d5suite.launch.base import Launch, Outcome, describe_exit, tail_of, worker_environment
from d5suite.launch.command import command
from d5suite.launch.leftovers import MARK, end_marked
from d5suite.launch.processes import family_memory, kill_group

POLL_S = 0.25
"""Seconds between two checks of the limits; a check takes well under 1 ms."""


class Supervisor:
    """Supervises the worker of one job. Always call `end` or `close`.

    The job file is locked until `end`. A worker exits when the lock is released, so that none
    outlives a session or a wrapper that was killed.

    Parameters
    ----------
    job : Job
    path : Path
        The job file. The worker writes its result and its log beside it.
    launch : Launch

    Attributes
    ----------
    peak_bytes : int
        Peak resident memory, descendants included, as measured every `POLL_S` seconds.
    """

    def __init__(self, job: Job, path: Path, launch: Launch) -> None:
        self.job, self.path, self.log, self.launch = job, path, log_path(path), launch
        self.processes: list[subprocess.Popen[bytes]] = []
        self.peak_bytes = 0
        self._killed: str | None = None
        self._exceeded: int | None = None
        self._ran_s = 0.0
        self._mark = uuid.uuid4().hex
        self._held = contextlib.ExitStack()
        self._held.enter_context(locked(path))

    def start(self) -> None:
        """Start the processes.

        Raises
        ------
        ConfigurationError
            If the command cannot be started.
        """
        self.spawn(self.command(), worker_environment(self.job, self.launch), self.log)

    def command(self, launcher: Sequence[str] = (), options: Sequence[str] = ()) -> list[str]:
        """Return the worker's command, as `d5suite.launch.command.command` does."""
        before = [*launcher, *shlex.split(self.launch.wrap or "")]
        options = ["--session", str(os.getpid()), *options, *self.launch.options]
        return command(self.path, before, python=self.launch.python, options=options)

    def spawn(self, words: list[str], environment: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()) -> None:
        """Start a process in a process group of its own, with its output in a log."""
        with log.open("w", encoding="utf-8") as output:
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env={**environment, MARK: self._mark},
                    cwd=self.launch.folder, pass_fds=pass_fds, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ConfigurationError(
                    f"cannot start the worker: {error.strerror}",
                    where=words[0],
                    hint="Check --wrap and D5SUITE_PYTHON_*.",
                ) from error
        self.processes.append(process)

    def run_until(self, done: Callable[[], bool]) -> bool:
        """Let the processes run; return True when `done` does, False if a limit came first.

        Parameters
        ----------
        done : callable
            Waits at most `POLL_S` seconds.
        """
        start = time.monotonic()
        try:
            while not done():
                reason = self.check(self._ran_s + time.monotonic() - start)
                if reason is not None:
                    self.kill(reason)
                    return False
                if self.launch.watch is not None:
                    self.launch.watch()
            return True
        finally:
            self._ran_s += time.monotonic() - start

    def ready(self) -> str | None:
        """Run until the worker waits for a turn, and return the measurement's key; None at its end.

        Only a `d5suite.launch.turns.TurnWorker` waits for turns.
        """
        self.run_until(self.has_ended)
        return None

    def has_ended(self) -> bool:
        """Wait at most `POLL_S` seconds for the end of all processes, or the failure of one."""
        running = [each for each in self.processes if each.poll() is None]
        if running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(timeout=POLL_S)
        codes = [each.poll() for each in self.processes]
        return None not in codes or any(codes)

    def resident_bytes(self) -> int:
        """Return the resident memory in bytes, descendants included."""
        used = family_memory(each.pid for each in self.processes)
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def check(self, ran_s: float) -> str | None:
        """Return why the processes must be killed after `ran_s` seconds, if they must."""
        limits = self.launch.limits
        used = self.resident_bytes()
        if ran_s > limits.seconds:
            return f"did not finish within {limits.seconds:g} s (--job-timeout) and was killed"
        if used <= limits.memory_bytes:
            return None
        self._exceeded = limits.memory_bytes
        return (
            f"used {used / 2**30:.2f} GiB, over its limit of {limits.memory_bytes / 2**30:.2f} GiB (--job-memory), "
            "and was killed"
        )

    def kill(self, reason: str) -> None:
        """Kill the processes; the reason continues a sentence about the worker."""
        self._killed = reason
        self.kill_all()

    def kill_all(self) -> None:
        """Kill the process groups."""
        for each in self.processes:
            kill_group(each.pid)

    def end(self, interrupt: BaseException | None = None) -> Outcome:
        """Kill all processes that still run, and return how the job ended.

        Parameters
        ----------
        interrupt : BaseException, optional
            The exception that ended the wait.
        """
        still_runs = any(each.poll() is None for each in self.processes)
        if self._killed is None and (interrupt is not None or still_runs):
            self._killed = "was interrupted"
        self.close()
        return replace(self.outcome(), interrupt=interrupt)

    def close(self) -> None:
        """Kill all processes that still run, and release the job file."""
        self.kill_all()
        self._held.close()  # a worker that could not be killed exits now
        for each in self.processes:
            each.wait()
        left = end_marked(self._mark, [each.pid for each in self.processes]) if self.processes else []
        if left:
            with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as log:
                log.write(f"killed what the worker had started and left: {', '.join(left)}\n")

    def outcome(self) -> Outcome:
        """Return how the processes ended."""
        if self._killed is not None:
            return Outcome(False, f"the worker {self._killed}", tail_of(self.log), exceeded_bytes=self._exceeded)
        code = self.processes[0].returncode
        return Outcome(0 <= code <= 2, f"the worker {describe_exit(code)}", tail_of(self.log))
