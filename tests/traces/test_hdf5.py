"""A trace as an HDF5 file and back, and what is no such file."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from d5suite.cli import main
from d5suite.report.timeline.write import page
from d5suite.traces.analysis import analyse
from d5suite.traces.events import COLUMNS, CollectiveOp, MetricSeries, Region, Trace
from d5suite.traces.hdf5 import read_hdf5, write_hdf5
from tests.traces.made import call, collective, recv, send, steps_of_ranks, trace_of


def made() -> Trace:
    first = [*call("MPI_Send", 10, 20, send(11, to=1)), *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 30, 60)]
    second = [*call("MPI_Recv", 0, 25, recv(24, of=0)), *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 40, 61)]
    trace = trace_of(first, second)
    odd = Region("\"><script>'\u00e9</script>", "function", False, 'a"b.py', 7)
    return replace(
        trace, regions=[*trace.regions, odd], notes=("rank 1 dropped 3 events",), properties={"clock error ns": "12"},
        metrics=[MetricSeries("memory", "bytes", 1, np.array([5, 6]), np.array([0.5, np.pi]))],
    )  # fmt: skip


def equal(one: Trace, other: Trace) -> None:
    for name in ("locations", "communicators", "notes"):
        assert list(getattr(one, name)) == list(getattr(other, name)), name
    assert one.properties == other.properties and one.ticks_per_second == other.ticks_per_second
    for ours, theirs in zip(one.events, other.events, strict=True):
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column), err_msg=column)
    for mine, its in zip(one.metrics, other.metrics, strict=True):
        assert (mine.name, mine.unit, mine.location) == (its.name, its.unit, its.location)
        assert mine.time.tolist() == its.time.tolist() and mine.value.tolist() == its.value.tolist()


def test_a_trace_is_the_same_after_hdf5_and_otf2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("otf2")
    trace = made()
    write_hdf5(trace, tmp_path / "trace.h5")
    found = read_hdf5(tmp_path / "trace.h5")
    equal(found, trace)
    assert found.regions == trace.regions
    assert main(["trace", "convert", str(tmp_path / "trace.h5"), "-o", str(tmp_path / "archive")]) == 0
    assert main(["trace", "convert", str(tmp_path / "archive"), "-o", str(tmp_path / "again.h5")]) == 0
    equal(read_hdf5(tmp_path / "again.h5"), trace)  # notes and properties, too, went through the archive
    assert main(["trace", "analyze", str(tmp_path / "again.h5")]) == 0
    assert "rank 1 dropped 3 events" in capsys.readouterr().out

    assert main(["trace", "convert", str(tmp_path / "again.h5"), "-o", str(tmp_path / "archive")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["trace", "convert", str(tmp_path / "again.h5"), "-o", str(tmp_path / "a.txt")]) == 2
    assert "ends neither with .json nor with .h5" in capsys.readouterr().err


def test_what_is_no_trace_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.h5"
    write_hdf5(made(), path)
    whole = path.read_bytes()

    def said() -> str:
        assert main(["trace", "analyze", str(path)]) == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
        return message

    path.write_bytes(whole[:200])
    assert "is no HDF5 file, or is damaged" in said()
    with h5py.File(path, "w") as file:
        file["samples"] = [1.0]
    assert "is no trace of d5suite" in said()
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file["events/0/region"][0] = 99
    assert "an event is in a region that is not defined" in said()


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Planted: no file may grow beyond 4 KiB."""
    pytest.importorskip("otf2")
    pytest.importorskip("resource")
    write_hdf5(steps_of_ranks(20_000), tmp_path / "trace.h5")
    before = sorted(tmp_path.rglob("*"))
    code = (
        "import resource, sys\n"
        "from d5suite.cli import main\n"
        "main(['trace', 'analyze', sys.argv[1]])\n"
        "sys.dont_write_bytecode = True  # Python would keep a compiled module that is cut off\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "print('codes', *(main(['trace', 'convert', sys.argv[1], '-o', name]) for name in sys.argv[2:]))\n"
    )
    outputs = [str(tmp_path / name) for name in ("archive", "again.h5", "trace.json")]
    words = [sys.executable, "-c", code, str(tmp_path / "trace.h5"), *outputs]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert "codes 2 2 2" in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("cannot be written") == 3 and "Traceback" not in done.stderr, done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_million_events_are_read_analysed_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "trace.h5"
    trace = steps_of_ranks(1_000_000)
    events, ticks = len(trace), trace.end - trace.begin
    write_hdf5(trace, path)
    found = analyse(read_hdf5(path))
    assert events > 990_000 and len(found.trace) == events
    for rank in found.ranks:
        assert rank.computing + rank.waiting + rank.communicating + rank.outside == ticks
    assert len(page(found, title="many")) < 10_000_000
