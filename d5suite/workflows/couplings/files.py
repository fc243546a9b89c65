"""One HDF5 file per step, in a folder per channel.

A file gets its name when it is complete (``rename``, which is atomic). The reader renames a file to
take it, and a writer that discards removes it; only one of the two can succeed. Imports h5py late.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from d5suite.workflows.couplings import base
from d5suite.workflows.couplings.base import HEADER, Channel

LAST = "end"
"""Name of the file that says that no message follows."""


def _folder(channel: Channel) -> Path:
    return channel.folder / channel.name


def _waiting(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".h5"))


class Writer(base.Writer):
    """The end that writes files."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._folder = _folder(channel)
        self._folder.mkdir(parents=True)

    def is_full(self) -> bool:
        return len(_waiting(self._folder)) >= self.capacity

    def make_room(self) -> int:
        dropped = 0
        for name in _waiting(self._folder)[: -self.capacity + 1 or None]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / name)
                dropped += 1
        return dropped

    def write(self, header: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        import h5py

        image = io.BytesIO()  # in memory, because a full disk crashes the library
        with h5py.File(image, "w") as file:
            for name, value in zip(HEADER.names or (), header[0].tolist(), strict=True):
                file.attrs[name] = value
            for name, each in self.channel.fields.items():
                file.create_dataset(name, data=arrays[name]).attrs["unit"] = each.unit
        place = self._folder / f"{int(header['number'][0]):012d}.h5"
        part = place.with_suffix(".part")
        part.write_bytes(image.getbuffer())
        part.replace(place)

    def end(self) -> None:
        (self._folder / LAST).touch()


class Reader(base.Reader):
    """The end that reads and removes files."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._folder = _folder(channel)

    def is_ready(self) -> bool:
        return bool(_waiting(self._folder)) or (self._folder / LAST).exists()

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        import h5py

        is_last = (self._folder / LAST).exists()
        names = _waiting(self._folder)
        if not names:
            self.ended = is_last
            return None
        taken = self._folder / "taken"
        try:
            os.rename(self._folder / names[0], taken)
        except FileNotFoundError:
            return None
        with h5py.File(taken, "r") as file:
            header = np.array([tuple(int(file.attrs[name]) for name in HEADER.names or ())], HEADER)
            arrays = {name: file[name][()] for name in self.channel.fields}
        os.unlink(taken)
        return header, arrays
