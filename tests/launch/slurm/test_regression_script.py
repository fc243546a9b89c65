"""The batch script of ``docs/ci.md`` on a real cluster: sbatch ends with d5suite's exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import plugin_environment, write_recipe
from tests.launch.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SCRIPT = Path(__file__).parents[3] / "examples/ci/regression.sbatch"


def submit(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbatch", "--wait", "--time=5", str(SCRIPT), *arguments], cwd=folder, timeout=400, capture_output=True,
        text=True, env={**plugin_environment(), "D5SUITE_RESULTS": str(folder / "results"), **variables},
    )  # fmt: skip


def logs(folder: Path) -> str:
    return "".join(each.read_text() for each in folder.glob("d5suite-regression-*.log"))


def test_a_verdict_is_the_jobs_exit_code(slurm: Cluster, tmp_path: Path, small_onnx: Path, imagenet_tree: Path) -> None:
    write_recipe(tmp_path, small_onnx)
    done = submit(
        tmp_path, "here", "env:FAULTY_FAULT=wrong:4", "recipes", "--backend", "faulty", "--",
        "--imagenet", str(imagenet_tree), "--threads", "1", "-k", "inference",
        D5SUITE=str(Path(sys.executable).with_name("d5suite")), PATH=os.environ["PATH"],
    )  # fmt: skip
    assert done.returncode == 3, done.stderr + logs(tmp_path)
    found = json.loads((tmp_path / "results/comparison.json").read_text())
    assert [each["verdict"] for each in found["benchmarks"]] == ["invalid"]
    assert {each.name for each in (tmp_path / "results").iterdir()} == {
        f"comparison.{kind}" for kind in ("json", "md", "xml")
    }


def test_a_call_without_sides_says_how(slurm: Cluster, tmp_path: Path) -> None:
    assert submit(tmp_path, "here").returncode == 2
    assert "usage: sbatch --wait regression.sbatch A B RECIPE" in logs(tmp_path)
