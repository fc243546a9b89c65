"""What launchers share: limits, the environment and the end of a job's processes.

Imports `d5suite.instruments`, and psutil lazily.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.instruments.memory import MEMORY_LIMIT
from d5suite.instruments.threads import thread_environment

POLL_S = 0.25
"""Period of checking limits; a check takes well under 1 ms."""

TAIL_LINES = 30
"""Lines of a failed worker's output in a message."""

RANK, RANKS, MEETING = "D5SUITE_RANK", "D5SUITE_RANKS", "D5SUITE_MEETING"
"""Environment of a rank: its number, how many there are, and a folder that all of them see."""

WATCHED = "D5SUITE_WATCHED"
"""Environment of a rank whose launcher watches: else rank 0 does."""

STARTED_BY_SRUN = "D5SUITE_SRUN"
"""Environment of a rank that srun starts: ``bound`` if srun has given it CPUs and a GPU, or
``free``."""


@dataclass(frozen=True)
class Limits:
    """Limits of a worker.

    Attributes
    ----------
    seconds : float
        Wall-clock time.
    memory_bytes : int
        Resident memory of the worker and its descendants together; of all ranks of a job.
    """

    seconds: float
    memory_bytes: int

    def over_time(self) -> str:
        """Return the message about a worker that exceeded its time limit."""
        return f"the worker did not finish within {self.seconds:g} s (--job-timeout) and was killed"

    def over_memory(self, used: int) -> str:
        """Return the message about a worker that exceeded its memory limit."""
        return (
            f"the worker used {used / 2**30:.2f} GiB, over its limit of {self.memory_bytes / 2**30:.2f} GiB "
            "(--job-memory), and was killed"
        )


@dataclass(frozen=True)
class Outcome:
    """The end of a worker.

    Attributes
    ----------
    ok : bool
        Whether it exited by itself with status 0, 1 or 2; its result file has the details.
    reason : str
        One sentence.
    tail : str
        The last lines of its output.
    interrupt : BaseException or None
        What ended the wait for it, such as `KeyboardInterrupt`: to be raised again once its results
        are kept.
    rank : int or None
        The rank that ended a job of several; the reason then says all of it, and the rank's own
        result file which measurement it cost.
    """

    ok: bool
    reason: str
    tail: str
    interrupt: BaseException | None = None
    rank: int | None = None


def interpreter(backend: str, configured: Mapping[str, str]) -> str | None:
    """Return the Python interpreter of a backend's workers, if configured.

    ``D5SUITE_PYTHON_<BACKEND>`` in the environment takes precedence over ``configured``.

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


def worker_environment(threads: int, device: str, limits: Limits) -> dict[str, str]:
    """Return the environment of a worker with this thread budget."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | thread_environment(threads)
    environment |= {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", MEMORY_LIMIT: str(limits.memory_bytes)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def tail_of(log: Path) -> str:
    """Return the last lines of a log; empty without one."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])


def said_of(code: int) -> str:
    """Return how a process ended, from its return code in `subprocess`."""
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    meaning = {"SIGSEGV": " (it crashed)", "SIGKILL": " (killed from outside, or out of memory)"}.get(name, "")
    return f"died of {name}{meaning}"


def cannot_start(command: str, error: OSError) -> ConfigurationError:
    """Return the error of a command that cannot be started."""
    return ConfigurationError(
        f"cannot start the worker: {error.strerror}", where=command, hint="Check --wrap and D5SUITE_PYTHON_*."
    )


def family_of(pids: Iterable[int]) -> set[int]:
    """Return the processes and all their descendants that are alive."""
    import psutil

    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {pid, *(each.pid for each in process.children(recursive=True))}
    return found


def group_memory(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; 0 if it is gone."""
    import psutil

    total = 0
    for each in family_of([pid]):
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(each).memory_info().rss
    return total


def is_running(pid: int) -> bool:
    """Return whether a thread of a process is runnable; False without Linux's proc(5)."""
    for stat in Path("/proc", str(pid), "task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def kill_group(pid: int) -> None:
    """Kill the rest of a process group, if any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
