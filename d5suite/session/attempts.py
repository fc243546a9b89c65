"""What one worker finished: results, failures, and the measurements left for the next worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d5suite.errors import JobError, ValidationError
from d5suite.files import read_json
from d5suite.job import Failure, Job, Measured, Result, of_rank, result_path
from d5suite.launch.base import Outcome


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
        Why there is no result: a message for the user, with the job file's path.
    kept : dict or None
        Partial results that survive the failure.
    wrong : bool
        Whether the measurement failed because an answer was wrong.
    path : Path or None
        The result file of a job that ran elsewhere.
    job_file : Path or None
        The job file of a measurement that succeeded here.
    """

    key: str
    job: Job
    result: Result
    measured: Measured | None = None
    failure: str | None = None
    kept: dict[str, Any] | None = None
    wrong: bool = False
    path: Path | None = None
    job_file: Path | None = None

    @classmethod
    def failed(cls, key: str, job: Job, result: Result, message: str, failure: Failure | None) -> Attempt:
        """Return a failed attempt; ``failure`` is the worker's report of the failure, if any."""
        wrong = failure is not None and failure.type == ValidationError.__name__
        return cls(key, job, result, failure=message, kept=result.kept.get(key), wrong=wrong)


def settle(job: Job, outcome: Outcome, path: Path, remaining: list[str]) -> tuple[list[Attempt], list[str]]:
    """Return a worker's attempts, and the keys of the measurements left for another worker.

    If a worker dies, the measurement that it was working on is lost.

    Parameters
    ----------
    job : Job
    outcome : Outcome
        How the worker ended.
    path : Path
        The job file.
    remaining : list of str
        Keys of the measurements that the worker had to make.
    """
    outcome, result = read_result(outcome, path)
    where = f"\njob file: {path}"
    if result.kept:
        where = f"\nresult file, with partial results: {result_path(path)}{where}"
    reported: Mapping[str, Failure] = result.failures
    if outcome.rank is not None:
        with contextlib.suppress(JobError):  # the rank may have died without a result
            reported = Result.load(of_rank(result_path(path), outcome.rank)).failures

    def fail(key: str, message: str) -> Attempt:
        return Attempt.failed(key, job, result, f"{message}{where}", reported.get(key))

    settled = [fail(key, failure.message) for key, failure in result.failures.items()]
    settled += [Attempt(key, job, result, measured, job_file=path) for key, measured in result.measurements.items()]
    done = {each.key for each in settled}
    settled += [Attempt(key, job, result) for key in remaining if key in result.references and key not in done]
    done |= set(result.references)
    left = [key for key in remaining if key not in done]
    if outcome.ok and result.status == "done":
        return settled, []
    lost = left
    if outcome.rank is None and result.status == "failed" and result.error is not None:
        message = result.error.message
    else:
        reason = f"{outcome.reason} without finishing" if outcome.ok else outcome.reason
        message = reason if outcome.rank is not None else f"{reason}, while {result.phase}"
        where += f"\n{outcome.tail}"
        if result.measurement in left:
            lost = [result.measurement]
    return settled + [fail(key, message) for key in lost], [key for key in left if key not in lost]


def read_result(outcome: Outcome, path: Path) -> tuple[Outcome, Result]:
    """Read the result of a job that has ended; if there is no result, the outcome says why.

    Parameters
    ----------
    outcome : Outcome
    path : Path
        The job file.
    """
    own = result_path(path)
    try:
        result = Result.load(own)
    except JobError as error:
        if outcome.ok:
            outcome = replace(outcome, ok=False, reason=f"the worker left no result ({error})")
        return outcome, Result()
    if outcome.rank is not None:  # the other ranks only report that they lost this rank
        result.failures.clear()
        with contextlib.suppress(JobError):  # without a result of that rank, what rank 0 has finished still counts
            result.measurement = read_json(of_rank(own, outcome.rank)).get("measurement")
    return outcome, result


def watcher(path: Path, progress: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that reports the phase of a job's worker if it is new."""
    shown = ""

    def watch() -> None:
        nonlocal shown
        with contextlib.suppress(JobError, KeyError):
            phase = str(read_json(result_path(path))["phase"])
            if phase != shown:
                shown = phase
                progress(phase)

    return watch
