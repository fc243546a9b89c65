"""A trace from wherever it lies: an OTF2 archive, a recording, an HDF5 file, or profiles.

Imports its neighbours.
"""

from __future__ import annotations

from pathlib import Path

from d5suite.errors import TraceError
from d5suite.traces.archive import read_archive
from d5suite.traces.events import Trace
from d5suite.traces.hdf5 import read_hdf5
from d5suite.traces.profilers import is_profile, read_profiles
from d5suite.traces.recorded import is_recording, read_recording


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Parameters
    ----------
    path : Path
        An OTF2 archive's anchor file, an HDF5 file, a framework's profile, a recording's folder, or
        a folder that holds one of them or one profile a rank.

    Raises
    ------
    TraceError
        If there is none or several, or it cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        if path.exists() and is_profile(path):
            return read_profiles([path])
        return read_hdf5(path) if path.suffix == ".h5" and path.exists() else read_archive(path)
    if is_recording(path):
        return read_recording(path)
    if any(path.glob("*.otf2")):
        return read_archive(path)
    recordings = {each.parent for each in path.rglob("*.jsonl")}
    found = [*sorted(path.rglob("*.otf2")), *sorted(recordings)]
    profiles = [] if found else sorted(each for each in path.iterdir() if is_profile(each))
    if profiles:
        return read_profiles(profiles)
    if len(found) != 1:
        raise TraceError(
            f"holds {len(found)} traces" if found else "holds no trace",
            where=str(path),
            hint=f"Name one of {', '.join(str(each.relative_to(path)) for each in found[:8])}." if found else None,
        )
    return read_trace(found[0])
