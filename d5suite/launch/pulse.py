"""How a rank shows that it lives, and how its launcher tells one that hangs from one that waits.

A thread of each rank writes a line into a file of the meeting folder; the launcher reads it.
Imports psutil lazily.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PERIOD_S = 0.5
"""Between two lines; one takes 30 µs."""

STALLED_S = 6.0
"""Seconds without any work after which a rank that the others wait for is taken to hang: it is
named within 10."""

PATIENCE = 20
"""A step that takes this many times as long as the longest one before hangs, if all others wait."""

DEADLOCK_S = 60.0
"""Seconds after which ranks that all wait for each other are taken to do so for ever; a collective
may take long."""

LEAST_CPU_S = 0.05
"""CPU time, or time ready for a core, that counts as work; a rank's own pulse takes a hundredth of
that in `STALLED_S`."""


@dataclass(frozen=True)
class Pulse:
    """What a rank last wrote.

    Attributes
    ----------
    pid : int
    ticks : int
        Lines written.
    beats : int
        Steps made where all ranks step together; 0 elsewhere.
    waits : bool
        Whether it is in a call of its communicator.
    failed_at : float
        When it failed, by the host's monotonic clock; 0 if it did not.
    host : str
    """

    pid: int
    ticks: int
    beats: int
    waits: bool
    failed_at: float
    host: str

    @classmethod
    def read(cls, path: Path) -> Pulse | None:
        """The last line; None before the first."""
        try:
            pid, ticks, beats, waits, failed_at, host = path.read_text().split()
        except (OSError, ValueError):
            return None
        return cls(int(pid), int(ticks), int(beats), waits == "1", float(failed_at), host)


def pulse_path(meeting: Path, rank: int) -> Path:
    """Where a rank's pulse is."""
    return meeting / f"rank{rank}.pulse"


class Heart:
    """A rank's side: a thread that writes its pulse.

    Parameters
    ----------
    path : Path or None
        None if nobody watches.

    Attributes
    ----------
    beats : int
        See `Pulse`; the main thread counts.
    waits : callable
        Says whether the rank is in a call of its communicator.
    """

    def __init__(self, path: Path | None) -> None:
        self.beats = 0
        self.waits: Callable[[], bool] = lambda: False
        self._path, self._ticks, self._failed_at = path, 0, 0.0
        self._lock = threading.Lock()
        if path is not None:
            self._write()
            threading.Thread(target=self._run, daemon=True).start()

    def fail(self) -> None:
        """Note that this rank fails now: the first that does is the one to blame."""
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
            line = f"{os.getpid()} {self._ticks} {self.beats} {int(self.waits())} {self._failed_at}"
            new = self._path.with_suffix(".new")
            new.write_text(f"{line} {socket.gethostname()}\n")
            new.replace(self._path)


@dataclass
class _Seen:
    """What the launcher knows of one rank, with the times since when it has been so."""

    pulse: Pulse | None = None
    ticked: float = 0.0
    beaten: float = 0.0
    longest: float = 0.0
    worked: float = 0.0
    cpu_s: float = 0.0
    waits_since: float | None = None


@dataclass
class Watch:
    """The launcher's side: which ranks hang."""

    ranks: int
    seen: list[_Seen] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = [_Seen() for _ in range(self.ranks)]

    def look(self, pulses: Sequence[Pulse | None], now: float) -> tuple[int, str] | None:
        """Take in the ranks' pulses; return one that hangs and how, if any.

        A rank hangs if it does not wait, although it has used no CPU time for `STALLED_S` or is in
        a step for far too long, while each of the others waits or has done nothing either.
        """
        for seen, pulse in zip(self.seen, pulses, strict=True):
            if pulse is None:
                return None
            self._note(seen, pulse, now)
        waiting = [now - each.waits_since if each.waits_since is not None else 0.0 for each in self.seen]
        if self.ranks > 1 and min(waiting) > DEADLOCK_S:
            return 0, f"and all others have waited for each other for {min(waiting):.0f} s (deadlock) and were killed"
        if any(
            waited < STALLED_S and now - each.worked < STALLED_S
            for waited, each in zip(waiting, self.seen, strict=True)
        ):
            return self._endless(waiting, now)
        idle = [rank for rank, seen in enumerate(self.seen) if seen.waits_since is None]
        if not idle:
            return None
        return idle[0], f"hung (no work for {now - self.seen[idle[0]].worked:.0f} s) and was killed"

    def _endless(self, waiting: Sequence[float], now: float) -> tuple[int, str] | None:
        (rank, *others) = [rank for rank, waited in enumerate(waiting) if waited < STALLED_S]
        seen = self.seen[rank]
        took = now - seen.beaten
        if others or self.ranks == 1 or seen.longest == 0.0 or took < max(STALLED_S, PATIENCE * seen.longest):
            return None
        return rank, f"hung ({took:.0f} s in a step; at most {seen.longest:.2g} s before) and was killed"

    def _note(self, seen: _Seen, pulse: Pulse, now: float) -> None:
        before, seen.pulse = seen.pulse, pulse
        cpu_s, blocked = _work_of(pulse.pid)
        if before is None or blocked or abs(cpu_s - seen.cpu_s) > LEAST_CPU_S:  # less: a child has ended
            seen.cpu_s, seen.worked = cpu_s, now
        if before is None or pulse.ticks != before.ticks:
            seen.ticked = now
        if before is None or pulse.beats != before.beats:
            if before is not None and 0 < before.beats < pulse.beats:
                seen.longest = max(seen.longest, (now - seen.beaten) / (pulse.beats - before.beats))
            if pulse.beats == 0:
                seen.longest = 0.0
            seen.beaten = now
            seen.worked = now
        # One that has been stopped cannot say that it no longer waits.
        waits = pulse.waits and not (now - seen.ticked > STALLED_S / 2 and now - seen.worked > STALLED_S / 2)
        still = waits and before is not None and before.beats == pulse.beats
        seen.waits_since = (seen.waits_since if seen.waits_since is not None else now) if still else None


def _work_of(pid: int) -> tuple[float, bool]:
    """Seconds that a process and its children ran or could have, and whether one waits for a disk.

    A rank that is ready but gets no core on a crowded machine does not hang.
    """
    import psutil

    total, blocked = 0.0, False
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system + _waited_for_a_core_s(each.pid)
                blocked = blocked or each.status() == psutil.STATUS_DISK_SLEEP
    return total, blocked


def _waited_for_a_core_s(pid: int) -> float:
    """Seconds that a process's main thread was ready to run and did not; 0 if the kernel is silent.

    The second figure of ``/proc/PID/schedstat`` (Linux: Documentation/scheduler/sched-stats.rst).
    Other threads, such as that of the pulse, wake by themselves: they say nothing of the work.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0
