"""A parameter server whose workers wait for the slowest when they are too far ahead.

Imports `d5suite.levels` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from d5suite.distributed.schemes.asynchronous import Asynchronous, AsynchronousSettings


@dataclass(frozen=True)
class StaleSynchronousSettings(AsynchronousSettings):
    """SSP, with a bound on staleness.

    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server"
    (NIPS 2013).

    Attributes
    ----------
    bound : int
        s: a worker begins a step only while it has made at most s steps more than the slowest. With
        0 all begin each step with the same weights.
    """

    bound: int = 3

    name: ClassVar[str] = "stale_synchronous"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.bound >= 0, f"the bound must not be negative: {self.bound}")

    @property
    def allowed(self) -> float:
        """See `AsynchronousSettings.allowed`."""
        return self.bound


class StaleSynchronous(Asynchronous):
    """`Asynchronous` with answers that wait until the slowest worker is close enough."""

    name = "stale_synchronous"
    settings_type = StaleSynchronousSettings
    settings: StaleSynchronousSettings
