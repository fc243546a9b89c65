"""TensorFlow's record files ``train-00000-of-00004``: a ``tf.train.Example`` per image.

The framing with checksums is TensorFlow's
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). The features are
named as in the scripts that prepare ImageNet for it (``build_imagenet_data.py``), so their files
can be read, too. ``image/class/synset`` determines the class if it exists, because those scripts
count ``image/class/label`` from 1; we count from 0. The few protocol-buffer messages are encoded
and decoded here, which does not read the images.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from d5suite.data.decode import header
from d5suite.data.formats import tables
from d5suite.data.formats.store import SPLITS, LabelReader, Store, full_name, sniff
from d5suite.data.formats.writing import RecordWriter, mapped
from d5suite.data.openimages import SparseLabels
from d5suite.data.reading import FilePieces, masked_crc32c_bytes
from d5suite.errors import DataError

SHARD_BYTES = 256 << 20
"""The approximate size of a file."""

_FILE = re.compile(rf"({'|'.join(SPLITS)})(?:-(\d{{5}})-of-(\d{{5}}))?(\.tfrecords?)?")
_LONGEST_NAME = 4096

Features = dict[str, tuple[int, int] | list[int]]
"""Features by name: begin and end of the first value's bytes, or a list of integers."""


def splits(path: Path) -> list[str]:
    """Return the splits in the folder."""
    found = {match[1] for match in map(_match, os.listdir(path)) if match}
    return [split for split in SPLITS if split in found]


def read(path: Path, split: str) -> Store:
    """Read the index of one split; make it if there is none.

    Raises
    ------
    DataError
        If a file is missing, truncated or damaged, or contradicts the index or the classes.
    """
    files = _shards(path, split)
    return tables.indexed(path, split, files) or tables.index(_scan(path, split, files))


def scan(path: Path, split: str) -> Store:
    """Read all records of one split and compare them with the index, if there is one.

    Raises
    ------
    DataError
        As `read`, or if the index contradicts the records.
    """
    files = _shards(path, split)
    index = tables.indexed(path, split, files)
    store = _scan(path, split, files)
    if index is not None:
        tables.check_same(store, index)
    return store


def _match(name: str) -> re.Match[str] | None:
    match = _FILE.fullmatch(name)
    return match if match and (match[2] or match[4]) else None


def _shards(path: Path, split: str) -> list[Path]:
    found = sorted(
        (match for match in map(_match, os.listdir(path)) if match and match[1] == split), key=lambda m: m[0]
    )
    numbers = [(match[2], match[3]) for match in found]
    count = int(numbers[0][1] or 1)
    expected = [(f"{i:05}", f"{count:05}") for i in range(count)] if numbers[0][0] else [(None, None)]
    if numbers != expected:
        missing = sorted(set(map(str, expected)) - set(map(str, numbers)))
        raise DataError(
            f"there are {len(found)} files of {split!r}, but their names say {count}"
            + (f"; missing: {len(missing)}" if missing else ""),
            where=str(path / found[0][0]),
        )
    return [path / match[0] for match in found]


def _scan(path: Path, split: str, files: Sequence[Path]) -> Store:
    """Find all images; read only the beginning of every record."""
    labels = LabelReader(path)
    names: list[str] = []
    rows = array("q")  # 8 bytes per number; lists for a million images would need gigabytes
    for number, file in enumerate(files):
        with mapped(file) as content:
            for record, begin, end in _records(content, file):
                where = f"{file}, byte {record}"
                features = _example(content, begin, end, where)
                image = _bytes_feature(features, "image/encoded", where)
                rows.extend((number, record, image[0], image[1] - image[0]))
                names.append(_image(content, features, labels, split, len(names), where))
    if not names:
        raise DataError("no images", where=str(files[0]))
    file_number, records, offset, length = np.array(rows).reshape(-1, 4).T
    places = FilePieces(
        [str(file) for file in files],
        file_number.astype(np.int32),
        records.copy(),
        np.arange(len(names) + 1),
        offset.copy(),
        length.copy(),
    )
    label_names, class_names, values = labels.result()
    return Store(path, split, label_names, class_names, names, values, places)


def _image(
    content: mmap.mmap | bytes, features: Features, labels: LabelReader, split: str, count: int, where: str
) -> str:
    """Add an image's labels; return its name."""
    label = ""
    if labels.several:
        verified = [features.get(f"image/class/{kind}", []) for kind in ("positive", "negative")]
        positive, negative = (value if isinstance(value, list) else [] for value in verified)
        labels.add_several(positive, negative, where)
    else:
        numbers = features.get("image/class/label")
        number = numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else None
        if "image/class/synset" in features:
            name = _text(content, features, "image/class/synset", where)
            label = labels.add(name, where) if number is None else labels.add_both(name, number, where)
        elif number is None:
            raise DataError("the record has neither image/class/synset nor one image/class/label", where=where)
        else:
            label = labels.add(number, where)
    has_name = "image/filename" in features
    name = _text(content, features, "image/filename", where) if has_name else f"{count:08}.JPEG"
    return full_name(split, label, name, where)


def _bytes_feature(features: Features, name: str, where: str) -> tuple[int, int]:
    value = features.get(name)
    if not isinstance(value, tuple):
        raise DataError(f"the record has no feature {name} of bytes", where=where)
    return value


def _text(content: mmap.mmap | bytes, features: Features, name: str, where: str) -> str:
    begin, end = _bytes_feature(features, name, where)
    if end - begin > _LONGEST_NAME:
        raise DataError(f"{name} is {end - begin:,} bytes long", where=where)
    return content[begin:end].decode("utf-8", "backslashreplace")


def _records(content: mmap.mmap | bytes, file: Path) -> Iterator[tuple[int, int, int]]:
    """Yield where every record begins, and where its data begin and end."""
    at, size = 0, len(content)
    while at < size:
        where = f"{file}, byte {at}"
        head = content[at : at + 12]
        if len(head) < 12:
            raise DataError("the file ends inside this record", where=where, hint="It was cut short.")
        if head[8:] != masked_crc32c_bytes(head[:8]):
            what = "the checksum of the record's length does not match"
            if at == 0 and (kind := sniff(file)) != "TFRecord":
                what = f"is not a TFRecord file: its content is {kind}"
            raise DataError(what, where=where)
        (length,) = struct.unpack("<Q", head[:8])
        if length > size - at - 16:
            raise DataError(
                f"the file ends inside this record of {length:,} bytes", where=where, hint="It was cut short."
            )
        yield at, at + 12, at + 12 + length
        at += length + 16


def _example(content: mmap.mmap | bytes, begin: int, end: int, where: str) -> Features:
    """Read the features of a ``tf.train.Example``."""
    features: Features = {}
    try:
        for _, a, b in _fields(content, begin, end, {1}):  # Example.features
            for _, c, d in _fields(content, a, b, {1}):  # Features.feature, a map: entries of key and value
                name, value = "", (0, 0)
                for field, e, f in _fields(content, c, d, {1, 2}):
                    if field == 2:
                        value = e, f
                    elif f - e <= _LONGEST_NAME:
                        name = content[e:f].decode("utf-8", "replace")
                for kind, e, f in _fields(content, *value, {1, 3}):  # Feature: bytes_list or int64_list
                    if kind == 1:
                        places = [(g, h) for _, g, h in _fields(content, e, f, {1})]
                        if places:
                            features[name] = places[0]
                    else:
                        features[name] = _whole_numbers(content, e, f)
    except (IndexError, OverflowError) as error:
        raise DataError("the record is not a tf.train.Example", where=where) from error
    return features


def _fields(content: mmap.mmap | bytes, at: int, end: int, wanted: set[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the wanted length-delimited fields of a message: number, begin, end.

    Raises
    ------
    IndexError
        If the message is malformed.
    """
    while at < end:
        key, at = _varint(content, at, end)
        kind = key & 7
        if kind == 2:
            length, at = _varint(content, at, end)
            begin, at = at, at + length
        elif kind == 0:
            begin, at = at, _varint(content, at, end)[1]
        elif kind in (1, 5):
            begin, at = at, at + (8 if kind == 1 else 4)
        else:
            raise IndexError
        if at > end:
            raise IndexError
        if kind == 2 and key >> 3 in wanted:
            yield key >> 3, begin, at


def _whole_numbers(content: mmap.mmap | bytes, at: int, end: int) -> list[int]:
    """Read the values of an ``Int64List``, packed or not."""
    values = []
    while at < end:
        key, at = _varint(content, at, end)
        stop = at + 1  # of one value
        if key == 0x0A:
            length, at = _varint(content, at, end)
            stop = at + length
        elif key != 0x08:
            raise IndexError
        if stop > end:
            raise IndexError
        while at < stop:
            value, at = _varint(content, at, end)
            values.append(value - (1 << 64) if value >> 63 else value)
    return values


def _varint(content: mmap.mmap | bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end or shift > 63:
            raise IndexError
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


class Writer(RecordWriter):
    """Write shards of about `SHARD_BYTES`."""

    def record(self, split: str, number: int, content: bytes) -> tuple[str, bytes]:
        """See `RecordWriter.record`."""
        store = self.stores[split]
        shards = max(1, -(-int(self.image_sizes[split].sum()) // SHARD_BYTES))
        shard = number * shards // len(store)
        data = example(store, number, content)
        length = struct.pack("<Q", len(data))
        record = b"".join([length, masked_crc32c_bytes(length), data, masked_crc32c_bytes(data)])
        return f"{split}-{shard:05}-of-{shards:05}", record

    def scan(self, split: str) -> Store:
        """See `RecordWriter.scan`."""
        return _scan(self.target, split, _shards(self.target, split))


def example(store: Store, number: int, content: bytes) -> bytes:
    """Return the ``tf.train.Example`` of one image.

    Parameters
    ----------
    store : Store
        The dataset, with the image's name and labels.
    number : int
        The image's number.
    content : bytes
        The encoded image.
    """
    features: dict[str, bytes | str | list[int]] = {"image/filename": store.names[number]}
    if found := header(content):
        features["image/format"], features["image/height"], features["image/width"] = found[0], [found[1]], [found[2]]
    labels = store.labels
    if isinstance(labels, SparseLabels):
        features["image/class/positive"], features["image/class/negative"] = labels.verified(number)
    else:
        name = store.label_names[labels[number]]
        features["image/class/label"] = [int(labels[number])]
        features["image/class/synset"] = name
        features["image/class/text"] = store.class_names.get(name, "")
    features["image/encoded"] = content
    entries = (_field(_field(name.encode()) + _field(_feature(value), 2)) for name, value in features.items())
    return _field(b"".join(entries))


def _feature(value: bytes | str | list[int]) -> bytes:
    if isinstance(value, list):
        packed = b"".join(_varint_bytes(number) for number in value)
        return _field(_field(packed) if packed else b"", 3)
    return _field(_field(value.encode() if isinstance(value, str) else value))


def _field(content: bytes, number: int = 1) -> bytes:
    return _varint_bytes(number << 3 | 2) + _varint_bytes(len(content)) + content


def _varint_bytes(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
