"""Named arrays in a group of an HDF5 file, in their order. Imports h5py and NumPy."""

from __future__ import annotations

from collections.abc import Mapping

import h5py
import numpy as np


def write_arrays(group: h5py.Group, values: Mapping[str, np.ndarray]) -> None:
    """Write arrays under their numbers, and their names, which may hold slashes, as ``names``."""
    group["names"] = np.array(list(values), dtype=h5py.string_dtype())
    for index, value in enumerate(values.values()):
        group[str(index)] = value


def read_arrays(group: h5py.Group) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote."""
    return {name.decode(): np.asarray(group[str(index)][()]) for index, name in enumerate(group["names"][()])}
