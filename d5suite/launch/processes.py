"""Process trees: memory, activity and end. Imports psutil lazily."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path


def family_of(pids: Iterable[int]) -> set[int]:
    """Return the processes that are alive, with all their descendants."""
    import psutil

    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {pid, *(each.pid for each in process.children(recursive=True))}
    return found


def family_memory(pids: Iterable[int]) -> int:
    """Return the resident bytes of processes and their descendants."""
    import psutil

    total = 0
    for each in family_of(pids):
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(each).memory_info().rss
    return total


def is_running(pid: int, states: str = "R") -> bool:
    """Return whether a thread of a process is in one of the states; False without proc(5)."""
    for stat in Path("/proc", str(pid), "task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] in states:
                return True
    return False


def kill_group(pid: int) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
