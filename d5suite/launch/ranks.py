"""Supervision of several ranks on this machine: when one fails, all end.

Each rank writes a log and a result of its own (`d5suite.job.of_rank`). When the job ends, neither a
process nor a file of the meeting folder is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from d5suite.errors import JobError
from d5suite.files import read_json
from d5suite.job import Job, of_rank, rank_named, result_path, stem_of
from d5suite.launch import mpi
from d5suite.launch.base import (
    MEETING,
    RANK,
    RANKS,
    WATCHED,
    Launch,
    Outcome,
    describe_exit,
    tail_of,
    worker_environment,
)
from d5suite.launch.heartbeat import FailedRank, HangDetector, Heartbeat, describe_stacks, heartbeat_path
from d5suite.launch.processes import family_memory, family_of, kill_group
from d5suite.launch.supervisor import Supervisor

MEETS = "meeting the other ranks"
"""Phase of a worker that connects to the others."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where MPI's ranks exchange messages
"""Parent of the meeting folder, where it exists."""


class RankSupervisor(Supervisor):
    """Supervises the ranks of a job: one process per rank, or mpiexec."""

    def __init__(self, job: Job, path: Path, launch: Launch) -> None:
        self._places = job.places  # raises before anything is made
        super().__init__(job, path, launch)
        for rank in range(job.ranks):  # only now: before, another session may have been writing them
            of_rank(self.log, rank).unlink(missing_ok=True)
            of_rank(result_path(path), rank).unlink(missing_ok=True)
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self.meeting = Path(tempfile.mkdtemp(prefix=f"d5suite-{os.getpid()}-", dir=parent))
        self._held.callback(shutil.rmtree, self.meeting, ignore_errors=True)
        couplings = path.with_name(f"{stem_of(result_path(path)).name}.couplings")
        self._held.callback(shutil.rmtree, couplings, ignore_errors=True)
        self._mpi_log = self.log.with_suffix(".mpiexec.log")
        self._heartbeats: list[Heartbeat | None] = [None] * job.ranks
        self._detector = HangDetector(job.ranks)
        self._failed: FailedRank | None = None

    def start(self) -> None:
        """Start the ranks, or mpiexec; see `Supervisor.start`."""
        how, ranks = self.job.distributed, self.job.ranks
        assert how is not None
        environment = worker_environment(self.job, self.launch)
        environment |= {RANKS: str(ranks), MEETING: str(self.meeting), WATCHED: "1"}
        if how.launcher == "mpi":
            launcher = mpi.mpiexec(ranks, python=self.launch.python, oversubscribe=how.oversubscribe)
            self.spawn(self.command(launcher), environment | mpi.environment(self.meeting), self._mpi_log)
            return
        for rank in range(ranks):
            self.spawn(self.command(), environment | {RANK: str(rank)}, of_rank(self.log, rank))

    def has_ended(self) -> bool:
        """Wait a moment for the end of all ranks, or the failure of one."""
        ended = super().has_ended()
        self._heartbeats = [Heartbeat.read(heartbeat_path(self.meeting, rank)) for rank in range(self.job.ranks)]
        if ended and any(each.poll() for each in self.processes):
            self._failed = self._first_failed()
        return ended

    def check(self, ran_s: float) -> str | None:
        """Return why the ranks must be killed, if they must, and note which rank is the cause."""
        reason = super().check(ran_s)
        if self._exceeded is not None:
            used = [family_memory([each.pid]) if each is not None else 0 for each in self._heartbeats]
            most = max(used)
            reason = (
                f"used {most / 2**30:.2f} GiB, and all ranks together more than the limit of "
                f"{self._exceeded / 2**30:.2f} GiB (--job-memory), and was killed"
            )
            self._failed = FailedRank(used.index(most), reason)
        elif reason is not None:
            self._failed = FailedRank(self._awaited(), reason, hung=True)
        else:
            self._failed = self._detector.check(self._heartbeats, time.monotonic())
        return self._failed.how if self._failed is not None else None

    def _awaited(self) -> int:
        """Return the rank that the others wait for: the first one that does not wait, else 0."""
        waits = [each is not None and each.in_call for each in self._heartbeats]
        return waits.index(False) if False in waits else 0

    def _first_failed(self) -> FailedRank:
        """Return the rank that caused the failure: one killed by a signal, else the first to fail.

        The others fail soon after, because their connections to it break.
        """
        if len(self.processes) < self.job.ranks:
            died = mpi.rank_that_died(self._mpi_log)
            if died is not None:
                return FailedRank(died[0], describe_exit(-died[1]))
            codes = dict.fromkeys(range(self.job.ranks), self.processes[0].returncode)
        else:
            codes = {rank: each.poll() or 0 for rank, each in enumerate(self.processes)}
            killed = [rank for rank, code in codes.items() if code < 0]
            killed.sort(key=lambda rank: codes[rank] == -signal.SIGABRT)  # transports that lose a peer abort
            if killed:
                return FailedRank(killed[0], describe_exit(codes[killed[0]]))
        failed = {rank: each.failed_at for rank, each in enumerate(self._heartbeats) if each and each.failed_at}
        rank = min(failed, key=failed.__getitem__) if failed else next(rank for rank, code in codes.items() if code)
        return FailedRank(rank, describe_exit(codes[rank]))

    def kill_all(self) -> None:
        """Kill all ranks and their descendants, even ranks that mpiexec has orphaned."""
        ranks = {each.pid for each in self._heartbeats if each is not None and self._is_rank(each)}
        started = {each.pid for each in self.processes} | ranks
        family = family_of(started)
        for pid in started:
            kill_group(pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _is_rank(self, heartbeat: Heartbeat) -> bool:
        """Return whether the rank that wrote this still runs."""
        import psutil

        try:
            here = heartbeat.host == socket.gethostname()
            return here and str(self.path) in psutil.Process(heartbeat.pid).cmdline()
        except psutil.Error:
            return False

    def outcome(self) -> Outcome:
        """Return how the ranks ended."""
        if self._failed is None:
            ok = self._killed is None
            reason = "all ranks exited with status 0" if ok else "the workers were interrupted"
            return Outcome(ok, reason, tail_of(self.log))
        rank = self._failed.rank
        reason = describe_failed(result_path(self.path), self._failed, self._heartbeats, self._places)
        return Outcome(False, reason, tail_of(of_rank(self.log, rank)) or tail_of(self._mpi_log), rank=rank)


def describe_failed(
    result: Path,
    failed: FailedRank,
    heartbeats: Sequence[Heartbeat | None],
    places: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> str:
    """Describe the rank that ended a job: its component, host, what happened, and in which phase.

    If a rank hung, lines follow that say where all ranks are.

    Parameters
    ----------
    result : Path
        The job's result file; the ranks' result files are in the same folder.
    failed : FailedRank
    heartbeats : sequence of Heartbeat or None
        The last heartbeat of every rank.
    places : mapping of str to sequence of int
        By component of a workflow: its ranks.
    """
    heartbeat = heartbeats[failed.rank]
    try:
        content: dict[str, Any] = read_json(of_rank(result, failed.rank))
    except JobError:
        content = {}
    host = heartbeat.host if heartbeat is not None else socket.gethostname()
    phase = content.get("phase", "starting")
    if heartbeat is not None and heartbeat.steps:
        phase += f" (last seen in step {heartbeat.steps})"
    failures = [*content.get("failures", {}).values(), *filter(None, [content.get("error")])]
    who = f"{rank_named(failed.rank, len(heartbeats), places)} on {host}"
    if failed.hung and phase == MEETS and len({each.host for each in heartbeats if each is not None}) > 1:
        phase += "; packets may be dropped between the hosts: choose another network with --interface"
    if failures and failed.how.startswith("exited"):
        return f"{who} failed, while {phase}: {failures[-1]['message']}"
    return f"{who} {failed.how}, while {phase}{describe_stacks(heartbeats) if failed.hung else ''}"
