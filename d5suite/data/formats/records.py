"""Files that only grow, as the writers of record files need them: cut back to what was durable, then written on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO


class GrowingFiles:
    """The files of a folder, written one after another.

    Parameters
    ----------
    folder : pathlib.Path
        Is made if need be.
    kept : mapping of str to int, optional
        Name and bytes of what stays of an interrupted folder: longer files are cut, and others deleted.

    Raises
    ------
    OSError
        If the folder cannot be written to.
    """

    def __init__(self, folder: Path, kept: Mapping[str, int] | None) -> None:
        self._folder = folder
        self._sizes = dict(kept or {})
        self._name = ""
        self._file: BinaryIO | None = None
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name not in self._sizes:
                path.unlink()
        for name, size in self._sizes.items():
            os.truncate(folder / name, size)

    def append(self, name: str, content: bytes) -> None:
        """Add to a file; the one before it is closed."""
        if self._file is None or name != self._name:
            self.sync()
            self.close()
            self._name, self._file = name, open(self._folder / name, "ab")  # noqa: SIM115 - it stays open
            self._sizes.setdefault(name, 0)
        self._file.write(content)
        self._sizes[name] += len(content)

    def sync(self) -> dict[str, int]:
        """Make durable what was written, and return the sizes of all files by name."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return dict(self._sizes)

    def close(self) -> None:
        """Close the file that is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
