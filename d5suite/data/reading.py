"""Where the bytes of an image lie, and reading them with files kept open. Imports NumPy, of d5suite its errors only."""

from __future__ import annotations

import os
import struct
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from d5suite.data.crc32c import masked_crc32c
from d5suite.errors import DataError

Location = str | tuple[Any, ...] | list[Any]
"""Where the encoded bytes of one image lie: a whole file, by its path; or ``(file, record, offset, length, ...)``, the
pieces of a file that joined are the image, with the byte offset of the TFRecord record around it, or -1 for none. It is
a message to worker processes, too, so it holds strings and whole numbers only."""

_OPEN_FILES = 256  # per reader; a process may have 1024 by default


@dataclass(frozen=True)
class Pieces(Sequence[Location]):
    """The locations of images that share files.

    Attributes
    ----------
    files : list of str
        Absolute paths.
    file : numpy.ndarray
        int32 (images,): position in `files`.
    record : numpy.ndarray
        int64 (images,): byte offset of the TFRecord record around the image, or -1.
    start : numpy.ndarray
        int64 (images + 1,): the pieces of image i are those from ``start[i]`` to ``start[i + 1]``.
    offset, length : numpy.ndarray
        int64 (pieces,): in bytes.
    """

    files: list[str]
    file: np.ndarray
    record: np.ndarray
    start: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.file)

    @overload
    def __getitem__(self, number: int) -> Location: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Location]: ...
    def __getitem__(self, number: int | slice) -> Location | Sequence[Location]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"image {number} of {len(self)}")
        place = (self.files[self.file[number]], int(self.record[number]))
        first, end = int(self.start[number]), int(self.start[number + 1])
        if end == first + 1:
            return (*place, int(self.offset[first]), int(self.length[first]))
        pieces = np.stack([self.offset[first:end], self.length[first:end]], axis=1)
        return (*place, *pieces.ravel().tolist())

    def take(self, numbers: np.ndarray) -> Pieces:
        """The locations of some of the images."""
        start, chosen = take_runs(self.start, numbers)
        return Pieces(
            self.files, self.file[numbers], self.record[numbers], start, self.offset[chosen], self.length[chosen]
        )

    def sizes(self) -> np.ndarray:
        """Bytes of every image: int64 (images,)."""
        sums = np.concatenate([[0], np.cumsum(self.length)])
        sizes: np.ndarray = np.diff(sums[self.start])
        return sizes


def take_runs(start: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The starts of the chosen ones of runs that lie one after another, and the positions of what is in them."""
    lengths = np.diff(start)[numbers]
    new = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return new, np.arange(new[-1]) + np.repeat(start[numbers] - new[:-1], lengths)


def name_of(location: Location) -> str:
    """What to call a location in a message: its file, and the byte where it begins."""
    return location if isinstance(location, str) else f"{location[0]}, byte {location[2]}"


class Reader:
    """Read images, keeping the files open that hold many.

    The checksum of a TFRecord record is checked when the reader first meets it: a second reading, in the next epoch,
    costs no more than any other file.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[str, int] = OrderedDict()
        self._checked = bytearray()
        self.close = weakref.finalize(self, _close_all, self._files)

    def read(self, location: Location, number: int) -> bytes:
        """The encoded bytes of an image.

        Parameters
        ----------
        location : Location
        number : int
            Of the image in its dataset, by which the reader remembers what it has checked.

        Raises
        ------
        DataError
            The file cannot be read or is too short, or a checksum does not match.
        """
        if isinstance(location, str):
            try:
                with open(location, "rb") as file:
                    return file.read()
            except OSError as error:
                raise DataError(f"cannot read the image: {error.strerror or error}", where=location) from None
        path, record, *pieces = location
        if record >= 0 and not self._is_checked(number):
            content = self._checked_record(path, record)
            self._checked[number >> 3] |= 1 << (number & 7)
            offset, length = pieces
            begin = offset - record - 12
            if begin < 0 or begin + length > len(content) - 4:
                raise DataError(
                    "the index places an image outside its record",
                    where=f"{path}, byte {record}",
                    hint="Delete the index file; it is made again when the store is next opened.",
                )
            return content[begin : begin + length]
        parts = [self._bytes(path, offset, length) for offset, length in zip(pieces[::2], pieces[1::2], strict=True)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _is_checked(self, number: int) -> bool:
        if number >> 3 >= len(self._checked):
            self._checked.extend(bytes((number >> 3) + 1024 - len(self._checked)))
        return bool(self._checked[number >> 3] >> (number & 7) & 1)

    def _checked_record(self, path: str, offset: int) -> bytes:
        """The data of a record, and its checksum, which matches."""
        header = self._bytes(path, offset, 12)
        if struct.unpack("<I", header[8:])[0] != masked_crc32c(header[:8]):
            raise DataError("the checksum of the record's length does not match", where=f"{path}, byte {offset}")
        (length,) = struct.unpack("<Q", header[:8])
        if length > os.fstat(self._descriptor(path)).st_size - offset - 16:
            raise DataError("the file ends inside this record", where=f"{path}, byte {offset}")
        content = self._bytes(path, offset + 12, length + 4)
        if struct.unpack("<I", content[-4:])[0] != masked_crc32c(memoryview(content)[:-4]):
            raise DataError(
                "the checksum of the record's data does not match",
                where=f"{path}, byte {offset}",
                hint="The file is damaged: fetch or convert it again.",
            )
        return content

    def _bytes(self, path: str, offset: int, length: int) -> bytes:
        try:
            content = os.pread(self._descriptor(path), length, offset)
            while len(content) < length and (more := self._more(path, offset, length, content)):
                content += more
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=f"{path}, byte {offset}") from None
        if len(content) < length:
            raise DataError(
                f"the file ends {length - len(content)} bytes too early",
                where=f"{path}, byte {offset + len(content)}",
                hint="It was cut short: fetch or convert it again.",
            )
        return content

    def _more(self, path: str, offset: int, length: int, content: bytes) -> bytes:
        """What a read that was cut short left out; Linux reads at most 2 GiB at a time."""
        return os.pread(self._descriptor(path), length - len(content), offset + len(content))

    def _descriptor(self, path: str) -> int:
        descriptor = self._files.get(path)
        if descriptor is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            descriptor = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._files.move_to_end(path)
        return descriptor


def _close_all(files: OrderedDict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])
