"""Recursive doubling and halving: in each round, ranks that differ in one bit exchange data.

If the number of ranks p is not a power of two, the surplus r = p - 2^⌊lg p⌋ is folded in first:
among the first 2r ranks, every even rank sends its array to the next rank, and receives the result
from it at the end.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
Int. J. High Perform. Comput. Appl. 19(1), 2005, sections 4.4 and 4.5; Rabenseifner, "Optimization
of collective reduction operations", ICCS 2004.

Imports NumPy and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from d5suite.distributed.algorithms.messages import TAG, add, exchange
from d5suite.levels.distributed import Collective, Communicator, segment_start


def _folded(
    communicator: Communicator, array: np.ndarray, inner: Callable[[int, int, Callable[[int], int]], None]
) -> None:
    """Fold in the surplus, call ``inner(place, places, rank of place)``, and send the result."""
    rank, places = communicator.rank, 1 << (communicator.size.bit_length() - 1)
    surplus = communicator.size - places

    def rank_of(place: int) -> int:
        return 2 * place + 1 if place < surplus else place + surplus

    if rank < 2 * surplus and rank % 2 == 0:
        communicator.send(array, rank + 1, TAG)
        communicator.receive(array, rank + 1, TAG)
        return
    folds = rank < 2 * surplus
    if folds:
        taken = np.empty_like(array)
        communicator.receive(taken, rank - 1, TAG)
        np.add(taken, array, out=array)
    inner(rank // 2 if folds else rank - surplus, places, rank_of)
    if folds:
        communicator.send(array, rank - 1, TAG)


def recursive_doubling(communicator: Communicator, array: np.ndarray) -> None:
    """All-reduce whole arrays in lg p rounds: the fewest messages, for small arrays."""

    def inner(place: int, places: int, rank_of: Callable[[int], int]) -> None:
        taken, bit = np.empty_like(array), 1
        while bit < places:
            other = rank_of(place ^ bit)
            exchange(communicator, array, other, taken, other)
            add(communicator, array, taken, other)
            bit *= 2

    _folded(communicator, array, inner)


def halving_doubling(communicator: Communicator, array: np.ndarray) -> None:
    """All-reduce by recursive halving (reduce-scatter), then recursive doubling (all-gather)."""
    flat = array.reshape(-1)

    def inner(place: int, places: int, rank_of: Callable[[int], int]) -> None:
        def start(part: int) -> int:
            return segment_start(flat.size, places, part)

        spare = np.empty(start((places + 1) // 2), flat.dtype)

        def half(of: int, bit: int) -> np.ndarray:
            """Return the segments whose number equals a place in this bit and all higher bits."""
            first = of & -bit
            return flat[start(first) : start(first + bit)]

        bit = places // 2
        while bit:
            other, own = place ^ bit, half(place, bit)
            taken = spare[: own.size]
            exchange(communicator, half(other, bit), rank_of(other), taken, rank_of(other))
            add(communicator, own, taken, rank_of(other))
            bit //= 2
        bit = 1
        while bit < places:
            other = place ^ bit
            exchange(communicator, half(place, bit), rank_of(other), half(other, bit), rank_of(other))
            bit *= 2

    _folded(communicator, array, inner)


RECURSIVE_DOUBLING: Mapping[str, Collective] = {"all_reduce": recursive_doubling}
HALVING_DOUBLING: Mapping[str, Collective] = {"all_reduce": halving_doubling}
