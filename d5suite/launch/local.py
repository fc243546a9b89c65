"""Run a worker on this machine: its own process group, a time limit, a memory limit, and nothing left behind.

Imports psutil and `d5suite.measure`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.measure.memory import MEMORY_LIMIT
from d5suite.measure.threads import thread_environment

POLL_S = 0.25
"""How often limits are looked at; each look takes well under a millisecond of the parent's time."""

PARENT = "D5SUITE_PARENT"
"""Environment variable: the process with which a worker is to end."""

TAIL_LINES = 30
"""How much of a failed worker's output a message shows."""


@dataclass(frozen=True)
class Limits:
    """What a worker may use.

    Attributes
    ----------
    seconds : float
        Wall-clock time.
    memory_bytes : int
        Resident memory of the worker and its child processes together.
    """

    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Outcome:
    """How a worker ended.

    Attributes
    ----------
    ok : bool
        It exited by itself, with status 0, 1 or 2: its result file tells the rest.
    reason : str
        One sentence.
    tail : str
        The last lines of its output.
    """

    ok: bool
    reason: str
    tail: str


def interpreter(backend: str, configured: Mapping[str, str]) -> str | None:
    """The Python that a backend's workers run in, if it has one of its own.

    ``D5SUITE_PYTHON_<BACKEND>`` in the environment goes before ``configured``.

    Raises
    ------
    ConfigurationError
        If it is not an executable file.
    """
    variable = f"D5SUITE_PYTHON_{backend.upper().replace('-', '_')}"
    chosen = os.environ.get(variable) or configured.get(backend)
    if chosen is None:
        return None
    if shutil.which(chosen) is None:
        raise ConfigurationError(
            f"{chosen!r} is not an executable Python",
            where=variable if variable in os.environ else "d5suite_python",
            hint="Give the path of a virtual environment's bin/python in which d5suite is installed.",
        )
    return chosen


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
    """Run one job to its end, or to its limits.

    Parameters
    ----------
    job : Path
        The job file; the worker writes its result beside it.
    threads : int
        Thread budget, given to every framework through the same environment variables.
    device : str
        On ``cpu`` GPUs are hidden from the worker.
    limits : Limits
    log : Path
        Receives what the worker prints.
    python : str, optional
        Interpreter; this one by default.
    wrap : str, optional
        A command put in front, split as a shell splits words but never given to a shell: ``"perf stat -d"``.
    watch : callable, optional
        Called at each look, to show progress.

    Raises
    ------
    ConfigurationError
        If the command cannot be started.
    """
    command = [*shlex.split(wrap or ""), python or sys.executable, "-m", "d5suite.worker", str(job)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | thread_environment(threads)
    environment["PYTHONHASHSEED"] = "0"
    environment["PYTHONUNBUFFERED"] = "1"
    environment[PARENT] = str(os.getpid())
    environment[MEMORY_LIMIT] = str(limits.memory_bytes)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("w", encoding="utf-8") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigurationError(
                f"cannot start the worker: {error.strerror}",
                where=command[0],
                hint="Check --wrap and D5SUITE_PYTHON_*.",
            ) from error
        try:
            ended = _wait(process, limits, watch)
        finally:
            kill_group(process.pid)
            process.wait()
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    if ended is not None:
        return Outcome(False, ended, tail)
    code = process.returncode
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        meaning = {"SIGSEGV": " (it crashed)", "SIGKILL": " (killed from outside, or out of memory)"}.get(name, "")
        return Outcome(False, f"the worker died of {name}{meaning}", tail)
    if code > 2:
        return Outcome(False, f"the worker exited with status {code}", tail)
    return Outcome(True, f"the worker exited with status {code}", tail)


def _wait(process: subprocess.Popen[bytes], limits: Limits, watch: Callable[[], None] | None) -> str | None:
    """Wait for the end; the sentence that says which limit was exceeded, or None."""
    deadline = time.monotonic() + limits.seconds
    while True:
        try:
            process.wait(timeout=POLL_S)
            return None
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            return f"the worker did not finish within {limits.seconds:g} s (--job-timeout) and was killed"
        used = group_memory(process.pid)
        if used > limits.memory_bytes:
            return (
                f"the worker used {used / 2**30:.2f} GiB, over its limit of {limits.memory_bytes / 2**30:.2f} GiB "
                "(--job-memory), and was killed"
            )
        if watch is not None:
            watch()


def group_memory(pid: int) -> int:
    """Resident bytes of a process and its descendants; 0 when it is gone. Shared pages count once per process."""
    import psutil

    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for process in family:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def kill_group(pid: int) -> None:
    """Kill what is left of a process group, without a word if nothing is."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
