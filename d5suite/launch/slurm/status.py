"""The state of each job of a run, from Slurm and from the results."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from d5suite.errors import JobError, ValidationError
from d5suite.files import read_json, write_bytes
from d5suite.job import (
    Failure,
    Job,
    Result,
    failures_of_ranks,
    log_path,
    of_rank,
    rank_named,
    reason_path,
    result_path,
    results_of,
)
from d5suite.launch.base import describe_exit, text_of
from d5suite.launch.slurm import client
from d5suite.launch.slurm.client import FINAL, NEVER_STARTS, NoAnswerError, SlurmState
from d5suite.launch.slurm.run import SCRIPTS, SlurmRun, Submission, number_all, submit
from d5suite.launch.slurm.script import FAILED, nodes_of_components

PERIOD_S = (0.1, 5.0)
"""Least and most seconds between two queries to the controller, which all users share. The period
starts at the least, and returns to it whenever a worker finishes."""

RESULTS_PERIOD_S = 0.2
"""Seconds between two checks of the results of running jobs."""

PATIENCE_S = 3600.0
"""Seconds without an answer after which the controller counts as down."""

NEVER_STARTS_S = 10.0
"""Seconds for which a job must have a reason never to start: Slurm's first reason is a guess."""

LATE_S = 60.0
"""Seconds after a job's end within which a shared file system shows its result."""

FAILED_LATE_S = 5.0
"""The same for a job that failed; it may have left no result."""

OUT_OF_MEMORY = r"(?i:oom.?kill|out of memory|exceeded .*memory limit)"

LOGGED_STATES = (
    (r"DUE TO TIME LIMIT", "TIMEOUT"),
    (r"DUE TO PREEMPTION", "PREEMPTED"),
    (r"DUE TO NODE FAILURE|NODE FAIL", "NODE_FAIL"),
    (OUT_OF_MEMORY, "OUT_OF_MEMORY"),
    (r"CANCELLED AT", "CANCELLED"),
)
"""Messages of Slurm in a job's log, and the states that they mean; the last match wins."""

UNKNOWN = "UNKNOWN"
"""State of a job that Slurm has forgotten."""

TAIL_LINES = 5
"""Number of lines of a log in a message."""

_SIGNALS = {
    signal.strsignal(each): each for each in signal.Signals if each not in (signal.SIGTERM, signal.SIGINT)
}  # with these two srun ends the other ranks

KILLED_RANK = re.compile(
    rf"srun: error: (\S+): tasks? (\d+)\S*: ({'|'.join(re.escape(str(each)) for each in _SIGNALS)})"
)
"""Message of srun about a rank that a signal killed: the node, the rank and the signal's name."""

EXITED = re.compile(r"srun: error: (\S+): tasks? (\d+)\S*: Exited with exit code")
"""Message of srun about the first rank that failed: the node and the rank."""


@dataclass(frozen=True)
class LostRank:
    """A rank that ended all others: the measurement lost with it, and a message about both."""

    key: str | None
    message: str


@dataclass(frozen=True)
class JobStatus:
    """The state of one job.

    Attributes
    ----------
    name : str
        The job file's name, without suffix.
    start : Submission or None
        The latest submission; None if the job was never submitted.
    state : SlurmState or None
        What Slurm reports, if anything.
    measured : int
        Number of measurements that have a result.
    wanted : int
        Number of measurements of the job.
    failed : tuple of str
        Messages of the worker about measurements that failed.
    phase : str
        What the worker is doing, or was doing last.
    lost : LostRank or None
        The rank that ended the latest start: killed by a signal, or before its first measurement.
    kept_back : bool
        Whether a limit of the site keeps the job from being submitted yet.
    """

    name: str
    start: Submission | None
    state: SlurmState | None
    measured: int
    wanted: int
    failed: tuple[str, ...] = ()
    phase: str = ""
    lost: LostRank | None = None
    kept_back: bool = False

    @property
    def complete(self) -> bool:
        """Whether every measurement has a result."""
        return self.measured == self.wanted

    @property
    def settled(self) -> bool:
        """Whether every measurement has a result or a reported failure."""
        return self.measured + len(self.failed) >= self.wanted

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good."""
        if self.kept_back:
            return False
        return self.start is None or (self.state is not None and (self.state.ended or self.state.name == UNKNOWN))

    @property
    def waits(self) -> bool:
        """Whether the job waits, in Slurm's queue or to be submitted."""
        return self.kept_back or (self.state is not None and self.state.name == "PENDING")


def job_statuses(run: SlurmRun) -> list[JobStatus]:
    """Query Slurm and read the results; note in the ledger which jobs have ended.

    Raises
    ------
    NoAnswerError
        The controller does not answer.
    """
    open_starts = [starts[-1] for starts in run.jobs.values() if starts and starts[-1].state is None]
    states = client.states(sorted({each.name for each in open_starts}))
    changed = number_all(run, states)
    statuses = []
    for name, starts in run.jobs.items():
        start = starts[-1] if starts else None
        state = None
        if start is not None:
            state = SlurmState(**start.state) if start.state else states.get((start.name, start.number))
            if state is None:
                state = _forgotten_state(run, start)
            elif state.name == "FAILED" and re.search(OUT_OF_MEMORY, text_of(log_of(run, start))):
                state = SlurmState("OUT_OF_MEMORY", "", state.nodes)  # the end of a step looks like a failure
            if start.state is None and state.ended:
                starts[-1] = start = replace(start, state=asdict(state))
                changed = True
        statuses.append(replace(_job_status(run, name, start, state), kept_back=name in run.kept_back))
    if changed:
        with contextlib.suppress(PermissionError):  # another user may ask for the status, too
            run.save()
    return statuses


def _forgotten_state(run: SlurmRun, start: Submission) -> SlurmState:
    """Return how a job ended that the controller has forgotten: from accounting or the log."""
    if start.number:
        state = client.accounted(start.number)
        if state is not None and state.ended:
            return state
    log = text_of(log_of(run, start))
    if not log and not start.number:
        return SlurmState(UNKNOWN, "Slurm never took it")
    places = [(match.start(), name) for pattern, name in LOGGED_STATES for match in re.finditer(pattern, log)]
    return SlurmState(max(places)[1] if places else UNKNOWN)


def log_of(run: SlurmRun, start: Submission) -> Path:
    """Return the log of a submission's batch script and of srun."""
    number = int(start.name.rpartition("-")[2])
    (script,) = (run.folder / SCRIPTS).glob(f"{number:02}-*.sh")
    return script.with_suffix(".log" if start.element is None else f".{start.element}.log")


def _job_status(run: SlurmRun, name: str, start: Submission | None, state: SlurmState | None) -> JobStatus:
    path = run.job_path(name)
    job = Job.load(path)
    keys = job.keys()
    measured: set[str] = set()
    failures: dict[str, str] = {}
    lost = _lost_rank(run, start, state, path, job)
    stopped = _stopping_line(run, start, state)
    phase = ""
    for each in results_of(path):
        with contextlib.suppress(JobError):
            result = Result.load(each)
            measured |= set(result.measurements)
            failures = {key: failure.message for key, failure in result.failures.items()}
            phase = result.phase
    left = [key for key in keys if key not in measured]
    if stopped is not None:
        failures = dict.fromkeys(left, stopped)
    elif lost is not None:  # the other ranks fail because they lose this one
        failures = {lost.key or next(iter(left), ""): lost.message}
    elif left:
        of_ranks = failures_of_ranks(result_path(path), job.ranks, left[0])
        first = next(iter(of_ranks.values()), "")
        if not failures or not first.startswith("rank 0 of "):  # rank 0 lost the rank that failed first
            failures = of_ranks
    failed = tuple(message for key, message in failures.items() if key in left)
    return JobStatus(name, start, state, len(measured & set(keys)), len(keys), failed, phase, lost)


def _stopping_line(run: SlurmRun, start: Submission | None, state: SlurmState | None) -> str | None:
    """Return which line of the profile failed before the worker started; None if none did."""
    if start is None or state is None or state.name not in ("FAILED", UNKNOWN):
        return None
    found = re.findall(rf"^{FAILED}(\w+): (.*)", text_of(log_of(run, start)), re.MULTILINE)
    return f"{found[-1][1]}\n  {run.profile.line(found[-1][0])}" if found else None


def _lost_rank(
    run: SlurmRun, start: Submission | None, state: SlurmState | None, path: Path, job: Job
) -> LostRank | None:
    """Return the rank that ended the latest start: killed, according to srun, or early."""
    if start is None or state is None or state.name != "FAILED":
        return None
    latest = re.split(r"CANCELLED AT .* DUE TO .*", text_of(log_of(run, start)))[-1]
    killed = list(KILLED_RANK.finditer(latest.partition("CANCELLED AT")[0]))
    if not killed:
        return _early_error(path, job)
    killed.sort(key=lambda each: each[3] == "Aborted")  # transports that lose a peer abort
    node, task, how = killed[0].groups()
    rank = _rank_of(run, job, path, node, int(task))
    result = Result()
    with contextlib.suppress(JobError):
        result = Result.load(of_rank(result_path(path), rank))
    who = rank_named(rank, job.ranks, job.places)
    message = f"{who} on {node} {describe_exit(-_SIGNALS[how])}, while {result.phase}"
    return LostRank(result.measurement, message)


def _rank_of(run: SlurmRun, job: Job, path: Path, node: str, task: int) -> int:
    """Return the rank that srun names; in a heterogeneous job, srun counts per component."""
    if nodes_of_components(job, run.profile.profile):
        for ranks in job.places.values():
            with contextlib.suppress(JobError, IndexError):
                found = Result.load(of_rank(result_path(path), ranks[task]))
                if found.environment.get("slurm", {}).get("node") == node:
                    return ranks[task]
    return task


def _early_error(path: Path, job: Job) -> LostRank | None:
    """Return the rank that ended first with an error before its first measurement."""
    found = []
    for rank in range(job.ranks):
        own = of_rank(result_path(path), rank)
        with contextlib.suppress(JobError, OSError):
            result = Result.load(own)
            if result.error is not None and result.measurement is None:
                found.append((own.stat().st_mtime_ns, rank, result.error.message))
    if not found:
        return None
    _, rank, message = min(found)
    who = f"{rank_named(rank, job.ranks, job.places)}: " if job.ranks > 1 else ""
    return LostRank(None, f"{who}{message}")


def describe(run: SlurmRun, status: JobStatus) -> str:
    """Describe a job's state in a sentence, with Slurm's message if results are missing."""
    if status.complete:
        return "measured"
    if status.kept_back:
        return "is submitted once another job has ended: the site limits how many you may submit"
    if status.start is None:
        return "not submitted"
    where = f"job {status.start.number or status.start.name}"
    state = status.state or SlurmState(UNKNOWN)
    on = f" on {state.nodes}" if state.nodes and "None" not in state.nodes else ""
    if state.name == "PENDING":
        key = NEVER_STARTS.get(state.reason)
        never = f" and will never start\n  {run.profile.line(key)}" if key else ""
        return f"{where} waits ({state.reason}){never}"
    if not status.ended:
        return f"{where} runs{on}: {status.phase or state.name.lower()}"
    if status.failed and state.name in ("COMPLETED", "FAILED", UNKNOWN):
        return f"{where}{on} failed: {status.failed[0]}"
    ended = FINAL.get(state.name, "is unknown to Slurm" if not state.reason else state.reason)
    reason = f" ({state.reason})" if state.ended and state.reason not in ("None", "", "NonZeroExitCode") else ""
    doing = f", while {status.phase}" if status.phase and status.phase != "done" else ""
    key = {"TIMEOUT": "time", "OUT_OF_MEMORY": "memory"}.get(state.name)
    line = f"\n  {run.profile.line(key)}" if key else ""
    tail = ""
    if state.name in ("FAILED", "COMPLETED", UNKNOWN):  # the job gave no reason
        common = text_of(log_of(run, status.start))
        first = EXITED.search(common)
        path = run.job_path(status.name)
        rank = _rank_of(run, Job.load(path), path, first[1], int(first[2])) if first else 0
        own = text_of(of_rank(log_path(path), rank))
        logs = [log.splitlines()[-TAIL_LINES:] for log in (own, common)]
        tail = "".join(f"\n    {line}" for lines in logs for line in lines)
    return f"{where} {ended}{on}{reason}{doing}{line}{tail}"


def write_reasons(run: SlurmRun, statuses: list[JobStatus]) -> None:
    """Write beside each incomplete job why it is incomplete, for ``--from-jobs``."""
    for status in statuses:
        path = reason_path(run.job_path(status.name))
        with contextlib.suppress(OSError):
            if status.complete:
                path.unlink(missing_ok=True)
            else:
                write_bytes(path, describe(run, status).encode())
                _name_lost_rank(run, status)


def _name_lost_rank(run: SlurmRun, status: JobStatus) -> None:
    """Replace rank 0's message that it lost a rank by the signal that killed that rank."""
    path = result_path(run.job_path(status.name))
    with contextlib.suppress(JobError):
        result = Result.load(path)
        key = result.measurement
        failure = result.failures.get(key or "")
        is_wrong = failure is not None and failure.type == ValidationError.__name__
        if status.lost is not None and key is not None and not is_wrong:
            result.failures[key] = Failure(JobError.__name__, status.lost.message)
            result.save(path)


def follow(run: SlurmRun, tell: Callable[[list[JobStatus], str], None]) -> list[JobStatus]:
    """Wait until all jobs of a run have ended and their results are visible.

    Parameters
    ----------
    run : SlurmRun
    tell : callable
        Receives the state of all jobs after each query, and a remark if the controller does not
        answer.

    Raises
    ------
    RefusedError
        A job will never start, or one that was kept back is refused.
    NoAnswerError
        The controller did not answer for an hour.
    """
    silent_since: float | None = None
    going = 0
    ended_at: dict[str, float] = {}
    waits: dict[str, tuple[str, float]] = {}
    statuses: list[JobStatus] = []
    known: set[str] = set()
    pause = PERIOD_S[0]
    while True:
        try:
            statuses = job_statuses(run)
            going = _submit_kept_back(run, going)
            silent_since = None
        except NoAnswerError as error:
            now = time.monotonic()
            silent_since = silent_since or now
            if now - silent_since > PATIENCE_S:
                raise
            tell(statuses, f"Slurm does not answer for {now - silent_since:.0f} s: {error.what}")
            time.sleep(max(pause, 1.0))
            pause = _longer(pause)
            continue
        tell(statuses, "")
        now = time.monotonic()
        _require_start(run, statuses, waits, now)
        for status in statuses:
            if status.ended:
                ended_at.setdefault(status.name, now)
        if all(each.ended and (_is_final(run, each) or now - ended_at[each.name] > _late_s(each)) for each in statuses):
            return statuses
        finished = _await_finished(run, statuses, pause, known)
        known |= finished
        pause = PERIOD_S[0] if finished else _longer(pause)


def _submit_kept_back(run: SlurmRun, before: int) -> int:
    """Submit jobs that were kept back if fewer jobs go on than before; return how many go on."""
    if run.kept_back and len(run.going()) < max(before, 1):
        submit(run, run.kept_back)
    return len(run.going())


def _await_finished(run: SlurmRun, statuses: list[JobStatus], pause: float, known: set[str]) -> set[str]:
    """Pause, but only until workers finish, which Slurm reports later; return their jobs' names."""
    going = [each.name for each in statuses if not each.ended and not each.kept_back]
    running = {name: result_path(run.job_path(name)) for name in going}
    end = time.monotonic() + pause
    finished: set[str] = set()
    while not finished and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, RESULTS_PERIOD_S))
        finished = {name for name in running.keys() - known if _result_status(running[name]) not in (None, "running")}
    return finished


def _result_status(path: Path) -> str | None:
    with contextlib.suppress(JobError, KeyError):
        return str(read_json(path)["status"])
    return None


def _is_final(run: SlurmRun, status: JobStatus) -> bool:
    """Return whether a job's results will not change any more."""
    if status.settled or status.start is None:
        return True
    if status.state is None or status.state.name not in ("COMPLETED", "FAILED"):
        return True  # it was ended from outside while it worked
    return _result_status(result_path(run.job_path(status.name))) == "failed"


def _late_s(status: JobStatus) -> float:
    return LATE_S if status.state is not None and status.state.name == "COMPLETED" else FAILED_LATE_S


def _require_start(run: SlurmRun, statuses: list[JobStatus], waits: dict[str, tuple[str, float]], now: float) -> None:
    """Cancel all pending jobs once one has had a reason never to start for `NEVER_STARTS_S`."""
    queued = [each for each in statuses if each.waits and not each.kept_back]
    pending = [(each, each.state, each.start) for each in queued if each.state and each.start]
    for status, state, _ in pending:
        if waits.get(status.name, ("", now))[0] != state.reason:
            waits[status.name] = state.reason, now
        if state.reason in NEVER_STARTS and now - waits[status.name][1] >= NEVER_STARTS_S:
            client.cancel([start.number for _, _, start in pending if start.number])
            raise client.RefusedError(f"{describe(run, status)}\n  It was cancelled, as were all that wait.")


def _longer(pause: float) -> float:
    """Return the next pause; pauses grow while nothing happens."""
    return min(PERIOD_S[1], pause * 1.1)
