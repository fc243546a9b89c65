"""MXNet's record files: ``train.rec``, with ``train.idx`` (where a record begins) and ``train.lst`` (labels, name).

A record is a magic number, a word with its length, a header (``IRHeader``: flag, label, two ids; then `flag` numbers if
it is not 0), and the encoded image. As MXNet's own writer does, one that contains the magic number at a multiple of
four bytes is split there. An image with several labels has, in the place for `flag` numbers: how many are present,
which, and then which are verified to be absent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from d5suite.data.formats import tables
from d5suite.data.formats.records import GrowingFiles
from d5suite.data.formats.store import (
    RECORDIO_MAGIC,
    SPLITS,
    LabelReader,
    Store,
    full_name,
    read_classes,
    sniff,
    write_classes,
)
from d5suite.data.openimages import SparseLabels
from d5suite.data.reading import Pieces
from d5suite.errors import DataError
from d5suite.files import atomic_path

_MAGIC = struct.pack("<I", RECORDIO_MAGIC)
_LENGTH_BITS = 29
_HEADER = struct.Struct("<IfQQ")  # flag, label, id, id2
_MOST_PARTS = 256
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)

Parts = list[tuple[int, int]]
"""Where the parts of a record lie, begin and length in the file; joined they are the record."""


def splits(path: Path) -> list[str]:
    """The splits in the folder."""
    return [split for split in SPLITS if (path / f"{split}.rec").exists()]


def read(path: Path, split: str) -> Store:
    """Read the index of one split; make it, if there is none.

    Raises
    ------
    DataError
        The file is truncated or damaged, or does not fit its index or the classes.
    """
    file = path / f"{split}.rec"
    if tables.index_file(path, split).exists():
        store = tables.fitting(path, tables.read_index([file], split), read_classes(path))
    else:
        store = _scan(file, split)
        with contextlib.suppress(
            OSError, RuntimeError
        ):  # the folder is somebody else's; it is scanned again the next time
            tables.write_index(store)
    places = store.files
    assert isinstance(places, Pieces)
    _check_idx(file.with_suffix(".idx"), places.record)
    places.record[:] = -1  # records without a checksum
    return store


def _check_idx(file: Path, records: np.ndarray) -> None:
    """Compare MXNet's index, if there is one, with where the records begin."""
    if not file.exists():
        return
    try:
        offsets = np.array([int(line.split("\t")[1]) for line in file.read_text("ascii").splitlines()], np.int64)
    except (OSError, ValueError, IndexError, OverflowError) as error:
        raise DataError(f"is not an index of a RecordIO file: {error}", where=str(file)) from None
    if len(offsets) != len(records):
        raise DataError(
            f"has {len(offsets):,} entries for {len(records):,} records of {file.with_suffix('.rec').name}",
            where=str(file),
        )
    wrong = np.sort(offsets) != np.sort(records)
    if wrong.any():
        where = int(np.sort(offsets)[wrong.argmax()])
        raise DataError(
            f"no record of {file.with_suffix('.rec').name} begins at byte {where}, which it names", where=str(file)
        )


def _scan(file: Path, split: str) -> Store:
    """Find all images. The file is not read as a whole, only the beginnings of the records."""
    labels = LabelReader(file.parent)
    listed = _read_list(file.with_suffix(".lst"))
    names: list[str] = []
    records, starts, pieces = array("q"), array("q", [0]), array("q")  # numbers of 8 bytes
    with open(file, "rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            raise DataError("no images", where=str(file))
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            content.madvise(mmap.MADV_RANDOM)
            for record, parts in _records(content, file):
                where = f"{file}, byte {record}"
                image_id, label, size = _header(content, parts, labels, where)
                name = listed.get(image_id, f"{len(names):08}.JPEG")
                names.append(full_name(split, label, name, where))
                records.append(record)
                for piece in _without(parts, size):
                    pieces.extend(piece)
                starts.append(len(pieces) // 2)
    offset, length = np.array(pieces).reshape(-1, 2).T
    places = Pieces(
        [str(file)],
        np.zeros(len(names), np.int32),
        np.array(records),
        np.array(starts),
        offset.copy(),
        length.copy(),
    )
    label_names, class_names, values = labels.result()
    return Store(file.parent, split, label_names, class_names, names, values, places)


def _records(content: mmap.mmap, file: Path) -> Iterator[tuple[int, Parts]]:
    """Where each record begins, and its parts."""
    at, size = 0, len(content)
    begin, parts = 0, Parts()
    while at < size:
        where = f"{file}, byte {at}"
        head = content[at : at + 8]
        if len(head) < 8:
            raise DataError("the file ends inside this record", where=where, hint="It was cut short.")
        magic, word = struct.unpack("<II", head)
        if magic != RECORDIO_MAGIC:
            what = f"the record begins with {magic:#010x}, not with the magic number {RECORDIO_MAGIC:#010x}"
            if at == 0 and (kind := sniff(file)) != "RecordIO":
                what = f"is not a RecordIO file: its content is {kind}"
            raise DataError(what, where=where)
        flag, length = word >> _LENGTH_BITS, word & (1 << _LENGTH_BITS) - 1
        if length > size - at - 8:
            raise DataError(
                f"the file ends inside this record of {length:,} bytes", where=where, hint="It was cut short."
            )
        if flag > _LAST or (flag in (_WHOLE, _FIRST)) == bool(parts):
            raise DataError("the parts of a split record are not in order", where=where)
        if not parts:
            begin = at
        # What was cut out between two parts is the magic number that the second begins with, and lies before it.
        glue = 4 if flag in (_FIRST, _MIDDLE) else 0
        if glue and length % 4:
            raise DataError("a part of a split record does not end at a multiple of four bytes", where=where)
        parts.append((at + 8, length + glue))
        if len(parts) > _MOST_PARTS:
            raise DataError(f"the record is split into more than {_MOST_PARTS} parts", where=where)
        at += 8 + length + -length % 4
        if not glue:
            yield begin, parts
            parts = []
    if parts:
        raise DataError("the file ends inside this record", where=f"{file}, byte {begin}", hint="It was cut short.")


def _header(content: mmap.mmap, parts: Parts, labels: LabelReader, where: str) -> tuple[int, str, int]:
    """Take an image's labels; return its id, the name of its label if it has one, and the size of the header."""
    size = _HEADER.size
    head = _first_bytes(content, parts, size)
    if len(head) < size:
        raise DataError(f"the record is shorter than its header of {size} bytes", where=where)
    flag, label, image_id, _ = _HEADER.unpack(head)
    size += 4 * flag
    if size > sum(length for _, length in parts):
        raise DataError(f"the record is shorter than its header of {size:,} bytes", where=where)
    values = np.frombuffer(_first_bytes(content, parts, size), "<f4", offset=_HEADER.size) if flag else [label]
    numbers = [int(value) if np.isfinite(value) else -1 for value in values]
    if numbers != list(values):
        raise DataError(f"a label is not a whole number: {label if not flag else values}", where=where)
    if not labels.several:
        if len(numbers) != 1:
            raise DataError(f"the record has {len(numbers)} labels, and no list of classes says so", where=where)
        return image_id, labels.add(numbers[0], where), size
    if not flag or not 0 <= numbers[0] < len(numbers):
        raise DataError("the labels do not begin with how many of them are present", where=where)
    labels.add_several(numbers[1 : numbers[0] + 1], numbers[numbers[0] + 1 :], where)
    return image_id, "", size


def _first_bytes(content: mmap.mmap, parts: Parts, size: int) -> bytes:
    found = b""
    for offset, length in parts:
        if len(found) >= size:
            break
        found += content[offset : offset + min(length, size - len(found))]
    return found


def _without(parts: Parts, size: int) -> Parts:
    """The parts without the first bytes of the record; at least one."""
    rest: Parts = []
    for number, (offset, length) in enumerate(parts, start=1):
        cut = min(size, length)
        size -= cut
        if length > cut or (number == len(parts) and not rest):
            rest.append((offset + cut, length - cut))
    return rest


def _read_list(file: Path) -> dict[int, str]:
    """Read MXNet's list of images: id, labels, name; return name by id."""
    if not file.exists():
        return {}
    try:
        rows = [line.split("\t") for line in file.read_text("utf-8").split("\n") if line]
        return {int(row[0]): row[-1] for row in rows if len(row) > 2}
    except (OSError, ValueError) as error:
        raise DataError(f"is not a list of images: {error}", where=str(file)) from None


class Writer:
    """Write all splits into a folder, from the beginning or on from an interruption: see `hdf5.Writer`."""

    def __init__(
        self,
        target: Path,
        stores: Mapping[str, Store],
        image_sizes: Mapping[str, np.ndarray],
        kept: Mapping[str, int] | None = None,
    ) -> None:
        self._target = target
        self._stores = stores
        self._files = GrowingFiles(target, kept)
        self.sync, self.close = self._files.sync, self._files.close

    def write(self, split: str, number: int, content: bytes) -> None:
        """Write one image; images of a split come in order."""
        values = _labels(self._stores[split], number)
        if self._stores[split].several:
            head = _HEADER.pack(len(values), 0, number, 0) + np.array(values, "<f4").tobytes()
        else:
            head = _HEADER.pack(0, values[0], number, 0)
        self._files.append(f"{split}.rec", framed(head + content, f"{split}, image {number}"))

    def finish(self) -> None:
        """Complete the store."""
        self.sync()
        write_classes(self._target, next(iter(self._stores.values())))
        for split, store in self._stores.items():
            with (
                atomic_path(self._target / f"{split}.lst") as temporary,
                open(temporary, "w", encoding="utf-8") as file,
            ):
                for number, name in enumerate(store.names):
                    labels = "\t".join(str(value) for value in _labels(store, number))
                    file.write(f"{number}\t{labels}\t{name}\n")
            found = _scan(self._target / f"{split}.rec", split)
            tables.write_index(found)
            assert isinstance(found.files, Pieces)
            records = found.files.record
            with atomic_path(self._target / f"{split}.idx") as temporary, open(temporary, "w") as file:
                file.writelines(f"{number}\t{offset}\n" for number, offset in enumerate(records.tolist()))


def _labels(store: Store, number: int) -> list[int]:
    """The numbers that a record and the list have for an image's labels."""
    labels = store.labels
    if not isinstance(labels, SparseLabels):
        return [int(labels[number])]
    first, end = labels.starts[number : number + 2].tolist()
    classes, present = labels.classes[first:end], labels.values[first:end] == 1
    return [int(present.sum()), *classes[present].tolist(), *classes[~present].tolist()]


def framed(data: bytes, where: str) -> bytes:
    """A record, split where it contains the magic number.

    Raises
    ------
    DataError
        It is too long for the format.
    """
    if len(data) >= 1 << _LENGTH_BITS:
        raise DataError(f"{len(data):,} bytes are too many for a RecordIO record", where=where)
    cuts = []
    at = data.find(_MAGIC)
    while at >= 0:
        if at % 4 == 0:
            cuts.append(at)
            at += 3
        at = data.find(_MAGIC, at + 1)
    if len(cuts) >= _MOST_PARTS:
        raise DataError("the image contains RecordIO's magic number too often", where=where)
    begins, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(data)]
    flags = [_FIRST, *[_MIDDLE] * (len(cuts) - 1), _LAST] if cuts else [_WHOLE]
    record = []
    for flag, begin, end in zip(flags, begins, ends, strict=True):
        record.append(_MAGIC + struct.pack("<I", flag << _LENGTH_BITS | end - begin) + data[begin:end])
    return b"".join(record) + bytes(-(ends[-1] - begins[-1]) % 4)
