"""Liveness of ranks: heartbeats that ranks write, and a detector of ranks that hang.

A thread of each rank writes a heartbeat twice a second: what the rank does, for how long, and where
in the code. The launcher reads the heartbeats, or rank 0 if d5suite did not start the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from d5suite.launch.processes import family_of, is_running

PERIOD_S = 0.5
"""Seconds between two heartbeats; writing one takes less than 0.2 ms."""

STALLED_S = 6.0
"""Seconds without a heartbeat, or without work while the others wait, after which a rank hangs."""

LONG_S = 60.0
"""The same where a long wait may be legitimate: shared file systems show heartbeats of another host
late, and all ranks may be in one long collective."""

PATIENCE = 20
"""A step hangs if it takes 20 s and 20 times as long as any step before, while other ranks wait."""

LEAST_CPU_S, COMPUTES = 0.05, 0.5
"""CPU time of the main thread, and busy fraction of another thread, that count as work. A thread
that only polls, as Horovod's does each millisecond, sleeps most of the time."""

FRAMES = 4
"""Number of frames of the main thread's stack in a heartbeat."""


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of a rank. A rank that is stopped or paused counts no seconds meanwhile.

    Attributes
    ----------
    pid : int
    host : str
    ticks : int
        Number of heartbeats written.
    steps : int
        Number of steps made while all ranks step together; 0 at other times.
    step_s, longest_s : float
        Seconds of the current step, and of the longest step before.
    waits : bool
        Whether the rank is inside a call of its communicator, or has ended.
    inside : bool
        Whether the rank is inside a call in which the framework itself connects the ranks, such as
        a framework's own step. Whether it waits or computes there is unknown.
    entered : int
        Number of such calls that the rank has entered; 0 with d5suite's schemes.
    same_s, idle_s : float
        Seconds since the rank entered or left a call of either kind or made a step, and seconds
        without work.
    failed_at : float
        When the rank failed, by the host's monotonic clock; 0 if it has not.
    over : bool
        Whether the rank has ended; it sends no more heartbeats.
    stack : sequence of str
        Where the main thread is, innermost call first.
    """

    pid: int
    host: str
    ticks: int = 0
    steps: int = 0
    step_s: float = 0.0
    longest_s: float = 0.0
    waits: bool = False
    inside: bool = False
    entered: int = 0
    same_s: float = 0.0
    idle_s: float = 0.0
    failed_at: float = 0.0
    over: bool = False
    stack: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Heartbeat | None:
        """Return the last heartbeat in a file; None before the first."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError):
            return None

    @property
    def in_call(self) -> bool:
        """Whether the rank is inside a call of either kind."""
        return self.waits or self.inside

    @property
    def is_quiet(self) -> bool:
        """Whether the rank has been inside one call, or without work, for `STALLED_S`."""
        return self.over or (self.same_s >= STALLED_S and (self.in_call or self.idle_s >= STALLED_S))

    @property
    def computes(self) -> bool:
        """Whether the rank does work, but waits for none of the others."""
        return not self.waits and self.idle_s < STALLED_S

    def __str__(self) -> str:
        """Return what the rank does, and where."""
        does = (
            "has ended" if self.over else "waits for others" if self.waits else "in the framework's own step"
            if self.inside else "computes" if self.computes else "without work"
        )  # fmt: skip
        return f"{does}, in {' from '.join(self.stack)}" if self.stack and not self.over else does


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
    calls : callable
        Returns how many calls of its communicator the rank has made, and whether it is inside one.
    framework : callable
        Returns how often the rank has entered, and how often it has left, a framework's own step.
    """

    def __init__(self, path: Path | None) -> None:
        self.steps = 0
        self.calls: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self.framework: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._path, self._lock, self._main = path, threading.Lock(), threading.get_ident()
        self._last = Heartbeat(os.getpid(), socket.gethostname())
        self._place: tuple[object, ...] = ()
        self._looked = time.monotonic()
        self._main_s, self._threads = 0.0, dict[int, float]()
        if path is not None:
            self._write(self._last)
            threading.Thread(target=self._run, daemon=True).start()

    def fail(self) -> None:
        """Record that this rank fails now: the rank that fails first is the cause."""
        self.end(self._last.failed_at or time.monotonic())

    def end(self, failed_at: float = 0.0) -> None:
        """Record that this rank ends now: no heartbeat follows."""
        if self._path is not None:
            self._write(replace(self._last, waits=True, over=True, failed_at=failed_at))

    def _run(self) -> None:
        while not self._last.over:
            time.sleep(PERIOD_S)
            self._write(self._look())

    def _write(self, heartbeat: Heartbeat) -> None:
        assert self._path is not None
        with self._lock, contextlib.suppress(OSError):  # the folder is removed when the job ends
            if self._last.over and not heartbeat.over:
                return
            self._last = replace(heartbeat, ticks=self._last.ticks + 1)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(asdict(self._last)))
            new.replace(self._path)

    def _look(self) -> Heartbeat:
        """Return what the rank is doing now."""
        last, now = self._last, time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * PERIOD_S), now
        (entered, left), (called, waits), steps = self.framework(), self.calls(), self.steps
        place, before = (entered, left, called, waits, steps), self._place
        self._place = place
        made, step_s, longest_s = steps - last.steps, last.step_s + passed, last.longest_s
        if made > 0 and last.steps:
            longest_s = max(longest_s, step_s / made)
        idle_s = last.idle_s + passed
        works = made != 0 or self._has_worked(waits, entered > left, idle_s, passed)
        return Heartbeat(
            last.pid, last.host, last.ticks, steps, 0.0 if made else step_s, longest_s if steps else 0.0, waits,
            entered > left, entered, last.same_s + passed if place == before else 0.0, 0.0 if works else idle_s,
            stack=self._stack(),
        )  # fmt: skip

    def _has_worked(self, waits: bool, inside: bool, idle_s: float, passed_s: float) -> bool:
        """Return whether the rank has worked lately.

        Time for which a thread waited for a core counts: on a crowded machine a rank without a core
        does not hang. Other threads, and child processes, are examined only before the rank would
        count as hanging, because that takes milliseconds.
        """
        own = _threads_of(os.getpid(), [os.getpid()])
        main_s = own[os.getpid()] if own else time.process_time()
        if main_s - self._main_s > LEAST_CPU_S:
            self._main_s = main_s
            if not inside:  # where the main thread may only poll for the others
                return True
        if waits or idle_s < STALLED_S / 2:
            self._threads = {}
            return False
        before, self._threads = self._threads, {}
        for pid in family_of([os.getpid()]):
            self._threads |= _threads_of(pid)
            if is_running(pid, "D"):  # waits for a disk
                return True
        return any(s - before.get(each, s) > COMPUTES * passed_s for each, s in self._threads.items())

    def _stack(self) -> list[str]:
        frame, found = sys._current_frames().get(self._main), list[str]()
        while frame is not None and len(found) < FRAMES:
            found.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
            frame = frame.f_back
        return found


class FailedRank(NamedTuple):
    """The rank that ended a job; ``how`` completes the sentence "rank N …".

    ``hung`` says whether it helps to know where all ranks are.
    """

    rank: int
    how: str
    hung: bool = False


@dataclass
class HangDetector:
    """Finds ranks that hang.

    Attributes
    ----------
    ranks : int
    host : str
        The host of the detector.
    """

    ranks: int
    host: str = field(default_factory=socket.gethostname)

    def __post_init__(self) -> None:
        self._ticks, self._silent_s = [0] * self.ranks, [0.0] * self.ranks
        self._looked: float | None = None

    def check(self, heartbeats: Sequence[Heartbeat | None], now: float) -> FailedRank | None:
        """Return a rank that hangs, given the ranks' last heartbeats; None if no rank hangs.

        A rank hangs if it sends no heartbeats, or if it does not wait and has done no work for
        `STALLED_S`, or has been in one step for far too long, while each of the others waits or
        does no work either. A rank inside a framework's own step counts as waiting for one that has
        not entered the step.
        """
        # A pause of this process, or of the whole machine, does not count as silence of the ranks.
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * PERIOD_S)
        self._looked = now
        for rank, each in enumerate(heartbeats):
            if each is None:
                continue
            here = each.host == self.host
            silent_s = self._silent_s[rank] = 0.0 if self._lives(rank, each, here) else self._silent_s[rank] + passed
            self._ticks[rank] = each.ticks
            if silent_s >= (STALLED_S if here else LONG_S):
                stopped = ", stopped by a signal" if here and is_running(each.pid, "T") else ""
                return FailedRank(rank, f"hung (no heartbeat for {silent_s:.0f} s{stopped}) and was killed", hung=True)
        if None in heartbeats or max(self._silent_s) >= STALLED_S / 2:
            return None  # a silent rank's last heartbeat may be out of date
        return _hanging([each for each in heartbeats if each is not None])

    def _lives(self, rank: int, heartbeat: Heartbeat, here: bool) -> bool:
        """Return whether a rank has sent a heartbeat since the last check, or cannot at present.

        Native code may keep the interpreter to itself, and a debugger or the disk may hold a rank.
        """
        if heartbeat.over or heartbeat.ticks != self._ticks[rank]:
            return True
        return here and self._silent_s[rank] > 2 * PERIOD_S and is_running(heartbeat.pid, "RDt")


def _hanging(ranks: Sequence[Heartbeat]) -> FailedRank | None:
    """Return a rank that hangs, given current heartbeats; None if no rank hangs."""
    quiet, busy = [each.is_quiet for each in ranks], [rank for rank, each in enumerate(ranks) if each.computes]
    stuck = [rank for rank, each in enumerate(ranks) if not each.in_call]
    if all(quiet) and stuck:
        # Ranks that have entered one more step may have left it already, and wait for its end.
        rank = min(stuck, key=lambda rank: (ranks[rank].entered, rank))
        return FailedRank(rank, f"hung (no work for {ranks[rank].idle_s:.0f} s) and was killed", hung=True)
    if len(busy) == 1 and all(quiet[rank] for rank in range(len(ranks)) if rank not in busy):
        step_s, longest_s = ranks[busy[0]].step_s, ranks[busy[0]].longest_s
        if longest_s and step_s >= PATIENCE * max(1.0, longest_s):
            how = f"hung ({step_s:.0f} s in a step; at most {longest_s:.2g} s before) and was killed"
            return FailedRank(busy[0], how, hung=True)
    locked = min(each.same_s if each.waits else min(each.same_s, each.idle_s) for each in ranks)
    if not stuck and locked >= LONG_S and not any(each.over for each in ranks):
        how = f"and all others have waited for each other for {locked:.0f} s (deadlock) and were killed"
        return FailedRank(0, how, hung=True)
    return None


def describe_stacks(heartbeats: Sequence[Heartbeat | None]) -> str:
    """Return a line for each place where ranks are, such as "ranks 0, 2: waits, in …"."""
    places: dict[str, list[str]] = {}
    for rank, each in enumerate(heartbeats):
        if each is not None:
            places.setdefault(str(each), []).append(str(rank))
    lines = (f"\n  rank{'s' * (len(of) > 1)} {', '.join(of)}: {place}" for place, of in places.items())
    return "\nWhere each rank was last seen:" + "".join(lines)


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
