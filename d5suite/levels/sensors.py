"""A GPU's own sensors as a framework reads them, where NVML has none: AMD's.

An adapter may offer them as ``runtime.sensors(device)``. Imports `d5suite.levels.contract`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from d5suite.levels.contract import ContractError

if TYPE_CHECKING:
    from d5suite.levels.backend import Backend


class Sensors(ABC):
    """The sensors of the GPU that a process uses; each answer is None if there is none.

    Attributes
    ----------
    name : str
        The vendor's name of the GPU.
    """

    name: str

    @abstractmethod
    def power_w(self) -> float | None:
        """Return the power of the whole board in watts."""

    @abstractmethod
    def temperature_c(self) -> float | None:
        """Return the temperature of the chip in degrees Celsius."""

    @abstractmethod
    def clock_mhz(self) -> float | None:
        """Return the clock of its processors in MHz."""

    @abstractmethod
    def used_bytes(self) -> int | None:
        """Return the used bytes of its memory, by all processes."""


def sensors(backend: Backend, device: str) -> Sensors | None:
    """Return a backend's sensors of a device, or None. Imports the framework.

    Raises
    ------
    ContractError
        If it offers something else.
    """
    make = getattr(backend.load("runtime"), "sensors", None) if device != "cpu" else None
    found = make(device) if make is not None else None
    if found is not None and not isinstance(found, Sensors):
        raise ContractError(backend.name, "backend.modules", f"runtime.sensors gave a {type(found).__name__}")
    return found
