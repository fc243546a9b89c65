"""Collectives as they are measured. Imports NumPy and `d5suite.levels.distributed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from d5suite.levels.distributed import Communicator, Request

BURST = 16
"""Messages that ``ping_burst`` and ``ping_paced`` send before one comes back."""

PAUSE_S = 2e-4
"""Pause before each message of ``ping_paced`` but the first: longer than any gap."""

Begin = Callable[[Communicator, np.ndarray, np.ndarray], Sequence[Request]]
"""Begins messages. Takes the communicator, the array to send and the array to receive."""


class MeasuredCall(NamedTuple):
    """A collective, with what its measurement needs.

    Attributes
    ----------
    run : callable
        Runs the collective. Takes the communicator, the array to send, and the array to receive.
    factor : callable
        Returns the ratio of bus bandwidth to bytes per second for a number of ranks (nccl-tests,
        PERFORMANCE.md).
    apart : bool
        Whether the result arrives in another array than the one sent.
    source : callable or None
        For messages between two ranks: takes a rank and the number of ranks, and returns the rank
        that sends to it, or None if the rank receives nothing.
    begin : callable or None
        For non-blocking messages: begins them, so that a rank can compute until it waits.
    """

    run: Callable[[Communicator, np.ndarray, np.ndarray], object]
    factor: Callable[[int], float]
    apart: bool = False
    source: Callable[[int, int], int | None] | None = None
    begin: Begin | None = None


def _messages(begin: Begin, source: Callable[[int, int], int | None], factor: Callable[[int], float]) -> MeasuredCall:
    def run(communicator: Communicator, given: np.ndarray, taken: np.ndarray) -> None:
        for each in begin(communicator, given, taken):
            each.wait()

    return MeasuredCall(run, factor, apart=True, source=source, begin=begin)


def _shift(communicator: Communicator, given: np.ndarray, taken: np.ndarray) -> list[Request]:
    """Send to the next rank and receive from the previous rank."""
    rank, size = communicator.rank, communicator.size
    return [communicator.ireceive(taken, (rank - 1) % size), communicator.isend(given, (rank + 1) % size)]


def _partner(rank: int, size: int) -> int | None:
    """Return a rank's partner: every rank of the first half has one in the second half."""
    half = size // 2
    return None if rank >= 2 * half else (rank + half) % (2 * half)


def _sender(rank: int, size: int) -> int | None:
    return _partner(rank, size) if rank >= size // 2 else None


def _send_pairs(communicator: Communicator, given: np.ndarray, taken: np.ndarray) -> list[Request]:
    """Send from each rank of the first half to its partner."""
    rank, partner = communicator.rank, _partner(communicator.rank, communicator.size)
    if partner is None:
        return []
    return [communicator.isend(given, partner) if partner > rank else communicator.ireceive(taken, partner)]


def _exchange_pairs(communicator: Communicator, given: np.ndarray, taken: np.ndarray) -> list[Request]:
    """Exchange arrays between the ranks of each pair."""
    partner = _partner(communicator.rank, communicator.size)
    if partner is None:
        return []
    return [communicator.ireceive(taken, partner), communicator.isend(given, partner)]


def _ping_pong(communicator: Communicator, given: np.ndarray, taken: np.ndarray) -> None:
    """Send to the partner, which then sends back."""
    rank, partner = communicator.rank, _partner(communicator.rank, communicator.size)
    if partner is None:
        return
    if rank < partner:
        communicator.send(given, partner)
        communicator.receive(taken, partner)
    else:
        communicator.receive(taken, partner)
        communicator.send(given, partner)


def _several(pause_s: float) -> Callable[[Communicator, np.ndarray, np.ndarray], None]:
    """Return a call that sends several messages to the partner, which then sends one back."""

    def run(communicator: Communicator, given: np.ndarray, taken: np.ndarray) -> None:
        rank, partner = communicator.rank, _partner(communicator.rank, communicator.size)
        if partner is None:
            return
        if rank < partner:
            for number in range(BURST):
                end = time.perf_counter() + pause_s
                while number and time.perf_counter() < end:  # busy, as a processor that computes
                    pass
                communicator.send(given, partner)
            communicator.receive(taken, partner)
        else:
            for _ in range(BURST):
                communicator.receive(taken, partner)
            communicator.send(given, partner)

    return run


CALLS: Mapping[str, MeasuredCall] = {
    "all_reduce": MeasuredCall(lambda c, given, _: c.all_reduce(given), lambda p: 2 * (p - 1) / p),
    "reduce_scatter": MeasuredCall(lambda c, given, _: c.reduce_scatter(given), lambda p: (p - 1) / p),
    "all_gather": MeasuredCall(lambda c, given, _: c.all_gather(given), lambda p: (p - 1) / p),
    "broadcast": MeasuredCall(lambda c, given, _: c.broadcast(given), lambda p: 1.0),
    "reduce": MeasuredCall(lambda c, given, _: c.reduce(given), lambda p: 1.0),
    "all_to_all": MeasuredCall(lambda c, given, taken: c.all_to_all(given, taken), lambda p: (p - 1) / p, apart=True),
    "send_receive": _messages(_shift, lambda rank, size: (rank - 1) % size, lambda p: 1.0),
    "send_pairs": _messages(_send_pairs, _sender, lambda p: float(p // 2)),
    "exchange_pairs": _messages(_exchange_pairs, _partner, lambda p: 2.0 * (p // 2)),
    "ping_pong": MeasuredCall(_ping_pong, lambda p: 2.0, apart=True, source=_partner),
    "ping_burst": MeasuredCall(_several(0.0), lambda p: BURST + 1.0, apart=True, source=_partner),
    "ping_paced": MeasuredCall(_several(PAUSE_S), lambda p: BURST + 1.0, apart=True, source=_partner),
}
"""Measured calls by name. ``send_receive``: each rank sends to the next and receives from the
previous rank. ``send_pairs``: each rank of the first half sends to its partner in the second half,
all at once; ``exchange_pairs``: both partners send. Their bandwidth counts all pairs together.
``ping_pong``: a message there and back in each pair. ``ping_burst``: `BURST` messages there, one
after the other, and one back; ``ping_paced``: the same with `PAUSE_S` between messages. LogGP's
parameters follow from these three."""


def gathered(communicator: Communicator, values: Sequence[float]) -> np.ndarray:
    """Gather all ranks' values, a row each, by single messages, which no collective can falsify."""
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
