"""The ranks of one run, as processes.

Imports d5suite's backends and `d5suite.instruments`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from d5suite.backends import Selection, select
from d5suite.instruments.threads import thread_environment

TIMEOUT_S = 300


def run_ranks(module: str, folder: Path, count: int, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run ``python -m MODULE FOLDER RANK ARGUMENTS`` for each rank, with one thread each.

    Parameters
    ----------
    module : str
        A module that ends with a call of `rank_main`.
    folder : Path
        For the ranks' results and logs. Ranks meet in its new subfolder ``meeting``.
    count : int
    *arguments : str
    timeout_s : float

    Returns
    -------
    str
        Which rank failed first or timed out, and the end of its log; empty if all succeeded.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | thread_environment(1)
    (folder / "meeting").mkdir()
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                command = [sys.executable, "-m", module, str(folder), str(rank), *arguments]
                started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
        failed = _wait(started, timeout_s)
    finally:
        for each in started:
            each.kill()
            each.wait()
    return "" if failed is None else f"rank {failed} failed:\n{logs[failed].read_text(errors='replace')[-2000:]}"


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> int | None:
    """Wait until all ranks end; return the first rank that failed, None if all succeeded."""
    deadline = time.monotonic() + timeout_s
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


def rank_main(run: Callable[..., None]) -> None:
    """Call ``run(FOLDER, RANK, ARGUMENTS)`` with this process's arguments; if it raises, exit.

    Exiting at once matters: some frameworks' clean-up waits for the other ranks.
    """
    folder, rank, *arguments = sys.argv[1:]
    try:
        run(Path(folder), int(rank), *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def configured(backend: str, device: str) -> Selection:
    """Select ``NAME:MODE`` and configure its framework for one rank."""
    selection = select(backend)
    selection.backend.load("runtime", selection.mode).configure(threads=1, seed=0, device=device)
    return selection
