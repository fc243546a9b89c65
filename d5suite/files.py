"""Atomic files, and files in the cache that several processes make only once.

May import the standard library and `d5suite.errors`, and h5py inside functions. One file, because
every part of d5suite both reads and writes files.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import glob
import hashlib
import importlib.util
import io
import json
import math
import os
import select
import shutil
import stat
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from d5suite.errors import ConfigurationError, DataError, JobError

if TYPE_CHECKING:
    import h5py

LARGEST_JSON = 256 << 20
"""Size limit of a JSON file in bytes; results of a whole run have less than 1 MB."""

DEEPEST_JSON = 100
"""Most levels of lists and objects in a JSON file; a result has about 12."""

LARGEST_TOML = 1 << 20
"""Size limit of a TOML file in bytes: a study, a profile, thresholds."""

_LONGEST_INTEGER = 22  # characters of 2**64 - 1 and a sign
_MOST_DIGITS = 4000  # Python converts a few more, in either direction

_LONGEST_STEM = 160  # bytes: a name may have 255, and names of temporary files are longer

PATIENCE_S = 1.0
"""Seconds to wait for a lock before printing a note."""

ABANDONED_S = 3600.0
"""Age in seconds from which a temporary file counts as abandoned by a killed process; writing takes
seconds, and updates the file's time."""

GZIP = ".gz"
"""The suffix of a compressed file."""

PARTIAL = ".partial"
"""The suffix of an unfinished folder."""


def cache_folder() -> Path:
    """Return the folder for files that d5suite makes once and reuses; it may not exist yet.

    It is ``$D5SUITE_CACHE``, else ``$XDG_CACHE_HOME/d5suite``, else ``~/.cache/d5suite``.
    """
    if own := os.environ.get("D5SUITE_CACHE"):
        return Path(os.path.abspath(own))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "d5suite"


def stem(path: Path) -> str:
    """Return the text with which names of temporary files beside ``path`` begin."""
    name = os.fsencode(path.name)
    return path.name if len(name) <= _LONGEST_STEM else hashlib.sha256(name).hexdigest()


class PendingFile:
    """A temporary file beside ``path`` that replaces it on `commit`.

    Temporary files of killed processes older than `ABANDONED_S` are removed.

    Parameters
    ----------
    path : Path
        The final path; a symbolic link is followed. An existing file stays unchanged until
        `commit`.

    Attributes
    ----------
    path, temporary : Path
        The final path, and the path to write to.

    Raises
    ------
    OSError
        If the folder is missing or not writable, or ``path`` is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        if is_special(path):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        self.path = Path(os.path.realpath(path))
        self._remove_abandoned()
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{stem(self.path)}.", suffix=".part")
        os.close(handle)
        self.temporary = Path(name)

    def _remove_abandoned(self) -> None:
        name, oldest = glob.escape(stem(self.path)), time.time() - ABANDONED_S
        for pattern in (f".{name}.*.part", f"..{name}.*.part.*.part"):
            for left in self.path.parent.glob(pattern):
                with contextlib.suppress(OSError):  # another process removes it, too
                    if left.lstat().st_mtime < oldest:
                        left.unlink()

    def commit(self, *, durable: bool = True) -> None:
        """Rename the temporary file to ``path``; flush it to disk first, if it must be durable."""
        commit_all([self], durable=durable)

    def discard(self) -> None:
        """Delete the temporary file unless it was committed."""
        self.temporary.unlink(missing_ok=True)


def commit_all(files: Sequence[PendingFile], *, durable: bool = True) -> None:
    """Put several files in place: all of them, or none after an error.

    Parameters
    ----------
    files : sequence of PendingFile
    durable : bool
        Whether to flush the files to disk first, so that they survive a crash of the system. Files
        that only this run reads need not be durable.

    Raises
    ------
    OSError
        If a file cannot be written; earlier files at the paths are restored.
    """
    mask = os.umask(0)
    os.umask(mask)
    for each in files:
        if durable:
            with each.temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.chmod(each.temporary, 0o666 & ~mask)
    earlier = [each.temporary.with_suffix(".old") for each in files]
    try:
        with contextlib.ExitStack() as undo:
            for each, old in zip(files, earlier, strict=True):
                if len(files) > 1 and each.path.exists():
                    try:
                        os.link(each.path, old)
                    except OSError:  # a file system without hard links
                        shutil.copy2(each.path, old)
                    undo.callback(os.replace, old, each.path)
                elif len(files) > 1:
                    undo.callback(each.path.unlink, missing_ok=True)
                os.replace(each.temporary, each.path)
            undo.pop_all()
    finally:
        for old in earlier:
            old.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path; rename it to ``path`` on success, delete it on failure.

    Raises
    ------
    OSError
        If the folder is not writable or the disk is full; ``path`` is then unchanged.
    """
    pending = PendingFile(path)
    try:
        yield pending.temporary
        pending.commit(durable=durable)
    finally:
        pending.discard()


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to ``path`` on success, delete it on failure.

    Parameters
    ----------
    path : Path
        Must not exist, or must be an empty folder. Parent folders are made if needed.

    Raises
    ------
    OSError
        See `atomic_path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{stem(path)}.", suffix=PARTIAL))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(file: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on ``file``; the system releases it if the process dies.

    After waiting for `PATIENCE_S`, print a note on standard error.

    Raises
    ------
    BlockingIOError
        If another process holds the lock and ``wait`` is false.
    """
    import fcntl

    with open(file, "a") as handle:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    raise
            if time.monotonic() > deadline:
                print(f"d5suite: waiting for another process, which holds {file}", file=sys.stderr, flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
                break
            time.sleep(0.05)
        yield


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return ``name`` in the cache folder; the first process makes it while others wait.

    Checksums are kept beside the file or folder; if it is damaged or incomplete, it is made again.

    Parameters
    ----------
    name : str
        Name that identifies the content completely, versions included.
    make : callable
        Makes the given path atomically, for example through `atomic_folder`.

    Raises
    ------
    DataError
        If the cache folder is not writable.
    """
    target = cache_folder() / name
    folder, sums = target.parent, target.with_name(f".{target.name}.sha256")
    if _is_whole(target, sums):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{target.name}.lock"):
            if not _is_whole(target, sums):
                if target.exists():
                    print(f"d5suite: rebuilding {target}: damaged or missing checksums", file=sys.stderr)
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
                for leftover in folder.glob(f".{target.name}.*{PARTIAL}"):  # from a killed process
                    shutil.rmtree(leftover, ignore_errors=True)
                make(target)
                inside = sorted(path for path in target.rglob("*") if path.is_file()) or [target]
                write_json(sums, {os.path.relpath(path, target): _sha256(path) for path in inside})
    except OSError as error:
        raise DataError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(folder),
            hint="Set D5SUITE_CACHE to a writable folder.",
        ) from None
    return target


_whole: dict[Path, dict[str, tuple[int, int]]] = {}
"""Sizes and times of files with verified checksums, by path; these files are not read again."""


def _is_whole(target: Path, sums: Path) -> bool:
    try:
        known: dict[str, str] = read_json(sums)
        facts = {name: os.stat(target / name) for name in known}
        state = {name: (each.st_size, each.st_mtime_ns) for name, each in facts.items()}
        if _whole.get(target) != state and any(_sha256(target / name) != each for name, each in known.items()):
            return False
    except (AttributeError, JobError, OSError, TypeError):
        return False
    _whole[target] = state
    return True


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def is_special(path: Path) -> bool:
    """Return whether the path is a special file, such as a pipe, which must not be replaced."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def write_bytes(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Write a file atomically; write directly to a special file such as a pipe or terminal.

    Raises
    ------
    OSError
        See `atomic_path`; the message has the number of bytes needed. Or if a pipe has no reader.
    """
    if is_special(path):
        _write_special(path, content)
        return
    try:
        with atomic_path(path, durable=durable) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        needed = f"{error.strerror}; {len(content):,} bytes are needed"
        raise OSError(error.errno, needed, str(path)) from error


def _write_special(path: Path, content: bytes | memoryview) -> None:
    with open_special(path) as file:
        os.set_blocking(file.fileno(), True)
        file.write(content)


def open_special(path: Path) -> BinaryIO:
    """Open a pipe or a terminal, for `write_to_reader` to write to.

    Raises
    ------
    OSError
        If the path is something else, or a pipe without a reader.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        what = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "this is not a regular file"
        raise OSError(errno.EISDIR, what, str(path))
    try:  # without O_NONBLOCK, a pipe without a reader would block forever
        return open(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "wb")
    except OSError as error:
        what = "this pipe has no reader" if error.errno == errno.ENXIO else str(error.strerror)
        raise OSError(error.errno, what, str(path)) from error


def write_to_reader(file: BinaryIO, content: bytes, patience_s: float) -> None:
    """Write to a file that `open_special` opened.

    Raises
    ------
    OSError
        If the reader is gone, or has read nothing for ``patience_s`` seconds.
    """
    left, ready = memoryview(content), select.poll()
    ready.register(file, select.POLLOUT)
    while left:
        if not ready.poll(1000 * patience_s):
            raise TimeoutError(errno.ETIMEDOUT, f"its reader has read nothing for {patience_s:g} s")
        left = left[os.write(file.fileno(), left) :]


@contextlib.contextmanager
def atomic_hdf5(path: Path, *, durable: bool = True) -> Iterator[h5py.File]:
    """Yield a new HDF5 file; write it to ``path`` on success.

    The file is built in memory, because a full disk crashes the HDF5 library (segmentation fault).

    Raises
    ------
    OSError
        See `write_bytes`.
    """
    import h5py

    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        yield file
    write_bytes(path, image.getbuffer(), durable=durable)


@contextlib.contextmanager
def declared(path: Path, what: str) -> Iterator[None]:
    """Turn an `OSError` from writing ``path`` into a `DataError` with a hint.

    Parameters
    ----------
    path : Path
    what : str
        Name of the file in the message, for example ``"the checkpoint"``.

    Raises
    ------
    DataError
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{what} cannot be written: {error.strerror or error}",
            where=str(path),
            hint="Free some space or choose another place; an earlier file there is unchanged.",
        ) from error


def check_writable(path: Path) -> None:
    """Check in advance that a file can be written at ``path``.

    Raises
    ------
    OSError
        If the folder is missing or not writable, ``path`` is a folder, or the name is too long.
    """
    path = Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if is_special(path):
        return
    tempfile.TemporaryFile(dir=path.parent).close()


def given_path(text: str) -> Path:
    """Return the path that a user gives; the type of an option.

    Raises
    ------
    argparse.ArgumentTypeError
        If the path is too long, or empty, as from a shell variable that is not set.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"the path {text[:40]!r}... is too long") from None
    return Path(text)


def read_bounded(path: Path, most: int) -> bytes:
    """Read a small file, which may come from anywhere; decompress it if the name ends with `GZIP`.

    Raises
    ------
    OSError
        If the file is missing, not a regular file, larger than ``most`` bytes (compressed or not),
        or not a whole gzip file.
    """
    content = _read_packed(path, most)
    if path.suffix != GZIP:
        return content
    unpack = zlib.decompressobj(wbits=31)  # 31: a gzip header and trailer; zlib.h, inflateInit2
    try:
        unpacked = unpack.decompress(content, most + 1)
    except zlib.error:
        unpacked = b""
    if len(unpacked) > most:
        raise OSError(errno.EFBIG, f"unpacked, it has more than the {most:,} bytes that are read", str(path))
    if not unpack.eof:
        raise OSError(errno.EINVAL, "this is not a whole gzip file", str(path))
    return unpacked


def _read_packed(path: Path, most: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO would block
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", str(path))
        size, content = facts.st_size, b""
        if size <= most:
            content = file.read((size or most) + 1)  # the kernel's own files state no size
            size = max(size, len(content))
    if size > most:
        raise OSError(errno.EFBIG, f"{size:,} bytes are more than the {most:,} that are read", str(path))
    return content


def check_targets(*paths: Path | None) -> None:
    """Check in advance that a command can write its files; None is skipped.

    Raises
    ------
    DataError
        If a file cannot be written.
    """
    for path in filter(None, paths):
        with declared(path, "the file"):
            check_writable(path)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN or infinity) atomically.

    Raises
    ------
    ValueError
        If a number is not finite.
    OSError
        See `write_bytes`.
    """
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path, *, any_number: bool = False) -> Any:
    """Read a JSON file strictly, because it may come from an untrusted source.

    Parameters
    ----------
    path : Path
    any_number : bool
        Whether to accept ``NaN``, ``Infinity`` and integers beyond 64 bits, which Python writes.
        The caller must then check every number that it uses.

    Raises
    ------
    JobError
        If the file is missing, not a regular file, larger than `LARGEST_JSON`, nested deeper than
        `DEEPEST_JSON` or not JSON; or if it holds a duplicate name, or a number that is not finite
        or exceeds 64 bits.
    """
    number = _any_number if any_number else _number
    try:
        content = json.loads(
            read_bounded(path, LARGEST_JSON).decode("utf-8-sig"),
            parse_constant=number,
            parse_float=number,
            parse_int=number,
            object_pairs_hook=_named_once,
        )
        _check_depth(content)
    except OSError as error:
        raise JobError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise JobError(f"not valid JSON: {error}", where=str(path)) from error
    except RecursionError:
        raise JobError("not valid JSON: it is nested too deeply", where=str(path)) from None
    return content


def _number(text: str) -> int | float:
    whole = text.lstrip("-").isdigit()
    if whole and len(text) < _LONGEST_INTEGER and abs(int(text)) < 1 << 64:
        return int(text)
    if not math.isfinite(number := float(text)) or whole:
        shown = text if len(text) <= 40 else f"{text[:20]}... of {len(text)} digits"
        raise ValueError(f"the number {shown} is not finite, or beyond 64 bits")
    return number


def _any_number(text: str) -> int | float:
    return int(text) if len(text) <= _MOST_DIGITS and text.lstrip("-").isdigit() else float(text)


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {twice[:80]!r} is given twice")
    return found


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST_JSON + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inside for each in values if isinstance(each, dict | list)]
        if not level:
            return
    raise RecursionError


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Read a small TOML file, which may come from anywhere; return its content and its text.

    Raises
    ------
    ConfigurationError
        If the file is missing, not a regular file, larger than `LARGEST_TOML`, or not TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = read_bounded(path, LARGEST_TOML).decode("utf-8-sig")
        return tomllib.loads(text), text
    except OSError as error:
        raise ConfigurationError(f"cannot read the file: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:  # errors of TOML and Unicode are ValueErrors
        raise ConfigurationError(f"not valid TOML: {error}", where=str(path)) from None


def import_file(file: str | Path) -> ModuleType:
    """Import a user's own Python file, which runs the file.

    Raises
    ------
    DataError
        If there is no such Python file.
    """
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"d5suite_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise DataError("there is no such Python file", where=str(file))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
