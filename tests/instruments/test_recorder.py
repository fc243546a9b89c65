"""The recorder: what it keeps of a killed process, what it drops, and on which clock ranks meet."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from d5suite.distributed.clocks import compare_clocks
from d5suite.distributed.communicators.threads import run
from d5suite.errors import TraceError
from d5suite.instruments import recorder as recorders
from d5suite.instruments.recorder import Recorder, RecorderError
from d5suite.levels.distributed import Communicator
from d5suite.traces.calls import calls_of
from d5suite.traces.events import Trace
from d5suite.traces.recorded import read_recording


def ticking(start: int = 1000, step: int = 10) -> Callable[[], int]:
    """A clock that goes on by a step each time that it is read."""
    return itertools.count(start, step).__next__


def spans(trace: Trace, location: int = 0) -> list[tuple[str, int, int]]:
    calls = calls_of(trace.events[location])
    rows = zip(calls.region.tolist(), calls.enter.tolist(), calls.leave.tolist(), strict=True)
    return [(trace.regions[region].name, enter, leave) for region, enter, leave in rows]


def test_what_is_recorded_is_read_and_names_do_no_harm(tmp_path: Path) -> None:
    name = "\"><script>alert('x')</script>\n\u00e9"
    one = Recorder(tmp_path / "run", "rank 0", run="a")
    inner = one.recorded(lambda: one.stream().read(one.metric("memory", "bytes"), 2.5), one.region(name))
    with one.inside(one.region("step")):
        inner()
        thread = threading.Thread(target=inner, name="courier")
        thread.start()
        thread.join()
    one.close()
    trace = read_recording(tmp_path / "run")
    assert [each.name for each in trace.locations] == ["main", "courier"] and trace.homes == [0, 0]
    assert [span[0] for span in spans(trace)] == ["step", name] and [span[0] for span in spans(trace, 1)] == [name]
    assert [(each.name, each.unit, each.value.tolist()) for each in trace.metrics] == [("memory", "bytes", [2.5])] * 2
    assert not trace.notes and trace.properties["dropped events"] == "0"


def test_what_does_not_fit_is_dropped_counted_and_leaves_whole_regions(tmp_path: Path) -> None:
    one = Recorder(tmp_path / "run", "rank 0", run="a", events=8)
    outer, region = one.region("outer"), one.region("inner")
    with one.inside(outer):
        for _ in range(10):
            with one.inside(region):
                pass
    one.close()
    trace = read_recording(tmp_path / "run")
    assert [name for name, *_ in spans(trace)] == ["outer", "inner", "inner", "inner"]
    assert calls_of(trace.events[0]).unfinished == 0
    assert trace.notes == ("rank 0 dropped 14 events for lack of room: the end is missing",)
    assert sum(path.stat().st_size for path in (tmp_path / "run").glob("*.events")) == 8 * 64


def test_a_killed_process_leaves_its_events(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal, pathlib\n"
        "from d5suite.instruments.recorder import Recorder\n"
        "one = Recorder(pathlib.Path(sys.argv[1]), 'rank 1', run='a')\n"
        "step, conv = one.region('step'), one.region('conv1')\n"
        "stream = one.stream()\n"
        "stream.enter(step); stream.enter(conv); stream.leave(conv); stream.enter(conv)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    other = Recorder(folder, "rank 0", run="a")
    other.close()
    trace = read_recording(folder)
    assert [each.process for each in trace.locations] == ["rank 0", "rank 1"]
    assert [name for name, *_ in spans(trace, 1)] == ["step", "conv1", "conv1"]
    assert calls_of(trace.events[1]).unfinished == 2
    assert "rank 1 did not end its recording, as if it was killed: its last events count" in trace.notes


def test_a_full_disk_and_a_folder_in_use_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Recorder(tmp_path / "run", "rank 0", run="a")
    with pytest.raises(RecorderError, match="holds a recording of rank 0 already\n  Record each run into a new folder"):
        Recorder(tmp_path / "run", "rank 0", run="a")
    one.close()
    other = Recorder(tmp_path / "run", "rank 1", run="b")
    other.close()
    with pytest.raises(TraceError, match=r"holds recordings of two runs\n  Move these elsewhere: rank1.jsonl"):
        read_recording(tmp_path / "run")

    def full(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorders, "_reserve", full)
    with pytest.raises(RecorderError, match=r"no room for the events of a thread \(8 MiB\): No space left on device"):
        Recorder(tmp_path / "full", "rank 0", run="a")
    assert not list((tmp_path / "full").glob("*.events"))


@pytest.mark.parametrize("damage", ["{", '{"recording": 7}', '{"recording": 1}', "[]"])
def test_a_damaged_recording_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "rank0.jsonl").write_text(damage + "\n")
    with pytest.raises(TraceError, match=r"is no recording of this version of d5suite|is damaged"):
        read_recording(tmp_path)


OFFSET_NS, DRIFT = 40_000_000_000, 80e-6


def recorded_by_two(folder: Path, clock: Callable[[], int], *, boot: bool = False) -> Trace:
    """Two ranks that enter a region at the same moments, the second with another clock."""

    def work(communicator: Communicator) -> None:
        own = clock if communicator.rank else time.perf_counter_ns
        one = Recorder(folder, f"rank {communicator.rank}", run="a", clock=own)
        one.say_clock(*compare_clocks(communicator, own, rounds=30))
        region = one.region("step")
        for _ in range(20):
            communicator.barrier()
            with one.inside(region):
                time.sleep(0.005)
        one.say_clock(*compare_clocks(communicator, own, rounds=30))
        one.close()

    run(2, work)
    return read_recording(folder)


def test_clocks_of_ranks_are_aligned_with_offset_and_drift(tmp_path: Path) -> None:
    begin = time.perf_counter_ns()
    trace = recorded_by_two(
        tmp_path / "run", lambda: OFFSET_NS + (now := time.perf_counter_ns()) + int((now - begin) * DRIFT)
    )
    error = int(trace.properties["clock error ns"])
    first, second = (np.array([enter for _, enter, _ in spans(trace, rank)]) for rank in (0, 1))
    assert 0 < error < 50_000_000
    # Both ranks leave a barrier at about the same time; threads wake up when they may.
    assert np.median(np.abs(first - second)) < error + 5_000_000
    assert not trace.notes


def test_one_clock_of_one_host_is_not_made_worse(tmp_path: Path) -> None:
    trace = recorded_by_two(tmp_path / "run", time.perf_counter_ns)
    assert trace.properties["clock error ns"] == "0" and not trace.notes


def test_a_clock_that_jumps_is_reported(tmp_path: Path) -> None:
    begin = time.perf_counter_ns()

    def jumping() -> int:
        now = time.perf_counter_ns()
        return OFFSET_NS + now + (900_000_000 if now - begin > 60_000_000 else 0)

    (note,) = recorded_by_two(tmp_path / "run", jumping).notes
    assert note.startswith("the clock of rank 1 jumped: against the first rank's it moved by 9")


def test_a_clock_that_goes_back_is_reported_and_times_do_not_decrease(tmp_path: Path) -> None:
    times = iter([1000, 1000, 2000, 3000, 2500, 4000, 5000])
    one = Recorder(tmp_path / "run", "rank 0", run="a", clock=lambda: next(times))
    for _ in range(2):
        with one.inside(one.region("step")):
            pass
    one.close()
    trace = read_recording(tmp_path / "run")
    assert (np.diff(trace.events[0].time) >= 0).all()
    assert trace.notes[0].startswith("the clock of rank 0 went back 1 times, by up to 0.0005 ms")


def test_recording_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    one = Recorder(tmp_path / "run", "rank 0", run="a", clock=ticking())
    one.close()
    assert len(os.listdir("/proc/self/fd")) == before if before else True
