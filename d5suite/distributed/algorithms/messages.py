"""What algorithms share: the group of all ranks, an exchange of two messages, and addition.

Imports NumPy and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from d5suite.levels.distributed import Communicator

TAG = 32767
"""Tag of collectives' messages, apart from users' tags: the largest that every MPI accepts."""


def everyone(communicator: Communicator) -> Sequence[int]:
    """Return the group of all ranks."""
    return range(communicator.size)


def exchange(communicator: Communicator, given: np.ndarray, to: int, taken: np.ndarray, source: int) -> None:
    """Send and receive at the same time."""
    receipt = communicator.ireceive(taken, source, TAG)
    sent = communicator.isend(given, to, TAG)
    receipt.wait()
    sent.wait()


def add(communicator: Communicator, array: np.ndarray, other: np.ndarray, source: int) -> None:
    """Add another rank's array in place, in the same order on both ranks: even NaNs are equal."""
    first, second = (array, other) if communicator.rank < source else (other, array)
    np.add(first, second, out=array)
