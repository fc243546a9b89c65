"""Results of jobs that ran elsewhere, such as on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError, JobError, ValidationError
from d5suite.job import Job, Result, fate_path, results_of
from d5suite.session.attempts import Attempt


def attempts_in(path: Path, wanted: Job) -> Iterator[Attempt]:
    """Read what workers made of a job file: the latest result of each measurement.

    Parameters
    ----------
    path : Path
        The job file. Results, and why there are none, lie beside it.
    wanted : Job
        The job as the options of this run make it.

    Raises
    ------
    ConfigurationError
        The file is of another job: what it measured is not what is asked for.
    JobError
        There is no job file.
    """
    job = Job.load(path)
    differ = _differences(job, wanted)
    if differ:
        raise ConfigurationError(
            f"this job was written with other options: {', '.join(differ)} differ", where=str(path),
            hint="Give --from-jobs the options that --write-jobs had.",
        )  # fmt: skip
    found: list[tuple[Result, Path]] = []
    why = ""
    for each in reversed(results_of(path)):
        try:
            found.append((Result.load(each), each))
        except JobError as error:
            why = why or str(error)
    try:
        why = fate_path(path).read_text(encoding="utf-8").strip()
    except OSError:
        why = why or "it has not run"
    for key in job.keys():  # noqa: SIM118  (not a mapping)
        yield _attempt(key, job, found, f"{why}\njob file: {path}")


def _attempt(key: str, job: Job, found: list[tuple[Result, Path]], why: str) -> Attempt:
    for result, path in found:
        if key in result.measurements:
            return Attempt(key, job, result, result.measurements[key], path=path)
    latest = found[0][0] if found else Result()
    if key in latest.failures:
        failure = latest.failures[key]
        wrong = failure.type == ValidationError.__name__
        return Attempt(key, job, latest, failure=failure.message, kept=latest.kept.get(key), wrong=wrong)
    if latest.error is not None:
        why = latest.error.message
    return Attempt(key, job, latest, failure=f"{key}: {why}", kept=latest.kept.get(key))


def _differences(job: Job, wanted: Job) -> list[str]:
    """Return the parts of two jobs that differ."""
    one, other = (_comparable(each) for each in (job, wanted))
    return [name for name in one if one[name] != other[name]]


def _comparable(job: Job) -> dict[str, Any]:
    return asdict(replace(job, digests={}))
