"""What needs a GPU: the small recipe and the operators on every framework that can use one.
``pytest -m gpu``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from d5suite.backends import discover
from tests.conftest import Run

pytestmark = pytest.mark.gpu
WITH_CUDA = [name for name, backend in discover()[0].items() if "cuda" in backend.devices]


@cache
def _problem(name: str) -> str | None:
    """Why a backend cannot use CUDA here, asked in a process of its own."""
    problem = discover()[0][name].problem()
    if problem:
        return problem
    code = (
        f"from d5suite.backends import backend\nprint(backend({name!r}).load('runtime').device_problem('cuda') or '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [""])[-1] or None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", WITH_CUDA)
def test_a_recipe_runs_on_the_gpu(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, name: str, precision: str
) -> None:
    problem = _problem(name)
    if problem:
        pytest.skip(problem)
    done = run_pytest(
        str(recipe_folder), "--backend", name, "--device", "cuda", "--precision", precision,
        "--benchmark-json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for bench in json.loads((tmp_path / "out.json").read_text())["benchmarks"]:
        info = bench["extra_info"]["d5suite"]
        assert info["device"] == "cuda"
        assert info["memory"]["method"] == "device"
        if importlib.util.find_spec("pynvml") is not None:
            driver, energy = info["memory"]["nvml"], info["energy"]
            assert driver.get("missing") or driver["peak_bytes"] >= info["peak_memory_bytes"]
            assert energy.get("missing") or 0 < energy["error_j"] < energy["joules_per_step"]
            assert len(info["environment"]["gpus"][0]["uuid_sha256"]) == 16
        if name == "torch" and "missing" not in info["device_events"]:
            assert info["device_events"]["trusted"]
            assert len(info["device_events"]["samples_s"]) == len(bench["stats"]["data"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", WITH_CUDA)
def test_operators_run_on_the_gpu(tmp_path: Path, name: str, precision: str) -> None:
    """Every family of the smoke preset; the custom operator from its CUDA source, where nvcc is
    present."""
    problem = _problem(name)
    if problem:
        pytest.skip(problem)
    operators = Path(__file__).parents[1] / "operators"
    out = tmp_path / "out.json"
    without = ["--deselect", str(operators / "test_bias_gelu.py")] if shutil.which("nvcc") is None else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(operators), "--backend", name,
         "--device", "cuda", "--precision", precision, "--benchmark-json", str(out), "--jobs", str(tmp_path / "jobs"),
         *without],
        cwd=operators.parent, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert all(b["extra_info"]["d5suite"]["device"] == "cuda" for b in json.loads(out.read_text())["benchmarks"])
