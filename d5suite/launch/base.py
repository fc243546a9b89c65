"""What all launchers share: how a worker is started, its limits, and how it ended.

Imports `d5suite.instruments`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.instruments.memory import MEMORY_LIMIT
from d5suite.instruments.settings import TIME_LIMIT
from d5suite.instruments.threads import thread_environment
from d5suite.job import Job

TAIL_LINES = 30
"""Number of lines of a failed worker's output in a message."""

RANK, RANKS, MEETING = "D5SUITE_RANK", "D5SUITE_RANKS", "D5SUITE_MEETING"
"""Environment variables of a rank: its number, the number of ranks, a folder that all ranks see."""

WATCHED = "D5SUITE_WATCHED"
"""Environment variable: the launcher watches the ranks. Without it rank 0 does."""

STARTED_BY_SRUN = "D5SUITE_SRUN"
"""Environment variable of a rank that srun started: ``bound`` if srun assigned CPUs and a GPU to
it, else ``free``."""


@dataclass(frozen=True)
class Limits:
    """Limits of a worker.

    Attributes
    ----------
    seconds : float
        Wall-clock time.
    memory_bytes : int
        Resident memory of the worker and its descendants, or of all ranks of a job, together.
    """

    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Launch:
    """How to start and limit the worker of a job.

    Attributes
    ----------
    limits : Limits
    python : str or None
        Interpreter; the current one by default.
    wrap : str or None
        A command to prepend, such as ``"perf stat -d"``. It is split into words as by a shell, but
        no shell runs it.
    environment : mapping of str to str
        Additional environment variables.
    folder : Path or None
        Working directory; the current one by default.
    options : sequence of str
        Additional options of ``python -m d5suite.worker``.
    watch : callable or None
        Called several times a second while the worker runs, to show progress.
    """

    limits: Limits
    python: str | None = None
    wrap: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    options: Sequence[str] = ()
    watch: Callable[[], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a worker ended.

    Attributes
    ----------
    ok : bool
        Whether the worker exited with status 0, 1 or 2 by itself; the result file has the details.
    reason : str
        How the worker ended, in one sentence.
    tail : str
        The last lines of the worker's output.
    interrupt : BaseException or None
        Exception that ended the wait, such as `KeyboardInterrupt`. Raise it again once the worker's
        results are saved.
    rank : int or None
        The rank whose failure ended a job of several ranks. Its own result file names the
        measurement that failed.
    exceeded_bytes : int or None
        The memory limit that the worker exceeded; None unless it was killed for this.
    """

    ok: bool
    reason: str
    tail: str
    interrupt: BaseException | None = None
    rank: int | None = None
    exceeded_bytes: int | None = None


def interpreter(backend: str, configured: Mapping[str, str]) -> str | None:
    """Return the Python interpreter of a backend's workers, if configured.

    ``D5SUITE_PYTHON_<BACKEND>`` in the environment takes precedence over ``configured``.

    Raises
    ------
    ConfigurationError
        If the interpreter is not an executable file.
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


def worker_environment(job: Job, launch: Launch) -> dict[str, str]:
    """Return the environment of a worker: a rank gets its share of the threads, at least one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= thread_environment(max(1, job.threads // job.ranks))
    environment |= {
        "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", MEMORY_LIMIT: str(launch.limits.memory_bytes),
        TIME_LIMIT: str(launch.limits.seconds),
    }  # fmt: skip
    if job.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return {**environment, **launch.environment}


def text_of(log: Path) -> str:
    """Return a log's text, or an empty string if there is no log."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def tail_of(log: Path) -> str:
    """Return the last lines of a log, or an empty string if there is no log."""
    return "\n".join(text_of(log).splitlines()[-TAIL_LINES:])


def describe_exit(code: int) -> str:
    """Describe how a process ended, given its return code as in `subprocess`."""
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    meaning = {"SIGSEGV": " (it crashed)", "SIGKILL": " (killed from outside, or out of memory)"}.get(name, "")
    return f"died of {name}{meaning}"
