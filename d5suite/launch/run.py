"""Running one job on this machine: a worker, or several ranks."""

from __future__ import annotations

from pathlib import Path

from d5suite.job import Job
from d5suite.launch.base import Launch, Outcome
from d5suite.launch.ranks import RankSupervisor
from d5suite.launch.supervisor import Supervisor


def start_job(job: Job, path: Path, launch: Launch) -> Supervisor:
    """Start a job; the caller then calls the supervisor's `ready` and `end`.

    Parameters
    ----------
    job : Job
    path : Path
        The job file. The worker writes its result and its log beside it.
    launch : Launch

    Raises
    ------
    ConfigurationError
        If the command cannot be started.
    """
    supervisor = (RankSupervisor if job.ranks > 1 else Supervisor)(job, path, launch)
    try:
        supervisor.start()
    except BaseException:
        supervisor.close()
        raise
    return supervisor


def run_job(job: Job, path: Path, launch: Launch) -> Outcome:
    """Run a job until it ends or reaches a limit; an interrupt is part of the outcome.

    See `start_job`.
    """
    supervisor = start_job(job, path, launch)
    try:
        supervisor.ready()
    except BaseException as error:  # the caller saves what the worker has finished, then raises it
        return supervisor.end(error)
    return supervisor.end()
