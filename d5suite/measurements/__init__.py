"""Measurements: one file each, in a folder by level, and the registry that finds them.

Those of d5suite are found by looking through these folders. Others come from plug-ins, through the
entry-point group ``d5suite.measurements``, or from the recipe file that uses them. `base` says what
a measurement is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from functools import lru_cache
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError
from d5suite.files import import_file

if TYPE_CHECKING:
    from d5suite.measurements.base import Measurement

GROUP = "d5suite.measurements"
"""Entry-point group of plug-ins: a measurement's name and its class."""


@lru_cache(maxsize=1)
def discover() -> dict[str, type[Measurement]]:
    """Return all measurements of d5suite and of plug-ins, by name.

    Raises
    ------
    ConfigurationError
        If a plug-in's entry point is not a measurement of its name, or the name is taken.
    """
    found: dict[str, type[Measurement]] = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        for measurement in _defined_in(importlib.import_module(module.name)):
            found[measurement.name] = measurement
    for entry in importlib.metadata.entry_points(group=GROUP):
        loaded = entry.load()
        if not _is_measurement(loaded) or loaded.name != entry.name or found.get(entry.name, loaded) is not loaded:
            raise ConfigurationError(
                f"{entry.value} is not a measurement called {entry.name!r}, or that name is taken",
                where=f"entry point of {GROUP}",
                hint="Uninstall the plug-in or correct it.",
            )
        found[entry.name] = loaded
    return found


def find(name: str, file: str | None = None) -> type[Measurement]:
    """Return the measurement of this name.

    Parameters
    ----------
    name : str
    file : str, optional
        The Python file that defines it, which is imported; a recipe's own.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    known = discover() if file is None else {each.name: each for each in _defined_in(import_file(file))}
    if name not in known:
        raise ConfigurationError(
            f"there is no measurement {name!r}", where=file or "", hint=f"Known: {', '.join(sorted(known)) or 'none'}."
        )
    return known[name]


def file_of(measurement: type[Measurement]) -> str | None:
    """Return the file that a job must name for a measurement; None where `discover` finds it."""
    if discover().get(measurement.name) is measurement:
        return None
    return inspect.getfile(measurement)


def _defined_in(module: object) -> list[type[Measurement]]:
    """Return the measurements that a module itself defines, bases without a name left out."""
    name = getattr(module, "__name__", "")
    return [each for each in vars(module).values() if _is_measurement(each) and each.__module__ == name]


def _is_measurement(value: object) -> bool:
    from d5suite.measurements.base import Measurement

    return inspect.isclass(value) and issubclass(value, Measurement) and hasattr(value, "name")
