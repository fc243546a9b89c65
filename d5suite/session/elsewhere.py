"""Results of jobs that ran elsewhere, such as on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from d5suite.errors import ConfigurationError, JobError
from d5suite.job import Job, Result, failures_of_ranks, reason_path, result_path, results_of
from d5suite.session.attempts import Attempt


def attempts_in(path: Path, wanted: Job) -> Iterator[Attempt]:
    """Read the results of a job that ran elsewhere: the latest result of every measurement.

    Parameters
    ----------
    path : Path
        The job file. The same folder has the results, or a file with the reason why there are none.
    wanted : Job
        The job that this run's options describe.

    Raises
    ------
    ConfigurationError
        The file describes another job.
    JobError
        There is no job file.
    """
    job = Job.load(path)
    one, other = asdict(job), asdict(wanted)
    differ = [name for name in one if name != "digests" and one[name] != other[name]]
    if differ:
        raise ConfigurationError(
            f"this job was written with other options: {', '.join(differ)} differ", where=str(path),
            hint="Give --from-jobs the options that --write-jobs had.",
        )  # fmt: skip
    results: list[tuple[Result, Path]] = []
    why = ""
    for each in reversed(results_of(path)):
        try:
            results.append((Result.load(each), each))
        except JobError as error:
            why = why or str(error)
    try:
        why = reason_path(path).read_text(encoding="utf-8").strip()
    except OSError:  # `d5suite slurm` has not followed the job
        failures = failures_of_ranks(result_path(path), job.ranks, job.keys()[0])
        why = next(iter(failures.values()), "") or why or "it has not run"
    for key in job.keys():  # noqa: SIM118  (not a mapping)
        yield _attempt(key, job, results, f"{why}\njob file: {path}")


def _attempt(key: str, job: Job, results: list[tuple[Result, Path]], why: str) -> Attempt:
    for result, path in results:
        if key in result.measurements:
            return Attempt(key, job, result, result.measurements[key], path=path)
    latest = results[0][0] if results else Result()
    failure = latest.failures.get(key)
    message = failure.message if failure else f"{key}: {latest.error.message if latest.error else why}"
    return Attempt.failed(key, job, latest, message, failure)
