"""What ``d5suite slurm run`` adds to the bare ``srun`` of the same workers, on a loopback cluster.

Both run the same jobs of one training step in turn: the command from its start to its end, with
collecting recipes, submitting, following and gathering; and the lines of its batch scripts that
call ``srun``, by themselves. Jobs run one after the other, on one node. Of one job and of three:
what is added once, and what by each further job.

The worker is a stand-in, which takes three seconds and then puts a real worker's result in place.
Real ones take seven, by one or two more or less each time, as much as what is measured; and on a
cluster they are not on the machine on which the command prepares to gather.

Both run as a user runs them: Python keeps what it compiles, and pytest has no plug-ins but those
that d5suite depends on. The tests' own cost each start of pytest 0.35 s (hypothesis alone 0.23 s).

``pytest benchmarks/bench_slurm.py`` prints the seconds that it adds; ``--benchmark-json`` keeps
them in ``extra_info``. Needs Slurm's daemons, as the tests do.
"""

from __future__ import annotations

import itertools
import os
import shlex
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

ROUNDS = 5
LIMIT_S = 2.0
"""Seconds that a run of one job may take longer, and each further job."""

MODES = ("torch", "torch:channels_last", "torch:stock")
"""A job each."""

TESTS_PLUGINS = ("anyio", "hypothesispytest", "rerunfailures", "xdist", "xdist.looponfail")

RECIPE = """
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Preset
RECIPE = Recipe(name='digits', network='lenet5', dataset='digits', on_request=True,
    optimizer=SGD(learning_rate=0.0625), measurements=('training_step',),
    presets={'smoke': Preset(image_size=32, batch_size=8, classes=10, max_time_s=0.05)})
"""

PROFILE = """
partition = "cpu"
time = "00:10:00"
cores_per_node = 1
options = ["--nodelist=n1"]
python = "{folder}/worker"
"""

WORKER = """#!/bin/bash
sleep 3
job=${{@: -1}}
cp "{results}/$(basename "$job" .job.json).result.json" "${{job%.job.json}}.result.json"
"""


def environment(started: Cluster) -> dict[str, str]:
    """As a user has it."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return own | started.environment | {"PYTEST_ADDOPTS": " ".join(f"-p no:{each}" for each in TESTS_PLUGINS)}


def slurm(folder: Path, started: Cluster, command: str, jobs: int) -> float:
    """Run the command; return its seconds."""
    words = [command, "test_digits.py", "--nodes", "1", "--backend", ",".join(MODES[:jobs]), "--out", "out.json"]
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "slurm", *words], cwd=folder, env=environment(started), check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    took = time.perf_counter() - begin
    shutil.rmtree(folder / "d5suite-slurm") if command == "run" else None
    return took


def bare(folder: Path, started: Cluster, kept: Path) -> float:
    """Run the workers of a batch script by srun alone, one after the other; return the seconds."""
    (script,) = kept.glob("scripts/*.sh")
    lines = [line for line in script.read_text().splitlines() if "SLURM_JOB_ID" not in line]
    head = [line for line in lines if line.startswith(("export ", "python="))]
    (call,) = (line.replace("srun ", "srun --partition=cpu --exclusive --nodelist=n1 ", 1)
               for line in lines if line.startswith("srun "))  # fmt: skip
    for each in sorted(kept.glob("jobs/*.job.json")):
        head += [f"job={shlex.quote(str(each).removesuffix('.job.json'))}", f"{call} || exit"]
    begin = time.perf_counter()
    subprocess.run(
        ["bash", "-c", "\n".join(head)], cwd=folder, env=environment(started), check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin


def test_slurm_run_adds_little_to_srun(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    reason = lacking()
    if reason:
        pytest.skip(reason)
    (tmp_path / "test_digits.py").write_text(RECIPE)
    (tmp_path / "d5suite-slurm.toml").write_text(PROFILE.format(folder=tmp_path))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    counts = (1, len(MODES))
    added: dict[int, list[float]] = {each: [] for each in counts}
    with cluster() as started:
        for jobs in counts:
            slurm(tmp_path, started, "script", jobs)
            (made,) = tmp_path.glob("d5suite-slurm/*")
            shutil.move(made, tmp_path / f"kept{jobs}")
        results = tmp_path / f"kept{jobs}/jobs"
        for job in results.glob("*.job.json"):
            subprocess.run([sys.executable, "-m", "d5suite.worker", str(job)], check=True, env=environment(started))
            shutil.copy(job.with_name(job.name.replace(".job.", ".result.")), tmp_path)
        (tmp_path / "worker").write_text(WORKER.format(results=tmp_path))
        (tmp_path / "worker").chmod(0o755)
        slurm(tmp_path, started, "run", 1)
        bare(tmp_path, started, tmp_path / "kept1")
        for turn, jobs in itertools.product(range(ROUNDS), counts):
            times = {}
            for kind in ("run", "srun") if turn % 2 else ("srun", "run"):
                kept = tmp_path / f"kept{jobs}"
                times[kind] = slurm(tmp_path, started, "run", jobs) if kind == "run" else bare(tmp_path, started, kept)
            added[jobs].append(times["run"] - times["srun"])
    further = [(more - one) / (counts[1] - 1) for one, more in zip(added[1], added[counts[1]], strict=True)]
    found = {"one job": added[1], "each further job": further}
    benchmark.extra_info["d5suite"] = {"added_s": added, "further_s": further, "limit_s": LIMIT_S}
    benchmark.pedantic(lambda: None, rounds=1)
    with capsys.disabled():
        for what, seconds in found.items():
            middle = statistics.median(seconds)
            print(
                f"\n{what}: slurm run adds {figure(middle)} s ({figure(min(seconds))}–{figure(max(seconds))}) to srun"
            )
    assert all(statistics.median(seconds) <= LIMIT_S for seconds in found.values())
