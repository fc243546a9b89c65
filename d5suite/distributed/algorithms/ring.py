"""The ring, or bucket, algorithm: each rank sends to the next one, and adds what it receives.

All-reduce is reduce-scatter and all-gather: p - 1 ticks each, of one segment of n/p. It sends the
fewest bytes, 2n(p - 1)/p, in the most messages. Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009.

Imports NumPy and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from d5suite.distributed.algorithms.messages import everyone, exchange
from d5suite.levels.distributed import Collective, Communicator, segments


def all_reduce(communicator: Communicator, array: np.ndarray, ranks: Sequence[int] | None = None) -> None:
    """Sum over all ranks, or over a group of them."""
    reduce_scatter(communicator, array, ranks)
    all_gather(communicator, array, ranks)


def reduce_scatter(communicator: Communicator, array: np.ndarray, ranks: Sequence[int] | None = None) -> None:
    """Sum into each rank's own segment: at tick t, rank r receives segment r - 2 - t."""
    ranks = ranks or everyone(communicator)
    me, size, flat = ranks.index(communicator.rank), len(ranks), array.reshape(-1)
    parts = segments(array.size, size)
    spare = np.empty(parts[0].stop, flat.dtype)
    for tick in range(size - 1):
        given, total = flat[parts[(me - 1 - tick) % size]], flat[parts[(me - 2 - tick) % size]]
        taken = spare[: total.size]
        exchange(communicator, given, ranks[(me + 1) % size], taken, ranks[me - 1])
        np.add(taken, total, out=total)


def all_gather(communicator: Communicator, array: np.ndarray, ranks: Sequence[int] | None = None) -> None:
    """Pass segments on: at tick t, rank r receives segment r - 1 - t."""
    ranks = ranks or everyone(communicator)
    me, size, flat = ranks.index(communicator.rank), len(ranks), array.reshape(-1)
    parts = segments(array.size, size)
    for tick in range(size - 1):
        given, taken = flat[parts[(me - tick) % size]], flat[parts[(me - 1 - tick) % size]]
        exchange(communicator, given, ranks[(me + 1) % size], taken, ranks[me - 1])


RING: Mapping[str, Collective] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
}
