"""OTF2 archives: what is written is read again, by us, by the library's own reader and by
``otf2-print``; what others write is read."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d5suite.errors import TraceError
from d5suite.traces.archive import read_archive, write_archive
from d5suite.traces.chrome import write_chrome
from d5suite.traces.events import COLUMNS, CollectiveOp, Comm, EventKind, Events, Location, MetricSeries, Region, Trace
from d5suite.traces.reading import read_trace
from tests.traces.made import call, collective, irecv, irecv_request, isend, isend_complete, recv, send, trace_of

otf2: Any = pytest.importorskip("otf2")


def whole() -> Trace:
    """A trace with an event of every kind."""
    return trace_of(
        [
            *call("MPI_Send", 10, 20, send(11, to=1, tag=3, size=2**40)),
            *call("MPI_Isend", 30, 40, isend(31, 1, 2**33)),
            *call("MPI_Wait", 50, 60, isend_complete(55, 2**33)),
            *collective("MPI_Reduce", CollectiveOp.REDUCE, 70, 80, root=1),
            *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 90, 95),
        ],
        [
            *call("MPI_Recv", 5, 25, recv(24, of=0, tag=3, size=2**40)),
            *call("MPI_Irecv", 30, 31, irecv_request(30, 9)),
            *call("MPI_Wait", 40, 60, irecv(59, of=0, request=9)),
            *collective("MPI_Reduce", CollectiveOp.REDUCE, 65, 85, root=1),
            *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 90, 95),
        ],
    )


def same(one: Trace, other: Trace) -> bool:
    return (
        list(one.locations) == list(other.locations)
        and list(one.communicators) == list(other.communicators)
        and [each.name for each in one.regions] == [each.name for each in other.regions]
        and [each.is_mpi for each in one.regions] == [each.is_mpi for each in other.regions]
        and [each.role for each in one.regions] == [each.role for each in other.regions]
        and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for a, b in zip(one.events, other.events, strict=True)
            for name in COLUMNS
        )
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    anchor = write_archive(whole(), tmp_path / "run", description="a test")
    assert same(read_archive(anchor), whole())
    assert same(read_archive(tmp_path / "run"), whole())
    with otf2.reader.open(str(anchor)) as reader:
        kinds = [type(event).__name__ for _, event in reader.events]
    assert len(kinds) == len(whole())
    assert {"MpiSend", "MpiRecv", "MpiIsend", "MpiIrecv", "MpiCollectiveEnd"} < set(kinds)


def test_metrics_are_kept_with_their_units(tmp_path: Path) -> None:
    trace = whole()
    trace.metrics = [
        MetricSeries("memory", "B", location, np.array([0, 15, 15, 500]), np.array([1.5, 2, 3, 4e12]))
        for location in (0, 1)
    ]
    again = read_archive(write_archive(trace, tmp_path / "run"))
    assert same(again, trace)
    assert [(each.name, each.unit, each.location) for each in again.metrics] == [("memory", "B", 0), ("memory", "B", 1)]
    assert again.metrics[1].time.tolist() == [0, 15, 15, 500]
    assert again.metrics[1].value.tolist() == [1.5, 2, 3, 4e12]


@pytest.mark.skipif(shutil.which("otf2-print") is None, reason="needs otf2-tools")
def test_the_official_tool_accepts_it(tmp_path: Path) -> None:
    anchor = write_archive(whole(), tmp_path / "run")
    done = subprocess.run(
        ["otf2-print", "--silent", "--warnings-as-errors", str(anchor)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = subprocess.run(["otf2-print", str(anchor)], capture_output=True, text=True, check=True).stdout
    assert "MPI_SEND" in text and "Length: 1099511627776" in text and "Root: NONE" in text


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    regions = [Region(f"{draw(names)} {index}", is_mpi=False, file="a.py") for index in range(draw(st.integers(1, 4)))]
    locations = [Location(draw(names), f"{draw(names)} {rank}", draw(names)) for rank in range(draw(st.integers(1, 3)))]
    events = []
    for _ in locations:
        times = sorted(draw(st.lists(st.integers(0, 2**62), max_size=20)))
        kinds, numbers = st.sampled_from([EventKind.ENTER, EventKind.LEAVE]), st.integers(0, len(regions) - 1)
        rows = [(time, draw(kinds), draw(numbers), -1, -1, -1, 0, 0, -1) for time in times]
        events.append(Events.from_rows(rows))
    return Trace(locations, regions, [Comm(draw(names) + "c", tuple(range(len(locations))))], events)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces())
def test_any_trace_survives(tmp_path: Path, trace: Trace) -> None:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    assert same(read_archive(write_archive(trace, folder)), trace)


def foreign(folder: Path) -> Path:
    """An archive as another tool writes it: metrics, a device's stream, parameters, two groups."""
    enums = otf2.enums
    with otf2.writer.open(str(folder), timer_resolution=1_000_000, archive_name="other") as writer:
        definitions = writer.definitions
        node = definitions.system_tree_node('a "quoted" <script>', class_name="node")
        mains, streams = [], []
        for rank in range(2):
            group = definitions.location_group(f"MPI Rank {rank}", system_tree_parent=node)
            mains.append(definitions.location("Master thread", type=enums.LocationType.CPU_THREAD, group=group))
            streams.append(definitions.location("CUDA[0:7]", type=enums.LocationType.ACCELERATOR_STREAM, group=group))
        definitions.group("", group_type=enums.GroupType.COMM_LOCATIONS, paradigm=enums.Paradigm.MPI, members=mains)
        comm = definitions.comm(
            "MPI_COMM_WORLD",
            group=definitions.group(
                "", group_type=enums.GroupType.COMM_GROUP, paradigm=enums.Paradigm.MPI, members=mains
            ),
        )
        main = definitions.region("main", source_file="main.c", region_role=enums.RegionRole.FUNCTION)
        barrier = definitions.region(
            "MPI_Barrier", source_file="MPI", region_role=enums.RegionRole.BARRIER, paradigm=enums.Paradigm.MPI
        )
        metric = definitions.metric_class(
            members=(definitions.metric_member("PAPI_TOT_CYC", value_type=otf2.enums.Type.UINT64, unit="#"),)
        )
        for rank, location in enumerate(mains):
            events = writer.event_writer_from_location(location)
            events.enter(100, main)
            events.metric(101, metric, [5])
            events.enter(200 + 100 * rank, barrier)
            events.mpi_collective_begin(200 + 100 * rank)
            events.mpi_collective_end(310, enums.CollectiveOp.BARRIER, comm, otf2.enums.Undefined.UINT32.value, 0, 0)
            events.leave(311, barrier)
            events.leave(400, main)
        for location in streams:
            events = writer.event_writer_from_location(location)
            events.enter(120, main)
            events.leave(130, main)
    return folder / "other.otf2"


def test_an_archive_of_another_tool(tmp_path: Path) -> None:
    trace = read_archive(foreign(tmp_path / "theirs"))
    assert trace.ticks_per_second == 1_000_000
    assert [each.is_main for each in trace.locations] == [True, False, True, False]
    assert trace.skipped == {"MpiCollectiveBegin": 2}
    assert [(each.name, each.unit, each.location, each.value.tolist()) for each in trace.metrics] == [
        ("PAPI_TOT_CYC", "#", 0, [5.0]),
        ("PAPI_TOT_CYC", "#", 2, [5.0]),
    ]
    assert trace.communicators == [Comm("MPI_COMM_WORLD", (0, 2))]
    assert trace.locations[0].host == 'a "quoted" <script>'


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.otf2").write_text("not a trace\n")
    with pytest.raises(TraceError, match="is no OTF2 archive"):
        read_archive(tmp_path / "text.otf2")
    with pytest.raises(TraceError, match="does not exist"):
        read_archive(tmp_path / "missing.otf2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="holds no OTF2 archive"):
        read_archive(tmp_path / "empty")
    two = tmp_path / "two"
    shutil.copytree(write_archive(whole(), tmp_path / "one").parent, two)
    shutil.copy(two / "traces.otf2", two / "again.otf2")
    with pytest.raises(TraceError, match="holds 2 OTF2 archives") as told:
        read_archive(two)
    assert "again.otf2, traces.otf2" in str(told.value)
    write_archive(whole(), tmp_path / "runs" / "second")
    shutil.copytree(tmp_path / "one", tmp_path / "runs" / "first")
    with pytest.raises(TraceError, match="holds 2 traces") as told:
        read_trace(tmp_path / "runs")
    assert str(Path("first", "traces.otf2")) in str(told.value)


@pytest.mark.parametrize("name", ["traces.otf2", "traces.def", "traces/0.evt"])
def test_a_truncated_archive_is_refused(tmp_path: Path, name: str) -> None:
    anchor = write_archive(whole(), tmp_path / "run")
    file = anchor.parent / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(TraceError, match=r"damaged|ends after|no locations"):
        read_archive(anchor)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    write_archive(whole(), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(TraceError, match="exists already"):
        write_archive(whole(), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_times_that_decrease_are_refused(tmp_path: Path) -> None:
    trace = trace_of([*call("step", 20, 30), *call("step", 10, 15)])
    with pytest.raises(TraceError, match="decrease"):
        write_archive(trace, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_chrome_trace_has_the_calls_and_the_waits(tmp_path: Path) -> None:
    trace = trace_of(
        collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 1000, 5000),
        collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 4000, 5000),
    )
    write_chrome(trace, tmp_path / "trace.json")
    slices = [each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["ph"] == "X"]
    assert [(each["name"], each["ts"], each["dur"]) for each in slices] == [
        ("MPI_Allreduce", 0, 4),
        ("MPI_Allreduce", 3, 1),
        ("wait at N x N", 0, 3),
    ]
    assert slices[-1]["args"] == {"for": "rank 1"}
