"""The process that runs one job: ``python -m d5suite.worker NAME.job.json``."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from d5suite.errors import D5Error, describe_error
from d5suite.job import Failure, Job, log_path, of_rank, result_path
from d5suite.launch.base import RANK, Launch, Limits
from d5suite.launch.heartbeat import HeartbeatWriter, heartbeat_path
from d5suite.launch.mpi import restore_environment
from d5suite.launch.run import run_job
from d5suite.worker.ranks import RankInfo
from d5suite.worker.run import run
from d5suite.worker.turns import TurnChannel
from d5suite.worker.writer import ResultWriter

PR_SET_PDEATHSIG = 1
"""Option of ``prctl``, from Linux's ``prctl.h``."""


LATE_S, LOOK_S = 60.0, 0.1
"""Longest wait for files of other hosts, and the time between two checks, in seconds."""


def end_with(session: int, job: Path, meeting: Path | None = None) -> None:
    """Make the system kill this process when the session that started it ends.

    A killed session cannot end its workers, and a leftover worker would disturb the next
    measurement. The session holds a lock on the job file, and the system releases the lock when the
    session ends. A thread waits for the lock, which also works with ``--wrap``, whose processes
    stand between session and worker. On Linux, the kernel also kills a direct child (prctl(2)),
    even if native code never lets the thread run. Ranks also remove the folder in which they met.
    """
    if sys.platform == "linux" and os.getppid() == session and meeting is None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        with job.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if meeting is not None:
                shutil.rmtree(meeting, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def await_shared(*paths: Path) -> None:
    """Wait until a shared file system shows files that another host has just written.

    Listing a folder makes the file system's client ask the server again.
    """
    deadline = time.monotonic() + LATE_S
    for path in paths:
        while not path.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.listdir(path.parent)
            time.sleep(LOOK_S)


def main(arguments: list[str] | None = None) -> int:
    """Run a job file.

    Returns
    -------
    int
        0 if every measurement succeeded, 1 if a measurement failed, 2 if the job could not run at
        all.
    """
    parser = argparse.ArgumentParser(prog="python -m d5suite.worker", description="Run one d5suite job file.")
    parser.add_argument("job", type=Path, help="the job file")
    parser.add_argument("--result", type=Path, help="the result file (default: beside the job file)")
    parser.add_argument(
        "--session", type=int, help=argparse.SUPPRESS
    )  # process id of the session, which locks the job file
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)  # file descriptor of the socket to the session
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # other workers run at first
    parser.add_argument("--trust", action="store_true", help="run the job's Python files even if they have changed")
    parser.add_argument(
        "--continue", action="store_true", dest="continues", help="go on from the checkpoints of a workflow that failed"
    )
    options = parser.parse_args(arguments)
    rank_info = RankInfo.from_environment(os.environ)
    if options.session is not None:
        end_with(options.session, options.job, rank_info.meeting if rank_info else None)
    path = options.result or result_path(options.job)
    try:
        if rank_info is not None and rank_info.meeting is not None:
            await_shared(rank_info.meeting, options.job)
        job = Job.load(options.job)
        if rank_info is not None and job.distributed is not None:
            own = of_rank(path, rank_info.rank)
            return _run_rank(job, options.job, own, rank_info, trust=options.trust, continues=options.continues)
        if job.ranks > 1:
            return _start_ranks(job, options.job, ["--trust"] * options.trust + ["--continue"] * options.continues)
        writer = ResultWriter(path)
    except (D5Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        try:
            if not options.trust:
                job.require_code()
            channel = None if options.turns is None else TurnChannel(options.turns, beside=options.beside)
            run(job, writer, channel=channel)
        except D5Error as error:
            writer.fail(error)
            print(f"error: {error}", file=sys.stderr)
            return 2
        writer.finish()
    except OSError as error:
        print(f"error: {error.filename or path}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 1 if writer.result.failures else 0


def _start_ranks(job: Job, path: Path, options: list[str]) -> int:
    """Start all ranks of a job that was run by hand."""
    limits = Limits(float("inf"), sys.maxsize)
    outcome = run_job(job, path, Launch(limits, options=options))
    if outcome.interrupt is not None:
        raise outcome.interrupt
    if not outcome.ok:
        print(f"error: {outcome.reason}\n{outcome.tail}", file=sys.stderr)
    return 0 if outcome.ok else 1


def _run_rank(job: Job, path: Path, result: Path, rank_info: RankInfo, *, trust: bool, continues: bool) -> int:
    """Run this rank's part of the job; any failure ends all ranks."""
    if rank_info.meeting is not None and RANK not in os.environ:  # mpiexec has one output for all ranks
        restore_environment()
        log = os.open(of_rank(log_path(path), rank_info.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
    heartbeat = HeartbeatWriter(heartbeat_path(rank_info.meeting, rank_info.rank) if rank_info.meeting else None)
    writer: ResultWriter | None = None
    try:
        writer = ResultWriter(result, together=True)
        if not trust:
            job.require_code()
        run(job, writer, rank_info, heartbeat, continues=continues)
        writer.finish()
        heartbeat.end()
    except BaseException as error:
        heartbeat.fail()
        if writer is not None and not writer.result.failures:
            writer.result.error = Failure(
                type(error).__name__, describe_error(error) if isinstance(error, Exception) else str(error)
            )
            with contextlib.suppress(OSError):  # the disk may be what failed
                writer.write()
        _leave(error)
    return 0


def _leave(error: BaseException) -> NoReturn:
    """End this process at once: a transport that closes cleanly waits for the other ranks."""
    try:
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
