"""The clocks of ranks, compared by messages there and back.

A rank answers with the time of its clock. That time lies between sending and receiving, so the
offset is known to within half a round trip; the fastest of many round trips counts (Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989). Imports NumPy and
`d5suite.levels.distributed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from d5suite.levels.distributed import Communicator

ROUNDS = 100
"""Messages there and back, to each rank."""


class Offset(NamedTuple):
    """How this rank's clock compares with rank 0's, in nanoseconds.

    Attributes
    ----------
    at_ns : int
        Time of the comparison, by this rank's clock.
    offset_ns : int
        Rank 0's clock minus this rank's.
    error_ns : int
        Largest error of the offset.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def compare_clocks(
    communicator: Communicator, clock: Callable[[], int] = time.perf_counter_ns, rounds: int = ROUNDS
) -> Offset:
    """Compare this rank's clock with rank 0's. Collective.

    Parameters
    ----------
    communicator : Communicator
    clock : callable
        Returns nanoseconds.
    rounds : int
        Messages there and back.
    """
    stamp, best = np.zeros(1, np.int64), np.zeros(3, np.int64)
    for rank in range(1, communicator.size):
        communicator.barrier()
        if communicator.rank == 0:
            shortest = 1 << 62
            for _ in range(rounds):
                begin = clock()
                communicator.send(stamp, rank)
                communicator.receive(stamp, rank)
                end = clock()
                if end - begin < shortest:
                    shortest, middle = end - begin, begin + (end - begin) // 2
                    best[:] = stamp[0], middle - stamp[0], (shortest + 1) // 2
            communicator.send(best, rank)
        elif communicator.rank == rank:
            for _ in range(rounds):
                communicator.receive(stamp, 0)
                stamp[0] = clock()
                communicator.send(stamp, 0)
            communicator.receive(best, 0)
    if communicator.rank == 0:
        return Offset(clock(), 0, 0)
    return Offset(*(int(each) for each in best))
