"""Traces of real steps: of one process, and of ranks of which one sleeps."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import discover
from d5suite.cli import main
from d5suite.distributed.communicators import problem
from d5suite.simulation import engine
from d5suite.traces.analysis import analyse
from d5suite.traces.archive import read_archive
from d5suite.traces.calls import calls_of
from d5suite.traces.reading import read_trace
from tests.conftest import Run as RunPytest
from tests.simulation.machines import machine

pytest.importorskip("otf2")

needs_torch = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")
needs_deep500 = pytest.mark.skipif(discover()[0]["deep500"].problem() is not None, reason="deep500 is not installed")

SLEEP_S = 0.3

RECIPE = f"""
import os
import signal
import time
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Acceptance, Preset
from d5suite.measurements.distributed.distributed_step import DistributedTraining
from d5suite.measurements.distributed.steps import DistributedStep

class SleepingStep(DistributedStep):
    sleeps = False

    def make(self, count):
        self.sleeps = True  # from here on steps are recorded
        super().make(count)

    def _step(self):
        if self.sleeps and self.communicator.rank == 1:
            time.sleep({SLEEP_S})
        return super()._step()

class Sleeping(DistributedTraining):
    name = "sleeping"
    takes_memory = False

    def prepare(self, workload):
        return SleepingStep(workload)

class DyingStep(DistributedStep):
    left = 3  # recorded steps until rank 1 dies in one

    def _step(self):
        folder = self.workload.folder.parent
        if self.communicator.rank == 1 and any(folder.rglob("recording/rank1.jsonl")):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._step()

class Dying(Sleeping):
    name = "dying"

    def prepare(self, workload):
        return DyingStep(workload)

RECIPE = Recipe(
    name="small", network="lenet5", dataset="digits", optimizer=SGD(learning_rate=0.125),
    measurements=("training_step", "step_breakdown", Sleeping, Dying), acceptance=Acceptance(trajectory_steps=3),
    presets=dict.fromkeys(
        ("smoke", "reduced"), Preset(image_size=32, batch_size=4, classes=10, max_time_s=0.05)
    ),
)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "test_small.py").write_text(RECIPE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "test_small.py"


def record_of(tmp_path: Path) -> dict[str, Any]:
    (bench,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    found: dict[str, Any] = bench["extra_info"]["d5suite"]
    return found


@needs_deep500
def test_a_step_leaves_an_archive_beside_the_result(run_pytest: RunPytest, recipe: Path, tmp_path: Path) -> None:
    options = ["-k", "step_breakdown", "--backend", "deep500", "--passes", "trace", "--benchmark-json", "out.json"]
    done = run_pytest(str(recipe), *options)
    assert done.returncode == 0, done.stdout
    part = record_of(tmp_path)["trace"]
    assert part["files"] == "out.trace/small-step_breakdown-deep500"
    trace = read_archive(tmp_path / part["files"] / part["archive"])
    found = analyse(trace)
    assert len(found.steps) == part["steps"] >= 3 and len(trace) == part["events"] and not part["dropped_events"]
    regions = {"wait for data", "feed", "forward, backward and update", "wait for the device"}
    assert regions <= found.regions.keys() and regions <= part["phases_s"].keys()
    (rank,) = found.ranks
    assert rank.computing + rank.waiting + rank.communicating + rank.outside == trace.end - trace.begin
    readings = {each.name: each for each in trace.metrics}
    assert readings["memory of the process"].unit == "bytes" and readings["memory of the process"].value.min() > 1 << 20
    assert part["slowdown"]["pairs"] >= 5 and part["slowdown"]["ratio"] > 0
    assert part["clock_error_s"] == 0

    # The folder of an earlier run is replaced, and what is not ours is kept.
    (tmp_path / "out.trace" / "results-of.txt").unlink()
    refused = run_pytest(str(recipe), *options)
    assert refused.returncode == 4 and "exists, and no earlier run has made it" in refused.stderr, refused.stderr


def _replays(archive: Path, folder: Path) -> None:
    """Hold a replay of a recording against the recording, and change one thing."""
    if engine.problem():
        return
    answer, file = folder / "replay.json", machine(folder / "machine.json")
    changes = ("--what-if", "compute=0.5x", "--what-if", "algorithm=tree", "--what-if", "ranks=2x")
    assert main(["simulate", str(archive), "--machine", str(file), *changes, "--json", str(answer)]) == 0
    found = json.loads(answer.read_text())
    assert found["step_s"] == pytest.approx(found["measured_s"], rel=0.1) and found["measured_s"] > SLEEP_S
    half, tree, more = found["what_if"]
    assert half["step_s"] == pytest.approx(found["step_s"] / 2, rel=0.1)  # one that sleeps is one that computes
    assert tree["step_s"] == pytest.approx(more["step_s"], rel=0.1) and more["ranks"] == 2 * found["ranks"]


@pytest.mark.slow
@needs_torch
@pytest.mark.skipif(problem("gloo") is not None, reason="Gloo is not installed")
def test_a_rank_that_sleeps_before_a_collective_is_found(run_pytest: RunPytest, recipe: Path, tmp_path: Path) -> None:
    ranks = 3
    done = run_pytest(
        str(recipe), "-k", "sleeping", "--backend", "torch", "--ranks", str(ranks), "--communicator", "gloo",
        "--oversubscribe", "--passes", "trace", "--benchmark-json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    part = record_of(tmp_path)["trace"]
    trace = read_archive(tmp_path / part["files"] / part["archive"])
    found = analyse(trace)
    waits = [each for each in found.states.waits if each.pattern == "wait at N x N"]
    names = [trace.locations[each.location].process for each in waits]
    assert len(found.steps) == part["steps"]
    waited = {f"rank {rank}": 0.0 for rank in range(ranks)}
    for wait, name in zip(waits, names, strict=True):
        waited[name] += trace.seconds(wait.ticks)
    per_step = [trace.seconds(waiting) for *_, waiting in found.steps]
    assert statistics.median(per_step) == pytest.approx((ranks - 1) * SLEEP_S, rel=0.05)
    assert waited["rank 1"] < waited["rank 0"] / 5
    _replays(tmp_path / part["files"] / part["archive"], tmp_path)
    asleep = found.ranks[1]
    for other in (found.ranks[0], *found.ranks[2:]):
        assert other.waiting > 4 * asleep.waiting and asleep.caused > 4 * other.caused
        assert asleep.critical > other.critical  # the path lies on the rank that sleeps
    assert part["waiting_s"]["wait at N x N"] == pytest.approx(sum(waited.values()))
    for rank in found.ranks:
        assert rank.computing + rank.waiting + rank.communicating + rank.outside == trace.end - trace.begin


@pytest.mark.slow
@needs_torch
@pytest.mark.skipif(problem("gloo") is not None, reason="Gloo is not installed")
def test_events_of_a_killed_rank_survive_in_an_archive_that_says_so(
    run_pytest: RunPytest, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: rank 1 is killed inside its third recorded step."""
    done = run_pytest(
        str(recipe), "-k", "dying", "--backend", "torch", "--ranks", "2", "--communicator", "gloo", "--oversubscribe",
        "--passes", "trace", "--jobs", "jobs", "--benchmark-json", "out.json",
    )  # fmt: skip
    assert done.returncode in (1, 5) and "rank 1" in done.stdout, done.stdout
    (folder,) = {each.parent for each in (tmp_path / "jobs").rglob("rank1.jsonl")}
    trace = read_trace(folder)
    main_thread = next(n for n, each in enumerate(trace.locations) if each.process == "rank 1" and each.is_main)
    calls = calls_of(trace.events[main_thread])
    assert [trace.regions[number].name for number in calls.region].count("step") == 3 and calls.unfinished
    assert main(["trace", "convert", str(folder), "-o", str(tmp_path / "archive")]) == 0
    archive = read_archive(tmp_path / "archive")
    assert len(archive) == len(trace) and "rank 1" in archive.properties["incomplete"]
    assert main(["trace", "analyze", str(tmp_path / "archive")]) == 0
    assert "rank 1 did not end its recording, as if it was killed" in capsys.readouterr().out
