"""``d5suite simulate``: networks, results, traces, what if, and errors in one sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.simulation import engine
from d5suite.simulation.replay import replay
from d5suite.traces.hdf5 import read_hdf5
from tests.report.planted import bench, layers, result
from tests.simulation.machines import machine, shared

needs_simgrid = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))

LENET = ("simulate", "lenet5", "--image-size", "32")
BUCKETS = "all_reduce:bucket_bytes=65536,first_bucket_bytes=1024"


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    answer = tmp_path / "answer.json"
    assert main([*options, "--json", str(answer)]) == 0
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@needs_simgrid
def test_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = machine(tmp_path / "machine.json")
    found = run(
        tmp_path, *LENET, "--ranks", "16", "--machine", str(file), "--what-if", "network=2x", "--what-if", "ranks=2x",
        "--stragglers", "0.2", "--failures", "10000,checkpoint=30", "--batch-size", "4",
    )  # fmt: skip
    faster, more = found["what_if"]
    assert faster["step_s"] < found["step_s"] < more["step_s"] and more["ranks"] == 32
    assert found["computing"] + found["communicating"] + found["waiting"] == pytest.approx(1)
    assert found["kinds"] == 1 and found["noise"]["median_s"] > found["step_s"]
    assert found["failures"]["efficiency"] == pytest.approx(found["failures"]["drawn"], rel=0.01)
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.split("Computing:")[0].splitlines())
    for part in (
        "16 ranks on one switch, all_reduce by ring",
        "network=2x",
        "What decides",
        "Young",
        "1 kind of ranks",
    ):
        assert part in text


@needs_simgrid
def test_ranks_of_a_machine_share_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for counts in ((1, 2), (1,)):
        file = shared(tmp_path / "machine.json", counts=counts)
        found = run(tmp_path, *LENET, "--machine", str(file), "--cores", "2")
        seconds.append(found["step_s"])
        assert bool(found["missing"]) == (counts == (1,)) != ("share" in found["sources"]["computing"])
    apart, alone = capsys.readouterr().out.split("as given")[1:]
    assert seconds[0] > 1.02 * seconds[1]
    assert "do not compete" not in apart and "d5suite machine --threads 1,2 -o FILE" in alone


@needs_simgrid
def test_figures_that_are_assumed_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, *LENET, "--algorithm", "tree")
    assert "assumed" in capsys.readouterr().out


@needs_simgrid
def test_a_result_gives_its_layer_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from d5suite.network.zoo import build

    network = build("squeezenet1_1", classes=10, image_size=64)
    part = layers(0.005)
    names = [node.name for node in network.nodes]
    part["graph"] = {name: {"op_type": "Conv", "stage": "x", "flops": 1, "bytes": 1} for name in names}
    part["times"] = [
        {"nodes": [name], "direction": way, "seconds": seconds, "calls": 1}
        for name in names for way, seconds in (("forward", 2e-4), ("backward", 3e-4))
    ]  # fmt: skip
    file = result(tmp_path / "out.json", bench(part=part, step_s=0.1))
    found = run(tmp_path, "simulate", str(file), "--ranks", "4", "--network", "squeezenet1_1")
    assert found["step_s"] == pytest.approx(len(names) * 5e-4, rel=0.05)
    assert "measured by the layers pass" in capsys.readouterr().out
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    again = run(tmp_path, "simulate", str(packed), "--ranks", "4", "--network", "squeezenet1_1")
    assert again["step_s"] == found["step_s"]
    plain = result(tmp_path / "plain.json", bench(step_s=0.1))
    assert run(tmp_path, "simulate", str(plain), "--ranks", "4", "--network", "squeezenet1_1")[
        "step_s"
    ] == pytest.approx(0.1, rel=0.05)
    nothing = result(tmp_path / "none.json", bench("inference", step_s=0.1))
    assert main(["simulate", str(nothing)]) == 2
    assert "no training step of one rank" in capsys.readouterr().err


@needs_simgrid
def test_a_backend_is_named_by_its_result_or_its_framework(tmp_path: Path) -> None:
    compiled, plain, one_rank = (bench(step_s=each) for each in (0.3, 0.1, 0.2))
    for each, name in ((compiled, "torch:compile"), (plain, "torch"), (one_rank, "torch-all_reduce-local-1")):
        each["param"], each["fullname"] = name, f"test_planted.py::test[training_step-{name}]"
    for benches, chosen, step_s in (
        ((compiled, plain, one_rank), "torch", 0.1),
        ((compiled, plain, one_rank), "torch:compile", 0.3),
        ((one_rank,), "torch", 0.2),
    ):
        file = result(tmp_path / "out.json", *benches)
        found = run(tmp_path, "simulate", str(file), "--backend", chosen, "--network", "squeezenet1_1")
        assert found["step_s"] == pytest.approx(step_s, rel=0.05)


@needs_simgrid
@pytest.mark.parametrize(("algorithm", "scheme"), [("tree", "all_reduce"), ("ring", "all_reduce"), ("ring", BUCKETS)])
def test_the_trace_of_a_simulation_replays_as_long(
    algorithm: str, scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trace = machine(tmp_path / "machine.json"), tmp_path / "t.h5"
    options = ("--machine", str(file), "--algorithm", algorithm, "--scheme", scheme, "--ranks", "6", "--topology",
               "fat-tree")  # fmt: skip
    first = run(tmp_path, *LENET, *options, "--trace", str(trace))
    again = run(tmp_path, "simulate", str(trace), "--machine", str(file), "--topology", "fat-tree",
                "--what-if", "network=4x")  # fmt: skip
    assert again["measured_s"] == pytest.approx(first["step_s"], rel=1e-5)
    assert again["step_s"] == pytest.approx(first["step_s"], rel=1e-3)
    hidden = scheme == BUCKETS  # most of it lies behind computing
    assert again["what_if"][0]["step_s"] < (0.97 if hidden else 0.9) * again["step_s"]
    assert "% off" in capsys.readouterr().out
    assert main(["simulate", str(trace), "--ranks", "12"]) == 2
    assert "messages outside of collectives" in capsys.readouterr().err
    assert main(["trace", "analyze", str(trace)]) == 0
    assert len(replay(read_hdf5(trace), "t").programs) == 6


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text('{"schema": "d5suite-machine-1", "name": "empty"}')
    nothing = tmp_path / "folder"
    nothing.mkdir()
    unsourced = machine(tmp_path / "unsourced.json")
    unsourced.write_text(unsourced.read_text().replace('"source": "by hand"', '"source": ""'))
    for options, said in (
        ((*LENET, "--ranks", "1"), "from 2 to"),
        ((*LENET, "--topology", "torus"), "no topology 'torus'"),
        ((*LENET, "--scheme", "no_such"), "no_such"),
        ((*LENET, "--scheme", "all_reduce:overlap"), "not SETTING=VALUE"),
        ((*LENET, "--scheme", "all_reduce:colour=1"), "colour"),
        ((*LENET, "--algorithm", "no_such"), "no algorithm 'no_such'"),
        ((*LENET, "--what-if", "network"), "not NAME=VALUE"),
        ((*LENET, "--share", "0"), "--share is 0"),
        ((*LENET, "--cores", "0"), "--cores is 0"),
        ((*LENET, "--failures", "often"), "is not HOURS"),
        ((*LENET, "--stragglers", "9"), "below 5"),
        ((*LENET, "--machine", str(empty)), "no ceilings"),
        ((*LENET, "--machine", str(unsourced)), "has no source"),
        ((*LENET, "--transport", "gloo"), "no transport 'gloo'"),
        ((*LENET, "--trace", "t.json"), "does not end with .h5"),
        (("simulate", "no_such_network"), "no network 'no_such_network'"),
        (("simulate", str(nothing)), "holds no trace"),
    ):
        assert main(list(options)) == 2, options
        text = capsys.readouterr().err
        assert said in text and "a fault of d5suite" not in text and len(text.splitlines()) <= 3, options


def test_without_simgrid_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "FOLDERS", (str(tmp_path),))
    monkeypatch.delenv("CPLUS_INCLUDE_PATH", raising=False)
    assert main([*LENET]) == 2
    text = capsys.readouterr().err
    assert "SimGrid, which is not installed" in text and "apt-get install libsimgrid-dev" in text
