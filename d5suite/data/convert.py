"""Convert an image dataset to another format, without touching the encoded images.

Everything is written into a folder beside the destination, which takes its name only when it is whole and was read
back. What is durable is noted there every few seconds, so a conversion that was killed goes on from where it was.
Imports NumPy, h5py and, of d5suite, `data`, `errors` and `files`.
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from d5suite.data.formats import format_module, read_split, scan_split, splits_of
from d5suite.data.formats.store import Store, check_name
from d5suite.data.openimages import SparseLabels
from d5suite.data.reading import Reader, name_of
from d5suite.errors import DataError
from d5suite.files import write_json

NOTE_S = 2.0
"""Seconds between two notes of what is durable."""

Item = TypeVar("Item")

_NOTE_BYTES = 64 << 20
_OVERHEAD_BYTES = 1 << 20


def work_folder(destination: Path) -> Path:
    """The folder that holds a conversion until it is whole."""
    return destination.parent / f".{destination.name}.converting"


def convert(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], to: str, *, progress: bool = True
) -> list[Store]:
    """Convert all splits of a dataset; go on with a conversion that was interrupted.

    Parameters
    ----------
    source : path
        A dataset in any format.
    destination : path
        What to make: for ``hdf5`` a file, else a folder.
    to : {"folder", "hdf5", "tfrecord", "recordio"}
        The format.
    progress : bool
        Show a progress bar, if standard error is a terminal.

    Returns
    -------
    list of Store
        The splits, as read back.

    Raises
    ------
    DataError
        The source is damaged, cannot be held in this format, the destination exists or cannot be written.
    ConfigurationError
        There is no such format.
    """
    module = format_module(to)
    target = Path(os.path.abspath(destination))
    work = work_folder(target)
    if target.exists() and not work.exists():
        raise DataError("exists already; nothing was changed", where=str(target), hint="Name a new one.")
    stores = {split: scan_split(source, split) for split in splits_of(source)}
    sizes = {split: store.sizes() for split, store in stores.items()}
    _check(stores)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        with _locked(work):
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
            hint=f"{'Make room, then run' if room else 'Run'} the same command again: it goes on from where it was. "
            f"What there is lies in {work}.",
        ) from None
    return [read_split(target, split) for split in stores]


class _Notes:
    """How far a conversion is, in a file."""

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
                "an unfinished conversion of another dataset, or to another format, is in the way",
                where=str(file.parent),
                hint="Run that one again, or delete this folder.",
            )

    def write(self, *, whole: bool = False) -> None:
        """Replace the file."""
        note = {"of": self._fingerprint, "done": self.done, "kept": self.kept, "whole": whole}
        write_json(self._file, note)


def _check(stores: Mapping[str, Store]) -> None:
    first = next(iter(stores.values()))
    for store in stores.values():
        if (store.label_names, store.several) != (first.label_names, first.several):
            raise DataError(f"{store.split!r} and {first.split!r} have different classes", where=str(store.path))
        if len(set(store.names)) < len(store):
            seen: set[str] = set()
            twice = next(name for name in store.names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise DataError(f"two images have the name {twice!r}", where=str(store.path))
        for name in store.names:
            check_name(name, str(store.path))
        for label in (*store.label_names, *store.class_names.values()):
            if "\n" in label:
                raise DataError(f"a line break in the name of class {label!r}", where=str(store.path))


def _fingerprint(to: str, stores: Mapping[str, Store], sizes: Mapping[str, np.ndarray]) -> str:
    """What a conversion is of, so that only the same one is gone on with."""
    digest = hashlib.sha256(to.encode())
    for split, store in stores.items():
        digest.update(json.dumps([split, store.label_names, store.class_names, list(store.names)]).encode())
        labels = store.labels
        for array in (labels.starts, labels.classes, labels.values) if isinstance(labels, SparseLabels) else (labels,):
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
    try:
        rest = {split: range(notes.done[split], len(store)) for split, store in stores.items()}
        work = ((split, number) for split, numbers in rest.items() for number in numbers)
        reader = Reader()
        unnoted, noted = 0, time.monotonic()
        for split, number in shown(work, sum(map(len, rest.values())), "Converting", progress):
            location = stores[split].files[number]
            content = reader.read(location, _place(stores, split, number))
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
        with contextlib.suppress(OSError):  # of what was not written for another error
            writer.close()
        reader.close()


def _place(stores: Mapping[str, Store], split: str, number: int) -> int:
    """A number for an image that no image of another split has."""
    for name, store in stores.items():
        if name == split:
            break
        number += len(store)
    return number


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
            and _same_labels(found, store)
        )
        if not same:
            raise DataError(
                f"the names, labels or classes of {split!r} cannot be held in the format {to!r}",
                where=str(store.path),
                hint=f"What was read back is in {path}; delete {path.parent} before another try.",
            )


def _same_labels(one: Store, other: Store) -> bool:
    if isinstance(one.labels, SparseLabels) and isinstance(other.labels, SparseLabels):
        pairs = ((getattr(one.labels, name), getattr(other.labels, name)) for name in ("starts", "classes", "values"))
        return all(np.array_equal(a, b) for a, b in pairs)
    return np.array_equal(np.asarray(one.labels), np.asarray(other.labels))


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Keep a second process from the same conversion; the lock vanishes with this one, however it ends."""
    import fcntl

    with open(work / "lock", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError("another process is at this conversion", where=str(work)) from None
        yield


def shown(items: Iterable[Item], total: int, what: str, progress: bool) -> Iterator[Item]:
    """Pass items on, with a progress bar if wanted and standard error is a terminal."""
    if not (progress and sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, total=total, console=Console(stderr=True), transient=True)
