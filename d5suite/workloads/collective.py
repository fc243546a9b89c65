"""A collective at several sizes: the arrays of every rank, the expected answers, and the timing.

Arrays hold small whole numbers, drawn per rank, so that sums are equal to the last bit in any order
of additions.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import Any

import numpy as np

from d5suite.backends import Selection
from d5suite.distributed.calls import CALLS, gathered
from d5suite.distributed.transports import transport_backend
from d5suite.errors import JobError
from d5suite.instruments.clock import AgreedClock, now
from d5suite.instruments.memory import free_memory
from d5suite.instruments.sampling import Samples, sample
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import CollectiveCase, Job
from d5suite.levels.distributed import Communicator, segments
from d5suite.network.operation import PRECISIONS
from d5suite.workloads.base import Workload

PERIOD = 8191
"""Number of drawn values, which arrays repeat: a prime, so that no two segments start alike."""

LARGEST = 4
"""Largest magnitude of drawn numbers: sums over 64 ranks are exact in bfloat16."""

NOTHING = -77
"""Value of the elements that a rank does not fill itself."""

SAMPLE_S = 2e-3
"""Shortest sample, in seconds: short calls are repeated, every call on another array."""

OVERLAP_ROUNDS, COMPUTED = 5, 512
"""Rounds in which overlap is measured, and elements of the array with which ranks compute
meanwhile: one addition to the array takes less than a microsecond."""

MOST_CALLS = 1000
MOST_BYTES = 64 << 20
"""Most calls in a sample, and most bytes of the arrays of all calls, unless one array is larger."""


def rounded(name: str, size: int, itemsize: int, ranks: int) -> int:
    """Round a size in bytes to whole elements; for all_to_all, to the same number per rank."""
    count = max(1, size // itemsize)
    return itemsize * (-(-count // ranks) * ranks if name == "all_to_all" else count)


def compute(block: np.ndarray) -> None:
    """Compute a little: add 1 to every element."""
    np.add(block, 1.0, out=block)


class Messages:
    """Arrays for one collective at one size, which are refilled before every sample.

    Parameters
    ----------
    communicator : Communicator
    name : str
        A key of `d5suite.distributed.calls.CALLS`.
    size : int
        Size of an array in bytes, from `rounded`.
    dtype : numpy.dtype
    seed : int

    Attributes
    ----------
    rank_medians_s : list of float
        After `time`: the median seconds of a call, by rank.
    """

    def __init__(self, communicator: Communicator, name: str, size: int, dtype: np.dtype[Any], seed: int) -> None:
        self.communicator, self.name, self.call = communicator, name, CALLS[name]
        self.dtype, self.seed = np.dtype(dtype), seed
        self.nbytes, self.count = size, size // self.dtype.itemsize
        self._own = segments(self.count, communicator.size)[communicator.rank]
        self.copies = 0
        self.rank_medians_s: list[float] = []
        self.allocate(1)

    def allocate(self, copies: int) -> None:
        """Allocate arrays for this number of calls, unless they exist already."""
        if copies != self.copies:
            self.copies = copies
            self._given = np.empty((copies, self.count), self.dtype)
            self._taken = np.empty((copies if self.call.apart else 1, self.count), self.dtype)

    def free(self) -> None:
        """Release the arrays; `copies` keeps the number of arrays."""
        self._given = self._taken = np.empty((0, 0), self.dtype)

    def fill(self) -> None:
        """Refill all arrays before a sample."""
        whole, rank = self.name not in ("broadcast", "all_gather"), self.communicator.rank
        if whole or (self.name == "broadcast" and rank == 0):
            np.copyto(self._given, self._drawn(rank))
        else:
            self._given.fill(NOTHING)
            if self.name == "all_gather":
                self._given[:, self._own] = self._drawn(0)[self._own]
        if self.call.apart:
            self._taken.fill(NOTHING)

    def run(self) -> None:
        """Make one call per array."""
        run, communicator = self.call.run, self.communicator
        for given, taken in zip(self._given, self._taken if self.call.apart else self._given, strict=True):
            run(communicator, given, taken)

    def wrong(self) -> float:
        """Return the fraction of wrong elements on the rank with the most wrong elements."""
        place, expected = self._expected()
        if expected is None:
            part = 0.0
        else:
            answer = (self._taken if self.call.apart else self._given)[:, place]
            bits = f"u{self.dtype.itemsize}"
            differ = answer.view(bits) != np.ascontiguousarray(expected).view(bits)
            part = float(differ.mean()) if differ.size else 0.0
        return float(gathered(self.communicator, [part]).max())

    def differing(self) -> int:
        """Count the ranks whose result of an all_reduce with rounded sums differs from rank 0's."""
        given = self._given[0]
        given[:] = np.random.default_rng([self.seed, self.communicator.rank]).standard_normal(self.count)
        self.call.run(self.communicator, given, given)
        digests = gathered(self.communicator, [zlib.crc32(given.view(np.uint8))])
        return int((digests != digests[0]).sum())

    def traffic(self) -> dict[str, int]:
        """Return bytes, messages and opaque calls of one call: the maxima over all ranks."""
        kinds = ("bytes_sent", "messages_sent", "opaque_calls")

        def total() -> list[int]:
            return [sum(getattr(each, kind) for each in self.communicator.traffic.values()) for kind in kinds]

        before = total()
        self.call.run(self.communicator, self._given[0], self._taken[0])
        counted = [after - earlier for after, earlier in zip(total(), before, strict=True)]
        return dict(zip(kinds, gathered(self.communicator, counted).max(0).astype(int).tolist(), strict=True))

    def time(self, settings: SamplingSettings) -> Samples:
        """Sample a call's seconds on the slowest rank; all ranks take equally many samples."""
        communicator, rows = self.communicator, list[np.ndarray]()
        latest = np.zeros(communicator.size)

        def agree(seconds: float) -> float:
            nonlocal latest
            latest = gathered(communicator, [seconds])[:, 0]
            return float(latest.max())

        clock, ended = AgreedClock(agree), now()

        def prepare() -> None:
            self.fill()
            clock.advance(now() - ended)  # time between samples counts in the budget

        def step() -> None:
            nonlocal ended
            communicator.barrier()
            start = now()
            self.run()
            ended = now()
            clock.advance(ended - start)
            rows.append(latest)

        def once() -> float:
            prepare()
            start = clock()
            step()
            return clock() - start

        first_call_s = once()
        most = max(1, min(MOST_CALLS, MOST_BYTES // self.nbytes))
        while self.copies < most and (took := min(once() for _ in range(3))) < SAMPLE_S:
            wanted = int(self.copies * SAMPLE_S / max(took, 1e-9))
            self.allocate(min(most, max(2 * self.copies, wanted)))
        found = sample(step, lambda: None, settings, before_sample=prepare, clock=clock)
        self.rank_medians_s = (np.median(rows[-len(found.samples_s) :], axis=0) / self.copies).tolist()
        return Samples(
            first_call_s,
            [each / self.copies for each in found.warmup_s],
            [each / self.copies for each in found.samples_s],
            found.steady,
            found.stopped_by,
            found.confidence,
        )

    def overlap(self) -> float | None:
        """Return the share of a message's time in which ranks can compute; None if the call blocks.

        The share is 1 - (both - computing) / messages. All times begin after a barrier, end on the
        slowest rank, and are minima over some rounds; ranks compute for as long as the messages
        take. The OSU Micro-Benchmarks measure non-blocking collectives in the same way.
        """
        begin, communicator = self.call.begin, self.communicator
        if begin is None:
            return None
        given, taken, block = self._given[0], self._taken[0], np.zeros(COMPUTED)

        def clocked(additions: int, messages: bool) -> float:
            communicator.barrier()
            start = now()
            pending = begin(communicator, given, taken) if messages else ()
            for _ in range(additions):
                compute(block)
            for each in pending:
                each.wait()
            return float(gathered(communicator, [now() - start]).max())

        alone_s = min(clocked(0, True) for _ in range(OVERLAP_ROUNDS))
        additions = max(1, round(100 * alone_s / min(clocked(100, False) for _ in range(OVERLAP_ROUNDS))))
        rounds = [(clocked(additions, True), clocked(additions, False)) for _ in range(OVERLAP_ROUNDS)]
        both_s, computing_s = (min(each) for each in zip(*rounds, strict=True))
        return min(1.0, max(0.0, 1.0 - (both_s - computing_s) / alone_s))

    def _drawn(self, rank: int) -> np.ndarray:
        return np.resize(self._table(rank), self.count)

    def _table(self, rank: int) -> np.ndarray:
        drawn = np.random.default_rng([self.seed, rank]).integers(-LARGEST, LARGEST + 1, PERIOD)
        return drawn.astype(self.dtype)

    def _expected(self) -> tuple[slice, np.ndarray | None]:
        """Return the place and value of this rank's answer; the value is None without an answer."""
        rank, ranks, everything = self.communicator.rank, self.communicator.size, slice(None)
        if self.name in ("all_reduce", "reduce", "reduce_scatter"):
            if self.name == "reduce" and rank != 0:
                return everything, None
            total = sum(self._table(each).astype(np.int64) for each in range(ranks))
            place = self._own if self.name == "reduce_scatter" else everything
            return place, np.resize(np.asarray(total).astype(self.dtype), self.count)[place]
        if self.name == "all_to_all":
            parts = segments(self.count, ranks)
            return everything, np.concatenate([self._drawn(each)[parts[rank]] for each in range(ranks)])
        source = self.call.source(rank, ranks) if self.call.source else 0
        return everything, None if source is None else self._drawn(source)


class CollectiveWorkload(Workload):
    """One collective on one communicator, with one algorithm.

    Parameters
    ----------
    job : Job
    case : CollectiveCase
    selection : Selection
    """

    kind = "collective"

    communicator: Communicator

    @classmethod
    def select(cls, job: Job) -> Selection:
        return Selection(transport_backend(job.backend["name"]), job.backend["mode"])

    def __init__(self, job: Job, case: CollectiveCase, selection: Selection) -> None:
        super().__init__(job, case, selection)
        self.case = case

    def require_memory(self) -> None:
        """Raise `JobError` if this host has too little memory for its ranks at the largest size."""
        largest, hosts = self.sizes[-1], self.communicator.hosts
        here = hosts.count(hosts[self.communicator.rank])
        needed, free = 5 * largest * here, free_memory("cpu")
        where, least = min(free.items(), key=lambda each: each[1])
        if needed > least:
            raise JobError(
                f"{here} ranks with arrays of {largest:,} bytes need {needed:,} bytes, and {least:,} are free {where}",
                where=self.case.name,
                hint="Choose a smaller preset.",
            )

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Element type of all arrays."""
        return np.dtype(PRECISIONS[self.job.precision])

    @cached_property
    def sizes(self) -> list[int]:
        """The rounded sizes in bytes, smallest first, without duplicates."""
        itemsize, ranks = self.dtype.itemsize, self.communicator.size
        return sorted({rounded(self.case.collective, size, itemsize, ranks) for size in self.case.sizes})

    def messages(self, size: int) -> Messages:
        """Return arrays of this size in bytes."""
        return Messages(self.communicator, self.case.collective, size, self.dtype, self.job.seed)

    def facts(self) -> dict[str, Any]:
        return {}

    def free_validation(self) -> None:
        """Do nothing: arrays exist only while they are used."""
