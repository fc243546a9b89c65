"""Writing files so that a reader never meets half of one. Imports the standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d5suite.errors import JobError


def cache_folder() -> Path:
    """The folder for files that d5suite makes once and reuses, which need not exist.

    It is ``$D5SUITE_CACHE``, else ``$XDG_CACHE_HOME/d5suite``, else ``~/.cache/d5suite``.
    """
    if own := os.environ.get("D5SUITE_CACHE"):
        return Path(os.path.abspath(own))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "d5suite"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place when the block ends well, and vanishes otherwise.

    Raises
    ------
    OSError
        If the folder cannot be written to or the disk is full; ``path`` is then as it was.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN or infinity) atomically.

    Raises
    ------
    ValueError
        If a number is not finite.
    OSError
        As `atomic_path`.
    """
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises
    ------
    JobError
        If it is missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise JobError(f"not valid JSON: {error}", where=str(path)) from error
