"""Processes that are ranks of one run.

Imports the standard library and `d5suite.instruments`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from d5suite.instruments.threads import thread_environment

TIMEOUT_S = 300


def run_ranks(module: str, work: Path, count: int) -> str:
    """Run ``python -m MODULE WORK RANK`` for each rank, with one thread each.

    Parameters
    ----------
    module : str
    work : Path
        The file that says what to do; the ranks' logs are written beside it.
    count : int

    Returns
    -------
    str
        Which rank failed first, or did not end, and the end of its log; empty if all succeeded.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | thread_environment(1)
    logs = [work.with_name(f"rank{rank}.log") for rank in range(count)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                command = [sys.executable, "-m", module, str(work), str(rank)]
                started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
        failed = _wait(started)
    finally:
        for each in started:
            each.kill()
            each.wait()
    return "" if failed is None else f"rank {failed} failed:\n{logs[failed].read_text(errors='replace')[-2000:]}"


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for the end; return the first rank that failed, if any."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(each.poll() is None for each in ranks) and time.monotonic() < deadline:
        failed = [rank for rank, each in enumerate(ranks) if each.poll()]
        if failed:
            return failed[0]
        for each in ranks:
            if each.poll() is None:
                try:
                    each.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    break
    return next((rank for rank, each in enumerate(ranks) if each.poll() != 0), None)
