"""The analysis of a trace: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.cli import main
from d5suite.traces.analysis import analyse
from d5suite.traces.events import CollectiveOp, Comm, Events, Location, Trace
from tests.traces.made import (
    REGIONS,
    Row,
    call,
    collective,
    irecv,
    irecv_request,
    isend,
    isend_complete,
    recv,
    send,
    trace_of,
)

pytest.importorskip("otf2")


def steps(*lengths: tuple[int, ...]) -> Trace:
    """Steps of a convolution and an all-reduce; by step the convolution's ticks on each rank."""
    rows: list[list[Row]] = [[] for _ in lengths[0]]
    start = 0
    for each in lengths:
        end = start + max(each) + 10
        for rank, ticks in enumerate(each):
            allreduce = collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, start + ticks, end)
            rows[rank] += call("step", start, end, *call("conv1", start, start + ticks), *allreduce)
        start = end
    return trace_of(*rows)


def test_the_slow_rank_is_named() -> None:
    found = analyse(steps((50, 80), (50, 130), (60, 60)))
    first, second = found.ranks
    assert (first.computing, first.waiting, first.communicating) == (160, 110, 30)
    assert (second.computing, second.waiting, second.communicating) == (270, 0, 30)
    assert (first.caused, second.caused) == (0, 110)
    assert found.patterns == {"wait at N x N": (2, 110)}
    assert found.steps == [(90, 90, 30), (140, 140, 80), (70, 70, 0)]
    assert found.regions["step"] == (0, 30, 110)
    assert found.regions["conv1"][0] == 430


def test_the_critical_path_runs_through_the_rank_that_is_waited_for() -> None:
    found = analyse(steps((50, 80), (130, 50), (60, 60)))
    pieces = [(each.location, each.begin, each.end) for each in found.path]
    # Until 80 rank 1 computes, and rank 0 waits; then rank 0 is late, until 90 + 130.
    assert pieces == [(1, 0, 80), (1, 80, 90), (0, 90, 300)] or pieces == [(1, 0, 80), (0, 80, 300)]
    assert found.regions["conv1"][1] == 80 + 130 + 60


def test_a_message_under_way_while_a_rank_computes_is_overlapped() -> None:
    sender = [
        *call("MPI_Isend", 0, 10, isend(5, 1, 1)),
        *call("conv1", 10, 110),
        *call("MPI_Wait", 110, 130, isend_complete(129, 1)),
    ]
    receiver = [*call("MPI_Irecv", 0, 10, irecv_request(5, 4)), *call("MPI_Wait", 10, 130, irecv(129, 0, 4))]
    ranks = analyse(trace_of(sender, receiver)).ranks
    assert [each.overlapped for each in ranks] == [100, 0]


def test_a_thread_that_communicates_beside_computing_overlaps() -> None:
    main_thread = Events.from_rows(call("conv1", 0, 100))
    other = Events.from_rows(collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 40, 160))
    locations = [Location("main", "rank 0", "a"), Location("gloo", "rank 0", "a", is_main=False)]
    found = analyse(Trace(locations, REGIONS, [Comm("world", (1,))], [main_thread, other]))
    (rank,) = found.ranks
    assert (rank.computing, rank.overlapped, rank.outside) == (100, 60, 60)


def test_waiting_for_the_other_end_of_a_coupling_is_no_computing() -> None:
    reader = call("wait for writer: data", 0, 70, *call("MPI_Recv", 20, 30))
    reader += call("conv1", 70, 100)
    (rank, _) = analyse(trace_of(reader, call("conv1", 0, 100))).ranks
    assert (rank.computing, rank.waiting, rank.communicating, rank.outside) == (30, 60, 10, 0)


@st.composite
def programs(draw: st.DrawFn) -> Trace:
    """Runs of two to four ranks that send, receive, reduce and compute, by one program."""
    size = draw(st.integers(2, 4))
    clock = [draw(st.integers(0, 50)) for _ in range(size)]
    rows: list[list[Row]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(1, 12))):
        for rank in range(size):
            start = clock[rank]
            clock[rank] += draw(st.integers(1, 100))
            rows[rank] += call("conv1", start, clock[rank])
        match draw(st.sampled_from(["message", "all", "none"])):
            case "message":
                source, target = draw(st.permutations(range(size)))[:2]
                end = max(clock[source], clock[target]) + draw(st.integers(1, 20))
                rows[source] += call("MPI_Send", clock[source], end, send(clock[source], target))
                rows[target] += call("MPI_Recv", clock[target], end, recv(end, source))
                clock[source] = clock[target] = end
            case "all":
                end = max(clock) + draw(st.integers(1, 20))
                for rank in range(size):
                    rows[rank] += collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, clock[rank], end)
                    clock[rank] = end
    return trace_of(*rows)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_all_parts_add_up(trace: Trace) -> None:
    found = analyse(trace)
    whole = trace.end - trace.begin
    for rank in found.ranks:
        assert rank.computing + rank.waiting + rank.communicating + rank.outside == whole
        assert min(rank.computing, rank.waiting, rank.communicating, rank.outside) >= 0
    assert sum(each.end - each.begin for each in found.path) == whole
    assert all(one.end == two.begin for one, two in zip(found.path, found.path[1:], strict=False))
    assert sum(rank.critical for rank in found.ranks) == whole == sum(row[1] for row in found.regions.values())
    assert sum(rank.caused for rank in found.ranks) == sum(rank.waiting for rank in found.ranks)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_nobody_waits_on_the_critical_path(trace: Trace) -> None:
    found = analyse(trace)
    for wait in found.states.waits:
        if wait.cause < 0:
            continue
        for piece in found.path:
            if piece.location == wait.location:
                assert min(piece.end, wait.end) <= max(piece.begin, wait.begin), (piece, wait)


def test_a_trace_without_events() -> None:
    found = analyse(trace_of([], []))
    assert found.path == [] and [each.outside for each in found.ranks] == [0, 0]


def test_the_command_shows_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from d5suite.traces.archive import write_archive

    write_archive(steps((50, 80), (50, 130)), tmp_path / "run")
    assert main(["trace", "analyze", str(tmp_path / "run"), "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert "wait at N x N" in shown and "rank 1" in shown
    assert max(map(len, shown.splitlines())) <= 80
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["ranks"][1]["caused_s"] == pytest.approx(110e-9)
    assert main(["trace", "convert", str(tmp_path / "run"), "-o", str(tmp_path / "trace.json")]) == 0
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 8


def test_the_command_refuses_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "analyze", str(tmp_path / "missing")]) == 2
    assert "does not exist" in capsys.readouterr().err
