"""Find and end the processes that a worker leaves behind, in whatever session or process group.

Every worker's environment holds a unique mark, which all child processes inherit, as in Jenkins
(wiki: ProcessTreeKiller). A process group would not suffice: a daemon makes a new group.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path

MARK = "D5SUITE_WORKER"
"""Environment variable: marks the processes of one worker."""


def end_marked(mark: str, groups: Collection[int] = ()) -> list[str]:
    """Kill all processes with a worker's mark.

    Parameters
    ----------
    mark : str
    groups : collection of int
        Process groups that were killed already.

    Returns
    -------
    list of str
        The killed processes' numbers and commands; empty without Linux's proc(5).
    """
    ended: dict[int, str] = {}
    while found := {pid: name for pid, name in _marked(mark, groups) if pid not in ended}:  # may have forked
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
    return [f"{pid} {name}" for pid, name in ended.items()]


def _marked(mark: str, groups: Collection[int]) -> list[tuple[int, str]]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            pid = int(folder.name)
            if wanted in (folder / "environ").read_bytes().split(b"\0") and os.getpgid(pid) not in groups:
                found.append((pid, (folder / "comm").read_text(errors="replace").strip()))
    return found
