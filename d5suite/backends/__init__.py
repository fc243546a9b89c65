"""The backends: one folder per framework, found through the entry-point group ``d5suite.backends``.

Imports `d5suite.levels` and `d5suite.errors`. Importing this module, or a backend's own
``__init__``, imports no framework.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import lru_cache

from d5suite.errors import BackendError
from d5suite.levels.backend import Backend
from d5suite.levels.contract import ContractError

GROUP = "d5suite.backends"


@dataclass(frozen=True)
class Selection:
    """A backend in one of its modes, written ``name`` or ``name:mode``."""

    backend: Backend
    mode: str

    def __str__(self) -> str:
        return self.backend.name if self.mode == self.backend.default_mode else f"{self.backend.name}:{self.mode}"


@lru_cache(maxsize=1)
def discover() -> tuple[dict[str, Backend], dict[str, BackendError]]:
    """Return every published backend by name, and the error of every faulty plug-in.

    Returns
    -------
    backends : dict of str to Backend
    faults : dict of str to BackendError
        By entry-point name. Plug-ins that share a name are all faulty, because results of one could
        be taken for the other's.
    """
    backends: dict[str, Backend] = {}
    faults: dict[str, BackendError] = {}
    by_name: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        if all(entry.value != other.value for other in by_name.setdefault(entry.name, [])):
            by_name[entry.name].append(entry)
    for name, entries in by_name.items():
        try:
            if len(entries) > 1:
                listed = " and ".join(_origin(entry) for entry in entries)
                raise ContractError(name, "backend.name", f"{listed} both have this name; uninstall one")
            backends[name] = _load(entries[0])
        except BackendError as error:
            faults[name] = error
    return backends, faults


def _load(entry: importlib.metadata.EntryPoint) -> Backend:
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way without affecting the others
        raise BackendError(
            f"backend {entry.name!r} is faulty: {entry.value} failed to import: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Backend):
        what = f"{entry.value} is a {type(found).__name__}, not a d5suite Backend"
        raise ContractError(entry.name, "backend.name", what)
    if found.name != entry.name:
        raise ContractError(entry.name, "backend.name", f"{entry.value} calls itself {found.name!r}")
    found.check_data()
    return found


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.value} ({entry.dist.name})" if entry.dist else entry.value


def backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises
    ------
    BackendError
        If it does not exist or is faulty. The message lists the known backends, and how to install
        those that are missing.
    """
    backends, faults = discover()
    if name in faults:
        raise faults[name]
    if name not in backends:
        listed = []
        for known in backends.values():
            problem = known.problem()
            modes = ", ".join(known.modes)
            listed.append(f"  {known.name} (modes: {modes})" + (f"; {problem}" if problem else ""))
        known_list = "\n".join(listed) if listed else "  none; is d5suite installed (pip install -e .)?"
        raise BackendError(f"there is no backend {name!r}", hint=f"Known backends:\n{known_list}")
    return backends[name]


def select(text: str) -> Selection:
    """Return the backend and mode written as ``name`` or ``name:mode``.

    Raises
    ------
    BackendError
        If there is no such backend or mode.
    """
    name, _, mode = text.strip().partition(":")
    found = backend(name)
    found.check(mode=mode or None)
    mode = mode or found.default_mode
    return Selection(found.of_mode(mode), mode)


__all__ = ["GROUP", "Backend", "Selection", "backend", "discover", "select"]
