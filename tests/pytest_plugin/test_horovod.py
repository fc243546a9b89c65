"""Horovod as a scheme: proved, timed, its settings obeyed, started by each launcher.

The conformance kit holds each adapter's to one process, with planted mistakes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from d5suite.backends import discover
from d5suite.distributed.communicators import problem
from d5suite.distributed.horovod import environment
from d5suite.job import Result, of_rank, result_path
from tests.conftest import Run as RunPytest
from tests.conftest import plugin_environment

EXPECTED = os.environ.get("D5SUITE_HAS_HOROVOD", "").split()
"""Backends whose extension continuous integration has built: their tests are not skipped."""

RECIPE = """
import os, signal
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Acceptance, Preset
from d5suite.measurements.distributed.distributed_step import DistributedTraining
from d5suite.measurements.distributed.steps import DistributedStep

class KilledStep(DistributedStep):
    def _next_feed(self):
        if self.communicator.rank == 1 and self.workload.heartbeat.steps > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._next_feed()

class Killed(DistributedTraining):
    name = "killed"
    takes_memory = False

    def prepare(self, workload):
        return KilledStep(workload)

class SummedStep(DistributedStep):
    def make_scheme(self, replica):
        from d5suite.backends.torch.horovod import hvd
        hvd.Average = hvd.Sum
        return super().make_scheme(replica)

class Summed(DistributedTraining):
    name = "summed"
    takes_memory = False

    def prepare(self, workload):
        return SummedStep(workload)

RECIPE = Recipe(
    name="ranked", network=NETWORK, dataset="imagenet", optimizer=SGD(learning_rate=0.0625, momentum=0.5),
    measurements=("training_step", Killed, Summed), acceptance=Acceptance(trajectory_steps=3),
    presets={"smoke": Preset(image_size=32, batch_size=4, classes=4, max_time_s=0.05)},
)
"""


def _lacking() -> str | None:
    backend = discover()[0]["torch"]
    found = problem("gloo") or backend.lacks_scheme(
        "horovod", mode=backend.default_mode, device="cpu", precision="fp32"
    )
    assert not (found and "torch" in EXPECTED), found
    return found


needs_horovod = pytest.mark.skipif(_lacking() is not None, reason=_lacking() or "")


@pytest.fixture
def recipe(tmp_path: Path, small_onnx: Path) -> Path:
    (tmp_path / "test_ranked.py").write_text(RECIPE.replace("NETWORK", repr(str(small_onnx))))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "test_ranked.py"


def measured(
    run: RunPytest, recipe: Path, scheme: str, *more: str, timeline: Path | None = None
) -> tuple[Mapping[str, Any], str]:
    """The record of a run of two ranks that passes, and Horovod's own record of what it did."""
    given = {} if timeline is None else {"HOROVOD_TIMELINE": str(timeline)}
    done = run(
        str(recipe), "-k", "distributed", "--backend", "torch", "--ranks", "2", "--scheme", scheme, "--oversubscribe",
        "--benchmark-json", "out.json", *(more or ("--communicator", "gloo")), environment=given,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    (bench,) = json.loads((recipe.parent / "out.json").read_text())["benchmarks"]
    found: dict[str, Any] = bench["extra_info"]["d5suite"]
    return found, "" if timeline is None else timeline.read_text()


def proved(found: Mapping[str, Any]) -> Mapping[str, Any]:
    (check,) = (check for check in found["validation"]["checks"] if "vs one process" in check["name"])
    return dict(check)


@needs_horovod
def test_a_step_is_proved_and_gradients_travel_together(run_pytest: RunPytest, recipe: Path, tmp_path: Path) -> None:
    found, said = measured(run_pytest, recipe, "horovod", timeline=tmp_path / "timeline")
    how = found["distributed"]
    assert (how["scheme"], how["communicator"], how["native"]) == ("horovod", "gloo", True)
    assert how["bytes_per_step"] == 2 * found["memory"]["parameters_bytes"]
    assert proved(found)["error"] <= 1e-10
    assert "MEMCPY_IN_FUSION_BUFFER" in said


@needs_horovod
@pytest.mark.slow
def test_settings_reach_horovod(run_pytest: RunPytest, recipe: Path, tmp_path: Path) -> None:
    scheme = "horovod:fusion_bytes=0:cycle_ms=2:compression=fp16"
    found, said = measured(run_pytest, recipe, scheme, timeline=tmp_path / "timeline")
    assert found["distributed"]["bytes_per_step"] == found["memory"]["parameters_bytes"]
    assert 1e-10 < proved(found)["error"] <= 2.0**-9
    assert "ALLREDUCE" in said and "MEMCPY_IN_FUSION_BUFFER" not in said


@needs_horovod
@pytest.mark.slow
@pytest.mark.skipif(problem("mpi") is not None, reason="no MPI")
def test_mpiexec_starts_it(run_pytest: RunPytest, recipe: Path) -> None:
    found, _ = measured(run_pytest, recipe, "horovod", "--communicator", "mpi")
    assert found["distributed"]["launcher"] == "mpi" and proved(found)["error"] <= 1e-10


@needs_horovod
@pytest.mark.slow
def test_horovodrun_starts_it(run_pytest: RunPytest, recipe: Path, tmp_path: Path) -> None:
    measured(run_pytest, recipe, "horovod", "--communicator", "gloo", "--jobs", str(tmp_path / "jobs"))
    (job,) = (tmp_path / "jobs").rglob("*.job.json")
    for rank in range(2):
        of_rank(result_path(job), rank).unlink()
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    runner = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--gloo", "-H", "localhost:2"]
    done = subprocess.run(
        [*runner, sys.executable, "-m", "d5suite.worker", str(job)], env=plugin_environment()
        | {"D5SUITE_MEETING": str(meeting)}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(Result.load(result_path(job)).measurements) == 1


@needs_horovod
def test_gradients_that_are_added_are_refused(run_pytest: RunPytest, recipe: Path) -> None:
    done = run_pytest(
        str(recipe), "-k", "summed", "--backend", "torch", "--ranks", "2", "--scheme", "horovod", "--oversubscribe",
        "--communicator", "gloo",
    )  # fmt: skip
    assert done.returncode == 1 and "vs one process" in done.stdout, done.stdout


@needs_horovod
@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_nothing_is_left(run_pytest: RunPytest, recipe: Path) -> None:
    done = run_pytest(
        str(recipe), "-k", "killed", "--backend", "torch", "--ranks", "2", "--scheme", "horovod", "--oversubscribe",
        "--communicator", "gloo",
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and f"rank 1 of 2 on {socket.gethostname()} died of SIGKILL" in said, done.stdout
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if str(recipe.parent) in " ".join(line or ())]


def test_ranks_of_two_hosts_are_numbered_as_horovodrun_does() -> None:
    hosts = ["a", "a", "b"]
    found = [environment(rank, hosts, 7) for rank in range(3)]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    numbers = [[int(each[f"HOROVOD_{name}"]) for name in names] for each in found]
    assert numbers == [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]]
    assert {each["HOROVOD_GLOO_RENDEZVOUS_ADDR"] for each in found} == {"a"}
    assert "HOROVOD_GLOO_IFACE" not in found[0]
    assert environment(1, ["a", "a"], 7)["HOROVOD_GLOO_IFACE"] == "lo"


def test_a_backend_without_the_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d5suite.levels.description._is_installed", lambda module: False)
    backends = discover()[0]
    for name, module in (
        ("torch", "torch.mpi_lib_v2"),
        ("tensorflow", "tensorflow.mpi_lib"),
        ("mxnet", "mxnet.mpi_lib"),
    ):
        backend = backends[name]
        said = backend.lacks_scheme("horovod", mode=backend.default_mode, device="cpu", precision="fp32")
        assert said == f"Horovod needs horovod.{module}, which is not installed; install it with: make horovod"
    keras = backends["keras"]
    for mode, module in (("torch", "torch.mpi_lib_v2"), ("tensorflow", "tensorflow.mpi_lib")):
        assert f"horovod.{module}," in str(keras.lacks_scheme("horovod", mode=mode, device="cpu", precision="fp32"))
    assert "no extension for JAX" in str(keras.lacks_scheme("horovod", mode="jax", device="cpu", precision="fp32"))
