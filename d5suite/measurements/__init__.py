"""Measurements: one file each, in a folder by level, and the registry that finds them.

d5suite's own are the classes in these folders. Others come from plug-ins, through the entry-point
group ``d5suite.measurements``, or from the recipe file that uses them. `base` says what a
measurement is.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from d5suite.registry import Registry

if TYPE_CHECKING:
    from d5suite.measurements.base import Measurement

_REGISTRY: Registry[Measurement] = Registry("d5suite.measurements", "Measurement")

discover = _REGISTRY.discover
find = _REGISTRY.find


def file_of(measurement: type[Measurement]) -> str | None:
    """Return the file that a job must name for a measurement; None where `discover` finds it."""
    return None if _REGISTRY.is_installed(measurement) else inspect.getfile(measurement)
