"""Recipes by ranks: their results, what the options refuse, and a rank that diverges."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jsonschema
import psutil
import pytest

from d5suite.backends import discover
from d5suite.cases.case import absent
from d5suite.launch.ranks import SHARED_MEMORY
from d5suite.measurements.distributed.distributed_step import DistributedTraining
from tests.conftest import Run as RunPytest
from tests.conftest import end_with_tests, plugin_environment, run_several, wait_until
from tests.training.small import needs_torch

RECIPE = """
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Acceptance, Preset
from d5suite.measurements.distributed.distributed_step import DistributedTraining
from d5suite.measurements.distributed.steps import DistributedStep

class DivergingStep(DistributedStep):
    def _next_feed(self):
        feed = super()._next_feed()
        if self.communicator.rank == 1 and self.workload.heartbeat.steps:
            feed = {name: value * float("nan") if value.ndim == 4 else value for name, value in feed.items()}
        return feed

class Diverging(DistributedTraining):
    name = "diverging"
    takes_memory = False

    def prepare(self, workload):
        return DivergingStep(workload)

RECIPE = Recipe(
    name="ranked", network=NETWORK, dataset="imagenet", optimizer=SGD(learning_rate=0.0625, momentum=0.5),
    measurements=("training_step", Diverging), acceptance=Acceptance(trajectory_steps=3),
    presets={"smoke": Preset(image_size=32, batch_size=4, classes=4, max_time_s=0.05)},
)
"""

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TOO_MANY = str(CPUS + 1)


@pytest.fixture
def recipe(tmp_path: Path, small_onnx: Path) -> Path:
    (tmp_path / "test_ranked.py").write_text(RECIPE.replace("NETWORK", repr(str(small_onnx))))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "test_ranked.py"


@needs_torch
def test_ranks_are_measured_and_one_that_diverges_is_named(run_pytest: RunPytest, recipe: Path, tmp_path: Path) -> None:
    done = run_pytest(
        str(recipe), "--backend", "torch", "--ranks", "2", "--communicator", "gloo", "--oversubscribe",
        "--benchmark-json", "out.json",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "training diverged first on rank 1 (" in done.stdout and "): loss nan in step " in done.stdout
    assert "1 passed" in done.stdout and "1 failed" in done.stdout  # the training step itself is not measured
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, json.loads((Path(__file__).parents[2] / "results" / "schema.json").read_text()))
    (bench,) = result["benchmarks"]
    assert bench["param"] == "torch-all_reduce-gloo-2"
    found = bench["extra_info"]["d5suite"]
    how = found["distributed"]
    assert (found["level"], found["ranks"], how["scheme"], how["communicator"]) == (3, 2, "all_reduce", "gloo")
    assert [rank["rank"] for rank in how["ranks"]] == [0, 1] and all(rank["median_s"] > 0 for rank in how["ranks"])
    assert how["straggler_ratio"] >= 1
    assert found["throughput"]["value"] == pytest.approx(8 / found["median_s"])
    names = [check["name"] for check in found["validation"]["checks"]]
    assert any("vs one process" in name for name in names)
    assert "parameters after the timed steps, bit by bit" in names
    assert bool(found.get("warnings")) == (CPUS < 2)


@pytest.mark.slow
@needs_torch
def test_a_frameworks_own_scheme_is_measured_and_elsewhere_refused(
    run_pytest: RunPytest, recipe: Path, tmp_path: Path
) -> None:
    done = run_pytest(
        str(recipe), "-k", "distributed", "--backend", "torch,deep500", "--ranks", "2", "--scheme", "ddp",
        "--communicator", "gloo", "--oversubscribe", "--benchmark-json", "out.json",
    )  # fmt: skip
    assert "deep500 has no scheme 'ddp': it has none of its own" in done.stdout
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, json.loads((Path(__file__).parents[2] / "results" / "schema.json").read_text()))
    (bench,) = result["benchmarks"]
    assert bench["param"] == "torch-ddp-2"
    found = bench["extra_info"]["d5suite"]
    how = found["distributed"]
    assert (how["scheme"], how["communicator"], how["native"], how["parts"]) == ("ddp", "gloo", True, None)
    assert how["synchronous"]
    size = found["memory"]["parameters_bytes"]
    assert how["bytes_per_step"] == 2 * size
    (check,) = (check for check in found["validation"]["checks"] if "vs one process" in check["name"])
    assert check["error"] <= 1e-10


@pytest.mark.slow
@needs_torch
def test_ctrl_c_leaves_nothing_of_the_ranks(recipe: Path, tmp_path: Path, imagenet_tree: Path) -> None:
    recipe.write_text(
        recipe.read_text().replace(
            "        feed = super()._next_feed()\n",
            "        feed = super()._next_feed()\n"
            "        if self.workload.heartbeat.steps:\n"
            "            import pathlib, threading\n"
            f"            pathlib.Path({str(tmp_path / 'timed')!r}).touch()\n"
            "            threading.Event().wait()\n",
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe), "-k", "diverging", "--backend", "torch",
         "--ranks", "2", "--communicator", "gloo", "--oversubscribe", "--imagenet", str(imagenet_tree)],
        cwd=tmp_path, env=plugin_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=end_with_tests,
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "timed").exists() or process.poll() is not None, "the timed steps")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and "KeyboardInterrupt" in said, said
    places = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    assert not [path for place in places for path in place.glob(f"d5suite-{process.pid}-*")]
    started = (each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"]))
    assert not [words for words in started if "d5suite.worker" in words and str(process.pid) in words]


REFUSED: list[tuple[list[str], str]] = [
    (["--ranks", "1", "--scheme", "ddp", "--algorithm", "ring"], "ddp is a framework's own scheme, which does not use"),
    (
        ["--ranks", "1", "--scheme", "ddp:bucket_mib=-1"],
        "bucket_mib is how many MiB of gradients are sent together: -1",
    ),
    (["--ranks", "1", "--scheme", "ddp:bucket_mib=yes"], "'yes' is not a float"),
    (["--ranks", "1", "--scheme", "ddp:colour=1"], "scheme 'ddp' has no setting 'colour'"),
    (["--ranks", TOO_MANY], f"{TOO_MANY} ranks are more than the {CPUS} core"),
    (["--ranks", "2", "--threads", "1"], "2 ranks are more than the 1 core that they may use"),
    (["--ranks", "0"], "'0' is not a number of ranks"),
    (["--ranks", "1,1"], "names something twice"),
    (["--ranks", "1", "--scheme", "telepathy"], "there is no scheme 'telepathy'"),
    (["--ranks", "1", "--scheme", "top_k:density"], "'density' is not KEY=VALUE"),
    (["--ranks", "1", "--scheme", "top_k:share=0.1"], "'share'"),
    (["--ranks", "1", "--algorithm", "smoke_signals"], "there is no algorithm 'smoke_signals'"),
    (["--ranks", "2", "--oversubscribe", "--communicator", "pigeons"], "there is no communicator 'pigeons'"),
    (["--scheme", "all_reduce"], "--scheme is for several ranks"),
    (["--oversubscribe"], "--oversubscribe is for several ranks"),
    (["--interface", "lo"], "--interface is for several ranks"),
    (["--order", "tic"], "--order is for several ranks"),
    (["--ranks", "1", "--order", "alphabetic"], "there is no order 'alphabetic'"),
    (
        ["--ranks", "1", "--scheme", "gossip:order=tic"],
        "gossip cannot honour order: a rank sends all its weights in one",
    ),
    (["--ranks", "1", "--slice", "0"], "--slice"),
    (["--ranks", "1", "--interface", "eth77"], "has no network interface 'eth77'"),
]
"""Options that make no sense, and what is said of them."""


def test_what_makes_no_sense_is_refused_before_anything_runs(recipe: Path, tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", str(recipe), "--collect-only"]
    for (_, message), done in zip(
        REFUSED, run_several([["pytest", *options, *each] for each, _ in REFUSED], tmp_path), strict=True
    ):
        assert done.returncode == 4, (done.args, done.stdout)
        assert message in done.stderr + done.stdout


def test_a_backend_that_says_nothing_of_level_3_is_skipped() -> None:
    backend = discover()[0]["torch"]
    without = replace(backend, levels=frozenset({0, 1, 2}))
    assert absent(backend, DistributedTraining) is None
    assert absent(without, DistributedTraining) == "torch has no level 3: not declared"


def test_level_3_is_measured_with_ranks_only(recipe: Path, tmp_path: Path) -> None:
    other = recipe.rename(tmp_path / "test_other.py")
    recipe.write_text(other.read_text())  # one process imports a file once
    plain = ["pytest", "-p", "no:cacheprovider", "-q", "--collect-only"]
    options = ["--ranks", "1", "--scheme", "gossip"]
    without, ranked = run_several([[*plain, str(recipe)], [*plain, str(other), *options]], tmp_path)
    assert "test_training_step[" in without.stdout and "test_distributed_step" not in without.stdout
    assert "test_distributed_step[torch-gossip-local-1]" in ranked.stdout
    assert "test_training_step[" not in ranked.stdout


@needs_torch
def test_a_precision_that_ranks_lack_is_skipped_with_its_reason_and_no_success(recipe: Path, tmp_path: Path) -> None:
    """As any run that measures nothing does; with other backends or precisions it is a remark."""
    options = ["--ranks", "1", "--precision", "fp16", "--backend", "torch", "-k", "distributed_step"]
    (done,) = run_several([["pytest", "-p", "no:cacheprovider", str(recipe), *options]], tmp_path)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "nothing was measured:" in done.stdout and "1 skipped" in done.stdout
    assert "test_distributed_step[torch-all_reduce-local-1]: level 3 has no fp16: the loss scale" in done.stdout


@needs_torch
def test_an_algorithm_that_changes_nothing_is_skipped_with_its_reason(recipe: Path, tmp_path: Path) -> None:
    options = ["--ranks", "2", "--oversubscribe", "--communicator", "gloo", "--backend", "torch", "-k", "distributed"]
    schemes = ["--scheme", "gossip,top_k", "--algorithm", "tree"]
    (done,) = run_several([["pytest", "-p", "no:cacheprovider", str(recipe), *options, *schemes]], tmp_path)
    assert done.returncode == 5 and "2 skipped" in done.stdout, done.stdout + done.stderr
    assert "gossip makes no collective, so that tree would change nothing" in done.stdout
    assert "tree has no all_gather, the collective of top_k" in done.stdout
