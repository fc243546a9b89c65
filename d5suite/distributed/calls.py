"""Collectives as they are measured. Imports NumPy and `d5suite.levels.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from d5suite.levels.distributed import Communicator


class MeasuredCall(NamedTuple):
    """A collective as it is measured.

    Attributes
    ----------
    run : callable
        Of a communicator, the array given, and the one taken if that is another.
    factor : callable
        Bus bandwidth over bytes per second, of the number of ranks: nccl-tests' PERFORMANCE.md.
    apart : bool
        Whether the answer is another array than what was given.
    """

    run: Callable[[Communicator, np.ndarray, np.ndarray], object]
    factor: Callable[[int], float]
    apart: bool = False


def _shift(communicator: Communicator, given: np.ndarray, taken: np.ndarray) -> None:
    """Send to the next rank and receive from the one before."""
    rank, size = communicator.rank, communicator.size
    arriving = communicator.ireceive(taken, (rank - 1) % size)
    leaving = communicator.isend(given, (rank + 1) % size)
    arriving.wait()
    leaving.wait()


CALLS: Mapping[str, MeasuredCall] = {
    "all_reduce": MeasuredCall(lambda c, given, _: c.all_reduce(given), lambda p: 2 * (p - 1) / p),
    "reduce_scatter": MeasuredCall(lambda c, given, _: c.reduce_scatter(given), lambda p: (p - 1) / p),
    "all_gather": MeasuredCall(lambda c, given, _: c.all_gather(given), lambda p: (p - 1) / p),
    "broadcast": MeasuredCall(lambda c, given, _: c.broadcast(given), lambda p: 1.0),
    "reduce": MeasuredCall(lambda c, given, _: c.reduce(given), lambda p: 1.0),
    "all_to_all": MeasuredCall(lambda c, given, taken: c.all_to_all(given, taken), lambda p: (p - 1) / p, apart=True),
    "send_receive": MeasuredCall(_shift, lambda p: 1.0, apart=True),
}
"""Measured calls by name. ``send_receive``: each rank sends to the next and receives from the
one before."""


def gathered(communicator: Communicator, values: Sequence[float]) -> np.ndarray:
    """Gather all ranks' values, a row each, by single messages: no collective can falsify them."""
    own = np.array(values, np.float64)
    rows = np.zeros((communicator.size, len(own)))
    rows[communicator.rank] = own
    if communicator.rank == 0:
        for rank in range(1, communicator.size):
            communicator.receive(rows[rank], rank)
        for rank in range(1, communicator.size):
            communicator.send(rows, rank)
    else:
        communicator.send(own, 0)
        communicator.receive(rows, 0)
    return rows
