"""What needs a GPU: the small recipe and the operators on every framework that can use one.
``pytest -m gpu``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import backend, discover
from d5suite.measurements import find
from tests.conftest import Run

pytestmark = pytest.mark.gpu
WITH_CUDA = [name for name, described in discover()[0].items() if "cuda" in described.devices]

STEPS = ["inference", "gradient", "training_step"]
"""Measurements of the recipe that take energy, and that can be made with a cold cache."""

REASONS = (
    "Not Supported",
    "Insufficient Permissions",
    "is divided (MIG)",
    "several GPUs, which CUDA may count otherwise",
)
"""Why a GPU that works may lack a figure; that NVML does not answer, or a lost GPU, is none."""

UNKNOWN = "unknown to this version of nvidia-ml-py"


@cache
def _problem(name: str) -> str | None:
    """Why a backend cannot use CUDA here, asked in a process of its own."""
    problem = discover()[0][name].problem()
    if problem:
        return problem
    devices = map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
    if not any(devices) and shutil.which("nvidia-smi") is None:  # asking a framework takes seconds
        return "there is no GPU's driver"
    code = (
        f"from d5suite.backends import backend\nprint(backend({name!r}).load('runtime').device_problem('cuda') or '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [""])[-1] or None


def _measured(run_pytest: Run, recipe_folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The benchmarks of a recipe on the GPU, each of which has figures of its device."""
    out = recipe_folder / "out.json"
    done = run_pytest(str(recipe_folder), *arguments, "--device", "cuda", "--benchmark-json", str(out))
    assert done.returncode == 0, done.stdout[-5000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())["benchmarks"]
    for bench in found:
        info = bench["extra_info"]["d5suite"]
        assert info["device"] == "cuda"
        assert info["memory"]["method"] == "device"
    return found


def check_driver(info: dict[str, Any]) -> None:
    """With nvidia-ml-py, each figure of the driver has a value or one of `REASONS`."""
    if importlib.util.find_spec("pynvml") is None:
        return
    driver, energy, gpus = info["memory"]["nvml"], info["energy"], info["machine"]["gpus"]
    if not refused(driver):
        assert driver["peak_bytes"] >= info["peak_memory_bytes"] > 0
    if info["measurement"] not in STEPS:
        assert energy == {"missing": find(info["measurement"]).without_energy}
    elif not refused(energy):
        assert 0 < energy["error_j"] < energy["joules_per_step"]
    assert gpus
    for gpu in gpus:
        assert set(gpu["missing"].values()) <= {"Not Supported", "Insufficient Permissions", UNKNOWN}
        assert gpu["clock_mhz"] or "nvmlDeviceGetClockInfo" in gpu["missing"]
        assert gpu["temperature_c"] or "nvmlDeviceGetTemperature" in gpu["missing"]
    assert len(info["environment"]["gpus"][0]["uuid_sha256"]) == 16
    assert not re.search("(GPU|MIG)-[0-9a-f]{8}-", json.dumps(info))


def refused(figure: dict[str, Any]) -> bool:
    """Whether a figure is missing, for which there must be one of `REASONS`."""
    assert "missing" not in figure or any(reason in figure["missing"] for reason in REASONS), figure
    return "missing" in figure


def check_events(info: dict[str, Any], samples: int) -> None:
    """All samples are on the device's clock, where the backend reads it."""
    events, absent = info["device_events"], backend(info["backend"]["name"]).absent
    if "device events" in absent:
        assert events == {"missing": absent["device events"]}
    else:
        assert events.get("trusted"), events
        assert len(events["samples_s"]) == samples


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", WITH_CUDA)
def test_a_recipe_runs_on_the_gpu(run_pytest: Run, recipe_folder: Path, name: str, precision: str) -> None:
    problem = _problem(name)
    if problem:
        pytest.skip(problem)
    found = _measured(run_pytest, recipe_folder, "--backend", name, "--precision", precision)
    assert [bench["extra_info"]["d5suite"]["measurement"] for bench in found] == [*STEPS, "input_pipeline"]
    for bench in found:
        info = bench["extra_info"]["d5suite"]
        check_driver(info)
        check_events(info, len(bench["stats"]["data"]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("choice", ["torch:cuda_graphs", "torch:channels_last", "tensorflow:xla"])
def test_a_mode_runs_on_the_gpu(run_pytest: Run, recipe_folder: Path, choice: str, precision: str) -> None:
    name, _, mode = choice.partition(":")
    problem = _problem(name)
    if problem:
        pytest.skip(problem)
    found = _measured(
        run_pytest, recipe_folder, "--backend", choice, "--precision", precision, "-k", " or ".join(STEPS)
    )
    assert [bench["extra_info"]["d5suite"]["measurement"] for bench in found] == STEPS
    for bench in found:
        info = bench["extra_info"]["d5suite"]
        assert (info["backend"]["name"], info["backend"]["mode"], info["precision"]) == (name, mode, precision)
        check_events(info, len(bench["stats"]["data"]))


def test_steps_find_a_cold_cache_on_the_gpu(run_pytest: Run, recipe_folder: Path) -> None:
    problem = _problem("torch")
    if problem:
        pytest.skip(problem)
    found = _measured(run_pytest, recipe_folder, "--backend", "torch", "--l2-cold", "-k", " or ".join(STEPS))
    assert [bench["extra_info"]["d5suite"]["measurement"] for bench in found] == STEPS
    for bench in found:
        info = bench["extra_info"]["d5suite"]
        assert 0 < 2 * info["l2_cold"]["cache_bytes"] == info["l2_cold"]["buffer_bytes"]
        check_events(info, len(bench["stats"]["data"]))


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
    found = [bench["extra_info"]["d5suite"] for bench in json.loads(out.read_text())["benchmarks"]]
    assert found
    for info in found:
        assert (info["device"], info["precision"]) == ("cuda", precision)
        check_ceilings(info)


def check_ceilings(info: dict[str, Any]) -> None:
    """An operator has the ceilings of arithmetic and memory that the backend can reach."""
    name, precision = info["backend"]["name"], info["precision"]
    makers = {"flops_per_s": "Gemm", "bytes_per_s": "Concat"}
    able = {key for key, maker in makers.items() if backend(name).lacks_operator(maker, precision) is None}
    assert set(info["ceiling"]) == able
    for key in able:
        assert info["ceiling"][key]["value"] > 0 and info["ceiling"][key]["backend"] == name
        assert (info["fraction_of_ceiling"][key] is None) == (not info["achieved"][key])
