"""What schemes that send tensors one by one share: order, slices and credit.

Imports NumPy, `d5suite.levels` and the orders only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from d5suite.distributed.order_tasks import check_order, parameter_order
from d5suite.distributed.schemes.common import TRANSFERS, Common
from d5suite.levels.distributed import Communicator, Replica, Request, SchemeSettings


@dataclass(frozen=True)
class OrderedSettings(SchemeSettings):
    """Transfers of single tensors; without any of these settings, a scheme sends its own messages.

    Attributes
    ----------
    order : str
        A key of `d5suite.distributed.order_tasks.ORDERS`, ``random:SEED`` or ``tac:FILE``. Hashemi
        et al., "TicTac" (MLSys 2019).
    slice_bytes : int
        Most bytes of a transfer; 0: whole tensors. Jayarajan et al., "Priority-based parameter
        propagation" (MLSys 2019). Without an order, slices follow the framework's order.
    """

    order: str = field(default="", kw_only=True)
    slice_bytes: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(isinstance(self.order, str), f"an order is a name, not {self.order!r}")
        if self.order:
            check_order(self.order, f"{self.kind} {self.name}")
        for what in TRANSFERS[1:]:
            size = getattr(self, what, 0)
            self._require(isinstance(size, int) and size >= 0, f"{what} is a number of bytes, not {size!r}")

    @property
    def is_ordered(self) -> bool:
        """Whether single tensors are sent in an order."""
        return bool(self.order or self.slice_bytes or getattr(self, "credit_bytes", 0))

    def to_dict(self) -> dict[str, Any]:
        """See `NamedSettings.to_dict`; what is not set is left out."""
        unset = {name for name in TRANSFERS if not getattr(self, name, 0)}
        return {name: value for name, value in super().to_dict().items() if name not in unset}


class OrderedScheme(Common):
    """A scheme that can send tensors one by one, in an order."""

    settings: OrderedSettings

    def __init__(self, replica: Replica, communicator: Communicator, settings: SchemeSettings) -> None:
        super().__init__(replica, communicator, settings)
        self._known: tuple[str, ...] = ()

    def _in_order(self, came: Sequence[str]) -> tuple[str, ...]:
        """Return the parameters in the order in which they are sent; ``came``: the framework's."""
        order = self.settings.order or "framework"
        if order == "framework":
            return tuple(came)
        self._known = self._known or parameter_order(order, self.replica.trainer.executor.network)
        return self._known

    def _arrived(self, stream: str, names: Iterable[str]) -> None:
        """Note the order of a step's transfers; slices of one tensor in a row count once."""
        found = list(names)
        kept = tuple(name for place, name in enumerate(found) if place == 0 or name != found[place - 1])
        self.arrivals.setdefault(stream, Counter())[kept] += 1


class Credit:
    """Messages in flight: at most ``nbytes`` together, or one message.

    Peng et al., "A generic communication scheduler for distributed DNN training acceleration"
    (ByteScheduler, SOSP 2019), section 4.2.

    Parameters
    ----------
    communicator : Communicator
    nbytes : int
        Most bytes in flight; 0: without a limit.
    """

    def __init__(self, communicator: Communicator, nbytes: int) -> None:
        self._communicator, self._limit = communicator, nbytes
        self._sent: deque[tuple[Request, int]] = deque()
        self._on_their_way = 0

    def send(self, array: np.ndarray, to: int, tag: int) -> None:
        """Begin to send, once enough of the earlier messages have gone."""
        while self._limit and self._sent and self._on_their_way + array.nbytes > self._limit:
            self._wait()
        self._sent.append((self._communicator.isend(array, to, tag), array.nbytes))
        self._on_their_way += array.nbytes

    def wait(self) -> None:
        """Wait until all messages have gone."""
        while self._sent:
            self._wait()

    def _wait(self) -> None:
        request, nbytes = self._sent.popleft()
        request.wait()
        self._on_their_way -= nbytes
