"""The device's own clock: events that a framework records among the work it issues.

An adapter offers it as ``runtime.event_timer(device)``, or `Backend.absent` says under ``device
events`` why it does not. Imports `d5suite.levels.contract`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from d5suite.levels.contract import ContractError

if TYPE_CHECKING:
    from d5suite.levels.backend import Backend


class EventTimer(ABC):
    """A pair of events on the queue to which the adapter issues its work.

    The device notes the time when it comes to an event, after all work that was issued before.
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


def event_timer(backend: Backend, device: str) -> tuple[EventTimer | None, str]:
    """Return a backend's event timer, or None and why it has none. Imports the framework.

    Raises
    ------
    ContractError
        If it has none without a reason.
    """
    if device == "cpu":
        return None, "work on the CPU is timed by the host's clock alone"
    if "device events" in backend.absent:
        return None, backend.absent["device events"]
    make = getattr(backend.load("runtime"), "event_timer", None)
    timer = make(device) if make is not None else None
    if not isinstance(timer, EventTimer):
        what = "runtime offers no event_timer, and Backend.absent does not say why under 'device events'"
        raise ContractError(backend.name, "backend.modules", what)
    return timer, ""
