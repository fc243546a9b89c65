"""Writing files so that a reader never meets half of one.

Imports the standard library and `d5suite.errors`, and h5py where an HDF5 file is made.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.errors import DataError, JobError

if TYPE_CHECKING:
    import h5py


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


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically.

    Raises
    ------
    OSError
        As `atomic_path`; it names ``path`` and says how many bytes are needed.
    """
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        needed = f"{error.strerror}; {len(content):,} bytes are needed"
        raise OSError(error.errno, needed, str(path)) from error


@contextlib.contextmanager
def atomic_hdf5(path: Path) -> Iterator[h5py.File]:
    """An HDF5 file to be filled, which takes its place at ``path`` whole when the block ends well.

    It is made in memory, because the HDF5 library does not survive a full disk: it ends in a segmentation fault.

    Raises
    ------
    OSError
        As `write_bytes`.
    """
    import h5py

    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        yield file
    write_bytes(path, image.getbuffer())


@contextlib.contextmanager
def declared(path: Path, what: str) -> Iterator[None]:
    """Turn an `OSError` of writing ``path`` into an error of d5suite.

    Parameters
    ----------
    path : Path
    what : str
        What is written there, for example ``"the checkpoint"``.

    Raises
    ------
    DataError
        In its place; it says what was wrong and what to do.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{what} cannot be written: {error.strerror or error}",
            where=str(path),
            hint="Make room or choose another place; a file that was there before is as it was.",
        ) from error


def check_writable(path: Path) -> None:
    """Find out now, not when there is something to lose, whether a file can be put at ``path``.

    Raises
    ------
    OSError
        If its folder does not exist or takes no files, or ``path`` is a folder itself.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    tempfile.TemporaryFile(dir=path.parent).close()


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
