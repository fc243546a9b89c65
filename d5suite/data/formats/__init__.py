"""The storage formats of image datasets, which are all read as a `Store`.

Every format has a module with the same names: ``splits(path)``, ``read(path, split)`` and
``Writer``. The formats of record files, which have an index, also have ``scan(path, split)``, which
reads all records. `d5suite.data.convert` converts between formats.

- `folder`: ImageNet's and Open Images' folders of JPEG files;
- `hdf5`: one HDF5 file;
- `tfrecord`: TensorFlow's record files, as the scripts that prepare ImageNet for it write them;
- `recordio`: MXNet's record files.

``docs/datasets.md`` describes the layouts. No framework is needed to read or write them. May import
NumPy, h5py and, from d5suite, `data`, `errors` and `files`.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from d5suite.data.formats.store import SPLITS, Store, sniff
from d5suite.data.imagenet import ImageNet
from d5suite.data.openimages import OpenImages
from d5suite.data.reading import check_classes
from d5suite.errors import ConfigurationError, DataError

KINDS = ("folder", "hdf5", "tfrecord", "recordio")
"""The formats, by the names of their modules."""

_OTHER_NAMES = {"val": "validation", "validation": "val"}


def format_module(kind: str) -> Any:
    """Import the module of a format.

    Raises
    ------
    ConfigurationError
        If the format is unknown.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"unknown format {kind!r}", hint=f"The formats are {', '.join(KINDS)}.")
    return importlib.import_module(f"{__name__}.{kind}")


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return the format of a dataset, one of `KINDS`, by its content.

    Raises
    ------
    DataError
        If the path does not exist, or is a file other than HDF5.
    """
    where = Path(path)
    if where.is_dir():
        found = [kind for kind in ("tfrecord", "recordio") if format_module(kind).splits(where)]
        if len(found) > 1:
            raise DataError("holds both TFRecord and RecordIO files", where=str(where), hint="Separate them.")
        return found[0] if found else "folder"
    if not where.exists():
        raise DataError("does not exist", where=str(where))
    content = sniff(where)
    if content != "HDF5":
        hint = "Give the folder that holds the files." if content in ("TFRecord", "RecordIO") else None
        raise DataError(f"is neither a folder nor an HDF5 file: its content is {content}", where=str(where), hint=hint)
    return "hdf5"


def stored_as(dataset: ImageNet | OpenImages | Store) -> str:
    """Return the format of an open split, one of `KINDS`."""
    return kind_of(dataset.path) if isinstance(dataset, Store) else "folder"


def splits_of(path: str | os.PathLike[str]) -> list[str]:
    """Return which of ``train``, ``val``, ``validation`` and ``test`` a dataset has.

    Raises
    ------
    DataError
        As `kind_of`, or if there are no splits.
    """
    found: list[str] = format_module(kind_of(path)).splits(Path(os.path.abspath(path)))
    if not found:
        raise DataError(f"holds none of the splits {', '.join(SPLITS)}", where=str(path))
    return found


def read_split(path: str | os.PathLike[str], split: str, *, scan: bool = False) -> Store:
    """Read one split of a dataset in any format, including a folder of images.

    Parameters
    ----------
    path : path
    split : str
    scan : bool
        Read all records, as frameworks' own readers do, and compare them with the index. Otherwise
        an index is trusted if the file sizes fit.

    Raises
    ------
    DataError
        If there is no such split, or its files are damaged, unsafe or inconsistent.
    ConfigurationError
        If ``split`` is not the name of a split.
    """
    module = format_module(kind_of(path))
    root = Path(os.path.abspath(path))
    read = getattr(module, "scan", module.read) if scan else module.read
    store: Store = read(root, _split_there(root, module.splits(root), split))
    return store


def _split_there(root: Path, found: list[str], split: str) -> str:
    """Return the name of a split on disk; ``val`` and ``validation`` mean the same."""
    if split not in SPLITS:
        raise ConfigurationError(f"unknown split {split!r}", hint=f"The splits are {', '.join(SPLITS)}.")
    for name in (split, _OTHER_NAMES.get(split)):
        if name in found:
            return name
    raise DataError(f"has no split {split!r}", where=str(root), hint=f"It has {', '.join(found) or 'none'}.")


def open_store(
    path: str | os.PathLike[str], split: str, *, classes: int | None = None
) -> ImageNet | OpenImages | Store:
    """Open one split of a dataset in any format, ready for `Loader`.

    Parameters
    ----------
    path : path
        A folder of images, a folder of TFRecord or RecordIO files, or an HDF5 file.
    split : str
        ``train``, ``val`` or ``validation`` (the same), or ``test``.
    classes : int, optional
        Number of classes to use, from the first; by default all.

    Returns
    -------
    ImageNet, OpenImages or Store
        For a folder of images one of the first two. All have ``files``, ``labels`` and
        ``class_names``.

    Raises
    ------
    DataError
        As `read_split`, or if there are fewer classes.
    ConfigurationError
        If `classes` is less than 1, or ``split`` is not the name of a split.
    """
    check_classes(classes)
    if kind_of(path) == "folder":
        folder, root = format_module("folder"), Path(os.path.abspath(path))
        dataset: ImageNet | OpenImages = folder.dataset(root, _split_there(root, folder.splits(root), split), classes)
        return dataset
    store = read_split(path, split)
    return store if classes is None else store.first_classes(classes)
