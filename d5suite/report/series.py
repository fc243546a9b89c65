"""Raw samples and per-step series in HDF5, beside the JSON that summarises them. Uses h5py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from d5suite.files import atomic_hdf5


def save_series(path: Path, series: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Write one group per benchmark, atomically.

    Parameters
    ----------
    path : Path
        The HDF5 file.
    series : mapping
        Benchmark's full name to its series; each becomes a float64 dataset in the group of that name (``/`` is kept as
        ``|``), the full name itself the group's attribute ``fullname``. Times are in seconds.

    Raises
    ------
    OSError
        If it cannot be written; an older file of that name is then as it was.
    """
    import numpy as np

    with atomic_hdf5(path) as file:
        for name, arrays in series.items():
            group = file.create_group(name.replace("/", "|"))
            group.attrs["fullname"] = name
            for key, values in arrays.items():
                group.create_dataset(key, data=np.asarray(values, np.float64))
