"""Run the ranks of a job on this machine, and end all of them when one fails.

Imports `d5suite.files`, `d5suite.job` and its neighbours in ``d5suite.launch``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.errors import JobError
from d5suite.files import locked, read_json
from d5suite.job import log_path, of_rank, result_path
from d5suite.launch import mpi
from d5suite.launch.base import (
    MEETING,
    POLL_S,
    RANK,
    RANKS,
    WATCHED,
    Limits,
    Outcome,
    cannot_start,
    family_of,
    group_memory,
    kill_group,
    said_of,
    tail_of,
    worker_environment,
)
from d5suite.launch.heartbeat import HangDetector, Heartbeat, heartbeat_path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where MPI's ranks exchange messages
"""Parent of the meeting folder, where it exists."""


class Culprit(NamedTuple):
    """The rank that ended a job, and how."""

    rank: int
    how: str


def run_ranks(
    job: Path,
    *,
    ranks: int,
    launcher: str,
    threads: int,
    device: str,
    limits: Limits,
    oversubscribe: bool = False,
    python: str | None = None,
    wrap: str | None = None,
    watch: Callable[[], None] | None = None,
    options: Sequence[str] = (),
) -> Outcome:
    """Run the ranks of a job until all have ended, or one of them failed.

    Each writes a log and a result of its own (`d5suite.job.of_rank`). Whatever happens, no process
    and no file of the meeting is left.

    Parameters
    ----------
    job : Path
        As for `d5suite.launch.local.run_worker`, as are the parameters not named here.
    ranks : int
    launcher : {"process", "mpi"}
    threads : int
        Of all ranks together; each has its part, at least one.
    limits : Limits
        The memory is that of all ranks together.
    oversubscribe : bool
        Whether there may be more ranks than cores.
    options : sequence of str
        Further options of the worker.

    Raises
    ------
    ConfigurationError
        If the command cannot be started.
    """
    command = [*shlex.split(wrap or ""), python or sys.executable, "-m", "d5suite.worker"]
    command += ["--session", str(os.getpid()), *options, str(job)]
    environment = worker_environment(max(1, threads // ranks), device, limits)
    with _meeting() as meeting, locked(job):
        for rank in range(ranks):  # not before: another session may still write them
            of_rank(log_path(job), rank).unlink(missing_ok=True)
            of_rank(result_path(job), rank).unlink(missing_ok=True)
        group = _Group(job, ranks, meeting)
        environment |= {RANKS: str(ranks), MEETING: str(meeting), WATCHED: "1"}
        interrupt = None
        try:
            if launcher == "mpi":
                before = mpi.mpiexec(ranks, python=python, oversubscribe=oversubscribe)
                group.start([*before, *command], environment | mpi.environment(meeting), group.own_log)
            else:
                for rank in range(ranks):
                    group.start(command, environment | {RANK: str(rank)}, of_rank(log_path(job), rank))
            culprit = group.wait(limits, watch)
        except Exception:
            raise
        except BaseException as error:  # an interrupt must not lose what the workers have finished
            culprit, interrupt = None, error
        finally:
            group.end()
        if interrupt is not None:
            return Outcome(False, "the workers were interrupted", tail_of(log_path(job)), interrupt)
        if culprit is None:
            return Outcome(True, "all ranks exited with status 0", tail_of(log_path(job)))
        log = of_rank(log_path(job), culprit.rank)
        return Outcome(False, group.told(culprit), tail_of(log) or tail_of(group.own_log), rank=culprit.rank)


def told(result: Path, ranks: int, culprit: Culprit, heartbeat: Heartbeat | None) -> str:
    """Return a sentence on the rank that ended a job: its host, the event, its last phase.

    Parameters
    ----------
    result : Path
        The job's; its ranks' lie beside it.
    ranks : int
    culprit : Culprit
    heartbeat : Heartbeat or None
        Its last one.
    """
    try:
        found: dict[str, Any] = read_json(of_rank(result, culprit.rank))
    except JobError:
        found = {}
    host = heartbeat.host if heartbeat is not None else socket.gethostname()
    phase = found.get("phase", "starting")
    if heartbeat is not None and heartbeat.steps:
        phase += f" (last seen in step {heartbeat.steps})"
    failures = [*found.get("failures", {}).values(), *filter(None, [found.get("error")])]
    who = f"rank {culprit.rank} of {ranks} on {host}"
    if failures and culprit.how.startswith("exited"):
        return f"{who} failed, while {phase}: {failures[-1]['message']}"
    return f"{who} {culprit.how}, while {phase}"


@contextlib.contextmanager
def _meeting() -> Iterator[Path]:
    """Yield a temporary folder in which ranks find each other."""
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f"d5suite-{os.getpid()}-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Group:
    """The processes of a job: one per rank, or mpiexec."""

    def __init__(self, job: Path, ranks: int, meeting: Path) -> None:
        self.job, self.ranks, self.meeting = job, ranks, meeting
        self.own_log = log_path(job).with_suffix(".mpiexec.log")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.heartbeats: list[Heartbeat | None] = [None] * ranks
        self._watch = HangDetector(ranks)

    def start(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        with log.open("w", encoding="utf-8") as output:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise cannot_start(command[0], error) from error
        self.processes.append(process)

    def wait(self, limits: Limits, watch: Callable[[], None] | None) -> Culprit | None:
        """Wait for the end; return the rank that failed, if one did."""
        deadline = time.monotonic() + limits.seconds
        while True:
            running = [each for each in self.processes if each.poll() is None]
            self.heartbeats = [Heartbeat.read(heartbeat_path(self.meeting, rank)) for rank in range(self.ranks)]
            if any(each.returncode for each in self.processes):
                return self._failed()
            if not running:
                return None
            now = time.monotonic()
            if now > deadline:
                return Culprit(self._slowest(), limits.over_time().removeprefix("the worker "))
            if sum(group_memory(each.pid) for each in running) > limits.memory_bytes:
                return self._greedy(limits)
            hung = self._watch.look(self.heartbeats, now)
            if hung is not None:
                return Culprit(*hung)
            if watch is not None:
                watch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(timeout=POLL_S)

    def _failed(self) -> Culprit:
        """Return the rank to blame: one that a signal ended, else the first that failed.

        Others fail soon after it, because their connections to it break.
        """
        if len(self.processes) < self.ranks:
            codes = dict.fromkeys(range(self.ranks), self.processes[0].returncode)
            died = mpi.rank_that_died(self.own_log)
            if died is not None:
                return Culprit(died[0], said_of(-died[1]))
        else:
            codes = {rank: each.poll() or 0 for rank, each in enumerate(self.processes)}
            killed = [rank for rank, code in codes.items() if code < 0]
            killed.sort(key=lambda rank: codes[rank] == -signal.SIGABRT)  # as transports end that lose a peer
            if killed:
                return Culprit(killed[0], said_of(codes[killed[0]]))
        failed = {
            rank: heartbeat.failed_at
            for rank, heartbeat in enumerate(self.heartbeats)
            if heartbeat and heartbeat.failed_at
        }
        rank = min(failed, key=failed.__getitem__) if failed else next(rank for rank, code in codes.items() if code)
        return Culprit(rank, said_of(codes[rank]))

    def _slowest(self) -> int:
        """Return the rank that the others wait for, or 0."""
        waits = [heartbeat is not None and (heartbeat.waits or heartbeat.inside) for heartbeat in self.heartbeats]
        return waits.index(False) if False in waits else 0

    def _greedy(self, limits: Limits) -> Culprit:
        used = [group_memory(each.pid) if each is not None else 0 for each in self.heartbeats]
        most = used.index(max(used))
        return Culprit(
            most,
            f"used {used[most] / 2**30:.2f} GiB, and all ranks together more than the limit of "
            f"{limits.memory_bytes / 2**30:.2f} GiB (--job-memory), and was killed",
        )

    def told(self, culprit: Culprit) -> str:
        """Return a sentence on the rank: its host, the event, its last phase."""
        return told(result_path(self.job), self.ranks, culprit, self.heartbeats[culprit.rank])

    def end(self) -> None:
        """Kill the remaining processes of all ranks."""
        ranks = {each.pid for each in self.heartbeats if each is not None and self._is_rank(each)}
        started = {each.pid for each in self.processes} | ranks
        family = family_of(started)
        for pid in started:
            kill_group(pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _is_rank(self, heartbeat: Heartbeat) -> bool:
        """Return whether the rank that wrote this still runs; mpiexec may have orphaned it."""
        import psutil

        try:
            return heartbeat.host == socket.gethostname() and str(self.job) in psutil.Process(heartbeat.pid).cmdline()
        except psutil.Error:
            return False
