"""Locations of images in files, reading them, and checks that all datasets share.

May import NumPy, google_crc32c and, from d5suite, `errors` and `files`.
"""

from __future__ import annotations

import csv
import os
import stat
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from d5suite.errors import ConfigurationError, DataError
from d5suite.files import is_special

FileLocation = str | tuple[Any, ...] | list[Any]
"""The location of an image's encoded bytes: the path of a file; or ``(file, record, offset, length,
...)``: the pieces of a file that make up the image, after the byte offset of the TFRecord record
around it, or -1. It consists of strings and integers, because workers receive it as JSON."""

_OPEN_FILES = 256  # per reader; a process may have 1024 by default
_FRAME_BYTES = 12  # of a TFRecord record before its data: a length and its checksum


@dataclass(frozen=True)
class FilePieces(Sequence[FileLocation]):
    """The locations of images that share files, as arrays.

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

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        place = (self.files[self.file[number]], int(self.record[number]))
        first, end = int(self.start[number]), int(self.start[number + 1])
        if end == first + 1:
            return (*place, int(self.offset[first]), int(self.length[first]))
        pieces = np.stack([self.offset[first:end], self.length[first:end]], axis=1)
        return (*place, *pieces.ravel().tolist())

    def take(self, numbers: np.ndarray) -> FilePieces:
        """Return the locations of some of the images."""
        start, chosen = take_runs(self.start, numbers)
        return FilePieces(
            self.files, self.file[numbers], self.record[numbers], start, self.offset[chosen], self.length[chosen]
        )

    def sizes(self) -> np.ndarray:
        """Return the bytes of every image: int64 (images,)."""
        sums = np.concatenate([[0], np.cumsum(self.length)])
        sizes: np.ndarray = np.diff(sums[self.start])
        return sizes


def take_runs(start: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Select runs of consecutive items; return their new starts and the items' positions."""
    lengths = np.diff(start)[numbers]
    new = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return new, np.arange(new[-1]) + np.repeat(start[numbers] - new[:-1], lengths)


def name_of(location: FileLocation) -> str:
    """Return a location for messages: the file, and the byte where the image begins."""
    return location if isinstance(location, str) else f"{location[0]}, byte {location[2]}"


@contextmanager
def naming_errors(file: Path) -> Iterator[None]:
    """Turn errors from reading a text file or folder into a `DataError` that names it.

    A pipe or a device, which may have no end, is refused.
    """
    try:
        if not os.path.isdir(file) and is_special(file):
            raise OSError("this is not a regular file")
        yield
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(file)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"is not a valid text file: {error}", where=str(file)) from None


def check_split(split: str, splits: Sequence[str]) -> None:
    """Raise `ConfigurationError` if ``split`` is unknown."""
    if split not in splits:
        raise ConfigurationError(f"unknown split {split!r}", hint=f"The splits are {', '.join(splits)}.")


def check_classes(count: int | None) -> None:
    """Raise `ConfigurationError` if a number of classes is given and less than 1."""
    if count is not None and count < 1:
        raise ConfigurationError(f"classes is {count}; it must be at least 1")


def first_classes(known: list[str], count: int | None, where: Path) -> list[str]:
    """Return the first classes, all by default; raise `DataError` if there are fewer."""
    if count is not None and count > len(known):
        raise DataError(
            f"{count} classes are requested, but there are only {len(known)}",
            where=str(where),
            hint=f"Request at most {len(known)}.",
        )
    return known[:count]


def images_in(folder: Path, is_image: Callable[[str], bool], others: list[str]) -> Iterator[str]:
    """Yield the names of a folder's images.

    Parameters
    ----------
    folder : pathlib.Path
    is_image : callable
        Returns whether a name is an image's.
    others : list of str
        Gets the names of files that are left out: those that are not hidden, and hidden images.

    Raises
    ------
    DataError
        If the folder cannot be read, or entries with image names are not regular files.
    """
    odd = []
    with naming_errors(folder), os.scandir(folder) as entries:
        for entry in entries:
            image, hidden = is_image(entry.name), entry.name.startswith(".")
            if not image or hidden:
                others += [entry.name] * (image or not hidden)
            elif entry.is_file():
                yield entry.name
            else:
                odd.append(entry.name)
    _refuse_look_alikes(folder, odd)


def _refuse_look_alikes(folder: Path, odd: Sequence[str]) -> None:
    if not odd:
        return
    first = folder / min(odd)
    mode = first.lstat().st_mode
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
        stat.S_ISLNK: "a dangling link",
    }
    kind = next((name for test, name in kinds.items() if test(mode)), "a device")
    raise DataError(
        f"{len(odd):,} entries with image names are not regular files; this one is {kind}",
        where=str(first),
        hint="Remove it, or put the image there.",
    )


def describe_left_out(names: Sequence[str]) -> str:
    """Describe the files and folders that a dataset leaves out; empty if there are none."""
    return f"{len(names):,} files or folders are left out, such as {min(names)!r}" if names else ""


def nor_others(count: int) -> str:
    """Return the end of a message that names only the first of ``count`` missing things."""
    return f", nor are {count - 1:,} others" if count > 1 else ""


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of TFRecord files: rotated by 15 bits, plus a constant.

    https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
    """
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def masked_crc32c_bytes(data: bytes) -> bytes:
    """Return `masked_crc32c` as four little-endian bytes."""
    return struct.pack("<I", masked_crc32c(data))


class ImageReader:
    """Reads images, and keeps files that hold many images open.

    A reader checks the checksum of a TFRecord record only once, so later epochs are as fast as with
    other files.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[str, int] = OrderedDict()
        self._checked = bytearray()
        self.close = weakref.finalize(self, _close_all, self._files)

    def read(self, location: FileLocation, number: int) -> bytes:
        """Return the encoded bytes of an image.

        Parameters
        ----------
        location : FileLocation
        number : int
            The image's number in its dataset, to remember which records were checked.

        Raises
        ------
        DataError
            If the file cannot be read or is too short, or a checksum does not match.
        """
        if isinstance(location, str):
            try:
                with open(location, "rb") as file:
                    return file.read()
            except OSError as error:
                raise DataError(f"cannot read the image: {error.strerror or error}", where=location) from None
        path, record, *pieces = location
        if record >= 0 and not self._is_checked(number):
            offset, length = pieces
            data = self._checked_record(path, record, offset + length - record)
            self._checked[number >> 3] |= 1 << (number & 7)
            begin = offset - record - _FRAME_BYTES
            if begin < 0 or begin + length > len(data):
                raise DataError(
                    "the index places an image outside its record",
                    where=f"{path}, byte {record}",
                    hint="Delete the index file; it is rebuilt when the store is next opened.",
                )
            return data[begin : begin + length]
        parts = [self._bytes(path, offset, length) for offset, length in zip(pieces[::2], pieces[1::2], strict=True)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _is_checked(self, number: int) -> bool:
        if number >> 3 >= len(self._checked):
            self._checked.extend(bytes((number >> 3) + 1024 - len(self._checked)))
        return bool(self._checked[number >> 3] >> (number & 7) & 1)

    def _checked_record(self, path: str, offset: int, image_end: int) -> bytes:
        """Return the data of a record after checking its checksum.

        The image usually ends the record; one read then gets everything, checksum included.
        """
        content = self._available(path, offset, max(image_end, _FRAME_BYTES) + 4)
        if len(content) < _FRAME_BYTES:
            raise _cut_short(path, offset + len(content), _FRAME_BYTES - len(content))
        length, checksum = struct.unpack_from("<QI", content)
        if checksum != masked_crc32c(content[:8]):
            raise DataError("the checksum of the record's length does not match", where=f"{path}, byte {offset}")
        end = _FRAME_BYTES + length
        if end + 4 > len(content):
            if end + 4 > os.fstat(self._descriptor(path)).st_size - offset:
                raise DataError("the file ends inside this record", where=f"{path}, byte {offset}")
            content += self._bytes(path, offset + len(content), end + 4 - len(content))
        data = content[_FRAME_BYTES:end]
        if struct.unpack_from("<I", content, end)[0] != masked_crc32c(data):
            raise DataError(
                "the checksum of the record's data does not match",
                where=f"{path}, byte {offset}",
                hint="The file is damaged: fetch or convert it again.",
            )
        return data

    def _bytes(self, path: str, offset: int, length: int) -> bytes:
        content = self._available(path, offset, length)
        if len(content) < length:
            raise _cut_short(path, offset + len(content), length - len(content))
        return content

    def _available(self, path: str, offset: int, length: int) -> bytes:
        """Return these bytes, or as many of them as the file has."""
        try:
            descriptor = self._descriptor(path)
            content = os.pread(descriptor, length, offset)
            # Linux reads at most 2 GiB at a time.
            while len(content) < length and (
                more := os.pread(descriptor, length - len(content), offset + len(content))
            ):
                content += more
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=f"{path}, byte {offset}") from None
        return content

    def _descriptor(self, path: str) -> int:
        descriptor = self._files.get(path)
        if descriptor is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            descriptor = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._files.move_to_end(path)
        return descriptor


def _cut_short(path: str, end: int, missing: int) -> DataError:
    return DataError(
        f"the file ends {missing} bytes too early",
        where=f"{path}, byte {end}",
        hint="It was cut short: fetch or convert it again.",
    )


def _close_all(files: OrderedDict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])
