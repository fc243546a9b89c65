"""Track the state of each job of a run."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from d5suite.errors import JobError, ValidationError
from d5suite.files import read_json, write_bytes
from d5suite.job import Failure, Job, Result, fate_path, of_rank, result_path, results_of
from d5suite.launch.base import describe_exit
from d5suite.launch.slurm import client
from d5suite.launch.slurm.client import FINAL, SilentError, State
from d5suite.launch.slurm.run import SCRIPTS, Run, Submission, number_all

PERIOD_S = (0.1, 5.0)
"""Seconds between two queries to the controller: the shortest, used first and after a worker has
finished, and the longest. All users share the controller."""

GLANCE_S = 0.2
"""Seconds between two checks of the results of running jobs."""

PATIENCE_S = 3600.0
"""Seconds without an answer after which the controller counts as down."""

HOPELESS_S = 10.0
"""Seconds for which a pending reason must last before it counts: Slurm's first is a guess."""

LATE_S = 60.0
"""Seconds after a job's end within which a shared file system must show its result."""

FAILED_LATE_S = 5.0
"""The same limit for a job that failed, and may have left no result."""

OUT_OF_MEMORY = r"(?i:oom.?kill|out of memory|exceeded .*memory limit)"

TELLING = (
    (r"DUE TO TIME LIMIT", "TIMEOUT"),
    (r"DUE TO PREEMPTION", "PREEMPTED"),
    (r"DUE TO NODE FAILURE|NODE FAIL", "NODE_FAIL"),
    (OUT_OF_MEMORY, "OUT_OF_MEMORY"),
    (r"CANCELLED AT", "CANCELLED"),
)
"""Slurm's messages in a job's own log, and the states that they mean; the last match wins."""

NAMELESS = "UNKNOWN"
"""State of a job that Slurm no longer knows."""

TAIL_LINES = 5

_SIGNALS = {
    signal.strsignal(each): each for each in signal.Signals if each not in (signal.SIGTERM, signal.SIGINT)
}  # with these srun ends the other ranks

DIED = re.compile(rf"srun: error: (\S+): tasks? (\d+)\S*: ({'|'.join(re.escape(str(each)) for each in _SIGNALS)})")
"""Message of srun about a rank that a signal ended: node, rank and the signal's name."""


@dataclass(frozen=True)
class Fate:
    """The state of one job.

    Attributes
    ----------
    name : str
        Of the job file.
    start : Submission or None
        The latest; None if it was never submitted.
    state : State or None
        What Slurm says, if anything.
    measured : int
        Measurements that have a result.
    wanted : int
    failed : tuple of str
        What went wrong with others, in the worker's words.
    phase : str
        What the worker says it does.
    """

    name: str
    start: Submission | None
    state: State | None
    measured: int
    wanted: int
    failed: tuple[str, ...] = ()
    phase: str = ""

    @property
    def complete(self) -> bool:
        """Whether each measurement has a result."""
        return self.measured == self.wanted

    @property
    def settled(self) -> bool:
        """Whether each measurement has a result or a reported failure."""
        return self.measured + len(self.failed) >= self.wanted

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.start is None or (self.state is not None and (self.state.ended or self.state.name == NAMELESS))

    @property
    def waits(self) -> bool:
        """Whether it waits in Slurm's queue."""
        return self.state is not None and self.state.name == "PENDING"


class Death(NamedTuple):
    """A rank that a signal ended, the measurement lost with it, and both in a sentence."""

    rank: int
    key: str | None
    message: str


def look(run: Run) -> list[Fate]:
    """Update the state of all jobs from Slurm and the results; record their ends in the ledger.

    Raises
    ------
    SilentError
        The controller does not answer.
    """
    unknown = [starts[-1] for starts in run.jobs.values() if starts and starts[-1].state is None]
    said = client.states(sorted({each.name for each in unknown}))
    changed = number_all(run, said)
    found = []
    for name, starts in run.jobs.items():
        start = starts[-1] if starts else None
        state = None
        if start is not None:
            state = State(**start.state) if start.state else said.get((start.name, start.number))
            if state is None:
                state = _forgotten(run, start)
            elif state.name == "FAILED" and re.search(OUT_OF_MEMORY, _log(run, start)):
                state = State("OUT_OF_MEMORY", "", state.nodes)  # a step's end looks like a failure
            if start.state is None and state.ended:
                starts[-1] = start = replace(start, state=asdict(state))
                changed = True
        found.append(_fate(run, name, start, state))
    if changed:
        with contextlib.suppress(PermissionError):  # another user may look, too
            run.save()
    return found


def _forgotten(run: Run, start: Submission) -> State:
    """Return how a job ended that the controller forgot, from accounting or the job's log."""
    if start.number:
        state = client.remembered(start.number)
        if state is not None and state.ended:
            return state
    text = _log(run, start)
    if not text and not start.number:
        return State(NAMELESS, "Slurm never took it")
    places = [(match.start(), name) for pattern, name in TELLING for match in re.finditer(pattern, text)]
    return State(max(places)[1] if places else NAMELESS)


def _log(run: Run, start: Submission) -> str:
    try:
        return log_of(run, start).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def log_of(run: Run, start: Submission) -> Path:
    """Return the log of a submission's batch script and of srun."""
    number = int(start.name.rpartition("-")[2])
    (script,) = (run.folder / SCRIPTS).glob(f"{number:02}-*.sh")
    return script.with_suffix(".log" if start.element is None else f".{start.element}.log")


def _fate(run: Run, name: str, start: Submission | None, state: State | None) -> Fate:
    path = run.job_path(name)
    job = Job.load(path)
    keys = job.keys()
    measured: set[str] = set()
    failures: dict[str, str] = {}
    death = _death(run, start, state, path, job.ranks)
    phase = ""
    for each in results_of(path):
        try:
            result = Result.load(each)
        except JobError:
            continue
        measured |= set(result.measurements)
        failures = {key: failure.message for key, failure in result.failures.items()}
        phase = result.phase
    if death is not None:  # others fail because they lose it
        failures = {death.key or next((key for key in keys if key not in measured), ""): death.message}
    elif not failures and len(measured) < len(keys):
        failures = _of_other_ranks(path, job.ranks)
    failed = tuple(message for key, message in failures.items() if key in keys and key not in measured)
    return Fate(name, start, state, len(measured & set(keys)), len(keys), failed, phase)


def _death(run: Run, start: Submission | None, state: State | None, path: Path, ranks: int) -> Death | None:
    """Return the rank that a signal ended first in the latest start, according to srun."""
    if start is None or state is None or state.name != "FAILED":
        return None
    latest = re.split(r"CANCELLED AT .* DUE TO .*", _log(run, start))[-1]
    died = list(DIED.finditer(latest.partition("CANCELLED AT")[0]))
    died.sort(key=lambda each: each[3] == "Aborted")  # as transports end that lose a peer
    if not died:
        return None
    node, rank, how = died[0].groups()
    try:
        result = Result.load(of_rank(result_path(path), int(rank)))
    except JobError:
        result = Result()
    said = f"rank {rank} of {ranks} on {node} {describe_exit(-_SIGNALS[how])}, while {result.phase}"
    return Death(int(rank), result.measurement, said)


def _of_other_ranks(path: Path, ranks: int) -> dict[str, str]:
    """Return failures by measurement, of ranks whose failure ended rank 0, too."""
    found: dict[str, str] = {}
    for rank in range(1, ranks):
        try:
            result = Result.load(of_rank(result_path(path), rank))
        except JobError:
            continue
        own = {key: failure.message for key, failure in result.failures.items()}
        if result.error is not None and result.measurement is not None:
            own[result.measurement] = result.error.message
        for key, message in own.items():
            found.setdefault(key, f"rank {rank} of {ranks}: {message}")
    return found


def told(run: Run, fate: Fate) -> str:
    """Return a job's state in a sentence, with Slurm's message if results are missing."""
    if fate.complete:
        return "measured"
    if fate.start is None:
        return "not submitted"
    where = f"job {fate.start.number or fate.start.name}"
    state = fate.state or State(NAMELESS)
    on = f" on {state.nodes}" if state.nodes and "None" not in state.nodes else ""
    if state.name == "PENDING":
        return f"{where} waits ({state.reason})" + _hopeless(run, state)
    if not fate.ended:
        return f"{where} runs{on}: {fate.phase or state.name.lower()}"
    if fate.failed and state.name in ("COMPLETED", "FAILED", NAMELESS):
        return f"{where}{on} failed: {fate.failed[0]}"
    ended = FINAL.get(state.name, "is unknown to Slurm" if not state.reason else state.reason)
    reason = f" ({state.reason})" if state.ended and state.reason not in ("None", "", "NonZeroExitCode") else ""
    doing = f", while {fate.phase}" if fate.phase and fate.phase != "done" else ""
    key = {"TIMEOUT": "time", "OUT_OF_MEMORY": "memory"}.get(state.name)
    line = f"\n  {run.profile.line(key)}" if key else ""
    tail = _tail(run, fate) if state.name in ("FAILED", "COMPLETED", NAMELESS) else ""
    return f"{where} {ended}{on}{reason}{doing}{line}{tail}"


def _hopeless(run: Run, state: State) -> str:
    key = client.HOPELESS.get(state.reason)
    return f" and will never start\n  {run.profile.line(key)}" if key else ""


def _tail(run: Run, fate: Fate) -> str:
    """Return the last lines of the logs of a job that left no reason."""
    assert fate.start is not None
    lines: list[str] = []
    own = result_path(run.job_path(fate.name)).with_name(f"{fate.name}.log")
    for log in (own, log_of(run, fate.start)):
        with contextlib.suppress(OSError):
            lines += log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "".join(f"\n    {line}" for line in lines)


def write_fates(run: Run, fates: list[Fate]) -> None:
    """Write the reason beside each incomplete job, for ``--from-jobs``."""
    for fate in fates:
        path = fate_path(run.job_path(fate.name))
        with contextlib.suppress(OSError):
            if fate.complete:
                path.unlink(missing_ok=True)
            else:
                write_bytes(path, told(run, fate).encode())
                _blame(run, fate)


def _blame(run: Run, fate: Fate) -> None:
    """Replace rank 0's message about a lost rank by the signal that ended that rank."""
    path = run.job_path(fate.name)
    with contextlib.suppress(JobError):
        result = Result.load(result_path(path))
        death = _death(run, fate.start, fate.state, path, Job.load(path).ranks)
        key = result.measurement
        lost = result.failures.get(key or "")
        if death is None or key is None or (lost is not None and lost.type == ValidationError.__name__):
            return
        result.failures[key] = Failure(JobError.__name__, death.message)
        result.save(result_path(path))


def follow(run: Run, tell: Callable[[list[Fate], str], None]) -> list[Fate]:
    """Wait until all jobs of a run have ended and their results are visible.

    Parameters
    ----------
    run : Run
    tell : callable
        Receives the state of all jobs after each look, and a remark: that the controller is silent.

    Raises
    ------
    RefusedError
        A job waits for what will never come.
    SilentError
        The controller was silent for an hour.
    """
    silent_since: float | None = None
    ended_at: dict[str, float] = {}
    waits: dict[str, tuple[str, float]] = {}
    fates: list[Fate] = []
    known: set[str] = set()
    pause = PERIOD_S[0]
    while True:
        try:
            fates = look(run)
            silent_since = None
        except SilentError as error:
            now = time.monotonic()
            silent_since = silent_since or now
            if now - silent_since > PATIENCE_S:
                raise
            tell(fates, f"Slurm does not answer for {now - silent_since:.0f} s: {error.what}")
            time.sleep(max(pause, 1.0))
            pause = _longer(pause)
            continue
        tell(fates, "")
        now = time.monotonic()
        _require_hope(run, fates, waits, now)
        for fate in fates:
            if fate.ended:
                ended_at.setdefault(fate.name, now)
        if all(fate.ended and (_seen(run, fate) or now - ended_at[fate.name] > _late_s(fate)) for fate in fates):
            return fates
        finished = _newly_finished(run, fates, pause, known)
        known |= finished
        pause = PERIOD_S[0] if finished else _longer(pause)


def _newly_finished(run: Run, fates: list[Fate], pause: float, known: set[str]) -> set[str]:
    """Wait, at most until workers finish, which Slurm reports later; return their jobs' names."""
    running = {each.name: result_path(run.job_path(each.name)) for each in fates if not each.ended}
    end = time.monotonic() + pause
    finished: set[str] = set()
    while not finished and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, GLANCE_S))
        for name in running.keys() - known:
            with contextlib.suppress(JobError, KeyError):
                if read_json(running[name])["status"] != "running":
                    finished.add(name)
    return finished


def _seen(run: Run, fate: Fate) -> bool:
    """Return whether a job's results are final."""
    if fate.settled or fate.start is None:
        return True
    if fate.state is None or fate.state.name not in ("COMPLETED", "FAILED"):
        return True  # it was ended from outside, in the midst of it
    with contextlib.suppress(JobError, KeyError):
        return read_json(result_path(run.job_path(fate.name)))["status"] == "failed"
    return False


def _late_s(fate: Fate) -> float:
    return LATE_S if fate.state is not None and fate.state.name == "COMPLETED" else FAILED_LATE_S


def _require_hope(run: Run, fates: list[Fate], waits: dict[str, tuple[str, float]], now: float) -> None:
    """Cancel all pending jobs once one has had a hopeless reason for `HOPELESS_S`."""
    pending = [fate for fate in fates if fate.waits]
    for fate in pending:
        assert fate.state is not None and fate.start is not None
        if waits.get(fate.name, ("", now))[0] != fate.state.reason:
            waits[fate.name] = fate.state.reason, now
        if fate.state.reason in client.HOPELESS and now - waits[fate.name][1] >= HOPELESS_S:
            numbers = [each.start.number for each in pending if each.start is not None]
            client.cancel([number for number in numbers if number])
            raise client.RefusedError(f"{told(run, fate)}\n  It was cancelled, as were all that wait.")


def _longer(pause: float) -> float:
    """Return the next pause, which grows with the length of jobs."""
    return min(PERIOD_S[1], pause * 1.1)
