"""MXNet's record files: ``train.rec``, ``train.idx`` (offsets) and ``train.lst`` (labels, name).

A record is a magic number, a word with its length, a header (``IRHeader``: flag, label, two ids,
then `flag` numbers), and the encoded image. Like MXNet's own writer, ours splits a record that
contains the magic number at a multiple of four bytes. The `flag` numbers of an image with several
labels are the count of present labels, these labels, and the labels verified as absent.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from d5suite.data.formats import tables
from d5suite.data.formats.store import RECORDIO_MAGIC, SPLITS, LabelReader, Store, full_name, sniff
from d5suite.data.formats.writing import RecordWriter, mapped
from d5suite.data.openimages import SparseLabels
from d5suite.data.reading import FilePieces
from d5suite.errors import DataError
from d5suite.files import atomic_path

_MAGIC = struct.pack("<I", RECORDIO_MAGIC)
_LENGTH_BITS = 29
_HEADER = struct.Struct("<IfQQ")  # flag, label, id, id2
_MOST_PARTS = 256
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)

Parts = list[tuple[int, int]]
"""Begin and length in the file of the parts that make up a record."""


def splits(path: Path) -> list[str]:
    """Return the splits in the folder."""
    return [split for split in SPLITS if (path / f"{split}.rec").exists()]


def read(path: Path, split: str) -> Store:
    """Read the index of one split; make it if there is none.

    Raises
    ------
    DataError
        If the file is truncated or damaged, or contradicts its index or the classes.
    """
    file = path / f"{split}.rec"
    store = tables.indexed(path, split, [file]) or tables.index(_scan(file, split)[0])
    return _checked(store, file, None)


def scan(path: Path, split: str) -> Store:
    """Read all records of one split and compare them with its indexes, ours and MXNet's.

    Raises
    ------
    DataError
        As `read`, or if an index contradicts the records.
    """
    file = path / f"{split}.rec"
    index = tables.indexed(path, split, [file])
    store, ids = _scan(file, split)
    if index is not None:
        if not file.with_suffix(".lst").exists() and len(index) == len(store):
            store = dataclasses.replace(store, names=index.names)  # records hold no names
        tables.check_same(store, index)
    return _checked(store, file, ids)


def _checked(store: Store, file: Path, ids: np.ndarray | None) -> Store:
    places = store.files
    assert isinstance(places, FilePieces)
    _check_idx(file.with_suffix(".idx"), places.record, ids)
    places.record[:] = -1  # records without a checksum
    return store


def _check_idx(file: Path, records: np.ndarray, ids: np.ndarray | None) -> None:
    """Compare MXNet's index, if there is one, with the offsets and optionally ids of records."""
    if not file.exists():
        return
    try:
        lines = [line.split("\t") for line in file.read_text("ascii").splitlines()]
        keys, offsets = (np.array([int(line[column]) for line in lines], np.int64) for column in (0, 1))
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
    if ids is not None:
        _check_keys(file, keys, offsets, np.searchsorted(records, offsets), ids)


def _check_keys(file: Path, keys: np.ndarray, offsets: np.ndarray, numbers: np.ndarray, ids: np.ndarray) -> None:
    """Check that MXNet finds the right image by its key; line i is for record ``numbers[i]``.

    A key must be the id of its record, as in `im2rec`. Without a list of labels by id, keys in the
    order of the records suffice, because MXNet then reads the label from the record.
    """
    in_order = (np.diff(numbers[np.argsort(keys, kind="stable")]) > 0).all() and len(np.unique(keys)) == len(keys)
    wrong = ids[numbers] != keys.astype(np.uint64)
    if wrong.any() and (file.with_suffix(".lst").exists() or not in_order):
        line = int(wrong.argmax())
        raise DataError(
            f"key {keys[line]} names byte {offsets[line]} of {file.with_suffix('.rec').name}, where record "
            f"{numbers[line]} begins, which has the id {ids[numbers[line]]}",
            where=f"{file}, line {line + 1}",
            hint="Lines are swapped or from another file: fetch or convert it again.",
        )


def _scan(file: Path, split: str) -> tuple[Store, np.ndarray]:
    """Find all images and their ids; read only the beginning of every record."""
    labels = LabelReader(file.parent)
    listed = _read_list(file.with_suffix(".lst"))
    names: list[str] = []
    records, starts, pieces = array("q"), array("q", [0]), array("q")  # numbers of 8 bytes
    ids = array("Q")
    with mapped(file) as content:
        for record, parts in _records(content, file):
            where = f"{file}, byte {record}"
            image_id, numbers, size = _header(content, parts, labels.several, where)
            label = _take(numbers, labels, where)
            *written, name = listed.get(image_id, f"{len(names):08}.JPEG").split("\t")
            if written and not _same_numbers(written, numbers):
                raise DataError(
                    f"record {len(names)} has label {' '.join(map(str, numbers))}, and {file.stem}.lst says "
                    f"{' '.join(written)} of its id {image_id}",
                    where=where,
                )
            ids.append(image_id)
            names.append(full_name(split, label, name, where))
            records.append(record)
            for piece in _without(parts, size):
                pieces.extend(piece)
            starts.append(len(pieces) // 2)
    if not names:
        raise DataError("no images", where=str(file))
    offset, length = np.array(pieces).reshape(-1, 2).T
    places = FilePieces(
        [str(file)], np.zeros(len(names), np.int32), np.array(records), np.array(starts), offset.copy(), length.copy()
    )
    label_names, class_names, values = labels.result()
    return Store(file.parent, split, label_names, class_names, names, values, places), np.array(ids)


def _records(content: mmap.mmap | bytes, file: Path) -> Iterator[tuple[int, Parts]]:
    """Yield where every record begins, and its parts."""
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
        # The writer removed a magic number from the data between two parts; the header has it.
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


def _header(content: mmap.mmap | bytes, parts: Parts, several: bool, where: str) -> tuple[int, list[int], int]:
    """Return an image's id, the numbers of its labels, and the size of the header."""
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
    if not several and len(numbers) != 1:
        raise DataError(f"the record has {len(numbers)} labels, but no list of classes allows several", where=where)
    if several and (not flag or not 0 <= numbers[0] < len(numbers)):
        raise DataError("the labels do not begin with how many of them are present", where=where)
    return image_id, numbers, size


def _take(numbers: list[int], labels: LabelReader, where: str) -> str:
    """Add an image's labels; return the label's name if there is one label per image."""
    if not labels.several:
        return labels.add(numbers[0], where)
    labels.add_several(numbers[1 : numbers[0] + 1], numbers[numbers[0] + 1 :], where)
    return ""


def _first_bytes(content: mmap.mmap | bytes, parts: Parts, size: int) -> bytes:
    found = b""
    for offset, length in parts:
        if len(found) >= size:
            break
        found += content[offset : offset + min(length, size - len(found))]
    return found


def _without(parts: Parts, size: int) -> Parts:
    """Return the parts, at least one, without the first bytes of the record."""
    rest: Parts = []
    for number, (offset, length) in enumerate(parts, start=1):
        cut = min(size, length)
        size -= cut
        if length > cut or (number == len(parts) and not rest):
            rest.append((offset + cut, length - cut))
    return rest


def _same_numbers(written: list[str], numbers: list[int]) -> bool:
    """Return whether the list's labels match a record, which may hold only the first label."""
    try:
        return [float(text) for text in written[: len(numbers)]] == numbers
    except ValueError:
        return False


def _read_list(file: Path) -> dict[int, str]:
    """Read MXNet's list of images: id, labels, name; return labels and name by id."""
    listed: dict[int, str] = {}
    if not file.exists():
        return listed
    try:
        for number, line in enumerate(file.read_text("utf-8").split("\n"), start=1):
            image_id, _, rest = line.partition("\t")
            if "\t" in rest and listed.setdefault(int(image_id), rest) != rest:
                raise DataError(f"line {number} has the id {int(image_id)} a second time", where=str(file))
    except (OSError, ValueError) as error:
        raise DataError(f"is not a list of images: {error}", where=str(file)) from None
    return listed


class Writer(RecordWriter):
    """Write a ``.rec``, ``.lst`` and ``.idx`` file per split."""

    def record(self, split: str, number: int, content: bytes) -> tuple[str, bytes]:
        """See `RecordWriter.record`."""
        values = _labels(self.stores[split], number)
        if self.stores[split].several:
            head = _HEADER.pack(len(values), 0, number, 0) + np.array(values, "<f4").tobytes()
        else:
            head = _HEADER.pack(0, values[0], number, 0)
        return f"{split}.rec", framed(head + content, f"{split}, image {number}")

    def scan(self, split: str) -> Store:
        """Read back the records of a split, after MXNet's list and before its index are written."""
        store = self.stores[split]
        with atomic_path(self.target / f"{split}.lst") as temporary, open(temporary, "w", encoding="utf-8") as file:
            for number, name in enumerate(store.names):
                labels = "\t".join(str(value) for value in _labels(store, number))
                file.write(f"{number}\t{labels}\t{name}\n")
        found, _ = _scan(self.target / f"{split}.rec", split)
        assert isinstance(found.files, FilePieces)
        records = found.files.record
        with atomic_path(self.target / f"{split}.idx") as temporary, open(temporary, "w") as file:
            file.writelines(f"{number}\t{offset}\n" for number, offset in enumerate(records.tolist()))
        return found


def _labels(store: Store, number: int) -> list[int]:
    """Return the numbers for an image's labels in a record and in the list."""
    labels = store.labels
    if not isinstance(labels, SparseLabels):
        return [int(labels[number])]
    present, absent = labels.verified(number)
    return [len(present), *present, *absent]


def framed(data: bytes, where: str) -> bytes:
    """Return a record, split where it contains the magic number.

    Raises
    ------
    DataError
        If it is too long for the format.
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
