"""Detection of work that is left to feeding or fetching, which no sample contains.

A lazy framework may return a promise and compute when the answer is fetched, or compute when an
input is fed. Its answers are right, and its samples far too short. Imports NumPy and its neighbours
in ``d5suite.instruments``.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from d5suite.instruments.clock import now
from d5suite.instruments.freshness import LONGER, ROUNDS

LEAST_S = 5e-4
"""Accepted seconds for handing over a few small tensors; on a busy 2-core machine Keras took 0.6 to
0.9 ms, within the time of its calls."""

FETCH_S = 3e-4
"""Accepted seconds by which a first fetch may exceed twice the second one; MXNet needs 0.1 ms."""

FETCH_SHARE = 0.01
"""The same for long calls, as a fraction of the call. Code and memory are cold at a first fetch:
after Keras's calls of 67 ms on a busy machine, it took 0.48 ms and the second one 0.07."""

COPIES = 4
"""Accepted time for feeding and fetching, in NumPy copies to another layout: both may convert the
type and the layout and, on a GPU, cross the bus."""

BLOCK = (16, 64, 32, 32)
"""Images, float32, whose copy with channels last measures how fast NumPy copies."""

T = TypeVar("T")


def time_work(action: Callable[[], T], device: str) -> tuple[T, float]:
    """Call a function once; return its result and the seconds in which it worked.

    If another program took a CPU from this process meanwhile, the seconds are at most the CPU time
    of all threads of this process: a call that waits for a CPU does no work. On a GPU the elapsed
    time counts, because the host may sleep while the device works.
    """
    switches, used, start = _lost_turns(), time.process_time(), now()
    result = action()
    elapsed, worked = now() - start, time.process_time() - used
    disturbed = device == "cpu" and _lost_turns() > switches
    return result, min(elapsed, worked) if disturbed else elapsed


def _lost_turns() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class Outside:
    """Times of a call and of what surrounds it, in seconds.

    Attributes
    ----------
    call_s : float
        A timed call.
    outside_s : float
        The shortest time to feed new input and fetch its answer.
    copy_s : float
        Copying as many bytes by NumPy.
    """

    call_s: float
    outside_s: float
    copy_s: float

    @property
    def limit_s(self) -> float:
        """Return the longest accepted ``outside_s``."""
        return LONGER * self.call_s + COPIES * self.copy_s + LEAST_S


@dataclass(frozen=True)
class Fetches:
    """Times of fetching one answer, in seconds.

    Attributes
    ----------
    first_s, second_s : float
        The first time, and again.
    memory_s : float
        Filling as many bytes of new memory. A virtual machine may have to ask its host for each
        page: at 10 µs a page, 1.6 MB take 5 ms instead of 0.3.
    """

    first_s: float
    second_s: float
    memory_s: float = 0.0

    @property
    def late_s(self) -> float:
        """Return the seconds that neither copying nor memory for two copies explains."""
        return self.first_s - LONGER * self.second_s - 2 * self.memory_s

    def are_late(self, call_s: float) -> bool:
        """Return whether the first fetch did work of the call, which took ``call_s`` seconds."""
        return self.late_s > max(FETCH_S, FETCH_SHARE * call_s)


def copying_s(nbytes: int) -> float:
    """Return how long NumPy takes to copy so many bytes to another layout, in seconds."""
    block = np.zeros(BLOCK, np.float32)
    times = [time_work(lambda: np.ascontiguousarray(np.moveaxis(block, 1, -1)), "cpu")[1] for _ in range(3)]
    return min(times) * nbytes / block.nbytes


def measure_outside(call_s: float, nbytes: int, surround: Callable[[int], float]) -> Outside:
    """Feed and fetch until it is clear that both only copy, `ROUNDS` times at most.

    Parameters
    ----------
    call_s : float
        Seconds of a timed call.
    nbytes : int
        Bytes of the input and the answer.
    surround : callable
        Feeds new input, given a number from 0, makes the call, and fetches the answer; returns the
        seconds of feeding and fetching.
    """
    found = Outside(call_s, surround(0), copying_s(nbytes))
    for number in range(1, ROUNDS):
        if found.outside_s <= found.limit_s:
            break
        found = Outside(call_s, min(found.outside_s, surround(number)), found.copy_s)
    return found


def filling_s(nbytes: int) -> float:
    """Return how long NumPy takes to fill ``nbytes`` of new memory: the longest of three times."""
    blocks, times = [], []
    for _ in range(3):
        block, seconds = time_work(lambda: np.ones(nbytes, np.uint8), "cpu")
        blocks.append(block)  # the next one must not take its place
        times.append(seconds)
    return max(times)


def time_fetches(fetches: Sequence[Callable[[], Iterable[np.ndarray | None]]], device: str, nbytes: int = 0) -> Fetches:
    """Fetch several answers, each three times; return the times of the one that was least late.

    One disturbed fetch must not be taken for computing.

    Parameters
    ----------
    fetches : sequence of callable
        Each fetches an answer, the oldest one first: fetching a later one may complete earlier
        ones.
    device : str
    nbytes : int
        Bytes of an earlier answer, 0 if there is none: how much new memory is filled first.

    Returns
    -------
    Fetches
    """
    found = []
    for fetch in fetches:
        memory_s, times = filling_s(nbytes), []
        for _ in range(3):
            answer, seconds = time_work(fetch, device)
            times.append(seconds)
            nbytes = sum(array.nbytes for array in answer if array is not None)
            del answer
        found.append(Fetches(times[0], min(times[1:]), memory_s))
    return min(found, key=lambda each: each.late_s)
