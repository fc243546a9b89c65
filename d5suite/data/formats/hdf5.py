"""One HDF5 file for all splits: a group per split, with all encoded images in one array of bytes.

The array has chunks of 1 MiB that are allocated when the file is made, so the offset of every byte
is known. Images are read and written directly, without the HDF5 library, and an interrupted
conversion leaves a valid file. ``docs/datasets.md`` describes the layout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from d5suite.data.formats import tables
from d5suite.data.formats.store import SPLITS, Store
from d5suite.data.formats.writing import StoreWriter
from d5suite.data.openimages import SparseLabels
from d5suite.data.reading import FilePieces
from d5suite.errors import DataError
from d5suite.files import atomic_path

_FORMAT = "d5suite images"
_CHUNK_BYTES = 1 << 20
_NUMBERS_BYTES = 64  # limit of the table's bytes per image or class, without names


def splits(path: Path) -> list[str]:
    """Return the splits in the file."""
    with tables.opened(path, _FORMAT) as file:
        return [split for split in SPLITS if split in file]


def read(path: Path, split: str) -> Store:
    """Read the table of one split.

    Raises
    ------
    DataError
        If the file is truncated, damaged, compressed or of another layout.
    """
    with tables.opened(path, _FORMAT) as file:
        label_names, class_names = tables.read_classes(file)
        if not isinstance(file.get(split, getlink=True), h5py.HardLink):
            raise DataError("is not a group", where=f"{path}, /{split}")
        group = file[split]
        names, labels = tables.read_images(group, len(label_names))
        offset = tables.numbers(group, "offset", np.int64, len(names))
        length = tables.numbers(group, "length", np.int64, len(names))
        images = tables.dataset(group, "bytes", np.uint8)
        wrong = (offset < 0) | (length < 0) | (offset > images.size) | (length > images.size - offset)
        if wrong.any():
            raise DataError(
                f"image {int(wrong.argmax())} is outside of the {images.size:,} bytes", where=f"{path}, /{split}/offset"
            )
        places = _places(images, offset, length, str(path))
    return Store(path, split, label_names, class_names, names, labels, places)


def _places(images: h5py.Dataset, offset: np.ndarray, length: np.ndarray, path: str) -> FilePieces:
    """Return the images' locations in the file, from their positions in the array."""
    file, record = np.zeros(len(offset), np.int32), np.full(len(offset), -1, np.int64)
    each = np.arange(len(offset) + 1)
    if images.chunks is None:
        begin = images.id.get_offset()
        if begin is None:
            raise DataError("the images are not stored as one piece or in chunks", where=path)
        return FilePieces([path], file, record, each, offset + begin, length)
    size = images.chunks[0]
    shift = np.full(-(-images.size // size), -1, np.int64)  # chunks' file offset minus array offset; always > 0

    def take(chunk: h5py.h5d.StoreInfo) -> None:
        shift[chunk.chunk_offset[0] // size] = chunk.byte_offset - chunk.chunk_offset[0]

    images.id.chunk_iter(take)
    first, last = offset // size, np.maximum(offset + length - 1, offset) // size
    first, last = np.minimum(first, len(shift) - 1), np.minimum(last, len(shift) - 1)
    if (shift == shift[0]).all():
        return FilePieces([path], file, record, each, offset + shift[0], length)
    start = np.concatenate([[0], np.cumsum(last - first + 1)])
    chunk = np.arange(start[-1]) + np.repeat(first - start[:-1], np.diff(start))
    counts = np.diff(start)
    begin = np.maximum(np.repeat(offset, counts), chunk * size)
    end = np.minimum(np.repeat(offset + length, counts), (chunk + 1) * size)
    return FilePieces([path], file, record, start, begin + shift[chunk], end - begin)


class Writer(StoreWriter):
    """Write all splits into one file."""

    def open(self, kept: Mapping[str, int] | None) -> None:
        """Make the file if it is new, and open it."""
        if kept is None:
            _make(self.target, self.stores, self.image_sizes)
        self._places = {split: read(self.target, split).files for split in self.stores}
        self._file = os.open(self.target, os.O_RDWR | os.O_CLOEXEC)

    def write(self, split: str, number: int, content: bytes) -> None:
        """See `StoreWriter.write`."""
        at = 0
        pieces = self._places[split][number][2:]
        for offset, length in zip(pieces[::2], pieces[1::2], strict=True):
            while length:
                written = os.pwrite(self._file, memoryview(content)[at : at + length], offset)
                at, offset, length = at + written, offset + written, length - written

    def sync(self) -> dict[str, int]:
        """Flush written data to disk; images have fixed positions, so there is no other state."""
        os.fsync(self._file)
        return {}

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _make(target: Path, stores: Mapping[str, Store], image_sizes: Mapping[str, np.ndarray]) -> None:
    _probe(target, stores, image_sizes)
    with atomic_path(target) as temporary, _new(temporary) as file:
        file.attrs["format"], file.attrs["version"] = _FORMAT, tables.VERSION
        tables.write_classes(file, next(iter(stores.values())))
        for split, store in stores.items():
            group = h5py.Group(h5py.h5g.create(file.id, split.encode(), gcpl=_timeless(h5py.h5p.GROUP_CREATE)))
            tables.write_images(group, store)
            ends = np.cumsum(image_sizes[split])
            group["offset"], group["length"] = ends - image_sizes[split], image_sizes[split]
            properties = _timeless(h5py.h5p.DATASET_CREATE)
            total = max(int(ends[-1]), 1)
            properties.set_chunk((min(total, _CHUNK_BYTES),))
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple((total,))
            h5py.h5d.create(group.id, b"bytes", h5py.h5t.NATIVE_UINT8, space, dcpl=properties)


def _probe(path: Path, stores: Mapping[str, Store], image_sizes: Mapping[str, np.ndarray]) -> None:
    """Write and delete a file as large as the new one, because a full disk crashes HDF5.

    The space for images stays a hole, as in the new file.

    Raises
    ------
    OSError
        If the disk is full.
    """
    images = sum(int(sizes.sum()) + _CHUNK_BYTES for sizes in image_sizes.values())
    numbers = sum(_NUMBERS_BYTES * (len(store) + len(store.label_names)) for store in stores.values())
    numbers += sum(8 * len(s.labels.values) for s in stores.values() if isinstance(s.labels, SparseLabels))
    texts = sum(len(text.encode()) for store in stores.values() for text in (*store.names, *store.label_names))
    left = numbers + texts + _CHUNK_BYTES
    try:
        with open(path, "wb") as probe:
            os.truncate(probe.fileno(), images + left)
            while left > 0:
                left -= probe.write(bytes(_CHUNK_BYTES))
            os.fsync(probe.fileno())
    finally:
        path.unlink(missing_ok=True)


def _new(path: Path) -> h5py.File:
    """Make a file in the format of HDF5 1.10, whose preallocated chunks are contiguous."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    created = _timeless(h5py.h5p.FILE_CREATE)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fcpl=created, fapl=access))


def _timeless(kind: h5py.h5p.PropClassID) -> Any:
    """Return properties without timestamps, so that the same dataset gives the same bytes."""
    properties = h5py.h5p.create(kind)
    properties.set_obj_track_times(False)
    return properties
