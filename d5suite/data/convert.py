"""Convert an image dataset to another format; the encoded images stay the same, byte for byte.

The output is written to a folder beside the destination, read back, and then renamed. The progress
is recorded every few seconds, so a killed conversion can resume. May import NumPy, h5py
and, from d5suite, `data`, `errors` and `files`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from d5suite.data.formats import format_module, read_split, splits_of
from d5suite.data.formats.store import Store, check_name
from d5suite.data.reading import ImageReader, name_of
from d5suite.errors import DataError
from d5suite.files import locked, write_json

NOTE_S = 2.0
"""Seconds between two records of progress."""

Item = TypeVar("Item")

_NOTE_BYTES = 64 << 20
_OVERHEAD_BYTES = 1 << 20


def work_folder(destination: Path) -> Path:
    """Return the folder that holds a conversion until it is complete."""
    return destination.parent / f".{destination.name}.converting"


def convert(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], to: str, *, progress: bool = True
) -> list[Store]:
    """Convert all splits of a dataset, or resume an interrupted conversion.

    Parameters
    ----------
    source : path
        A dataset in any format.
    destination : path
        A file for ``hdf5``, else a folder.
    to : {"folder", "hdf5", "tfrecord", "recordio"}
        The output format.
    progress : bool
        Show a progress bar, if standard error is a terminal.

    Returns
    -------
    list of Store
        The splits, read from the destination.

    Raises
    ------
    DataError
        If the source is damaged or does not fit the format, or the destination exists or is not
        writable.
    ConfigurationError
        If the format is unknown.
    """
    module = format_module(to)
    target = Path(os.path.abspath(destination))
    work = work_folder(target)
    if target.exists() and not work.exists():
        raise DataError("exists already; nothing was changed", where=str(target), hint="Name a new one.")
    stores = {split: read_split(source, split, scan=True) for split in splits_of(source)}
    sizes = {split: store.sizes() for split, store in stores.items()}
    _check(stores)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        with _exclusive(work):
            notes = _Notes(work / "progress.json", _fingerprint(to, stores, sizes))
            if target.exists():
                if not notes.whole or (work / "store").exists():
                    raise DataError("exists already; nothing was changed", where=str(target), hint="Name a new one.")
            else:
                _write(module.Writer, work / "store", stores, sizes, notes, progress)
                _check_read_back(work / "store", to, stores, sizes)
                notes.write(whole=True)
                os.rename(work / "store", target)
            shutil.rmtree(work)
    except OSError as error:
        room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise DataError(
            f"cannot be written: {error.strerror or error}",
            where=str(target),
            hint=f"{'Free some space, then run' if room else 'Run'} the same command again to resume. "
            f"The partial output is in {work}.",
        ) from None
    return [read_split(target, split) for split in stores]


class _Notes:
    """The recorded progress of a conversion."""

    def __init__(self, file: Path, fingerprint: str) -> None:
        self._file = file
        self._fingerprint = fingerprint
        self.done: dict[str, int] = {}
        self.kept: dict[str, int] | None = None
        self.whole = False
        if not file.exists():
            return
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            same = content["of"] == fingerprint
            self.done, self.kept, self.whole = content["done"], content["kept"], content["whole"]
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise DataError(
                "an unfinished conversion of another dataset, or to another format, is here already",
                where=str(file.parent),
                hint="Run that one again, or delete this folder.",
            )

    def write(self, *, whole: bool = False) -> None:
        """Write the progress to the file."""
        note = {"of": self._fingerprint, "done": self.done, "kept": self.kept, "whole": whole}
        write_json(self._file, note)


def _check(stores: Mapping[str, Store]) -> None:
    first = next(iter(stores.values()))
    for store in stores.values():
        if (store.label_names, store.several) != (first.label_names, first.several):
            raise DataError(f"{store.split!r} and {first.split!r} have different classes", where=str(store.path))
        [(name, count)] = Counter(store.names).most_common(1)
        if count > 1:
            raise DataError(f"two images have the name {name!r}", where=str(store.path))
        for name in store.names:
            check_name(name, str(store.path))
        for label in (*store.label_names, *store.class_names.values()):
            if "\n" in label:
                raise DataError(f"a line break in the name of class {label!r}", where=str(store.path))


def _fingerprint(to: str, stores: Mapping[str, Store], sizes: Mapping[str, np.ndarray]) -> str:
    """Return a digest of format and source, to resume only the same conversion."""
    digest = hashlib.sha256(to.encode())
    for split, store in stores.items():
        digest.update(json.dumps([split, store.label_names, store.class_names, list(store.names)]).encode())
        for array in store.label_arrays:
            digest.update(np.ascontiguousarray(array).data)
        digest.update(sizes[split].data)
    return digest.hexdigest()


def _write(
    writer_of: Any,
    target: Path,
    stores: Mapping[str, Store],
    sizes: Mapping[str, np.ndarray],
    notes: _Notes,
    progress: bool,
) -> None:
    if notes.kept is None:
        if target.is_dir():
            shutil.rmtree(target)
        notes.done = dict.fromkeys(stores, 0)
    left = sum(int(sizes[split][notes.done[split] :].sum()) for split in stores) + _OVERHEAD_BYTES
    if left > (free := shutil.disk_usage(target.parent).free):
        raise OSError(errno.ENOSPC, f"{left:,} bytes are needed and {free:,} are free")
    writer = writer_of(target, stores, sizes, notes.kept)
    readers = {split: ImageReader() for split in stores}
    try:
        rest = {split: range(notes.done[split], len(store)) for split, store in stores.items()}
        work = ((split, number) for split, numbers in rest.items() for number in numbers)
        unnoted, noted = 0, time.monotonic()
        for split, number in shown(work, sum(map(len, rest.values())), "Converting", progress):
            location = stores[split].files[number]
            content = readers[split].read(location, number)
            if len(content) != sizes[split][number]:
                raise DataError(f"changed: it had {sizes[split][number]:,} bytes", where=name_of(location))
            writer.write(split, number, content)
            notes.done[split] = number + 1
            unnoted += len(content)
            if unnoted >= _NOTE_BYTES or time.monotonic() >= noted + NOTE_S:
                notes.kept = writer.sync()
                notes.write()
                unnoted, noted = 0, time.monotonic()
        notes.kept = writer.sync()
        notes.write()
        writer.finish()
    finally:
        with contextlib.suppress(OSError):  # an earlier error is already raised
            writer.close()
        for reader in readers.values():
            reader.close()


def _check_read_back(path: Path, to: str, stores: Mapping[str, Store], sizes: Mapping[str, np.ndarray]) -> None:
    module = format_module(to)
    for split, store in stores.items():
        found: Store = module.read(path, split)
        same = (
            list(found.names) == list(store.names)
            and found.label_names == store.label_names
            and found.class_names == store.class_names
            and found.several == store.several
            and np.array_equal(found.sizes(), sizes[split])
            and all(map(np.array_equal, found.label_arrays, store.label_arrays))
        )
        if not same:
            raise DataError(
                f"the names, labels or classes of {split!r} do not fit the format {to!r}",
                where=str(store.path),
                hint=f"The output is in {path}; delete {path.parent} before you try again.",
            )


@contextlib.contextmanager
def _exclusive(work: Path) -> Iterator[None]:
    try:
        with locked(work / "lock", wait=False):
            yield
    except BlockingIOError:
        raise DataError("another process is running this conversion", where=str(work)) from None


def shown(items: Iterable[Item], total: int, what: str, progress: bool) -> Iterator[Item]:
    """Yield the items, with a progress bar if wanted and standard error is a terminal."""
    if not (progress and sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, total=total, console=Console(stderr=True), transient=True)
