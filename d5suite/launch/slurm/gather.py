"""Runs of pytest: cases become jobs, and results become a file.

Both run `d5suite.pytest_plugin.preload`, which this part knows by name only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from d5suite.errors import ConfigurationError, JobError
from d5suite.launch.slurm.run import JOBS, SlurmRun

PYTEST = (sys.executable, "-m", "d5suite.pytest_plugin.preload")


def write_jobs(run: SlurmRun) -> list[str]:
    """Write the job files of a run.

    Returns
    -------
    list of str
        Names of the job files, without suffix.

    Raises
    ------
    ConfigurationError
        Options or recipes are invalid; the message is pytest's.
    """
    with _start(run, "-", _arguments(run, "--write-jobs"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        import jsonschema  # noqa: F401  reading the jobs needs it; meanwhile it costs no time

        output = process.communicate()
    names = sorted(each.name.removesuffix(".job.json") for each in (run.folder / JOBS).glob("*.job.json"))
    if process.returncode or not names:
        said = [line for line in "".join(output).splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in said if line.startswith(("ERROR", "E  ", "  "))]
        raise ConfigurationError("\n".join(errors or said[-8:]) or "nothing is to be measured")
    return names


class Gathering:
    """Merges results into a file; starts pytest in advance, to save the time of its imports.

    Parameters
    ----------
    run : SlurmRun
    out : Path
        The result file.
    """

    def __init__(self, run: SlurmRun, out: Path) -> None:
        self._run = run
        self._arguments = _arguments(run, "--from-jobs", "--quiet", "--no-header", f"--benchmark-json={out}")
        self._process: subprocess.Popen[str] | None = None
        self._pipe = -1

    def prepare(self) -> None:
        """Start pytest unless it was started before; it reads no results yet."""
        if self._process is not None:
            return
        reads, self._pipe = os.pipe()
        try:
            with _uninterrupted():
                self._process = _start(self._run, str(reads), self._arguments, pass_fds=[reads])
        finally:
            os.close(reads)

    def gather(self) -> int:
        """Write the result file of all results so far; return pytest's exit code.

        Raises
        ------
        JobError
            pytest cannot be run.
        """
        self.prepare()
        assert self._process is not None
        with contextlib.suppress(BrokenPipeError):  # pytest has ended; its exit code tells why
            os.write(self._pipe, b"\n")
        return self._process.wait()

    def __enter__(self) -> Gathering:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _arguments(run: SlurmRun, how: str, *more: str) -> list[str]:
    return ["-p", "no:cacheprovider", *run.arguments, how, str(run.folder / JOBS), *more]


def _start(
    run: SlurmRun, pipe: str, arguments: Sequence[str], *, stdout: int | None = None, stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[str]:  # fmt: skip
    """Start pytest on the recipes of a run, in the folder where the run was made."""
    try:
        return subprocess.Popen(
            [*PYTEST, pipe, *arguments], cwd=run.cwd, text=True, stdout=stdout, stderr=stderr, pass_fds=pass_fds
        )
    except OSError as error:
        raise JobError(f"cannot run pytest: {error.strerror}", where=run.cwd) from error


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Protect new processes from Ctrl-C until they have set their own handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
