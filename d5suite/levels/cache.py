"""A device's L2 cache, made cold: a buffer larger than it is written.

An adapter offers it as ``runtime.l2_flush(device)``, or `Backend.absent` says under ``L2 flush``
why it does not. Imports `d5suite.levels.contract`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from d5suite.levels.contract import ContractError

if TYPE_CHECKING:
    from d5suite.levels.backend import Backend

TIMES_CACHE = 2
"""Buffer size over cache size: evicts everything even if the order of eviction is imperfect."""


class L2Flush(ABC):
    """A buffer on the device that takes the place of all else in its L2 cache.

    Attributes
    ----------
    cache_bytes : int
        Of the cache.
    buffer_bytes : int
        Of the buffer: `TIMES_CACHE` times the cache.
    """

    cache_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Bytes that are written."""
        return TIMES_CACHE * self.cache_bytes

    @abstractmethod
    def __call__(self) -> None:
        """Write the whole buffer; the work may still be pending."""


def l2_flush(backend: Backend, device: str) -> tuple[L2Flush | None, str]:
    """Return a backend's flush of the cache, or None and the reason. Imports the framework.

    Raises
    ------
    ContractError
        If nothing does without a reason.
    """
    if device == "cpu":
        return None, "the caches of CPUs are left as they are"
    if "L2 flush" in backend.absent:
        return None, backend.absent["L2 flush"]
    make = getattr(backend.load("runtime"), "l2_flush", None)
    flush = make(device) if make is not None else None
    if not isinstance(flush, L2Flush):
        what = "runtime offers no l2_flush, and Backend.absent does not say why under 'L2 flush'"
        raise ContractError(backend.name, "backend.modules", what)
    return flush, ""
