"""Passes over a prepared step: one file each, and the registry that finds them.

A worker prepares a step once. Each pass runs that same step and adds its own part to the record:
`memory`, `energy` and `time` are d5suite's own. Others come from plug-ins, through the entry-point
group ``d5suite.passes``, or from a Python file that ``--passes`` names. `base` says what a pass is.

This room stands beside `d5suite.measurements` and not in the worker's, because the session, too,
reads a pass: its name, its schema, and how its part becomes part of the record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError
from d5suite.job import TIME
from d5suite.registry import Registry

if TYPE_CHECKING:
    from d5suite.passes.base import Pass

DEFAULT = ("memory", "energy", TIME)
"""The passes of a run that names none. Every run has `TIME`: a benchmark is its samples."""

_REGISTRY: Registry[Pass] = Registry("d5suite.passes", "Pass")

discover = _REGISTRY.discover
find = _REGISTRY.find


def requested(given: str | None, folder: Path) -> dict[str, str | None]:
    """Return the passes of a run by name, each with the file that defines it, if d5suite does not.

    d5suite's own come first, and `TIME` is always among them.

    Parameters
    ----------
    given : str or None
        What ``--passes`` is: names of passes and paths of Python files with commas between them; of
        a file all passes are taken. None for `DEFAULT`.
    folder : Path
        Where relative paths begin.

    Raises
    ------
    ConfigurationError
        If a name is unknown, or a file defines no pass or one whose name is taken.
    """
    if given is None:
        return dict.fromkeys(DEFAULT)
    found: dict[str, str | None] = {TIME: None}
    names = [each.strip() for each in given.split(",") if each.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"{given!r} names {'a pass twice' if names else 'no pass'}", where="--passes")
    for name in names:
        if not name.endswith(".py"):
            found[find(name).name] = None
            continue
        file = str(folder / name)
        defined = _REGISTRY.defined_in(file)
        if not defined:
            raise ConfigurationError("this file defines no pass", where=file)
        for taken in defined.keys() & (discover().keys() | found.keys()):
            raise ConfigurationError(f"the name of the pass {taken!r} is taken", where=file, hint="Choose another one.")
        found |= dict.fromkeys(defined, file)
    own = [each for each in DEFAULT if each in found]
    return {name: found[name] for name in [*own, *sorted(found.keys() - set(own))]}
