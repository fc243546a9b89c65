"""The command that runs a job: one function for a worker, for ranks of MPI and for srun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def command(
    job: Path | str, launcher: Sequence[str] = (), *, python: str | None = None, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs a job.

    Parameters
    ----------
    job : Path or str
        The job file.
    launcher : sequence of str
        The command that starts the worker, such as `d5suite.launch.mpi.mpiexec` or
        `d5suite.launch.slurm.script.srun`; by default the worker is started directly.
    python : str, optional
        Interpreter; the current one by default.
    options : sequence of str
        Options of ``python -m d5suite.worker``.
    """
    return [*launcher, python or sys.executable, "-m", "d5suite.worker", *options, str(job)]
