"""The backends: one folder per framework, found through the entry-point group ``d5suite.backends``.

This module finds and names them. It imports `d5suite.levels.backend` and `d5suite.errors`; importing it, or any
backend's own ``__init__``, imports no framework.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import lru_cache

from d5suite.errors import BackendError
from d5suite.levels.backend import Backend

GROUP = "d5suite.backends"


@dataclass(frozen=True)
class Selection:
    """A backend in one of its modes, as users write it: ``name`` or ``name:mode``."""

    backend: Backend
    mode: str

    def __str__(self) -> str:
        return self.backend.name if self.mode == self.backend.default_mode else f"{self.backend.name}:{self.mode}"


@lru_cache(maxsize=1)
def discover() -> tuple[dict[str, Backend], dict[str, str]]:
    """Every published backend by name, and for every faulty plug-in the reason it is left out.

    Returns
    -------
    backends : dict of str to Backend
    faults : dict of str to str
        Entry-point name to what is wrong with it.
    """
    backends: dict[str, Backend] = {}
    faults: dict[str, str] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        try:
            found = entry.load()
        except Exception as error:  # a plug-in may fail in any way, and must not take the others with it
            faults[entry.name] = f"{entry.value} failed to import: {type(error).__name__}: {error}"
            continue
        if not isinstance(found, Backend):
            faults[entry.name] = f"{entry.value} is a {type(found).__name__}, not a d5suite Backend"
        elif found.name != entry.name:
            faults[entry.name] = f"{entry.value} calls itself {found.name!r}"
        elif found.name in backends and backends[found.name] != found:
            faults[entry.name] = f"{entry.value} has the name of {backends[found.name].package}, which comes first"
        else:
            backends[found.name] = found
    return backends, faults


def backend(name: str) -> Backend:
    """The backend of this name.

    Raises
    ------
    BackendError
        If there is none; the message lists what there is and how to install what is not.
    """
    backends, faults = discover()
    if name in faults:
        raise BackendError(f"backend {name!r} is faulty: {faults[name]}")
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
    """Read ``name`` or ``name:mode``.

    Raises
    ------
    BackendError
        If there is no such backend or mode.
    """
    name, _, mode = text.strip().partition(":")
    found = backend(name)
    found.check(mode=mode or None)
    return Selection(found, mode or found.default_mode)


__all__ = ["GROUP", "Backend", "Selection", "backend", "discover", "select"]
