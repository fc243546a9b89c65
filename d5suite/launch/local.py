"""Run a worker on this machine in a process group of its own, with limits on time and memory.

Imports `d5suite.files` and its neighbours in ``d5suite.launch``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from d5suite.files import locked
from d5suite.launch.base import (
    POLL_S,
    Limits,
    Outcome,
    cannot_start,
    group_memory,
    kill_group,
    said_of,
    tail_of,
    worker_environment,
)


def run_worker(
    job: Path,
    *,
    threads: int,
    device: str,
    limits: Limits,
    log: Path,
    python: str | None = None,
    wrap: str | None = None,
    watch: Callable[[], None] | None = None,
) -> Outcome:
    """Run one job until it ends or reaches a limit.

    Parameters
    ----------
    job : Path
        The job file; the worker writes its result beside it. It is locked meanwhile: a worker ends
        when the lock does, so that none outlives a killed session or its wrapper.
    threads : int
        Thread budget, passed to every framework in the same environment variables.
    device : str
        ``cpu`` hides GPUs from the worker.
    limits : Limits
    log : Path
        Receives the worker's output.
    python : str, optional
        Interpreter; this one by default.
    wrap : str, optional
        A command to prepend, such as ``"perf stat -d"``; split like a shell's words, without a
        shell.
    watch : callable, optional
        Called periodically, to show progress.

    Raises
    ------
    ConfigurationError
        If the command cannot be started.
    """
    worker = [python or sys.executable, "-m", "d5suite.worker", "--session", str(os.getpid()), str(job)]
    command = [*shlex.split(wrap or ""), *worker]
    interrupt = None
    with locked(job):
        with log.open("w", encoding="utf-8") as output:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=worker_environment(threads, device, limits), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise cannot_start(command[0], error) from error
            try:
                ended = _wait(process, limits, watch)
            except BaseException as error:  # an interrupt must not lose what the worker has finished
                ended, interrupt = "the worker was interrupted", error
            kill_group(process.pid)
        process.wait()
    if ended is not None:
        return Outcome(False, ended, tail_of(log), interrupt)
    code = process.returncode
    return Outcome(0 <= code <= 2, f"the worker {said_of(code)}", tail_of(log))


def _wait(process: subprocess.Popen[bytes], limits: Limits, watch: Callable[[], None] | None) -> str | None:
    """Wait for the end; return a sentence about the exceeded limit, or None."""
    deadline = time.monotonic() + limits.seconds
    while True:
        try:
            process.wait(timeout=POLL_S)
            return None
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            return limits.over_time()
        used = group_memory(process.pid)
        if used > limits.memory_bytes:
            return limits.over_memory(used)
        if watch is not None:
            watch()
