"""Passes over a prepared step: one file each, and the registry that finds them.

A worker prepares a step once. Every pass runs that same step and adds a part to the record. By
default these are `memory`, `energy` and `time`. `layers` and `trace` also belong to d5suite; other
passes come from plug-ins, through the entry-point group ``d5suite.passes``, or from a Python file
that ``--passes`` names. `base` defines a pass.

The passes are beside `d5suite.measurements` and not in `d5suite.worker`, because the session also
reads them: a pass's name, its schema, and how its part becomes part of the record.
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
"""The passes of a run without ``--passes``. Every run has `TIME`: a benchmark needs samples."""

_REGISTRY: Registry[Pass] = Registry("d5suite.passes", "Pass")

discover = _REGISTRY.discover
find = _REGISTRY.find


def requested(given: str | None, folder: Path) -> dict[str, str | None]:
    """Return the passes of a run by name, with the user's file that defines the pass, or None.

    The default passes come first, and `TIME` is always among them.

    Parameters
    ----------
    given : str or None
        The value of ``--passes``: names of passes and paths of Python files, separated by commas;
        all passes of a file are taken. None for `DEFAULT`.
    folder : Path
        Folder where relative paths begin.

    Raises
    ------
    ConfigurationError
        If a name is unknown, or a file defines no pass, or a pass whose name is taken.
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
