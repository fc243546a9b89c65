"""Raw samples and per-step series in HDF5, beside the JSON that summarises them. Uses h5py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.files import atomic_hdf5

_UNREADABLE = (KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What h5py raises for files that are damaged, or whose content it does not know."""


def save_series(path: Path, series: Mapping[str, Mapping[str, list[float]]], token: str = "") -> None:
    """Write one group per benchmark, atomically.

    Parameters
    ----------
    path : Path
        The HDF5 file.
    series : mapping
        Series by the benchmark's full name. Each becomes a float64 dataset in the group of that
        name (with ``|`` for ``/``), whose attribute ``fullname`` is the full name. Times are in
        seconds.
    token : str
        Attribute of the file, also written to the JSON of the same run.

    Raises
    ------
    OSError
        If the file cannot be written; then an older file of that name is unchanged.
    """
    import numpy as np

    with atomic_hdf5(path) as file:
        file.attrs["token"] = token
        for name, arrays in series.items():
            group = file.create_group(name.replace("/", "|"))
            group.attrs["fullname"] = name
            for key, values in arrays.items():
                group.create_dataset(key, data=np.asarray(values, np.float64))


def check_pair(path: Path, facts: Mapping[str, Any]) -> None:
    """Raise `JobError` if the series beside a result file are from another run.

    The two files are replaced one after the other, and power may fail in between.

    Parameters
    ----------
    path : Path
        The JSON file.
    facts : mapping
        The file's ``d5suite`` object: see ``results/schema.json``. Series may be missing.
    """
    import h5py

    name, token = facts.get("series", ""), facts.get("series_token")
    beside = path.resolve().parent / Path(name).name
    if not name or token is None or not beside.is_file():
        return
    try:
        with h5py.File(beside, "r") as file:
            own_token = file.attrs.get("token")
    except _UNREADABLE as error:
        raise JobError(f"the series beside it cannot be read: {error}", where=str(beside)) from error
    if not isinstance(own_token, str) or own_token != token:
        raise JobError(
            f"it and its series, {beside.name}, come from different runs",
            where=str(path),
            hint=f"Repeat the run if it was cut off while it saved, or remove {beside.name}: the JSON is whole.",
        )


LARGEST_SERIES = 1 << 20
"""Most numbers of a series; longer ones are not read."""


def read_series(path: Path, names: Collection[str]) -> dict[str, dict[str, list[float]]]:
    """Read the series of benchmarks; leave out series that are missing, malformed or too large.

    Parameters
    ----------
    path : Path
        The HDF5 file. It may come from anywhere, so links to other files are not followed.
    names : collection of str
        Full names of benchmarks.

    Raises
    ------
    JobError
        If it is not an HDF5 file.
    """
    import h5py

    def inside(group: Any, name: str, kind: type) -> Any:
        hard = isinstance(group.get(name, getlink=True), h5py.HardLink) if name in group else False
        member = group[name] if hard else None
        return member if isinstance(member, kind) else None

    series: dict[str, dict[str, list[float]]] = {}
    try:
        with h5py.File(path, "r") as file:
            for name in names:
                group = inside(file, name.replace("/", "|"), h5py.Group)
                for key in group or ():
                    data = inside(group, key, h5py.Dataset)
                    if data is not None and data.ndim == 1 and data.dtype.kind == "f" and data.size <= LARGEST_SERIES:
                        series.setdefault(name, {})[key] = [float(each) for each in data[:]]
    except _UNREADABLE as error:
        raise JobError(f"the series cannot be read: {error}", where=str(path)) from error
    return series
