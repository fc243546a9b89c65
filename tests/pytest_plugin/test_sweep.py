"""``--sweep``: every point is measured by itself, and what cannot be is skipped with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from d5suite.backends import discover
from d5suite.cases.case import Settings
from d5suite.cases.problem import Problem, ProblemCase
from d5suite.cases.recipe import Preset, Recipe
from d5suite.cases.workflow import Component, Coupling, Workflow
from d5suite.errors import ConfigurationError
from d5suite.measurements.distributed.workflow import WorkflowMakespan
from d5suite.optimizers.settings import SGD
from d5suite.pytest_plugin.sweep import SweepPoint, check_options
from d5suite.report.reading import load_results
from tests.conftest import plugin_environment
from tests.passes.test_from_outside import RECIPE
from tests.report.planted import machine

needs_torch = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")


def config(*sweeps: str, args: tuple[str, ...] = (), **options: Any) -> Any:
    """What `check_options` asks of pytest's configuration."""
    given = {"sweep": list(sweeps)} | options
    return SimpleNamespace(getoption=given.get, invocation_params=SimpleNamespace(args=args))


def test_values_are_read_by_knob() -> None:
    found = check_options(config("threads=1,2", "precision=fp32,bf16", args=("--batch-size", "4")))
    assert found == {"threads": [1, 2], "precision": ["fp32", "bf16"]}


@pytest.mark.parametrize(
    ("sweeps", "more", "problem"),
    [
        (["ranks=1,2"], {}, "Give --ranks 1,2,4 instead"),
        (["speed=1"], {}, "there is no knob 'speed'"),
        (["threads=1", "threads=2"], {}, "threads is given twice"),
        (["threads=1,1"], {}, "names something twice"),
        (["threads=0"], {}, "not a whole number from 1 on"),
        (["threads=1,"], {}, "not a whole number from 1 on"),
        (["batch-size=²"], {}, "not a whole number from 1 on"),
        (["precision=fp31"], {}, "there is no precision 'fp31'"),
        (["placement=mixed"], {}, "there is no placement 'mixed'"),
        (["threads=1,2"], {"args": ("--threads=2",)}, "--threads is given, too"),
        (["threads=1,2"], {"write_jobs": Path("jobs")}, "one setting"),
        ([f"threads={','.join(map(str, range(1, 300)))}"], {}, "299 points are more than 256"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(sweeps: list[str], more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        check_options(config(*sweeps, **more))


def test_a_case_without_the_knob_is_measured_once() -> None:
    case = ProblemCase("gemm", Problem("small", "Gemm", {"A": (4, 4), "B": (4, 4)}))
    selection: Any = SimpleNamespace(backend=None)
    points = [SweepPoint({"batch-size": each}, Settings(batch_size=each), {"batch-size": 4}) for each in (4, 8)]
    assert points[0].why_not(case, selection) is None
    assert "no batch-size to sweep" in str(points[1].why_not(case, selection))


def measure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_small.py").write_text(RECIPE)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_small.py", "--backend", "torch", "--jobs",
         "jobs", "--benchmark-json", "out.json", "-k", "inference", *options],
        cwd=folder, env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@needs_torch
def test_points_are_measured_and_give_a_trajectory(tmp_path: Path) -> None:
    done = measure(
        tmp_path, "--sweep", "threads=1,4096", "--sweep", "batch-size=4,8", "--passes", "layers", "-rs", "--one-by-one"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4096 threads are more than the" in done.stdout
    found = load_results(tmp_path / "out.json")
    assert {(each["threads"], each["batch_size"]) for each in found.values()} == {(1, 4), (1, 8)}
    assert {backend for _, _, backend in found} == {"torch"}
    assert all(each["validation"]["passed"] for each in found.values())
    shown = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "roofline", "out.json", "--machine", str(machine(tmp_path / "m.json")),
         "--other-machine", "--svg", "roof.svg"],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "batch 4 → 8, 1 thread: rate ×" in shown.stdout and (tmp_path / "roof.svg").stat().st_size > 0


@needs_torch
def test_an_interrupted_sweep_keeps_what_is_measured(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_runtest_logreport(report):\n    if report.when == 'call':\n        raise KeyboardInterrupt\n"
    )
    done = measure(tmp_path, "--sweep", "batch-size=4,8", "--threads", "1")
    assert done.returncode == 2, done.stdout
    (bench,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert bench["param"] == "torch@batch-size=4" and bench["extra_info"]["d5suite"]["batch_size"] == 4


def test_images_of_a_swept_size_are_those_of_the_job(tmp_path: Path) -> None:
    recipe = Recipe(
        "small",
        "resnet18",
        "imagenet",
        SGD(learning_rate=0.1),
        {"smoke": Preset(image_size=32, batch_size=2, classes=10)},
    )
    (values,) = check_options(config("image-size=40,48")).values()
    backend: Any = SimpleNamespace(reduced="")
    sizes = [recipe.sized_preset(backend, Settings(image_size=each))[1].image_size for each in (None, *values)]
    assert sizes == [32, 40, 48]
    point = SweepPoint({"image-size": 48}, Settings(image_size=48), {"image-size": 40})
    selection: Any = SimpleNamespace(backend=backend)
    assert point.why_not(recipe, selection) is None
    digits = replace(recipe, dataset="digits")
    assert "no image-size to sweep" in str(point.why_not(digits, selection))


def test_a_workflow_is_swept_over_couplings_placements_and_buffers() -> None:
    workflow = Workflow(
        "heat", (Component("giving", "heat"), Component("taking", "online_training")),
        (Coupling("snapshots", "giving", "taking", capacity=4),), {"smoke": 2}, kinds=("memory", "files"),
    )  # fmt: skip
    wanted = Settings(coupling="memory", placement="interleaved", capacity=8)
    memory, files = (each.at(wanted)[0] for each in workflow.variants())
    assert (memory.placement, memory.couplings[0].capacity) == ("interleaved", 8)
    settings, selection = Settings(coupling="memory"), cast(Any, SimpleNamespace(backend=None))
    found = [each.why_excluded(WorkflowMakespan, settings, Path()) for each in (memory, files)]
    assert found == [None, "--sweep measures the coupling memory at this point"]
    assert workflow.variants()[0].at(Settings())[0].couplings[0].capacity == 4
    with pytest.raises(ConfigurationError, match="there is no coupling 'pigeons'"):
        next(iter(workflow.tests())).cases(Settings(coupling="pigeons"))
    point = SweepPoint({"coupling": "files"}, Settings(coupling="files"), {"coupling": "memory"})
    assert point.why_not(memory, selection) is None
    fixed = replace(workflow, couplings=[replace(workflow.couplings[0], kind="memory")])
    (own,) = (test.cases(settings)[0] for test in fixed.tests())
    assert "has no coupling to sweep" in str(point.why_not(own, selection))
