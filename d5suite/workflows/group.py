"""The ranks of one component: messages and collectives among them only.

Imports NumPy, `d5suite.distributed.algorithms` and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from d5suite.distributed.algorithms import DEFAULTS
from d5suite.levels.distributed import ANY, Communicator, Request

FIRST_TAG, TAGS = 100, 50
"""Tags of the first component's messages, and how many each component has."""


class Subcommunicator(Communicator):
    """Some ranks of a communicator, numbered from 0.

    Parameters
    ----------
    parent : Communicator
    ranks : sequence of int
        Ranks of the parent, of which this process has one.
    number : int
        Number of the component; it makes tags unique.
    """

    name = "group"

    def __init__(self, parent: Communicator, ranks: Sequence[int], number: int) -> None:
        hosts = [parent.hosts[rank] for rank in ranks]
        super().__init__(ranks.index(parent.rank), len(ranks), hosts, "native", DEFAULTS)
        self._parent, self._ranks, self._first = parent, list(ranks), FIRST_TAG + TAGS * number

    @property
    def seconds(self) -> float:
        """Seconds in all calls so far."""
        return sum(each.seconds for each in self.traffic.values())

    def _send(self, array: np.ndarray, to: int, tag: int) -> None:
        self._parent.send(array, self._ranks[to], self._first + tag)

    def _receive(self, array: np.ndarray, source: int, tag: int) -> int:
        other = self._ranks[source] if source != ANY else ANY
        return self._ranks.index(self._parent.receive(array, other, self._first + tag))

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return _Renumbered(self, self._parent.isend(array, self._ranks[to], self._first + tag))

    def _ireceive(self, array: np.ndarray, source: int, tag: int) -> Request:
        return _Renumbered(self, self._parent.ireceive(array, self._ranks[source], self._first + tag))

    def _native(self, call: str, array: np.ndarray, **more: object) -> None:
        raise AssertionError(f"an algorithm carries out {call}")

    def close(self) -> None:
        """Do nothing: the parent holds the connections."""


class _Renumbered(Request):
    """A request of the parent, whose other end has a rank in the group."""

    def __init__(self, group: Subcommunicator, request: Request) -> None:
        self._group, self._request = group, request

    def _wait(self) -> int:
        return self._group._ranks.index(self._request.wait())
