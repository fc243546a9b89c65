"""What frameworks' own profilers write, read as traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import backend, discover
from d5suite.cli import main
from d5suite.traces.analysis import analyse
from d5suite.traces.events import EventKind, Trace
from d5suite.traces.reading import read_trace


def regions(trace: Trace, location: int) -> set[str]:
    events = trace.events[location]
    return {trace.regions[number].name for number in events.region[events.kind == EventKind.ENTER].tolist()}


def named(trace: Trace, what: str) -> int:
    """The location in which a region runs."""
    return next(index for index in range(len(trace.events)) if any(what in name for name in regions(trace, index)))


def nested(trace: Trace) -> bool:
    """Whether each location's exits close the region that was entered last, in order of time."""
    for events in trace.events:
        stack = []
        if any(events.time[1:] < events.time[:-1]):
            return False
        for kind, region in zip(events.kind.tolist(), events.region.tolist(), strict=True):
            if kind == EventKind.ENTER:
                stack.append(region)
            elif kind == EventKind.LEAVE and (not stack or stack.pop() != region):
                return False
    return True


def test_a_profile_of_torch_becomes_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("otf2")
    with torch.profiler.profile() as profile, torch.profiler.record_function("my step"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    trace = read_trace(tmp_path / "torch.json")
    home = named(trace, "my step")
    assert trace.locations[home].is_main and {"aten::mm", "my step"} <= regions(trace, home) and nested(trace)
    assert main(["trace", "convert", str(tmp_path / "torch.json"), "-o", str(tmp_path / "archive")]) == 0
    assert regions(read_trace(tmp_path / "archive"), home) == regions(trace, home)
    assert main(["trace", "analyze", str(tmp_path / "torch.json"), "--step", "my step"]) == 0
    assert "my step" in capsys.readouterr().out


def test_a_profile_of_xla(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    with jax.profiler.trace(str(tmp_path)), jax.profiler.TraceAnnotation("my step"):
        jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8))).block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    trace = read_trace(path)
    assert nested(trace) and any("dot" in name for index in range(len(trace.events)) for name in regions(trace, index))
    assert trace.locations[named(trace, "my step")].is_main


def test_a_profile_of_mxnet(tmp_path: Path) -> None:
    if discover()[0]["mxnet"].problem() is not None:
        pytest.skip("MXNet is not installed")
    mx = backend("mxnet").load("runtime").mx
    mx.profiler.set_config(
        profile_imperative=True,
        profile_symbolic=True,
        continuous_dump=False,  # once continuous, later files of this process lack their beginning
        filename=str(tmp_path / "mxnet.json"),
    )
    mx.profiler.set_state("run")
    mx.nd.dot(mx.nd.ones((8, 8)), mx.nd.ones((8, 8))).wait_to_read()
    mx.profiler.set_state("stop")
    mx.profiler.dump(finished=True)
    trace = read_trace(tmp_path / "mxnet.json")
    assert nested(trace) and "dot" in regions(trace, named(trace, "dot"))


def event(
    ph: str, ts: float, name: str = "", *, dur: float | None = None, tid: Any = 1, cat: str = ""
) -> dict[str, Any]:
    return {"ph": ph, "ts": ts, "name": name, "pid": 1, "tid": tid, "cat": cat, **({} if dur is None else {"dur": dur})}


def test_ranks_of_one_run_wait_for_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted: rank 1 comes 3 ms late to the second of two operations."""
    for rank, late in enumerate((0, 3000)):
        events = [event("X", 0, "step", dur=9000), event("X", 100, "gloo:all_reduce", dur=50),
                  event("X", 1000 + late, "gloo:all_reduce", dur=3010 - late)]  # fmt: skip
        told = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"host_{rank}.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(told).encode()))
    trace = read_trace(tmp_path)
    found = analyse(trace, step="step")
    assert [each.process for each in trace.locations] == ["rank 0", "rank 1"]
    assert found.patterns["wait at N x N"][1] == 3_000_000
    (tmp_path / "host_1.pt.trace.json.gz").unlink()
    (tmp_path / "other.json").write_text('[{"ph": "X", "ts": 0, "dur": 1, "name": "a"}]')
    assert main(["trace", "analyze", str(tmp_path)]) == 2
    assert "are not ranks 0 to 1 of one run" in capsys.readouterr().err


def test_kernels_are_on_streams_of_the_process_that_launched_them(tmp_path: Path) -> None:
    pytest.importorskip("otf2")
    host = [event("X", 0, "step", dur=90), event("X", 5, "cudaLaunchKernel", dur=5, cat="cuda_runtime")]
    device = [
        event("X", 20, "sgemm", dur=9, tid=7, cat="kernel"),
        event("X", 40, "HtoD", dur=2, tid=7, cat="gpu_memcpy"),
        event("X", 50, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", dur=2, tid=7, cat="kernel"),
    ]
    for each in device:
        each["pid"] = 0
    name = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "GPU 0"}}
    (tmp_path / "gpu.json").write_text(json.dumps({"traceEvents": [name, *host, *device]}))
    assert main(["trace", "convert", str(tmp_path / "gpu.json"), "-o", str(tmp_path / "archive")]) == 0
    for trace in (read_trace(tmp_path / "gpu.json"), read_trace(tmp_path / "archive")):
        stream = trace.locations[named(trace, "sgemm")]
        assert stream.is_stream and "GPU 0" in stream.name and not trace.locations[named(trace, "step")].is_stream
        assert stream.process == trace.locations[named(trace, "step")].process
        roles = {each.name: each.role for each in trace.regions}
        assert roles == {"step": "function", "cudaLaunchKernel": "wrapper", "sgemm": "kernel", "HtoD": "data_transfer",
                         "MPI_Allreduce": "coll_all2all"}  # fmt: skip


def test_a_timeline_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = [
        event("B", 0, "ALLREDUCE"),
        event("B", 1, "GLOO_ALLREDUCE"),
        event("E", 5),
        event("E", 9),
        event("B", 12, "QUEUE"),
    ]
    text = "[\n" + ",\n".join(map(json.dumps, whole)) + ',\n{"ph": "E", "ts": 1'
    (tmp_path / "horovod.json").write_text(text)
    trace = read_trace(tmp_path / "horovod.json")
    assert regions(trace, 0) == {"ALLREDUCE", "MPI_Allreduce", "QUEUE"} and nested(trace)
    assert any("cut off" in note for note in trace.notes) and any("never ended" in note for note in trace.notes)


def test_slices_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    events = [event("X", 0, "a", dur=10), event("X", 5, "b", dur=10), event("X", 9.9995, "inside", dur=0.0015)]
    counter = {**event("C", 3, "memory"), "args": {"used": 7, "free": "much"}}
    (tmp_path / "odd.json").write_text(
        json.dumps([*events, counter, {"no": "event"}, 3, event("X", 1e300, "far", dur=1)])
    )
    trace = read_trace(tmp_path / "odd.json")
    assert [regions(trace, index) for index in range(2)] == [{"a", "inside"}, {"b"}] and nested(trace)
    assert trace.skipped == {"malformed": 3} and trace.metrics[0].name == "memory used"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello", "neither JSON nor a list"),
        ("{}", "no events in Chrome's"),
        ('{"traceEvents": 3}', "no events in Chrome's"),
        ("[1, 2]", "no events in Chrome's"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_what_is_no_profile_is_one_clear_error(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.json").write_text(text)
    (tmp_path / "wrong.pb").write_bytes(b"\xff" + text.encode()[:100])
    (tmp_path / "wrong.json.gz").write_text(text[:100])
    assert main(["trace", "analyze", str(tmp_path / "wrong.json")]) == 2
    assert problem in capsys.readouterr().err
    for name in ("wrong.pb", "wrong.json.gz"):
        assert main(["trace", "analyze", str(tmp_path / name)]) == 2
