"""Level 3 through pytest, as a user runs it: two ranks on gloo, their JSON, tables, pictures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import jsonschema
import pytest

from d5suite.cli import main
from d5suite.distributed.calls import CALLS
from tests.conftest import made_once, plugin_environment

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "results" / "schema.json").read_text())
PICTURE = b"\x89PNG\r\n"

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="gloo comes with PyTorch")

COLLECTIVES = """
from d5suite.cases.collective import Collectives
SMALL = Collectives("all_reduce", smoke=[4, 4096, 65536])
"""

LIE = """
import d5suite.distributed.calls as calls

def lie(communicator, given, taken):
    communicator.all_reduce(given)
    if communicator.rank == 1:
        given[-1] += 1

calls.CALLS["all_reduce"] = calls.CALLS["all_reduce"]._replace(run=lie)
"""


def _run(folder: Path, file: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file), "--communicator", "gloo"]
    return subprocess.run(
        [*command, "--jobs", "jobs", "--oversubscribe", *options], cwd=folder, capture_output=True, text=True,
        env=plugin_environment() | environment, timeout=600,
    )  # fmt: skip


def _records(path: Path, measurement: str = "") -> dict[str, dict[str, Any]]:
    """Return the records by backend and ranks, of all measurements or of one."""
    result = json.loads(path.read_text())
    jsonschema.validate(result, SCHEMA)
    found = [(bench["param"], bench["extra_info"]["d5suite"]) for bench in result["benchmarks"]]
    return {name: info for name, info in found if measurement in ("", info["measurement"])}


@needs_torch
def test_two_ranks_measure_a_collective_by_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_small.py"
    file.write_text(COLLECTIVES)
    done = _run(tmp_path, file, "--ranks", "1,2", "--algorithm", "native,ring", "--benchmark-max-time", "0.02",
                "--benchmark-json", "out.json")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 1 skipped" in done.stdout
    assert done.stdout.count(" all_reduce/collectives ") == 2  # each row names its collective
    found = _records(tmp_path / "out.json")
    assert set(found) == {"gloo-2", "gloo:ring-2"}
    for name, info in found.items():
        assert (info["level"], info["ranks"], info["communicator"]) == (3, 2, "gloo")
        assert [each["bytes"] for each in info["sizes"]] == [4, 4096, 65536]
        for each in info["sizes"]:  # on two ranks all-reduce's bus bandwidth is its bandwidth
            assert each["bus_bytes_per_s"] == pytest.approx(each["bytes"] / each["median_s"])
            assert 0 < each["ranks_s"]["min"] <= each["ranks_s"]["mean"] <= each["ranks_s"]["max"]
            assert each["overlap"] is None
        ways = [(each["rank"], each["transport"], each["interface"], each["address"]) for each in info["placement"]]
        assert ways == [(0, "TCP", "lo", "127.0.0.1"), (1, "TCP", "lo", "127.0.0.1")]
        assert info["median_s"] == info["sizes"][-1]["median_s"] and info["latency_s"] == info["sizes"][0]["median_s"]
        sent = [each["traffic"] for each in info["sizes"]]
        if name == "gloo-2":
            assert all(each["opaque_calls"] == 1 for each in sent)
        else:  # a ring of two: half of it each way, twice; messages without content are messages
            assert [each["bytes_sent"] for each in sent] == [4, 4096, 65536]
            assert all(each["messages_sent"] == 2 and each["opaque_calls"] == 0 for each in sent)
        checks = [check["name"] for check in info["validation"]["checks"]]
        assert sum("timed" in check for check in checks) == 3
        assert sum("ranks that differ" in check for check in checks) == 3
    with h5py.File(tmp_path / "out.h5") as series:
        assert all({"seconds_of_4_bytes", "seconds_of_65536_bytes"} <= set(group) for group in series.values())
    assert (tmp_path / "out.all_reduce.png").read_bytes().startswith(PICTURE)
    assert main(["compare", str(tmp_path / "out.json"), "--by-size"]) == 0
    table = capsys.readouterr().out
    assert "gloo:ring-2" in table and "bus GB/s" in table
    assert "2 ranks over gloo:\n  rank 0: " in table and "TCP lo 127.0.0.1" in table
    assert table.count("64 KiB") == 2 and "overlap" in table


@needs_torch
@pytest.mark.slow
def test_a_collective_that_lies_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "test_small.py"
    file.write_text(COLLECTIVES)
    (tmp_path / "sitecustomize.py").write_text(LIE)
    path = f"{tmp_path}:{plugin_environment()['PYTHONPATH']}"
    done = _run(tmp_path, file, "--ranks", "2", PYTHONPATH=path)
    assert done.returncode == 1
    assert "all_reduce of 4 bytes vs known numbers: relative error 1 exceeds 0" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with steps and trainings of one rank and of two: the same workers measure both."""

    def make() -> str:
        folder = tmp_path_factory.mktemp("both")
        source = (ROOT / "recipes" / "test_digits_lenet_ranks.py").read_text()
        source = source.replace("target=0.97, epochs=60, runs=3", "target=0.5, epochs=20, runs=2")
        source = source.replace('"distributed_accuracy",', '"distributed_step", "distributed_accuracy"')
        (folder / "test_digits.py").write_text(source)
        done = _run(
            folder, folder / "test_digits.py", "--ranks", "1,2", "--scheme", "all_reduce,asynchronous",
            "--backend", "torch", "--benchmark-max-time", "0.05", "--benchmark-json", "out.json",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return str(folder)

    return Path(made_once(tmp_path_factory, "runs-both", make))


@needs_torch
@pytest.mark.slow
def test_steps_of_one_and_two_ranks_scale(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _records(both / "out.json", "distributed_step")
    alone = found["torch-all_reduce-local-1"]
    assert len(found) == 3 and alone["distributed"]["bytes_per_step"] == 0 and "scaling" not in alone
    for name, trainers in (("all_reduce", 2), ("asynchronous", 1)):
        info = found[f"torch-{name}-gloo-2"]
        scaling, facts = info["scaling"], info["distributed"]
        assert scaling["mode"] == "weak" and scaling["baseline"]["ranks"] == 1
        assert scaling["baseline"]["throughput"] == alone["throughput"]["value"]
        assert scaling["efficiency"] == pytest.approx(info["throughput"]["value"] / alone["throughput"]["value"] / 2)
        assert facts["trainers"] == trainers and len(facts["ranks"]) == 2
        parts = facts["ranks"][1]["parts"]
        waiting = parts["waiting_s"] or 0.0
        total = parts["computing_s"] + parts["communicating_s"] + waiting - parts["overlapped_s"]
        assert total == pytest.approx(parts["step_s"], rel=0.01)
        assert (parts["waiting_s"] is None) == (name == "asynchronous")
        assert all(each["peak_memory_bytes"] > 1 << 20 for each in facts["ranks"])
        assert facts["bytes_per_step"] > 0 and facts["straggler_ratio"] >= 1
    assert (both / "out.digits_lenet_ranks.png").read_bytes().startswith(PICTURE)
    assert main(["compare", str(both / "out.json")]) == 0
    assert "% weak" in capsys.readouterr().out


@needs_torch
@pytest.mark.slow
def test_strong_scaling_divides_the_batch(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "test_digits_lenet.py"
    options = ("--scaling", "strong", "--backend", "torch", "--benchmark-max-time", "0.05")
    done = _run(tmp_path, recipe, *options, "--ranks", "1,2", "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    alone, together = _records(tmp_path / "out.json").values()
    assert (alone["batch_size"], together["batch_size"]) == (32, 16)
    assert together["scaling"]["mode"] == "strong"
    done = _run(tmp_path, recipe, *options, "--ranks", "2", "--batch-size", "7")
    assert "a batch of 7 cannot be divided among 2 ranks" in done.stdout


@needs_torch
@pytest.mark.slow
def test_ranks_are_trained_to_a_target(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _records(both / "out.json", "distributed_accuracy")
    assert len(found) == 3
    for name, info in found.items():
        assert info["target"]["value"] == 0.5
        for run in info["runs"]:
            trainers, epochs = info["distributed"]["trainers"], run["epochs"]
            assert run["top-1 accuracy"] >= 0.5 and run["steps"] % epochs == 0
            assert run["samples"] == run["steps"] * 32 * trainers
            assert run["bytes"] == pytest.approx(info["distributed"]["bytes_per_step"] * run["steps"])
            assert (run["bytes"] == 0) == name.endswith("local-1")
    with h5py.File(both / "out.h5") as series:
        trained = [group for group in series.values() if "distributed_accuracy" in group.attrs["fullname"]]
        assert len(trained) == 3
        assert all({"run_0_seconds", "run_0_bytes", "run_0_top-1 accuracy"} <= set(group) for group in trained)
    assert (both / "out.digits_lenet_ranks.accuracy.png").read_bytes().startswith(PICTURE)
    assert main(["compare", str(both / "out.json")]) == 0
    assert "GB sent" in capsys.readouterr().out


@needs_torch
@pytest.mark.slow
def test_a_replica_that_goes_wrong_while_timed_is_no_result(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "test_digits_lenet.py"
    options = ("--ranks", "2", "--backend", "stale:replay20", "--benchmark-max-time", "0.1")
    done = _run(tmp_path, recipe, *options, "--benchmark-json", "out.json")
    assert done.returncode == 1
    assert "of all_reduce on batches never fed before, replay20 fp32 vs one process" in done.stdout, done.stdout
    assert "no picture" not in done.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["benchmarks"] == [] and all(each["wrong"] for each in content["d5suite"]["failures"])


def test_every_collective_has_its_file() -> None:
    assert {path.stem for path in (ROOT / "collectives").glob("test_*.py")} == {f"test_{name}" for name in CALLS}
