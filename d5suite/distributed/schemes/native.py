"""A framework's own scheme among the others.

Imports NumPy, `d5suite.levels` and its neighbours only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from d5suite.distributed.framework import INSIDE
from d5suite.distributed.schemes.common import TRANSFERS, Common
from d5suite.levels.distributed import Buffers, Communicator, Replica, SchemeSettings
from d5suite.levels.native import FrameworkScheme, NativeSettings
from d5suite.levels.network import Native


class Framework(Common):
    """An adapter's `FrameworkScheme` on several connected ranks.

    The communicator exchanges what ranks must agree on, and averages running statistics if
    requested; the framework moves everything else.

    Parameters
    ----------
    replica : Replica
    communicator : Communicator
    settings : SchemeSettings
    kind : type of FrameworkScheme
    """

    settings_type = NativeSettings
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(TRANSFERS, "the framework orders its own transfers")

    def __init__(
        self, replica: Replica, communicator: Communicator, settings: SchemeSettings, kind: type[FrameworkScheme]
    ) -> None:
        super().__init__(replica, communicator, settings)
        assert isinstance(settings, NativeSettings)
        self.name, self.synchronous = settings.name, settings.described.synchronous
        with INSIDE:
            self._own = kind(replica, settings) if communicator.size > 1 else None

    def _step(self, feed: Native) -> Native:
        assert self._own is not None
        with INSIDE:
            return self._own.step(feed)

    def weights(self) -> Buffers:
        """See `Scheme.weights`."""
        if self._own is None:
            return super().weights()
        with INSIDE:
            return self._own.weights()

    def bytes_per_step(self, elements: int, itemsize: int) -> float | None:
        """See `Scheme.bytes_per_step`."""
        if self._own is None:
            return super().bytes_per_step(elements, itemsize)
        return self._own.bytes_per_step(elements, itemsize, self.communicator.size)

    def _finish(self) -> None:
        assert self._own is not None
        with INSIDE:
            self._own.finish()
