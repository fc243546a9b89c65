"""Writers of all formats: the interface, and a base class for record files.

May import NumPy and, from d5suite, `data` and `errors`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from d5suite.data.formats import tables
from d5suite.data.formats.store import Store, write_classes


@contextlib.contextmanager
def mapped(file: Path) -> Iterator[mmap.mmap | bytes]:
    """Map a record file into memory, to read parts of it."""
    with open(file, "rb") as opened:
        if not os.fstat(opened.fileno()).st_size:  # cannot be mapped
            yield b""
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            content.madvise(mmap.MADV_RANDOM)
            yield content


class StoreWriter(ABC):
    """Write all splits of a dataset, or resume after an interruption.

    Parameters
    ----------
    target : pathlib.Path
        The file or folder.
    stores : mapping of str to Store
        The data to write, by split.
    image_sizes : mapping of str to numpy.ndarray
        Bytes of every image.
    kept : mapping of str to int, optional
        The result of the last `sync` before an interruption; None for a new target.
    """

    def __init__(
        self,
        target: Path,
        stores: Mapping[str, Store],
        image_sizes: Mapping[str, np.ndarray],
        kept: Mapping[str, int] | None = None,
    ) -> None:
        self.target = target
        self.stores = stores
        self.image_sizes = image_sizes
        self.open(kept)

    @abstractmethod
    def open(self, kept: Mapping[str, int] | None) -> None:
        """Prepare the target."""

    @abstractmethod
    def write(self, split: str, number: int, content: bytes) -> None:
        """Write one image; images of a split come in order."""

    @abstractmethod
    def sync(self) -> dict[str, int]:
        """Flush written data to disk; return the state that is needed to resume from here."""

    def finish(self) -> None:
        """Complete the store."""
        self.sync()

    def close(self) -> None:  # noqa: B027 - optional
        """Close open files."""


class RecordWriter(StoreWriter):
    """Write record files, one after another, and their indexes. Only the last file is open."""

    def open(self, kept: Mapping[str, int] | None) -> None:
        """Truncate files to the sizes in ``kept``, and delete all other files."""
        self._sizes = dict(kept or {})
        self._name = ""
        self._file: BinaryIO | None = None
        self.target.mkdir(exist_ok=True)
        for path in self.target.iterdir():
            if path.name not in self._sizes:
                path.unlink()
        for name, size in self._sizes.items():
            os.truncate(self.target / name, size)

    @abstractmethod
    def record(self, split: str, number: int, content: bytes) -> tuple[str, bytes]:
        """Return the name of the record file for an image, and the image's record."""

    @abstractmethod
    def scan(self, split: str) -> Store:
        """Read back the records of a split."""

    def write(self, split: str, number: int, content: bytes) -> None:
        """See `StoreWriter.write`."""
        name, record = self.record(split, number, content)
        if self._file is None or name != self._name:
            self.sync()
            self.close()
            self._name, self._file = name, open(self.target / name, "ab")  # noqa: SIM115 - it stays open
            self._sizes.setdefault(name, 0)
        self._file.write(record)
        self._sizes[name] += len(record)

    def sync(self) -> dict[str, int]:
        """Flush written data to disk; return the sizes of all files by name."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return dict(self._sizes)

    def finish(self) -> None:
        """Complete the store: classes and indexes."""
        self.sync()
        write_classes(self.target, next(iter(self.stores.values())))
        for split in self.stores:
            tables.write_index(self.scan(split))

    def close(self) -> None:
        """Close the open file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
