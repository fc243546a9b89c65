"""The device besides computation: its own clock, a cold L2 cache, sensors and the processor's name.

An adapter offers ``runtime.event_timer(device)`` and ``runtime.l2_flush(device)``, or
`Backend.absent` gives the reason under ``device events`` and ``L2 flush``. It may offer
``runtime.sensors(device)``. Imports the standard library and `d5suite.levels.contract`.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from d5suite.levels.contract import ContractError

if TYPE_CHECKING:
    from d5suite.levels.backend import Backend

Offered = TypeVar("Offered")

TIMES_CACHE = 2
"""Buffer size over cache size: evicts everything even if the eviction order is imperfect."""


class EventTimer(ABC):
    """Two events on the queue to which the adapter issues its work: the device's own clock.

    The device notes the time when it reaches an event, after all work issued before it.
    """

    @abstractmethod
    def start(self) -> None:
        """Record the first event. Returns at once."""

    @abstractmethod
    def stop(self) -> None:
        """Record the second event. Returns at once."""

    @abstractmethod
    def milliseconds(self) -> float:
        """Wait for the second event, and return the time between both on the device's clock."""


class L2Flush(ABC):
    """A buffer larger than the device's L2 cache. Writing it evicts everything else.

    Attributes
    ----------
    cache_bytes : int
        Size of the cache.
    """

    cache_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer: `TIMES_CACHE` times the cache."""
        return TIMES_CACHE * self.cache_bytes

    @abstractmethod
    def __call__(self) -> None:
        """Write the whole buffer. The work may still be pending."""


class Sensors(ABC):
    """Sensors of the GPU that a process uses, as the framework reads them where NVML does not.

    A reading is None if there is no such sensor.

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
        """Return the clock rate of the GPU's processors in MHz."""

    @abstractmethod
    def used_bytes(self) -> int | None:
        """Return the bytes of GPU memory used by all processes."""


def event_timer(backend: Backend, device: str) -> tuple[EventTimer | None, str]:
    """Return a backend's event timer, or None and the reason. Imports the framework.

    Raises
    ------
    ContractError
        If there is neither a timer nor a reason.
    """
    if device == "cpu":
        return None, "work on the CPU is timed by the host's clock alone"
    return _offered(backend, device, "event_timer", EventTimer, "device events")


def l2_flush(backend: Backend, device: str) -> tuple[L2Flush | None, str]:
    """Return what flushes a device's L2 cache, or None and the reason. Imports the framework.

    Raises
    ------
    ContractError
        If there is neither a flush nor a reason.
    """
    if device == "cpu":
        return None, "the caches of CPUs are left as they are"
    return _offered(backend, device, "l2_flush", L2Flush, "L2 flush")


def _offered(
    backend: Backend, device: str, function: str, kind: type[Offered], what: str
) -> tuple[Offered | None, str]:
    if what in backend.absent:
        return None, backend.absent[what]
    make = getattr(backend.load("runtime"), function, None)
    made = make(device) if make is not None else None
    if not isinstance(made, kind):
        problem = f"runtime offers no {function}, and Backend.absent gives no reason under {what!r}"
        raise ContractError(backend.name, "backend.modules", problem)
    return made, ""


def sensors(backend: Backend, device: str) -> Sensors | None:
    """Return a backend's sensors of a device; None if it has none. Imports the framework.

    Raises
    ------
    ContractError
        If the runtime returns something else.
    """
    make = getattr(backend.load("runtime"), "sensors", None) if device != "cpu" else None
    made = make(device) if make is not None else None
    if made is not None and not isinstance(made, Sensors):
        raise ContractError(backend.name, "backend.modules", f"runtime.sensors returned a {type(made).__name__}")
    return made


def processor_name() -> str:
    """Return the CPU's model name, from /proc/cpuinfo if it exists."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
