"""A worker that is one of several ranks: its number, its share of the machine, hang detection.

Imports `d5suite.instruments`, `d5suite.launch`, `d5suite.job` and its neighbours.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import d5suite
from d5suite.errors import JobError
from d5suite.instruments.gpus import query_nvidia_smi
from d5suite.instruments.nvml import RUN_GPUS
from d5suite.instruments.threads import share_cpus
from d5suite.job import Failure, Job
from d5suite.launch.base import MEETING, RANK, RANKS, STARTED_BY_SRUN, WATCHED
from d5suite.launch.heartbeat import HangDetector, Heartbeat, HeartbeatWriter, heartbeat_path
from d5suite.launch.ranks import describe_failed
from d5suite.worker.writer import ResultWriter

LOOK_S = 1.0
"""Seconds between two checks for hanging ranks."""

DEPUTY_S = 4.0
"""Seconds that rank 1 waits before it reports a hang of rank 0, which may report it first."""

_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
)
"""Environment variables of Open MPI's and MPICH's mpiexec and of horovodrun: rank, number of ranks,
rank on this host, number of ranks on this host."""

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
"""Environment variables of srun: rank, number of ranks, rank on this node, number of nodes. All
nodes have the same number of ranks."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, and the number of ranks: in the job, and on this host.

    Attributes
    ----------
    rank, ranks : int
    local_rank, local_ranks : int
        The same, counted on this host only.
    meeting : Path or None
        A folder that all ranks see.
    bound : bool
        Whether the launcher has already bound this rank to its CPUs and its GPU.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    meeting: Path | None = None
    bound: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankInfo | None:
        """Read the numbers that a launcher sets in the environment; None without a launcher."""
        meeting = Path(environment[MEETING]) if environment.get(MEETING) else None
        if RANK in environment:
            rank, ranks = int(environment[RANK]), int(environment[RANKS])
            return cls(rank, ranks, rank, ranks, meeting)
        if STARTED_BY_SRUN in environment and all(name in environment for name in _SLURM):
            rank, ranks, local_rank, nodes = (int(environment[name]) for name in _SLURM)
            return cls(rank, ranks, local_rank, ranks // nodes, meeting, environment[STARTED_BY_SRUN] == "bound")
        for rank_of, size_of, local_of, locals_of in _LAUNCHERS:
            if rank_of in environment:
                rank, ranks = int(environment[rank_of]), int(environment[size_of])
                local = int(environment.get(local_of, rank)), int(environment.get(locals_of, ranks))
                return cls(rank, ranks, *local, meeting)
        return None


def share_resources(job: Job, rank_info: RankInfo, notes: list[str]) -> tuple[Job, list[int] | None]:
    """Divide threads, loader workers, CPUs and GPUs among the ranks; return this rank's share.

    Parameters
    ----------
    job : Job
    rank_info : RankInfo
    notes : list of str
        Receives reasons to doubt the result.

    Raises
    ------
    JobError
        If ranks would share cores or GPUs, which the job does not allow.
    """
    if rank_info.ranks != job.ranks:
        raise JobError(f"the job has {job.ranks} ranks, and {rank_info.ranks} were started")
    if job.distributed is None or rank_info.ranks == 1:
        return job, None
    threads = max(1, job.threads // rank_info.ranks)
    oversubscribe = job.distributed.oversubscribe
    own = replace(job, threads=threads, loader_workers=min(job.loader_workers, threads))
    ranks = rank_info.local_ranks
    if ranks == 1 or rank_info.bound:
        return own, None
    if ranks < rank_info.ranks:
        job = replace(job, threads=threads * ranks)  # the threads of this host's ranks
    found = {"CPU": min(job.threads, len(share_cpus(job.threads, 1, 0)))}
    if job.device != "cpu":
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = gpus if gpus != [""] else [row["index"] for row in query_nvidia_smi("gpu", ("index",)) or []]
        if gpus:
            found["GPU"] = len(gpus)
            os.environ[RUN_GPUS] = ",".join(gpus[:ranks])
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank_info.local_rank % len(gpus)]
    for kind, count in found.items():
        if ranks > count:
            shared = f"{ranks} ranks share {count} {kind}{'s' if count > 1 else ''}"
            if not oversubscribe:
                raise JobError(shared, hint="To run them anyway, give --oversubscribe.")
            notes.append(shared)
    cpus = share_cpus(job.threads, ranks, rank_info.local_rank)
    return own, cpus


def watch_ranks(
    rank_info: RankInfo, heartbeat: HeartbeatWriter, writer: ResultWriter, places: Mapping[str, Sequence[int]]
) -> Callable[[], None]:
    """Watch for hanging ranks under a foreign launcher; return a function that stops watching.

    A thread of rank 0 watches all ranks, and a thread of rank 1 watches rank 0. On a hang the
    watching rank writes into its own result which rank hangs, and ends its process. The launcher,
    srun or mpiexec, then ends all others.
    """
    if rank_info.meeting is None or WATCHED in os.environ or rank_info.ranks == 1 or rank_info.rank > 1:
        return lambda: None
    over = threading.Event()
    args = rank_info, rank_info.meeting, heartbeat, writer, over, places
    threading.Thread(target=_watch, args=args, daemon=True, name="watch").start()
    return over.set


def _watch(
    rank_info: RankInfo,
    meeting: Path,
    heartbeat: HeartbeatWriter,
    writer: ResultWriter,
    over: threading.Event,
    places: Mapping[str, Sequence[int]],
) -> None:
    detector, since = HangDetector(rank_info.ranks), None
    while not over.wait(LOOK_S):
        with contextlib.suppress(OSError):
            os.listdir(meeting)  # so that a client of a shared file system asks its server
        heartbeats = [Heartbeat.read(heartbeat_path(meeting, rank)) for rank in range(rank_info.ranks)]
        hung = detector.check(heartbeats, time.monotonic())
        if hung is None or (rank_info.rank == 1 and hung.rank != 0):
            since = None
            continue
        since = since or time.monotonic()
        if rank_info.rank == 1 and time.monotonic() - since < DEPUTY_S:
            continue
        first = writer.path.with_name(writer.path.name.replace(f".rank{rank_info.rank}.result.json", ".result.json"))
        message = describe_failed(first, hung, heartbeats, places)
        _end_all(message, heartbeat, writer)


def _end_all(message: str, heartbeat: HeartbeatWriter, writer: ResultWriter) -> None:
    """Write the reason into the result file, which the session reads, and end this process."""
    result = writer.result
    result.error = Failure(JobError.__name__, message)
    if result.measurement is not None:
        result.failures[result.measurement] = result.error
    heartbeat.fail()
    try:
        writer.write()
        print(f"error: {message}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def code_digest() -> str:
    """Return a checksum of d5suite's own code."""
    digest, folder = hashlib.sha256(), Path(d5suite.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
