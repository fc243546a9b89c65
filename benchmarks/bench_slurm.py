"""What ``d5suite slurm run`` adds to the bare ``srun`` of the same worker, on a loopback cluster.

Both run the same job of one training step in turn: the command from its start to its end, with
collecting recipes, submitting, following and gathering; and the line of its batch script that calls
``srun``, by itself.

``pytest benchmarks/bench_slurm.py`` prints the seconds that it adds; ``--benchmark-json`` keeps
them in ``extra_info``. Needs Slurm's daemons, as the tests do.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.report.formats import figure
from tests.launch.slurm.cluster import Cluster, cluster, lacking

ROUNDS = 6
LIMIT_S = 2.0
"""Seconds that a job may take longer."""

RECIPE = """
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Preset
RECIPE = Recipe(name='digits', network='lenet5', dataset='digits', on_request=True,
    optimizer=SGD(learning_rate=0.0625), measurements=('training_step',),
    presets={'smoke': Preset(image_size=32, batch_size=8, classes=10, max_time_s=0.05)})
"""

PROFILE = 'partition = "cpu"\ntime = "00:10:00"\ncores_per_node = 1\n'

WORDS = ["test_digits.py", "--nodes", "1", "--backend", "torch", "--out", "out.json"]


def slurm(folder: Path, started: Cluster, *words: str) -> float:
    """Run the command; return its seconds."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "slurm", *words], cwd=folder, env=os.environ | started.environment,
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    took = time.perf_counter() - begin
    shutil.rmtree(folder / "d5suite-slurm") if words[0] == "run" else None
    return took


def bare(folder: Path, started: Cluster, script: str) -> float:
    """Run the worker of a batch script by srun alone; return its seconds."""
    kept = ("export ", "job=", "python=", "srun ")
    lines = [line for line in script.splitlines() if line.startswith(kept) and "SLURM_JOB_ID" not in line]
    lines[-1] = lines[-1].replace("srun ", "srun --partition=cpu --exclusive ", 1)
    begin = time.perf_counter()
    subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=folder, env=os.environ | started.environment, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - begin


def test_slurm_run_adds_little_to_srun(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    reason = lacking()
    if reason:
        pytest.skip(reason)
    (tmp_path / "test_digits.py").write_text(RECIPE)
    (tmp_path / "d5suite-slurm.toml").write_text(PROFILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    with cluster() as started:
        slurm(tmp_path, started, "script", *WORDS)
        (script,) = tmp_path.glob("d5suite-slurm/*/scripts/*.sh")
        kept = tmp_path / "kept"
        shutil.move(script.parents[1], kept)
        text = script.read_text() if script.exists() else (kept / "scripts" / script.name).read_text()
        text = text.replace(str(script.parents[1]), str(kept))
        bare(tmp_path, started, text)
        added = []
        for turn in range(ROUNDS):
            times = {}
            for kind in ("run", "srun") if turn % 2 else ("srun", "run"):
                times[kind] = (
                    slurm(tmp_path, started, "run", *WORDS) if kind == "run" else bare(tmp_path, started, text)
                )
            added.append(times["run"] - times["srun"])
    middle = statistics.median(added)
    benchmark.extra_info["d5suite"] = {"added_s": added, "limit_s": LIMIT_S}
    benchmark.pedantic(lambda: None, rounds=1)
    with capsys.disabled():
        print(f"\nslurm run adds {figure(middle)} s ({figure(min(added))}–{figure(max(added))}) to srun")
    assert middle <= LIMIT_S
