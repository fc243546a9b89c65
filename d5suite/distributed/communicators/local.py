"""One rank: every code path without a launcher. A sum or copy over one rank is the array itself.

Imports NumPy, `d5suite.errors` and `d5suite.levels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import Collective, Communicator


def _nothing(communicator: Communicator, array: np.ndarray, **more: Any) -> None:
    """Leave the array as it is."""


def _copied(communicator: Communicator, array: np.ndarray, *, taken: np.ndarray) -> None:
    taken[...] = array


class LocalCommunicator(Communicator):
    """Communicator of a single rank: no data moves, whatever the algorithm."""

    name = "local"

    def __init__(self, algorithm: str = "native", hosts: Sequence[str] = ("here",)) -> None:
        super().__init__(0, 1, hosts, algorithm, {"all_to_all": _copied})

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def _chosen(self, call: str, array: np.ndarray) -> Collective:
        return self._collectives.get(call, _nothing)

    def _alone(self, *_: Any, **__: Any) -> NoReturn:
        raise D5Error("a single rank has no other to send to or to receive from")

    _send = _receive = _isend = _ireceive = _native = _alone


def connect(
    algorithm: str,
    rank: int | None,
    size: int | None,
    meeting: Path | None,
    timeout_s: float,
    hosts: Sequence[str] | None,
) -> Communicator:
    """Open the communicator; see `d5suite.distributed.communicators.open_communicator`."""
    if (rank or 0, size or 1) != (0, 1):
        raise ConfigurationError(f"local is one rank, not {size}", hint="Choose mpi or gloo.")
    return LocalCommunicator(algorithm, hosts or ("here",))
