"""The binomial tree: ⌈lg p⌉ rounds, in each of which twice as many ranks have taken part.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.

Imports NumPy and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from d5suite.distributed.algorithms.messages import TAG, everyone
from d5suite.levels.distributed import Collective, Communicator


def broadcast(
    communicator: Communicator, array: np.ndarray, *, root: int = 0, ranks: Sequence[int] | None = None
) -> None:
    """Receive from the rank without one's lowest bit, counted from the root; then pass it on."""
    ranks = ranks or everyone(communicator)
    size, at = len(ranks), ranks.index(root)
    me, bit = (ranks.index(communicator.rank) - at) % size, 1
    while bit < size and not me & bit:
        bit *= 2
    if me:
        communicator.receive(array, ranks[(me - bit + at) % size], TAG)
    while bit > 1:
        bit //= 2
        if me + bit < size:
            communicator.send(array, ranks[(me + bit + at) % size], TAG)


def reduce(communicator: Communicator, array: np.ndarray, *, root: int = 0, ranks: Sequence[int] | None = None) -> None:
    """Add what the ranks with one more bit send; then send it to the one without one's lowest."""
    ranks = ranks or everyone(communicator)
    size, at = len(ranks), ranks.index(root)
    me, bit = (ranks.index(communicator.rank) - at) % size, 1
    taken = np.empty_like(array) if me % 2 == 0 and me + 1 < size else array
    while bit < size and not me & bit:
        if me + bit < size:
            communicator.receive(taken, ranks[(me + bit + at) % size], TAG)
            np.add(array, taken, out=array)
        bit *= 2
    if me:
        communicator.send(array, ranks[(me - bit + at) % size], TAG)


def all_reduce(communicator: Communicator, array: np.ndarray) -> None:
    """Reduce to rank 0, which broadcasts."""
    reduce(communicator, array)
    broadcast(communicator, array)


TREE: Mapping[str, Collective] = {"broadcast": broadcast, "reduce": reduce, "all_reduce": all_reduce}
