"""Job files: what a worker refuses, and how it says so. Workers run as processes, as users run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from d5suite.errors import JobError
from d5suite.files import atomic_path, write_json
from d5suite.job import Job
from d5suite.worker import result_path
from tests.conftest import plugin_environment


@pytest.fixture
def job(small_onnx: Path, imagenet_tree: Path) -> dict[str, Any]:
    return {
        "schema": "d5suite-job-1",
        "recipe": "by_hand",
        "task": "measure",
        "measurements": ["inference"],
        "backend": {"name": "faulty", "mode": "good"},
        "device": "cpu",
        "precision": "fp32",
        "threads": 1,
        "seed": 0,
        "preset": "smoke",
        "network": {"onnx": str(small_onnx), "classes": 4, "image_size": 32},
        "dataset": {"kind": "imagenet", "root": str(imagenet_tree)},
        "batch_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "loader_workers": 1,
        "sampling": {"max_time_s": 0.05},
        "validation_steps": 2,
    }


def work(tmp_path: Path, content: Any) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "hand.job.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return subprocess.run(
        [sys.executable, "-m", "d5suite.worker", str(path)], env=plugin_environment(), capture_output=True, text=True
    )


def test_a_job_written_by_hand_runs(tmp_path: Path, job: dict[str, Any]) -> None:
    done = work(tmp_path, job)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "hand.result.json").read_text())
    assert result["status"] == "done"
    assert result["threads"]["budget"] == 1
    assert len(result["threads"]["cpus"]) == 1
    assert result["environment"]["environment_variables"]["OMP_NUM_THREADS"] == "1"
    assert result["measurements"]["inference"]["samples"]["samples_s"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "threads: 0 is less than the minimum of 1"),
        ({"measurements": ["inference", "fly"]}, "measurements.1: 'fly' is not one of"),
        ({"batch_size": "four"}, "batch_size: 'four' is not of type 'integer'"),
        ({"code": "import os"}, "'code' was unexpected"),
        ({"schema": "d5suite-job-99"}, "schema: 'd5suite-job-1' was expected"),
        ({"backend": {"name": "nosuch", "mode": "x"}}, "there is no backend 'nosuch'"),
        ({"backend": {"name": "absent", "mode": "only"}}, "Absent is not installed"),
        ({"precision": "fp64"}, "has no precision 'fp64'"),
        ({"optimizer": {"name": "adamax"}}, "unknown optimizer 'adamax'"),
        ({"optimizer": {"name": "sgd", "learning_rate": -1}}, "must be positive"),
        ({"network": {"zoo": "resnet51", "classes": 4, "image_size": 32}}, "the zoo has no network 'resnet51'"),
        (
            {"network": {"onnx": "/absent.onnx", "classes": 4, "image_size": 32}},
            "/absent.onnx: cannot read the network",
        ),
        ({"dataset": {"kind": "imagenet", "root": "/absent"}}, "/absent"),
        ({"sampling": {"max_time": 1}}, "max_time"),
        ({"loader_workers": 5}, "5 loader workers, but this job may use 1 core"),
    ],
)
def test_a_bad_job_is_one_clear_error(
    tmp_path: Path, job: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    done = work(tmp_path, job | change)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    result = tmp_path / "hand.result.json"
    assert not result.exists() or not json.loads(result.read_text())["measurements"]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"schema": NaN}'])
def test_what_is_no_job_at_all_is_refused(tmp_path: Path, content: str) -> None:
    done = work(tmp_path, content)
    assert done.returncode == 2
    assert str(tmp_path / "hand.job.json") in done.stderr
    assert "Traceback" not in done.stderr


def test_unsupported_operators_are_all_named_before_anything_runs(tmp_path: Path, job: dict[str, Any]) -> None:
    import onnx
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Tanh", ["x"], ["t"], "squash"),
        helper.make_node("Elu", ["t"], ["e"], "bend"),
        helper.make_node("Elu", ["e"], ["f"], "bend2"),
        helper.make_node("Flatten", ["f"], ["y"], "flat"),
    ]
    graph = helper.make_graph(
        nodes,
        "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3072])],
    )
    path = tmp_path / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    done = work(tmp_path, job | {"network": {"onnx": str(path), "classes": 4, "image_size": 32}})
    assert done.returncode != 0
    assert "backend 'faulty' lacks 2 operator(s)" in done.stderr
    assert "Elu (node bend and 1 more); Tanh (node squash)" in done.stderr


def test_a_job_survives_the_disk(tmp_path: Path, job: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(job))
    first = Job.load(tmp_path / "a.json")
    first.save(tmp_path / "b.json")
    assert Job.load(tmp_path / "b.json") == first
    assert result_path(tmp_path / "b.json").name == "b.result.json"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        temporary.write_text(str(1 / 0))
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(JobError, match=r"x\.txt"):
        Job.load(tmp_path / "x.txt")
