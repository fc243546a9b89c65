"""Workflows as a user measures them: ranks in processes, their records, and a side that dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from d5suite.job import result_path
from d5suite.launch.ranks import SHARED_MEMORY
from d5suite.workflows.couplings import problem
from tests.conftest import Run as RunPytest
from tests.conftest import plugin_environment
from tests.training.small import needs_torch

ROOT = Path(__file__).parents[2]

RECIPE = """
from d5suite.cases.workflow import Component, Coupling, Workflow
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, ROOT)
from tests.workflows.pair import Giver, Taker

def hang():
    Path("hung").touch()
    threading.Event().wait()

class Unlucky(Giver):
    name = "unlucky"

    def start(self):
        super().start()
        self.runs = getattr(self, "runs", 0) + 1

    def step(self, step):
        ACCIDENT
        return super().step(step)

WORKFLOW = Workflow(
    name="pair",
    components=(Component("giving", Unlucky), Component("taking", Taker)),
    couplings=(Coupling("numbers", "giving", "taking"),),
    steps={"smoke": 8},
    kinds=("KIND",),
    checkpoint_every=2,
)
"""


def write_pair(folder: Path, accident: str = "pass", kind: str = "memory") -> None:
    text = RECIPE.replace("ROOT", repr(str(ROOT))).replace("ACCIDENT", accident).replace("KIND", kind)
    (folder / "test_pair.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")


def options(communicator: str = "gloo", ranks: str = "2") -> list[str]:
    return ["--ranks", ranks, "--communicator", communicator, "--oversubscribe", "--backend", "deep500",
            "--benchmark-min-rounds", "2", "--benchmark-max-time", "0"]  # fmt: skip


@pytest.mark.slow
@needs_torch
def test_a_simulation_and_its_learner_are_measured(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    recipe = shutil.copy(ROOT / "recipes" / "test_coupled_heat_surrogate.py", tmp_path)
    Path(recipe).write_text(
        Path(recipe).read_text().replace('"points": 48', '"points": 12').replace('"smoke": 24', '"smoke": 9')
    )
    done = run_pytest(
        str(recipe), "-k", "memory", *options(ranks="3"), "--passes", "trace", "--benchmark-json", "out.json"
    )
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, json.loads((ROOT / "results" / "schema.json").read_text()))
    (bench,) = result["benchmarks"]
    assert bench["param"] == "deep500-workflow-gloo-3"
    found = bench["extra_info"]["d5suite"]
    workflow = found["workflow"]
    assert workflow["components"]["simulation"]["ranks"] == [0, 1]
    assert workflow["components"]["learner"]["role"] == "training"
    figures = workflow["components"]["simulation"]["figures"]
    assert 0 < figures["physical_error"] < 1 and figures["surrogate_strides"] == 4
    assert workflow["couplings"]["snapshots"]["messages"] == workflow["couplings"]["snapshots"]["taken"] == 18
    assert workflow["bottleneck"]["sentence"]
    names = [check["name"] for check in found["validation"]["checks"]]
    assert any("vs closed form, rank 1" in name for name in names)
    assert any("restarted before step 9" in name for name in names)
    assert any("native vs formula (fp64)" in name for name in names)
    assert {"run simulation", "train", "move snapshots"} <= set(found["trace"]["phases_s"])
    assert not list(SHARED_MEMORY.glob("d5suite-couplings-*"))


@needs_torch
def test_a_side_that_dies_ends_the_job_and_what_was_measured_is_kept(run_pytest: RunPytest, tmp_path: Path) -> None:
    write_pair(tmp_path, "self.runs == 6 and step == 2 and os.kill(os.getpid(), 9)")
    start = time.monotonic()
    done = run_pytest("test_pair.py", *options(), "--benchmark-json", "out.json")
    assert done.returncode == 1 and "rank 0 of 2 (giving) on " in done.stdout, done.stdout
    assert "died of SIGKILL" in done.stdout
    assert time.monotonic() - start < 60
    (job,) = (tmp_path / ".d5suite" / "jobs").glob("*/*-2.result.json")
    kept = json.loads(job.read_text())["kept"]["pair-memory/workflow"]
    assert len(kept["series"]["run_s"]) >= 1


@pytest.mark.slow
@needs_torch
def test_a_side_that_hangs_is_named_and_the_job_continues(run_pytest: RunPytest, tmp_path: Path) -> None:
    once = 'self.runs == 2 and step == 6 and not Path("hung").exists() and hang()'
    write_pair(tmp_path, once)
    done = run_pytest("test_pair.py", *options(), "--benchmark-json", "out.json")
    assert done.returncode == 1, done.stdout
    assert "rank 0 of 2 (giving) on " in done.stdout and "hung (no work for " in done.stdout
    (job,) = (tmp_path / ".d5suite" / "jobs").glob("*/*-2.job.json")
    assert list(job.parent.glob("*.checkpoints/rank0-step*.npz"))
    again = subprocess.run(
        [sys.executable, "-m", "d5suite.worker", "--continue", str(job)], cwd=tmp_path, env=plugin_environment(),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    result = json.loads(result_path(job).read_text())
    names = [each["name"] for each in result["validation"]["pair-memory/workflow"]["checks"]]
    (sent,) = (int(name.split()[3]) for name in names if name.startswith("numbers (memory, block): "))
    assert 2 <= sent < 8  # it went on from the last step that both sides have kept
    assert any("the last timed run vs the proved one" in name for name in names)
    assert not list(job.parent.glob("*.checkpoints"))


@pytest.mark.slow
@needs_torch
@pytest.mark.skipif(problem("adios2") is not None, reason=str(problem("adios2")))
def test_streams_of_adios2_couple_two_processes(run_pytest: RunPytest, tmp_path: Path) -> None:
    write_pair(tmp_path, kind="adios2")
    done = run_pytest("test_pair.py", *options(), "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout
    (bench,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    found = bench["extra_info"]["d5suite"]
    numbers = found["workflow"]["couplings"]["numbers"]
    assert (numbers["kind"], numbers["messages"], numbers["taken"]) == ("adios2", 8, 8)
    assert any("restarted before step 7" in each["name"] for each in found["validation"]["checks"])


@pytest.mark.slow
def test_a_program_in_c_is_coupled(run_pytest: RunPytest, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path / "coupled"
    shutil.copytree(ROOT / "examples" / "coupled_c", folder)
    subprocess.run([compiler, "-O2", "-o", "heat", "heat.c", "-lm"], cwd=folder, check=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = run_pytest("coupled/test_coupled_c.py", "-k", "memory", *options(), "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout
    (bench,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    workflow = bench["extra_info"]["d5suite"]["workflow"]
    assert workflow["couplings"]["snapshots"]["messages"] == 12
    assert workflow["components"]["learner"]["figures"]["updates"] == 11
