"""Encoded images in an HDF5 file, as the HDF5 library reads them, for adapters' native loaders.

d5suite's own loader reads such a file without that library. The native ones, its yardstick, share
only the file's layout with it (``docs/datasets.md``). Imports h5py.
"""

from __future__ import annotations

from pathlib import Path

import h5py


class EncodedImages:
    """The encoded images of a split with labels below ``classes``.

    Each process opens the file with its first image, because the library does not survive a fork;
    h5py serializes the reads of threads.

    Attributes
    ----------
    labels : numpy.ndarray
        The label of each image, int64.
    """

    def __init__(self, path: Path, split: str, classes: int) -> None:
        self._path, self._split = path, split
        with h5py.File(path) as file:
            labels, offsets, lengths = (file[split][name][...] for name in ("labels", "offset", "length"))
        chosen = labels < classes
        self.labels, self._offsets, self._lengths = labels[chosen], offsets[chosen], lengths[chosen]
        self._content: h5py.Dataset | None = None

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of an image."""
        if self._content is None:
            self._content = h5py.File(self._path)[self._split]["bytes"]
        begin = self._offsets[index]
        return bytes(self._content[begin : begin + self._lengths[index]])
