"""The formats that sites store image datasets in, all read to one `Store` and written by `d5suite.data.convert`.

One module per format, with the same names in each: ``splits(path)``, ``read(path, split)`` and ``Writer``; those of
record files, which have an index, also ``scan(path, split)``, which does not believe it.

- `folder`: ImageNet's and Open Images' folders of JPEG files;
- `hdf5`: one HDF5 file;
- `tfrecord`: TensorFlow's record files, as the scripts that prepare ImageNet for it write them;
- `recordio`: MXNet's record files.

``docs/datasets.md`` describes the layouts. No framework is needed: the bytes are read and written here. Imports NumPy,
h5py and, of d5suite, `data`, `errors` and `files`.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from d5suite.data.formats.store import SPLITS, Store, sniff
from d5suite.data.imagenet import ImageNet
from d5suite.data.openimages import OpenImages
from d5suite.errors import ConfigurationError, DataError

KINDS = ("folder", "hdf5", "tfrecord", "recordio")
"""The formats, by the names of their modules."""

_OTHER_NAMES = {"val": "validation", "validation": "val"}


def format_module(kind: str) -> Any:
    """Import the module of a format.

    Raises
    ------
    ConfigurationError
        There is no such format.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"unknown format {kind!r}", hint=f"The formats are {', '.join(KINDS)}.")
    return importlib.import_module(f"{__name__}.{kind}")


def kind_of(path: str | os.PathLike[str]) -> str:
    """Which format a dataset is stored in, by what is there; see `KINDS`.

    Raises
    ------
    DataError
        There is nothing, or a file that is not HDF5.
    """
    where = Path(path)
    if where.is_dir():
        found = [kind for kind in ("tfrecord", "recordio") if format_module(kind).splits(where)]
        if len(found) > 1:
            raise DataError("holds both TFRecord and RecordIO files", where=str(where), hint="Part them.")
        return found[0] if found else "folder"
    if not where.exists():
        raise DataError("does not exist", where=str(where))
    content = sniff(where)
    if content != "HDF5":
        hint = "Give the folder that holds the files." if content in ("TFRecord", "RecordIO") else None
        raise DataError(f"is neither a folder nor an HDF5 file: its content is {content}", where=str(where), hint=hint)
    return "hdf5"


def stored_as(dataset: ImageNet | OpenImages | Store) -> str:
    """Which format a split that is open is stored in; see `KINDS`."""
    return kind_of(dataset.path) if isinstance(dataset, Store) else "folder"


def splits_of(path: str | os.PathLike[str]) -> list[str]:
    """The splits of a dataset, a part of ``train, val, validation, test``.

    Raises
    ------
    DataError
        As `kind_of`, or there is none.
    """
    found: list[str] = format_module(kind_of(path)).splits(Path(os.path.abspath(path)))
    if not found:
        raise DataError(f"holds none of the splits {', '.join(SPLITS)}", where=str(path))
    return found


def read_split(path: str | os.PathLike[str], split: str) -> Store:
    """One split of a dataset in any format, a folder of images included.

    Raises
    ------
    DataError
        There is no such split, or its files are damaged, unsafe or do not fit each other.
    ConfigurationError
        No dataset has a split of this name.
    """
    module = format_module(kind_of(path))
    root = Path(os.path.abspath(path))
    store: Store = module.read(root, _split_there(root, module.splits(root), split))
    return store


def scan_split(path: str | os.PathLike[str], split: str) -> Store:
    """One split of a dataset, as its frameworks' own readers see it: record files are read, and indexes compared.

    `read_split` believes the index of record files where it has one of the right size.

    Raises
    ------
    DataError, ConfigurationError
        As `read_split`, or an index says anything else than the records.
    """
    module = format_module(kind_of(path))
    root = Path(os.path.abspath(path))
    store: Store = getattr(module, "scan", module.read)(root, _split_there(root, module.splits(root), split))
    return store


def _split_there(root: Path, found: list[str], split: str) -> str:
    """The split under the name that it has there."""
    if split not in SPLITS:
        raise ConfigurationError(f"unknown split {split!r}", hint=f"The splits are {', '.join(SPLITS)}.")
    for name in (split, _OTHER_NAMES.get(split)):
        if name in found:
            return name
    raise DataError(f"has no split {split!r}", where=str(root), hint=f"It has {', '.join(found) or 'none'}.")


def open_store(
    path: str | os.PathLike[str], split: str, *, classes: int | None = None
) -> ImageNet | OpenImages | Store:
    """One split of a dataset in any format, ready for `Loader`.

    Parameters
    ----------
    path : path
        A folder of images, a folder of TFRecord or RecordIO files, or an HDF5 file.
    split : str
        ``train``, ``val``, ``validation`` or ``test``; the middle two are the same.
    classes : int, optional
        Keep only the first so many classes; all by default.

    Returns
    -------
    ImageNet, OpenImages or Store
        The first two for folders of images; all have ``files``, ``labels`` and ``class_names``.

    Raises
    ------
    DataError
        As `read_split`, or there are fewer classes.
    ConfigurationError
        `classes` is less than 1, or no dataset has a split of this name.
    """
    if classes is not None and classes < 1:
        raise ConfigurationError(f"classes is {classes}; it must be at least 1")
    if kind_of(path) == "folder":
        folder, root = format_module("folder"), Path(os.path.abspath(path))
        dataset: ImageNet | OpenImages = folder.dataset(root, _split_there(root, folder.splits(root), split), classes)
        return dataset
    store = read_split(path, split)
    return store if classes is None else store.first_classes(classes)
