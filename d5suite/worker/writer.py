"""The result file, which a worker replaces atomically whenever its phase changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from d5suite.errors import describe_error
from d5suite.job import Failure, Result

T = TypeVar("T")


class ResultWriter:
    """A worker's result and its file.

    Parameters
    ----------
    path : Path
        The result file; a first version is written at once.
    together : bool
        Whether a failure ends the whole job, because other ranks would wait for this one forever.
    """

    def __init__(self, path: Path, *, together: bool = False) -> None:
        self.path = path
        self.together = together
        self.result = Result()
        self._start = time.monotonic()
        self.write()

    def write(self) -> None:
        """Replace the result file."""
        self.result.save(self.path)

    def phase(self, text: str, key: str | None = None) -> None:
        """Record and print the current phase, and the key of the measurement."""
        self.result.phase, self.result.measurement = text, key
        self.write()
        print(f"d5suite: {time.monotonic() - self._start:6.1f} s  {text}", flush=True)

    def tell(self, key: str, where: str, kept: dict[str, Any]) -> None:
        """Report the progress of a long measurement; its partial results survive a failure."""
        self.result.kept[key] = kept
        self.phase(f"measuring {key}: {where}", key)

    def attempt(self, key: str, doing: str, work: Callable[[], T]) -> T | None:
        """Run one phase of a measurement.

        Returns
        -------
        object
            The result of ``work``; None if it failed and the failure was recorded.

        Raises
        ------
        Exception
            The failure, after recording it, if ranks work ``together``.
        """
        self.phase(f"{doing} {key}", key)
        try:
            found = work()
        except Exception as error:  # whatever an adapter raises costs one measurement
            self.result.failures[key] = Failure(type(error).__name__, describe_error(error))
            self.write()
            print(f"error: {key}: {describe_error(error)}", file=sys.stderr)
            if self.together:
                raise
        else:
            return found
        return None

    def fail(self, error: Exception) -> None:
        """Record that the whole job failed."""
        self.result.status, self.result.error = "failed", Failure(type(error).__name__, str(error))
        self.write()

    def finish(self) -> None:
        """Record that the job is done."""
        self.result.status, self.result.phase, self.result.measurement = "done", "done", None
        self.write()
