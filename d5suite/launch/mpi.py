"""Ranks that mpiexec starts: the launcher, and messages of mpiexec about ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.launch.base import text_of

_TEMPORARY = "D5SUITE_TMPDIR"
"""Environment variable with the user's TMPDIR."""

DIED = re.compile(r"process rank (\d+) with PID \d+ on\s+node \S+ exited on\s+signal (\d+)")
"""Open MPI's message about a rank that a signal killed; its lines are wrapped."""


def mpiexec(ranks: int, *, python: str | None = None, oversubscribe: bool = False) -> list[str]:
    """Return the launcher of ranks, for `d5suite.launch.command.command`.

    It is ``D5SUITE_MPIEXEC``, or else the mpiexec beside the interpreter, where wheels install it,
    or else the system's.

    Raises
    ------
    ConfigurationError
        If there is no mpiexec.
    """
    found = find_mpiexec(python)
    if found is None:
        raise ConfigurationError(
            "ranks of MPI need mpiexec, which is not installed", hint="Install it with: pip install 'd5suite[mpi]'"
        )
    command = [found, "-n", str(ranks)]
    if _is_open_mpi(found):
        command += ["--bind-to", "none"]  # each rank binds itself
        command += ["--allow-run-as-root"] * (os.geteuid() == 0)
        command += ["--oversubscribe"] * oversubscribe
    return command


def find_mpiexec(python: str | None = None) -> str | None:
    """Return the path of mpiexec; None if it is not installed."""
    beside = Path(python or sys.executable).parent / "mpiexec"
    return shutil.which(os.environ.get("D5SUITE_MPIEXEC") or beside) or shutil.which("mpiexec")


@lru_cache(maxsize=8)
def _is_open_mpi(path: str) -> bool:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    return bool(re.search(r"open.?mpi|prte", done.stdout + done.stderr, re.IGNORECASE))


def environment(meeting: Path) -> dict[str, str]:
    """Return variables that make Open MPI keep its files in the meeting folder."""
    temporary = {_TEMPORARY: os.environ.get("TMPDIR", ""), "TMPDIR": str(meeting)}
    return {**temporary, "OMPI_MCA_btl_sm_backing_directory": str(meeting)}


def restore_environment() -> None:
    """Let a rank and its children use the user's folder for temporary files again."""
    own = os.environ.pop(_TEMPORARY, None)
    if own:
        os.environ["TMPDIR"] = own
    elif own is not None:
        os.environ.pop("TMPDIR", None)


def rank_that_died(log: Path) -> tuple[int, int] | None:
    """Return a rank that a signal killed, and the signal, according to mpiexec's log."""
    found = DIED.search(" ".join(text_of(log).split()))
    return (int(found[1]), int(found[2])) if found else None
