"""What a machine has run of a study: ``state.json`` beside its results, rewritten atomically."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.files import GZIP, LARGEST_JSON, read_bounded, read_json, write_json
from d5suite.study.declaration import NAME

STATE = "state.json"
"""Its name in the folder of a machine's results."""

RAW = "raw"
"""Folder of all machines' results in a study's folder."""

JOB_FILES = "jobs"
"""Folder of all machines' job files in a study's folder."""

FORMAT = "d5suite-study-1"

DONE, HALF, FAILED, LEFT_OUT = "done", "half", "failed", "left out"
"""States of a run: finished, whatever single measurements did; cut off, or running; without a
result; not started, because the budget was spent."""

LEAVES = (".json", f".json{GZIP}", ".h5", ".missed.h5", ".log", f".log{GZIP}", ".toml", ".trace")
"""Suffixes of what a run leaves: result, series, output, settings and traces."""

HARDWARE = ("CPU", "cores", "GPUs")
"""Facts in `RunState.made_on` that tell one machine from another."""

COMMIT = "commit"
"""The name of d5suite's Git revision in `RunState.made_with`."""

WITH_CHANGES = "with changes"
"""Ends a revision if files differ from it."""


@dataclass
class RunState:
    """What is known of a run.

    Attributes
    ----------
    command : str
        As one types it, with paths from the study's folder.
    part : str
    state : {"done", "half", "failed", "left out"}
    why : str
        Why it is not done, or what failed in it.
    started : str
        ISO 8601.
    seconds : float
    sha256 : str
        SHA-256 of the unpacked result; empty if there is none.
    made_on : dict of str to str
        Facts of the machine when it started.
    made_with : dict of str to str
        Versions of the software then, with d5suite's `COMMIT`.
    inputs : dict of str to str
        The SHA-256 of each result that it has read, by the name of the run.
    again : bool
        Whether it is to be measured again; until then its result counts.
    """

    command: str
    part: str
    state: str
    why: str = ""
    started: str = ""
    seconds: float = 0.0
    sha256: str = ""
    made_on: dict[str, str] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    again: bool = False


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("command", "part", "state", "why", "started", "sha256"), str),
    "seconds": (int, float), "made_on": dict, "made_with": dict, "inputs": dict, "again": bool,
}  # fmt: skip

_LATER = {"made_on", "made_with", "inputs", "again"}
"""Keys that states of earlier versions lack."""


@dataclass
class MachineRuns:
    """What a machine has run.

    Attributes
    ----------
    folder : Path
        Folder of the results.
    runs : dict of str to RunState
    """

    folder: Path
    runs: dict[str, RunState] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The machine's name."""
        return self.folder.name

    @property
    def job_files(self) -> Path:
        """The folder of its job files."""
        return self.folder.parents[1] / JOB_FILES / self.name

    def result(self, name: str) -> Path:
        """Return the path of a run's result file, which may be packed."""
        packed = self.folder / f"{name}.json{GZIP}"
        return packed if packed.is_file() else self.folder / f"{name}.json"

    def left(self, name: str) -> list[Path]:
        """Return the files and folders that a run has left."""
        return [path for suffix in LEAVES if (path := self.folder / f"{name}{suffix}").exists()]

    def is_kept(self, name: str, command: str) -> bool:
        """Return whether a run is finished, by the same command and inputs, with a whole result."""
        run = self.runs.get(name)
        if run is None or run.state != DONE or run.command != command or run.again or not self.is_whole(name):
            return False
        return self.is_current(name)

    def is_current(self, name: str) -> bool:
        """Return whether the results that a run has read are still those."""
        return all(sha256_of(self.result(each)) == digest for each, digest in self.runs[name].inputs.items())

    def is_whole(self, name: str) -> bool:
        """Return whether a run's result is still there, unchanged since it was written."""
        return bool(self.runs[name].sha256) and sha256_of(self.result(name)) == self.runs[name].sha256

    def save(self) -> None:
        """Write the state atomically."""
        runs = {name: asdict(run) for name, run in self.runs.items()}
        write_json(self.folder / STATE, {"format": FORMAT, "runs": runs})


def sha256_of(path: Path) -> str:
    """Return the digest of a file, unpacked; empty if it cannot be read."""
    try:
        return hashlib.sha256(read_bounded(path, LARGEST_JSON)).hexdigest()
    except OSError:
        return ""


def parts_by(runs: Iterable[tuple[str, str, Mapping[str, str]]], fact: str) -> dict[str, list[str]]:
    """Return the parts by the value of a fact; those for which it is not recorded are left out.

    Runs of one part that differ are named themselves.

    Parameters
    ----------
    runs : iterable of (str, str, mapping)
        The part, the name and the facts of each run.
    fact : str
    """
    known = [(part, name, facts[fact]) for part, name, facts in runs if facts.get(fact)]
    found: dict[str, dict[str, None]] = {}
    for part, name, value in known:
        is_mixed = any(other == part and one != value for other, _, one in known)
        found.setdefault(value, {})[name if is_mixed else part] = None
    return {value: list(names) for value, names in found.items()}


def read_state(folder: Path) -> MachineRuns:
    """Read a machine's state; return an empty one if none was written.

    Raises
    ------
    JobError
        If the file is damaged.
    """
    path = folder / STATE
    if not path.exists():
        return MachineRuns(folder)
    try:
        content = read_json(path)
    except JobError as error:
        raise JobError(error.what, where=str(path), hint=_HINT) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("runs"), dict):
        raise JobError("this is not the state of a study", where=str(path), hint=_HINT)
    return MachineRuns(folder, {name: _run(name, each, path) for name, each in content["runs"].items()})


_HINT = "Remove it to measure everything again; the results beside it are then replaced one by one."


def _run(name: str, given: Any, path: Path) -> RunState:
    right = isinstance(given, dict) and set(_KINDS) - _LATER <= set(given) <= set(_KINDS)
    if not right or not all(isinstance(each, _KINDS[key]) for key, each in given.items()) or not _is_name(name):
        raise JobError("this is not the state of a run", where=f"{path}, {name[:60]}", hint=_HINT)
    texts = [each for key in ("made_on", "made_with", "inputs") for each in given.get(key, {}).values()]
    if not all(isinstance(each, str) for each in texts) or not all(map(_is_name, given.get("inputs", {}))):
        raise JobError("made_on, made_with and inputs must hold texts", where=f"{path}, {name}", hint=_HINT)
    if given["state"] not in (DONE, HALF, FAILED, LEFT_OUT):
        raise JobError(f"a run is not {given['state']!r}", where=f"{path}, {name}", hint=_HINT)
    return RunState(**given)


def _is_name(name: str) -> bool:
    return all(NAME.match(part) for part in name.split(".")) and "/" not in name


def machines(folder: Path) -> list[MachineRuns]:
    """Return the states of all machines in a study's folder, by name.

    Raises
    ------
    JobError
        If one is damaged.
    """
    raw = folder / RAW
    found = sorted(each for each in raw.iterdir() if each.is_dir()) if raw.is_dir() else []
    return [read_state(each) for each in found if NAME.fullmatch(each.name)]
