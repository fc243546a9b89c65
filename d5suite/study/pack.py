"""Packing a study's folder for a repository, without what its report rests on."""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from d5suite.files import GZIP, write_bytes
from d5suite.study.run import REPEAT, held, remove
from d5suite.study.state import JOB_FILES, RAW, machines

ROOT = re.compile(rb"^rootdir: (/.*)$", re.MULTILINE)
"""Pytest's line about the folder that it runs in."""

SMALL = 100_000
"""Bytes up to which a file stays as it is."""


def pack(folder: Path, drawn: Collection[Path]) -> tuple[int, int]:
    """Pack large results and outputs; remove job files, traces, and series without a curve.

    Outputs no longer name the folder in which pytest ran.

    Digests in the states stay valid, because they are those of the unpacked results.

    Parameters
    ----------
    folder : Path
        The study's.
    drawn : collection of Path
        Series that curves of the report are drawn from; they stay.

    Returns
    -------
    before, after : int
        Bytes of raw data and job files.

    Raises
    ------
    ConfigurationError
        If the study is running.
    """
    before = _size(folder)
    for machine in machines(folder):
        with held(machine):
            remove(machine.folder / REPEAT)  # of a run that was killed
            for path in [each for name in machine.runs for each in machine.left(name)]:
                if path.suffix == ".log":
                    _unplace(path)
                if path.suffix in (".json", ".log") and path.stat().st_size > SMALL:
                    write_bytes(path.with_name(path.name + GZIP), gzip.compress(path.read_bytes(), mtime=0))
                    path.unlink()
                elif path.suffix == ".trace" or (path.suffix == ".h5" and path.resolve() not in drawn):
                    remove(path)
            shutil.rmtree(machine.job_files, ignore_errors=True)
    return before, _size(folder)


def _unplace(log: Path) -> None:
    """Replace the folder that pytest ran in: a repository is elsewhere, and need not tell where."""
    said = log.read_bytes()
    if (found := ROOT.search(said)) and len(found[1]) > 1:
        write_bytes(log, said.replace(found[1], b"."))


def _size(folder: Path) -> int:
    inside = [each for part in (RAW, JOB_FILES) for each in (folder / part).rglob("*")]
    return sum(each.stat().st_size for each in inside if each.is_file())
