"""Which rank hangs, by the heartbeats of all."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from d5suite.launch.heartbeat import (
    LEAST_CPU_S,
    LONG_S,
    PATIENCE,
    STALLED_S,
    FailedRank,
    HangDetector,
    Heartbeat,
    HeartbeatWriter,
    _threads_of,
)
from d5suite.launch.ranks import MEETS, describe_failed
from tests.conftest import wait_until


class Clock:
    """Ranks by hand, whose heartbeats are the writer's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> None:
        self.now, self.host, self.state, self.rank = 100.0, "here", "S", 0
        self.cpu, self.pool = [0.0] * ranks, [0.0] * ranks
        place = "d5suite.launch.heartbeat"
        monkeypatch.setattr(f"{place}.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(f"{place}._threads_of", self._threads)
        monkeypatch.setattr(f"{place}.is_running", self._is_running)
        monkeypatch.setattr(f"{place}.family_of", set)
        self.detector, self.writers = HangDetector(ranks, "here"), [HeartbeatWriter(None) for _ in range(ranks)]

    def _threads(self, pid: int, only: object = None) -> dict[int, float]:
        return {pid: self.cpu[self.rank], 0: self.pool[self.rank]}

    def _is_running(self, pid: int, states: str = "R") -> bool:
        assert self.host == "here" or states == "D", "the process is not here"
        return self.state in states

    def look(
        self, *ranks: str, steps: tuple[int, ...] = (), entered: tuple[int, ...] = (), seconds: float = 1.0
    ) -> FailedRank | None:
        """Let time pass in which a rank ``waits``, ``works``, is ``idle`` or waits ``asleep``.

        Another thread ``pools`` or ``polls`` meanwhile, as it does ``inside`` a framework's step
        where the main thread polls as well; it ``computes`` there. A ``silent`` rank does nothing.
        """
        self.now += seconds
        heartbeats = []
        for rank, (does, writer) in enumerate(zip(ranks, self.writers, strict=True)):
            self.rank = rank
            busy = 1.0 if does in ("waits", "works", "computes") else 0.03 * (does == "inside")
            self.cpu[self.rank] += seconds * busy
            self.pool[self.rank] += seconds * {"pools": 0.9, "polls": 0.15, "inside": 0.15}.get(does, 0.0)
            if does != "silent":
                often = entered[self.rank] if entered else 0
                writer.steps = steps[self.rank] if steps else 0
                writer.calls = lambda does=does: (0, does in ("waits", "asleep"))  # type: ignore[misc]
                left = often - (does in ("inside", "computes"))
                writer.framework = lambda often=often, left=left: (often, left)  # type: ignore[misc]
                found = writer._look()
                writer._last = replace(found, ticks=found.ticks + 1, host=self.host)
            heartbeats.append(writer._last)
        return self.detector.check(heartbeats, self.now)


@pytest.mark.parametrize("innocent", ["waits", "asleep", "idle", "works", "inside"])
@pytest.mark.parametrize("before", ["works", "idle", "asleep", "inside"])
def test_a_stopped_rank_hangs_whatever_it_and_the_others_do(
    before: str, innocent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    entered = (1, 1) if "inside" in (before, innocent) else ()
    clock.look(innocent, before, entered=entered)
    clock.state = "T"
    found = [clock.look(innocent, "silent", entered=entered, seconds=0.25) for _ in range(26)]
    assert not any(found[:20])  # 5 s
    named = next(filter(None, found))
    assert named[:2] == (1, "hung (no heartbeat for 6 s, stopped by a signal) and was killed")


@pytest.mark.parametrize("state", ["R", "D", "t"])
def test_native_code_a_disk_or_a_debugger_may_hold_a_rank(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.look("works", "works")
    clock.state = state
    assert not any(clock.look("waits", "silent") for _ in range(300))


def test_a_pause_of_everything_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.look("works", "works")
    for _ in range(10):
        clock.look("waits", "works", steps=(9, 9))
        assert clock.look("silent", "silent", steps=(9, 9), seconds=1000.0) is None
        assert clock.look("asleep", "idle", steps=(9, 9), seconds=1000.0) is None


def test_a_rank_that_has_ended_sends_no_heartbeats_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.look("works", "works")
    clock.writers[1]._last = replace(clock.writers[1]._last, waits=True, over=True)
    assert not any(clock.look("works", "silent") for _ in range(300))
    assert any(clock.look("idle", "silent") for _ in range(10))


def test_a_rank_that_waits_is_not_blamed_though_it_waits_for_less_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.look("works", "works")
    clock.look("idle", "idle", seconds=0.7)  # until its heartbeat says that it waits
    found = filter(None, (clock.look("asleep", "idle", seconds=0.25) for _ in range(40)))
    rank, how, _ = next(found)
    assert rank == 1 and how.startswith("hung (no work for ")


def test_waiting_for_a_rank_that_works_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert not any(clock.look("waits", "works") for _ in range(300))
    assert not any(clock.look("idle", "works") for _ in range(300))  # for a lock that it holds
    assert not any(clock.look("waits", "waits", steps=(n, n)) for n in range(1, 300))


def test_waiting_for_a_core_is_work_and_sleep_is_none() -> None:
    spin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(_ended(sys.executable, "-c", spin)).pid for _ in range(4)]
        sleeper = stack.enter_context(_ended("sleep", "1000")).pid
        wait_until(lambda: psutil.Process(sleeper).status() == psutil.STATUS_SLEEPING, "sleep")
        slept, before, ran = _main_s(sleeper), _main_s(crowd[0]), _ran_s(crowd[0])
        wait_until(lambda: _main_s(crowd[0]) - before > 2.0, "two seconds of running or waiting")
        assert _ran_s(crowd[0]) - ran < 1.8  # else it was ready, and had no core
        assert _main_s(sleeper) - slept < LEAST_CPU_S


def _main_s(pid: int) -> float:
    return _threads_of(pid)[pid]


def _ran_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def _ended(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_rank_without_work_that_others_wait_for_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 3)
    clock.look("works", "works", "works")
    found = [clock.look("waits", "idle", "waits") for _ in range(int(STALLED_S) + 2)]
    assert found[-1] is not None and found[-1][0] == 1
    assert not any(found[: int(STALLED_S) - 1])


@pytest.mark.parametrize("hung", ["idle", "polls"])
@pytest.mark.parametrize("others", ["inside", "computes", "idle"])
def test_who_has_not_entered_the_frameworks_step_hangs(hung: str, others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait in it, perhaps without sleeping; or they have left it, and wait for its end."""
    clock = Clock(monkeypatch, 3)
    clock.look("works", "works", "works", entered=(4, 4, 4))
    looks = range(int(STALLED_S) + 2)
    found = [clock.look(others, hung, others, entered=(5, 4, 5)) for _ in looks]
    assert found[-1] is not None and found[-1][0] == 1 and found[-1][1].startswith("hung (no work for ")
    assert not any(found[: int(STALLED_S) - 1])


def test_who_computes_before_or_in_the_frameworks_step_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.look("works", "works", entered=(4, 4))
    assert not any(clock.look("inside", "pools", entered=(5, 4)) for _ in range(300))
    assert not any(clock.look("inside", "works", entered=(5, 4)) for _ in range(300))
    assert not any(clock.look("inside", "computes", entered=(5, 5)) for _ in range(300))
    assert not any(clock.look("waits", "computes", entered=(5, 5)) for _ in range(300))


def test_ranks_that_all_wait_in_the_frameworks_step_are_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.look("works", "works", entered=(4, 4))
    found = [clock.look("inside", "asleep", entered=(5, 5)) for _ in range(int(LONG_S) + 3)]
    assert found[-1] is not None and "and all others have waited for each other" in found[-1][1]
    assert not any(found[: int(LONG_S) - 1])


def test_a_framework_step_that_never_ends_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for step in range(1, 10):
        assert clock.look("works", "works", steps=(step, step), entered=(step, step)) is None
    found = [clock.look("inside", "computes", steps=(9, 9), entered=(10, 10)) for _ in range(2 * PATIENCE)]
    assert found[-1] is not None and found[-1][0] == 1 and "s in a step; at most" in found[-1][1]
    assert not any(found[: PATIENCE - 2])


def test_of_a_rank_on_another_host_its_own_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.host = "elsewhere"
    clock.look("works", "works")
    assert not any(clock.look("waits", does) for does in ("works", "pools") for _ in range(100))
    assert not any(clock.look("silent", "silent") for _ in range(int(LONG_S) - 2))  # files are late
    found = [clock.look("waits", "idle") for _ in range(int(STALLED_S) + 2)]
    assert found[-1] is not None and found[-1].rank == 1
    silent = Clock(monkeypatch)
    silent.host = "elsewhere"
    silent.look("works", "works")
    gone = [silent.look("waits", "silent") for _ in range(int(LONG_S) + 2)]
    assert gone[-1] is not None and gone[-1].rank == 1
    assert not any(gone[: int(LONG_S) - 1])


def test_a_step_that_never_ends_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for step in range(1, 10):
        assert clock.look("works", "works", steps=(step, step)) is None
    found = [clock.look("waits", "works", steps=(9, 9)) for _ in range(2 * PATIENCE)]
    assert found[-1] is not None and found[-1][0] == 1
    assert not any(found[: PATIENCE - 2])


def test_ranks_that_wait_for_each_other_are_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = [clock.look("waits", "waits") for _ in range(int(LONG_S) + 3)]
    assert found[-1] is not None and "deadlock" in found[-1][1]
    assert not any(found[: int(LONG_S) - 1])


@pytest.mark.parametrize("other", ["here", "elsewhere"])
def test_hosts_that_cannot_connect_are_told_of_the_network(other: str, tmp_path: Path) -> None:
    result = tmp_path / "job.result.json"
    result.write_text(json.dumps({"phase": MEETS}))
    ranks = [Heartbeat(1, "here", waits=True, stack=["_connect (gloo.py:146)"]), Heartbeat(2, other, waits=True)]
    said = describe_failed(result, FailedRank(0, "and all others have waited (deadlock)", hung=True), ranks)
    assert said.startswith("rank 0 of 2 on here and all others have waited (deadlock), while meeting the other ranks")
    told = "packets may be dropped between the hosts: choose another network with --interface" in said
    assert told == (other == "elsewhere")
    assert "\n  rank 0: waits for others, in _connect (gloo.py:146)\n  rank 1: waits for others" in said
