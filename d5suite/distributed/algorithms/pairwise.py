"""Pairs of ranks exchange messages: all-to-all, and the barrier.

Imports NumPy and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from d5suite.distributed.algorithms.messages import exchange
from d5suite.levels.distributed import Collective, Communicator, segments


def all_to_all(communicator: Communicator, array: np.ndarray, *, taken: np.ndarray) -> None:
    """At tick t, send to rank r + t and receive from rank r - t: p - 1 messages of n/p.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
    Int. J. High Perform. Comput. Appl. 19(1), 2005, section 5.
    """
    rank, size = communicator.rank, communicator.size
    parts, given, into = segments(array.size, size), array.reshape(-1), taken.reshape(-1)
    into[parts[rank]] = given[parts[rank]]
    for tick in range(1, size):
        to, source = (rank + tick) % size, (rank - tick) % size
        exchange(communicator, given[parts[to]], to, into[parts[source]], source)


def barrier(communicator: Communicator, array: np.ndarray) -> None:
    """Dissemination: send an empty message to the ranks 1, 2, 4, ... further on, in ⌈lg p⌉ rounds.

    Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
    Program. 17(1), 1988.
    """
    distance = 1
    while distance < communicator.size:
        to, source = ((communicator.rank + sign * distance) % communicator.size for sign in (1, -1))
        exchange(communicator, array, to, np.empty(0, np.uint8), source)
        distance *= 2


PAIRWISE: Mapping[str, Collective] = {"all_to_all": all_to_all, "barrier": barrier}
