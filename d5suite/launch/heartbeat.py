"""Liveness of ranks: heartbeats that ranks write, and a detector of ranks that hang.

A thread of each rank writes heartbeats into a file. The launcher reads it, or rank 0 if d5suite did
not start the ranks. Imports psutil lazily.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

PERIOD_S = 0.5
"""Seconds between two heartbeats; writing one takes less than 0.1 ms."""

STALLED_S = 6.0
"""Seconds without work after which a rank that the others wait for counts as hanging. So a rank
that hangs is reported within 10 seconds."""

PATIENCE = 20
"""If all others wait, a step that takes this many times as long as the longest one before hangs."""

DEADLOCK_S = 60.0
"""Seconds after which ranks that all wait for each other count as deadlocked; a collective may
take long."""

LEAST_CPU_S = 0.05
"""Least CPU time of the main thread, running or waiting for a core, that counts as work."""

WINDOW_S, COMPUTES = 1.0, 0.5
"""Window in seconds over which other threads and child processes are observed, and the busy
fraction above which one counts as computing. A thread that only polls, as Horovod's does each
millisecond, sleeps for most of the window."""

SILENT_S = 60.0
"""Seconds by which heartbeats of another host may be late, because shared file systems show files
that late."""


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank.

    Attributes
    ----------
    pid : int
    ticks : int
        Number of heartbeats written.
    steps : int
        Number of steps made while all ranks step together; 0 at other times.
    waits : bool
        Whether the rank is inside a call of its communicator.
    failed_at : float
        When the rank failed, by the host's monotonic clock; 0 if it has not.
    host : str
    entered : int
        Number of times the rank has entered a call in which the framework itself connects the
        ranks, such as a framework's own step; 0 with d5suite's schemes.
    inside : bool
        Whether the rank is inside such a call.
    main_s, others_s : float
        CPU time of the rank's main thread, and of its other threads together, as it reports it.
    """

    pid: int
    ticks: int
    steps: int
    waits: bool
    failed_at: float
    host: str
    entered: int = 0
    inside: bool = False
    main_s: float = 0.0
    others_s: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Heartbeat | None:
        """Return the last heartbeat in a file; None before the first."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError):
            return None


def heartbeat_path(meeting: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeats."""
    return meeting / f"rank{rank}.heartbeat"


class HeartbeatWriter:
    """A rank's side: a thread that writes heartbeats.

    Parameters
    ----------
    path : Path or None
        None if the rank is not watched.

    Attributes
    ----------
    steps : int
        See `Heartbeat`; the main thread counts.
    waits : callable
        Returns whether the rank is inside a call of its communicator.
    framework : callable
        Returns how often the rank has entered, and how often it has left, a framework's own step.
    """

    def __init__(self, path: Path | None) -> None:
        self.steps = 0
        self.waits: Callable[[], bool] = lambda: False
        self.framework: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._path, self._ticks, self._failed_at = path, 0, 0.0
        self._lock = threading.Lock()
        if path is not None:
            self._write()
            threading.Thread(target=self._run, daemon=True).start()

    def fail(self) -> None:
        """Record that this rank fails now: the rank that fails first is the cause."""
        self._failed_at = self._failed_at or time.monotonic()
        if self._path is not None:
            self._write()

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            self._write()

    def _write(self) -> None:
        assert self._path is not None
        with self._lock, contextlib.suppress(OSError):  # the folder is removed when the job ends
            self._ticks += 1
            entered, left = self.framework()
            main_s = _threads_of(os.getpid(), [os.getpid()]).get(os.getpid(), 0.0)
            others_s = max(0.0, time.process_time() - main_s)
            heartbeat = Heartbeat(
                os.getpid(), self._ticks, self.steps, self.waits(), self._failed_at, socket.gethostname(), entered,
                entered > left, main_s, others_s,
            )  # fmt: skip
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(vars(heartbeat)))
            new.replace(self._path)


class FailedRank(NamedTuple):
    """The rank that ended a job; ``how`` completes the sentence "rank N …"."""

    rank: int
    how: str


class RankWork(NamedTuple):
    """The CPU time of a rank.

    Attributes
    ----------
    main_s : float
        Seconds for which the main thread ran or waited for a core.
    threads : mapping of int to float
        The same for each thread of the rank and of its child processes.
    blocked : bool
        Whether one of its processes waits for a disk.
    """

    main_s: float
    threads: Mapping[int, float]
    blocked: bool


@dataclass
class _RankState:
    """State of one rank, with the times of its last changes."""

    heartbeat: Heartbeat | None = None
    here: bool = True
    ticked: float = 0.0
    stepped: float = 0.0
    longest: float = 0.0
    worked: float = 0.0
    main_s: float = 0.0
    threads: Mapping[int, float] = field(default_factory=dict)
    counted: float = 0.0
    waits_since: float | None = None
    inside_since: float | None = None

    def idle_s(self, now: float) -> float:
        """Return the seconds without work; for a rank on another host, as last reported."""
        late = not self.here and now - self.ticked < SILENT_S
        return (self.ticked if late else now) - self.worked


@dataclass
class HangDetector:
    """Finds ranks that hang.

    Attributes
    ----------
    ranks : int
    host : str
        The host of the detector. It measures the CPU time of ranks on this host; ranks on other
        hosts report theirs.
    """

    ranks: int
    host: str = field(default_factory=socket.gethostname)
    states: list[_RankState] = field(init=False)

    def __post_init__(self) -> None:
        self.states = [_RankState() for _ in range(self.ranks)]

    def check(self, heartbeats: Sequence[Heartbeat | None], now: float) -> FailedRank | None:
        """Return a rank that hangs, given the ranks' last heartbeats.

        A rank hangs if it does not wait, has done no work for `STALLED_S` or has been in one step
        for far too long, and each of the others waits or has done no work either. Nobody knows
        whether a rank inside a framework's own step waits or computes. It counts as waiting for a
        rank that has not entered the step.
        """
        for state, heartbeat in zip(self.states, heartbeats, strict=True):
            if heartbeat is None:
                return None
            self._update(state, heartbeat, now)
        calling = [0.0 if each.waits_since is None else now - each.waits_since for each in self.states]
        inside = [0.0 if each.inside_since is None else now - each.inside_since for each in self.states]
        idle = [each.idle_s(now) for each in self.states]
        locked = min(max(c, min(i, own)) for c, i, own in zip(calling, inside, idle, strict=True))
        if self.ranks > 1 and locked > DEADLOCK_S:
            how = f"and all others have waited for each other for {locked:.0f} s (deadlock) and were killed"
            return FailedRank(0, how)
        outside = [rank for rank, each in enumerate(zip(calling, inside, strict=True)) if max(each) < STALLED_S]
        if any(idle[rank] < STALLED_S for rank in outside):
            return self._endless(outside, now)
        stuck = [
            rank for rank in outside
            if self.states[rank].waits_since is None and self.states[rank].inside_since is None
        ]  # fmt: skip
        if stuck:
            # Others may have left one more step, and wait for its end.
            rank = min(stuck, key=lambda rank: (self._entered(rank), rank))
            return FailedRank(rank, f"hung (no work for {idle[rank]:.0f} s) and was killed")
        return self._endless([rank for rank in range(self.ranks) if not calling[rank] and idle[rank] < STALLED_S], now)

    def _entered(self, rank: int) -> int:
        heartbeat = self.states[rank].heartbeat
        return heartbeat.entered if heartbeat is not None else 0

    def _endless(self, working: Sequence[int], now: float) -> FailedRank | None:
        """Return the only working rank if its step takes far too long."""
        if len(working) != 1 or self.ranks == 1:
            return None
        state = self.states[working[0]]
        took = now - state.stepped
        if state.longest == 0.0 or took < max(STALLED_S, PATIENCE * state.longest):
            return None
        how = f"hung ({took:.0f} s in a step; at most {state.longest:.2g} s before) and was killed"
        return FailedRank(working[0], how)

    def _update(self, state: _RankState, heartbeat: Heartbeat, now: float) -> None:
        before, state.heartbeat = state.heartbeat, heartbeat
        if before is None or heartbeat.ticks != before.ticks:
            state.ticked = now
        if self._works(state, before, heartbeat, now):
            state.worked = now
        if before is None or heartbeat.steps != before.steps:
            if before is not None and 0 < before.steps < heartbeat.steps:
                state.longest = max(state.longest, (now - state.stepped) / (heartbeat.steps - before.steps))
            if heartbeat.steps == 0:
                state.longest = 0.0
            state.stepped = state.worked = now
        # A rank that was stopped cannot report that it no longer waits.
        stopped = now - state.ticked > STALLED_S / 2 and now - state.worked > STALLED_S / 2 and state.here
        same_step = not stopped and before is not None and before.steps == heartbeat.steps
        same_call = same_step and before is not None and before.entered == heartbeat.entered
        state.waits_since = _since(state.waits_since, same_step and heartbeat.waits, now)
        state.inside_since = _since(state.inside_since, same_call and heartbeat.inside, now)

    def _works(self, state: _RankState, before: Heartbeat | None, heartbeat: Heartbeat, now: float) -> bool:
        """Return whether a rank has worked since the last check."""
        state.here = heartbeat.host == self.host
        reports_work = not heartbeat.inside and abs(heartbeat.main_s - state.main_s) > LEAST_CPU_S
        if before is not None and (heartbeat.steps != before.steps or reports_work):
            state.main_s = heartbeat.main_s
            return True  # measuring the process would take milliseconds of a core, perhaps of a rank's
        work = _work_of(heartbeat.pid) if state.here else None
        state.here = work is not None
        if work is None:
            work = RankWork(heartbeat.main_s, {-1: heartbeat.main_s, -2: heartbeat.others_s}, False)
        works = before is None or work.blocked
        if abs(work.main_s - state.main_s) > LEAST_CPU_S:
            state.main_s = work.main_s
            works = works or not heartbeat.inside  # inside, the main thread may only poll for the others
        if now - state.counted >= WINDOW_S:
            least = COMPUTES * (now - state.counted)
            works = works or any(s - state.threads.get(each, s) > least for each, s in work.threads.items())
            state.counted, state.threads = now, work.threads
        return works


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """Return since when something holds; None if it does not."""
    return (now if since is None else since) if holds else None


def _work_of(pid: int) -> RankWork | None:
    """Return the CPU time of a process on this host and its children; None if it does not exist.

    Time spent waiting for a core counts: on a crowded machine a rank without a core does not hang.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    threads: dict[int, float] = {}
    blocked = False
    for each in family:
        with contextlib.suppress(psutil.Error):
            threads |= _threads_of(each.pid)
            blocked = blocked or each.status() == psutil.STATUS_DISK_SLEEP
    if pid not in threads:  # not Linux, or it has just ended
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            return RankWork(times.user + times.system, threads, blocked)
    return RankWork(threads.get(pid, 0.0), threads, blocked)


def _threads_of(pid: int, only: Sequence[int] | None = None) -> dict[int, float]:
    """Return the seconds that each thread ran or was runnable; empty if the kernel hides them.

    The first two figures of ``schedstat`` (Linux: Documentation/scheduler/sched-stats.rst).
    """
    found = {}
    with contextlib.suppress(OSError):
        for thread in only or map(int, os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                found[thread] = (int(ran) + int(waited)) * 1e-9
    return found
