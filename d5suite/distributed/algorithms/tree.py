"""The binomial tree: in each of ⌈lg p⌉ rounds, the number of ranks that take part doubles.

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
    """Receive from the parent, whose number from the root lacks this rank's lowest bit; pass on."""
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
    """Add the arrays that the child ranks send; then send the sum to the parent rank."""
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
