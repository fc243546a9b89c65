"""Liveness of ranks: each writes a heartbeat, and a watch tells a hanging rank from a waiting one.

A thread of each rank writes a line into a file that the launcher reads, or rank 0 where no launcher
of d5suite's does. Imports psutil lazily.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

PERIOD_S = 0.5
"""Seconds between two lines; writing one takes 30 µs."""

STALLED_S = 6.0
"""Seconds without any work after which a rank that the others wait for is taken to hang: it is
named within 10."""

PATIENCE = 20
"""A step that takes this many times as long as the longest one before hangs, if all others wait."""

DEADLOCK_S = 60.0
"""Seconds after which ranks that all wait for each other count as deadlocked; a collective may
take long."""

LEAST_CPU_S = 0.05
"""CPU time of the main thread, or its time ready for a core, that counts as work."""

WINDOW_S, COMPUTES = 1.0, 0.5
"""Seconds over which other threads and children are looked at, and the share of them for which one
that computes runs or is ready. One that only asks again and again, as Horovod's does each
millisecond, sleeps for most of them."""

SILENT_S = 60.0
"""Seconds for which the heartbeat of a rank on another host may be late; a shared file system shows
files that late."""


@dataclass(frozen=True)
class Heartbeat:
    """The last line that a rank wrote.

    Attributes
    ----------
    pid : int
    ticks : int
        Lines written.
    steps : int
        Steps made where all ranks step together; 0 elsewhere.
    waits : bool
        Whether it is in a call of its communicator.
    failed_at : float
        When it failed, by the host's monotonic clock; 0 if it did not.
    host : str
    entered : int
        How often it has entered a framework's own step, or another call in which the framework
        itself connects the ranks; 0 where d5suite's schemes do.
    inside : bool
        Whether it is in such a call.
    main_s, others_s : float
        CPU time of its main thread, and of its other threads together, as it says itself.
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
        """Return the last line; None before the first."""
        try:
            pid, ticks, steps, waits, failed_at, host, entered, inside, main_s, others_s = path.read_text().split()
        except (OSError, ValueError):
            return None
        return cls(
            int(pid), int(ticks), int(steps), waits == "1", float(failed_at), host, int(entered), inside == "1",
            float(main_s), float(others_s),
        )  # fmt: skip

    def line(self) -> str:
        """Return the line that `read` reads."""
        words = (self.pid, self.ticks, self.steps, int(self.waits), self.failed_at, self.host)
        return " ".join(map(str, (*words, self.entered, int(self.inside), self.main_s, self.others_s)))


def heartbeat_path(meeting: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return meeting / f"rank{rank}.heartbeat"


class HeartbeatWriter:
    """A rank's side: a thread that writes its heartbeat.

    Parameters
    ----------
    path : Path or None
        None if nobody watches.

    Attributes
    ----------
    steps : int
        See `Heartbeat`; the main thread counts.
    waits : callable
        Says whether the rank is in a call of its communicator.
    framework : callable
        Says how often the rank has entered a framework's own step, and how often left it.
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
        """Record that this rank fails now: the first failure is the cause."""
        self._failed_at = self._failed_at or time.monotonic()
        if self._path is not None:
            self._write()

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            self._write()

    def _write(self) -> None:
        assert self._path is not None
        with self._lock, contextlib.suppress(OSError):  # the folder goes when the job ends
            self._ticks += 1
            entered, left = self.framework()
            main_s = _threads_of(os.getpid(), [os.getpid()]).get(os.getpid(), 0.0)
            others_s = max(0.0, time.process_time() - main_s)
            heartbeat = Heartbeat(
                os.getpid(), self._ticks, self.steps, self.waits(), self._failed_at, socket.gethostname(), entered,
                entered > left, main_s, others_s,
            )  # fmt: skip
            new = self._path.with_suffix(".new")
            new.write_text(heartbeat.line() + "\n")
            new.replace(self._path)


class RankWork(NamedTuple):
    """The work of a rank.

    Attributes
    ----------
    main_s : float
        Seconds for which its main thread ran or was ready for a core.
    threads : mapping of int to float
        The same of each thread, and of those of its children.
    blocked : bool
        Whether a process of it waits for a disk.
    """

    main_s: float
    threads: Mapping[int, float]
    blocked: bool


@dataclass
class _RankState:
    """State of one rank as the watch knows it, with the times of its changes."""

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
        """Return the seconds without work; of a rank on another host, as last reported."""
        late = not self.here and now - self.ticked < SILENT_S
        return (self.ticked if late else now) - self.worked


@dataclass
class HangDetector:
    """The watching side, which finds ranks that hang.

    Attributes
    ----------
    ranks : int
    host : str
        Where the watch is: work is looked at there, and elsewhere it is what the rank says.
    """

    ranks: int
    host: str = field(default_factory=socket.gethostname)
    seen: list[_RankState] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = [_RankState() for _ in range(self.ranks)]

    def look(self, heartbeats: Sequence[Heartbeat | None], now: float) -> tuple[int, str] | None:
        """Read the ranks' heartbeats; return one that hangs and how, if any.

        A rank hangs if it does not wait, although it has done no work for `STALLED_S` or is in a
        step for far too long, while each of the others waits or has done nothing either. In a
        framework's own step a rank waits or computes, nobody knows which: it counts as waiting for
        one that has not entered it.
        """
        for seen, heartbeat in zip(self.seen, heartbeats, strict=True):
            if heartbeat is None:
                return None
            self._note(seen, heartbeat, now)
        calling, inside = (
            [now - since if since is not None else 0.0 for since in found]
            for found in ([each.waits_since for each in self.seen], [each.inside_since for each in self.seen])
        )
        idle = [each.idle_s(now) for each in self.seen]
        waiting = [max(each) for each in zip(calling, inside, strict=True)]
        locked = min(max(c, min(i, own)) for c, i, own in zip(calling, inside, idle, strict=True))
        if self.ranks > 1 and locked > DEADLOCK_S:
            return 0, f"and all others have waited for each other for {locked:.0f} s (deadlock) and were killed"
        outside = [rank for rank, waited in enumerate(waiting) if waited < STALLED_S]
        if any(idle[rank] < STALLED_S for rank in outside):
            return self._endless(outside, now)
        stuck = [rank for rank in outside if self._is_outside(rank)]
        if stuck:
            # Others may have left one more step, and wait for its end.
            rank = min(stuck, key=lambda rank: (self._entered(rank), rank))
            return rank, f"hung (no work for {idle[rank]:.0f} s) and was killed"
        return self._endless([rank for rank in range(self.ranks) if not calling[rank] and idle[rank] < STALLED_S], now)

    def _is_outside(self, rank: int) -> bool:
        return self.seen[rank].waits_since is None and self.seen[rank].inside_since is None

    def _entered(self, rank: int) -> int:
        heartbeat = self.seen[rank].heartbeat
        return heartbeat.entered if heartbeat is not None else 0

    def _endless(self, working: Sequence[int], now: float) -> tuple[int, str] | None:
        if len(working) != 1 or self.ranks == 1:
            return None
        (rank,) = working
        seen = self.seen[rank]
        took = now - seen.stepped
        if seen.longest == 0.0 or took < max(STALLED_S, PATIENCE * seen.longest):
            return None
        return rank, f"hung ({took:.0f} s in a step; at most {seen.longest:.2g} s before) and was killed"

    def _note(self, seen: _RankState, heartbeat: Heartbeat, now: float) -> None:
        before, seen.heartbeat = seen.heartbeat, heartbeat
        if before is None or heartbeat.ticks != before.ticks:
            seen.ticked = now
        if self._works(seen, before, heartbeat, now):
            seen.worked = now
        if before is None or heartbeat.steps != before.steps:
            if before is not None and 0 < before.steps < heartbeat.steps:
                seen.longest = max(seen.longest, (now - seen.stepped) / (heartbeat.steps - before.steps))
            if heartbeat.steps == 0:
                seen.longest = 0.0
            seen.stepped = now
            seen.worked = now
        # One that has been stopped cannot say that it no longer waits.
        stopped = now - seen.ticked > STALLED_S / 2 and now - seen.worked > STALLED_S / 2 and seen.here
        since = seen.waits_since, seen.inside_since
        still = not stopped and before is not None and before.steps == heartbeat.steps
        seen.waits_since = (since[0] if since[0] is not None else now) if still and heartbeat.waits else None
        still = still and before is not None and before.entered == heartbeat.entered
        seen.inside_since = (since[1] if since[1] is not None else now) if still and heartbeat.inside else None

    def _works(self, seen: _RankState, before: Heartbeat | None, heartbeat: Heartbeat, now: float) -> bool:
        """Return whether a rank has worked since the last checks."""
        seen.here = heartbeat.host == self.host
        if before is not None and (heartbeat.steps != before.steps or self._says_it_works(seen, heartbeat)):
            seen.main_s = heartbeat.main_s
            return True  # to look at the process as well costs milliseconds, on a core that may be a rank's
        work = _work_of(heartbeat.pid) if seen.here else None
        seen.here = work is not None
        if work is None:
            work = RankWork(heartbeat.main_s, {-1: heartbeat.main_s, -2: heartbeat.others_s}, False)
        found = before is None or work.blocked
        if abs(work.main_s - seen.main_s) > LEAST_CPU_S:
            seen.main_s = work.main_s
            found = found or not heartbeat.inside  # where it may ask again and again whether others have come
        if now - seen.counted >= WINDOW_S:
            least = COMPUTES * (now - seen.counted)
            found = found or any(s - seen.threads.get(each, s) > least for each, s in work.threads.items())
            seen.counted, seen.threads = now, work.threads
        return found

    @staticmethod
    def _says_it_works(seen: _RankState, heartbeat: Heartbeat) -> bool:
        return not heartbeat.inside and abs(heartbeat.main_s - seen.main_s) > LEAST_CPU_S


def _work_of(pid: int) -> RankWork | None:
    """Return the work of a process of this host and its children; None if it does not exist.

    A rank that is ready but gets no core on a crowded machine does not hang.
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
