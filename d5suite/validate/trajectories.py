"""Training trajectories on disk, so that workers of different frameworks can compare. HDF5 through h5py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from d5suite.errors import JobError
from d5suite.files import atomic_hdf5
from d5suite.validate.checks import Trajectory


def save(path: Path, trajectory: Trajectory, backend: str) -> None:
    """Write a trajectory atomically: ``losses``, and ``parameters`` in the order of ``names``."""
    import h5py

    with atomic_hdf5(path) as file:
        file.attrs["backend"] = backend
        file["losses"] = trajectory.losses
        file["names"] = np.array(list(trajectory.parameters), dtype=h5py.string_dtype())
        group = file.create_group("parameters", track_order=True)
        for index, value in enumerate(trajectory.parameters.values()):
            group[str(index)] = value


def load(path: Path) -> tuple[Trajectory, str]:
    """Read a trajectory and the name of the backend that made it.

    Raises
    ------
    JobError
        If the file is missing or is no trajectory.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            names = [name.decode() for name in file["names"][()]]
            parameters = {name: file["parameters"][str(index)][()] for index, name in enumerate(names)}
            return Trajectory(file["losses"][()], parameters), str(file.attrs["backend"])
    except (OSError, KeyError) as error:
        raise JobError(f"cannot read the trajectory: {error}", where=str(path)) from error
