"""Running a job until each of its measurements has a result or a failure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from d5suite.cases.case import Settings
from d5suite.errors import JobError, ValidationError
from d5suite.files import read_json
from d5suite.job import Failure, Job, Measured, Result, of_rank, result_path
from d5suite.launch.base import Launch, Limits, Outcome, interpreter
from d5suite.launch.run import run_job


@dataclass(frozen=True)
class Attempt:
    """One worker's attempt at one measurement.

    Attributes
    ----------
    key : str
    job : Job
    result : Result
    measured : Measured or None
    failure : str or None
        Why there is none: for the user, with the job file's path.
    kept : dict or None
        Partial results that survive the failure.
    wrong : bool
        Whether it failed because an answer was wrong.
    path : Path or None
        Where the result is, if the job ran elsewhere.
    job_file : Path or None
        Where the job is, if it ran here and the measurement succeeded.
    """

    key: str
    job: Job
    result: Result
    measured: Measured | None = None
    failure: str | None = None
    kept: dict[str, object] | None = None
    wrong: bool = False
    path: Path | None = None
    job_file: Path | None = None


def attempts(
    make: Callable[[list[str]], Job],
    keys: list[str],
    run: Callable[[Job, int], tuple[Outcome, Result, Path]],
) -> Iterator[Attempt]:
    """Run a job until each measurement succeeded or failed.

    A worker that dies costs the measurement it was working on; a new one takes up the rest. An
    interrupt is raised once everything that the worker finished has been given.

    Parameters
    ----------
    make : callable
        The job for the keys that remain.
    keys : list of str
        Measurements: ``case/measurement``.
    run : callable
        Runs a job, given the number of the attempt from 1.
    """
    remaining = list(keys)
    number = 0
    while remaining:
        number += 1
        job = make(remaining)
        outcome, result, path = run(job, number)
        settled, remaining = settle(job, outcome, result, path, remaining)
        yield from settled
        if outcome.interrupt is not None:
            raise outcome.interrupt


def settle(
    job: Job, outcome: Outcome, result: Result, path: Path, remaining: list[str]
) -> tuple[list[Attempt], list[str]]:
    """Settle each measurement of one worker, and return those left to another.

    Parameters
    ----------
    job : Job
    outcome : Outcome
        How the worker ended.
    result : Result
        What it left.
    path : Path
        Of the job file.
    remaining : list of str
        Measurements that it was to make.
    """
    where = f"\njob file: {path}"
    if result.kept:
        where = f"\nresult file, with partial results: {result_path(path)}{where}"
    settled: list[Attempt] = []
    failures_of_rank: Mapping[str, Failure] = {}
    if outcome.rank is not None:
        with contextlib.suppress(JobError):  # it may have died without a result
            failures_of_rank = Result.load(of_rank(result_path(path), outcome.rank)).failures

    def fail(key: str, message: str, where: str = where) -> None:
        found = result.failures.get(key) or failures_of_rank.get(key)
        wrong = found is not None and found.type == ValidationError.__name__
        kept = result.kept.get(key)
        settled.append(Attempt(key, job, result, failure=f"{message}{where}", kept=kept, wrong=wrong))

    def left() -> list[str]:
        done = {each.key for each in settled}
        return [key for key in remaining if key not in done]

    for key, failure in result.failures.items():
        fail(key, failure.message)
    settled += [Attempt(key, job, result, measured, job_file=path) for key, measured in result.measurements.items()]
    settled += [Attempt(key, job, result) for key in left() if key in result.references]
    if outcome.ok and result.status == "done":
        return settled, []
    if outcome.rank is not None:
        lost, message = left(), outcome.reason
        if result.measurement in lost:
            lost = [result.measurement]
        where += f"\n{outcome.tail}"
    elif result.status == "failed" and result.error is not None:
        lost, message = left(), result.error.message
    else:
        reason = f"{outcome.reason} without finishing" if outcome.ok else outcome.reason
        lost, message = left(), f"{reason}, while {result.phase}"
        if result.measurement in lost:
            lost = [result.measurement]
        where += f"\n{outcome.tail}"
    for key in lost:
        fail(key, message, where)
    return settled, left()


def work(
    job: Job,
    path: Path,
    settings: Settings,
    limit_s: float,
    progress: Callable[[str], None] | None,
) -> tuple[Outcome, Result]:
    """Run a worker on a job, and read its result.

    Parameters
    ----------
    job : Job
    path : Path
        Where the job file goes; the log and the result go beside it.
    settings : Settings
    limit_s : float
        Seconds, unless the settings say otherwise.
    progress : callable, optional
        Receives each phase.
    """
    job.save(path)
    answer = result_path(path)
    limits = Limits(limit_s if settings.timeout_s is None else settings.timeout_s, settings.memory_bytes)
    python = sys.executable if "reference" in job.passes else interpreter(job.backend["name"], settings.pythons)
    watch = None if progress is None else watcher(path, progress)
    outcome = run_job(job, path, Launch(limits, python, settings.wrap, watch=watch))
    outcome, result = read_outcome(outcome, path)
    if result is None:
        return outcome, Result()
    if outcome.rank is not None:  # what other ranks say of it is that this one left them
        result.failures.clear()
        with contextlib.suppress(JobError):  # it may have left nothing: what rank 0 has finished counts all the same
            result.measurement = read_json(of_rank(answer, outcome.rank)).get("measurement")
    return outcome, result


def watcher(path: Path, progress: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that reports a new phase of the worker of a job file when called."""
    shown = ""

    def watch() -> None:
        nonlocal shown
        try:
            phase = str(read_json(result_path(path))["phase"])
        except (JobError, KeyError):
            return
        if phase != shown:
            shown = phase
            progress(phase)

    return watch


def read_outcome(outcome: Outcome, path: Path) -> tuple[Outcome, Result | None]:
    """Read what a worker has left, or None; without a result it has not ended well.

    Parameters
    ----------
    outcome : Outcome
        How it ended.
    path : Path
        Of the job file.
    """
    try:
        return outcome, Result.load(result_path(path))
    except JobError as error:
        if outcome.ok:
            outcome = Outcome(False, f"the worker left no result ({error})", outcome.tail, outcome.interrupt)
        return outcome, None
