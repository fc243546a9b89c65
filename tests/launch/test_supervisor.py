"""Workers end with their session, whatever stands between the two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from d5suite.job import Job
from d5suite.launch.base import Launch, Limits
from d5suite.launch.run import run_job
from tests.conftest import is_dead, plugin_environment, wait_until

WRAPPER = """
import os, subprocess, sys
how, *command = sys.argv[1:]
child = subprocess.Popen(command, start_new_session=how != "forks")
if how == "leaves":
    open("worker.pid", "w").write(str(child.pid))
else:
    sys.exit(child.wait())
"""
"""A profiler that starts the worker as its child: in its group, in another, or and ends itself."""


@pytest.mark.parametrize("wrapper", ["", "forks", pytest.param("has a session of its own", marks=pytest.mark.slow)])
def test_a_session_that_is_killed_takes_its_workers_along(
    recipe_folder: Path, imagenet_tree: Path, tmp_path: Path, wrapper: str
) -> None:
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    wrap = ["--wrap", f"{sys.executable} wrapper.py '{wrapper}'"] if wrapper else []
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe_folder), "--backend", "faulty:hangs",
         "-k", "inference", "--imagenet", str(imagenet_tree), "--jobs", "jobs", *wrap],
        cwd=tmp_path, env=plugin_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: bool(list((tmp_path / "jobs").rglob("small-faulty-hangs.result.json"))), "the worker")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > bool(wrapper)
    process.kill()
    process.wait(timeout=300)
    wait_until(lambda: all(is_dead(each.pid) for each in family), "the workers' end")


def _job(folder: Path, backend: str, network: Path, images: Path) -> Path:
    path = folder / "by_hand.job.json"
    path.write_text(json.dumps({
        "schema": "d5suite-job-3", "backend": {"name": backend, "mode": "hangs"}, "device": "cpu",
        "precision": "fp32", "threads": 1, "seed": 0,
        "cases": [{
            "kind": "network", "name": "by_hand", "preset": "smoke", "measurements": ["inference"], "batch_size": 4,
            "network": {"onnx": str(network), "classes": 4, "image_size": 32}, "validation_steps": 1,
            "dataset": {"kind": "imagenet", "root": str(images)},
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
        }],
    }))  # fmt: skip
    return path


def test_a_worker_whose_wrapper_ends_before_it_is_ended(
    imagenet_tree: Path, small_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in plugin_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    job = _job(tmp_path, "faulty", small_onnx, imagenet_tree)
    run_job(Job.load(job), job, Launch(Limits(60, 2**40), wrap=f"{sys.executable} wrapper.py leaves"))
    wait_until(lambda: is_dead(int((tmp_path / "worker.pid").read_text())), "the worker's end")


def test_what_a_worker_leaves_in_a_session_of_its_own_is_ended_and_named(
    imagenet_tree: Path, small_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ends by itself: its job makes no sense."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrapper.py").write_text(
        "import subprocess, sys\n"
        "daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('daemon.pid', 'w').write(str(daemon.pid))\n"
        "sys.exit(subprocess.call(sys.argv[1:]))\n"
    )
    job = _job(tmp_path, "nosuch", small_onnx, imagenet_tree)
    run_job(Job.load(job), job, Launch(Limits(60, 2**40), wrap=f"{sys.executable} wrapper.py"))
    pid = int((tmp_path / "daemon.pid").read_text())
    wait_until(lambda: is_dead(pid), "the daemon's end")
    log = (tmp_path / "by_hand.log").read_text()
    assert f"killed what the worker had started and left: {pid} sleep" in log
