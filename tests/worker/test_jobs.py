"""Job files: what a worker refuses, and how it says so. Workers run as processes, as users run
them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from d5suite.errors import JobError
from d5suite.files import PendingFile, atomic_path, write_json
from d5suite.job import Job, Result, result_path
from d5suite.launch.base import Launch, Limits
from d5suite.launch.turns import TurnWorker, run_beside
from tests.conftest import plugin_environment, run_several


@pytest.fixture
def case(small_onnx: Path, imagenet_tree: Path) -> dict[str, Any]:
    return {
        "kind": "network",
        "name": "by_hand",
        "preset": "smoke",
        "measurements": ["inference"],
        "sampling": {"max_time_s": 0.05},
        "network": {"onnx": str(small_onnx), "classes": 4, "image_size": 32},
        "dataset": {"kind": "imagenet", "root": str(imagenet_tree)},
        "batch_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "validation_steps": 2,
    }


@pytest.fixture
def job(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": "d5suite-job-3",
        "backend": {"name": "faulty", "mode": "good"},
        "device": "cpu",
        "precision": "fp32",
        "threads": 1,
        "seed": 0,
        "loader_workers": 1,
        "cases": [case],
    }


def work(tmp_path: Path, content: Any, *options: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "hand.job.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return subprocess.run(
        [sys.executable, "-m", "d5suite.worker", *options, str(path)],
        env=plugin_environment(),
        capture_output=True,
        text=True,
    )


def test_a_job_written_by_hand_runs(tmp_path: Path, job: dict[str, Any]) -> None:
    done = work(tmp_path, job)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "hand.result.json").read_text())
    assert result["status"] == "done"
    assert result["threads"]["budget"] == 1
    assert len(result["threads"]["cpus"]) == 1
    assert result["environment"]["environment_variables"]["OMP_NUM_THREADS"] == "1"
    passes = result["measurements"]["by_hand/inference"]["passes"]
    assert set(passes) == {"memory", "energy", "time"}
    assert passes["time"]["samples"]["samples_s"] and passes["memory"]["peak_bytes"]


BAD_JOBS: list[tuple[dict[str, Any], str]] = [
    ({"threads": 0}, "threads: 0 is less than the minimum of 1"),
    ({"code": "import os"}, "'code' was unexpected"),
    ({"schema": "d5suite-job-99"}, "schema: 'd5suite-job-3' was expected"),
    ({"passes": ["fly", "time"]}, "there is no pass 'fly'"),
    ({"passes": ["memory"]}, "'passes' lacks 'time'"),
    ({"passes": ["time", "time"]}, "passes: ['time', 'time'] has non-unique elements"),
    ({"cases": []}, "cases: [] should be non-empty"),
    ({"backend": {"name": "nosuch", "mode": "x"}}, "there is no backend 'nosuch'"),
    ({"backend": {"name": "absent", "mode": "only"}}, "Absent is not installed"),
    ({"precision": "fp64"}, "has no precision 'fp64'"),
    ({"loader_workers": 5}, "5 loader workers, but this job may use 1 core"),
]
"""Changes of a job, and what the error says."""

BAD_CASES: list[tuple[dict[str, Any], str]] = [
    ({"measurements": ["fly"]}, "there is no measurement 'fly'"),
    ({"measurements": []}, "cases.0.measurements: [] should be non-empty"),
    ({"files": {"inference": "/absent.py"}}, "/absent.py: there is no such Python file"),
    ({"kind": "program"}, "cases.0.kind: 'program' is not one of"),
    ({"code": "import os"}, "'code' was unexpected"),
    ({"batch_size": "four"}, "cases.0.batch_size: 'four' is not of type 'integer'"),
    ({"optimizer": {"name": "adamax"}}, "unknown optimizer 'adamax'"),
    ({"optimizer": {"name": "sgd", "learning_rate": -1}}, "must be positive"),
    ({"network": {"zoo": "resnet51", "classes": 4, "image_size": 32}}, "the zoo has no network 'resnet51'"),
    ({"network": {"onnx": "/absent.onnx", "classes": 4, "image_size": 32}}, "/absent.onnx: cannot read the network"),
    ({"dataset": {"kind": "imagenet", "root": "/absent"}}, "/absent"),
    ({"sampling": {"max_time": 1}}, "max_time"),
]
"""Changes of its case."""


def refused(folder: Path, contents: Sequence[str]) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run a worker on each job, in one process; none may measure anything or end in a traceback."""
    names = [f"{number}.job.json" for number in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_text(content)
    for name, done in zip(names, run_several([["d5suite.worker", name] for name in names], folder), strict=True):
        assert "Traceback" not in done.stderr
        result = folder / name.replace(".job.", ".result.")
        assert not result.exists() or not json.loads(result.read_text())["measurements"]
        yield done


def test_a_bad_job_is_one_clear_error(tmp_path: Path, job: dict[str, Any]) -> None:
    jobs = [job | change for change, _ in BAD_JOBS]
    jobs += [job | {"cases": [job["cases"][0] | change]} for change, _ in BAD_CASES]
    answers = refused(tmp_path, [json.dumps(each) for each in jobs])
    for (_, message), done in zip((*BAD_JOBS, *BAD_CASES), answers, strict=True):
        assert done.returncode in (1, 2), done.args
        assert message in done.stderr


def test_what_is_no_job_at_all_is_refused(tmp_path: Path) -> None:
    for done in refused(tmp_path, ["", "{", "[]", "null", '{"schema": NaN}']):
        assert done.returncode == 2
        assert done.args[1] in done.stderr


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
    case = job["cases"][0] | {"network": {"onnx": str(path), "classes": 4, "image_size": 32}}
    done = work(tmp_path, job | {"cases": [case]})
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


def test_what_a_killed_writer_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    """Killed while it writes one file for another; who still writes is left alone."""
    path = tmp_path / "a[1].h5"
    killed = """
import os, signal, sys
from pathlib import Path
from d5suite.files import PendingFile, atomic_path
with atomic_path(PendingFile(Path(sys.argv[1])).temporary):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", killed, str(path)]).returncode == -signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert len(left) == 2
    other = PendingFile(path)
    assert all(each.exists() for each in left)
    for each in left:
        os.utime(each, (0, 0))
    other.commit()
    PendingFile(path).discard()
    assert list(tmp_path.iterdir()) == [path]


LIAR = """#!{python}
import sys
from d5suite.worker import turns
turns.TurnChannel.run = lambda self, how: None
from d5suite.worker.__main__ import main
sys.exit(main(sys.argv[3:]))
"""
"""A worker that does not ask to be alone."""


def beside(tmp_path: Path, content: dict[str, Any], python: Path | None = None) -> TurnWorker:
    """Start a worker that may run beside others."""
    path = tmp_path / "hand.job.json"
    path.write_text(json.dumps(content))
    ours = {"PYTHONPATH": plugin_environment()["PYTHONPATH"]}
    launch = Launch(Limits(300.0, sys.maxsize), None if python is None else str(python), environment=ours)
    return TurnWorker(Job.load(path), path, launch, beside=True)


def test_a_worker_asks_to_be_alone_when_it_measures(tmp_path: Path, job: dict[str, Any]) -> None:
    asked = []
    with contextlib.closing(beside(tmp_path, job)) as worker:
        while (key := worker.ready()) == "":
            if worker.asks:
                phase = json.loads(result_path(worker.path).read_text())["phase"]
                asked.append((worker.asks, phase))
                worker.let()
            else:
                run_beside([worker])
        assert key == "by_hand/inference", worker.log.read_text()
    assert asked == [
        ("alone", "starting the framework"),
        ("beside", "taking the memory pass of by_hand/inference"),
        ("alone", "validating by_hand/inference"),
    ]


def test_a_worker_that_would_measure_beside_others_is_seen(tmp_path: Path, job: dict[str, Any]) -> None:
    python = tmp_path / "python"
    python.write_text(LIAR.format(python=sys.executable))
    python.chmod(0o755)
    with contextlib.closing(beside(tmp_path, job, python)) as worker:
        while worker.ready() is not None:
            run_beside([worker])
        result = Result.load(result_path(worker.path))
    assert not result.measurements
    said = result.failures["by_hand/inference"].message
    assert said == "the first call of by_hand/inference was to be measured while other workers run"


EARLIER = """
import sys, weakref
from d5suite.passes.base import Pass

class Earlier(Pass):
    name = "earlier"
    disturbs = False
    schema = {"required": ["alive"], "properties": {"alive": {"type": "integer"}}}

    def take(self, prepared):
        workload, seen = prepared.workload, sys.__dict__.setdefault("workloads", [])
        workload.itself = workload  # so that only a collection frees it
        workload.much = [[] for _ in range(500_000)]  # to make collections slow
        alive = sum(each() is not None for each in seen)
        seen.append(weakref.ref(workload))
        return {"alive": alive}
"""


def test_a_case_begins_without_the_earlier_ones_in_memory(
    tmp_path: Path, job: dict[str, Any], case: dict[str, Any]
) -> None:
    (tmp_path / "earlier.py").write_text(EARLIER)
    cases = [case | {"name": name} for name in ("first", "second", "third")]
    passes = {"passes": ["earlier", "time"], "pass_files": {"earlier": str(tmp_path / "earlier.py")}}
    done = work(tmp_path, job | passes | {"cases": cases}, "--trust")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "hand.result.json").read_text())["measurements"]
    assert [found[f"{each['name']}/inference"]["passes"]["earlier"]["alive"] for each in cases] == [0, 0, 0]
