"""Workflows under Slurm: components of a heterogeneous job, of which no side outlives another."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from d5suite.job import Result
from tests.launch.slurm.cluster import Cluster
from tests.launch.slurm.test_slurm import Site, until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RECIPE = """
import sys
from d5suite.cases.workflow import Component, Coupling, Workflow
sys.path.insert(0, ROOT)
from tests.workflows.pair import Giver, Taker

WORKFLOW = Workflow(
    name="pair",
    components=(Component("giving", Giver, options={"pauses": [0.05]}), Component("taking", Taker)),
    couplings=(Coupling("numbers", "giving", "taking"),),
    steps={"smoke": 4},
    kinds=("memory", "files"),
)
"""


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path) -> Site:
    found = Site(tmp_path, slurm, tmp_path)
    found.profile()
    (tmp_path / "test_pair.py").write_text(RECIPE.replace("ROOT", repr(str(Path(__file__).parents[3]))))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return found


def run(kind: str, rounds: int, *more: str) -> list[str]:
    """The words that run the workflow on two nodes."""
    return ["run", "test_pair.py", "--nodes", "2", "--backend", "deep500", "--out", "out.json", *more, "--", "-k", kind,
            "--benchmark-min-rounds", str(rounds), "--benchmark-max-time", "0"]  # fmt: skip


def test_components_are_those_of_a_heterogeneous_job(site: Site) -> None:
    site.profile("", "[components.taking]", 'constraint = ""')
    site(*run("files", 2))
    (info,) = site.results().values()
    assert [each["name"] for each in info["nodes"]] == ["n1", "n2"]
    assert [each["ranks"] for each in info["nodes"]] == [[0], [1]]
    assert "other_jobs" not in info or info["other_jobs"] == []
    assert info["workflow"]["couplings"]["numbers"]["taken"] == 4
    (script,) = site.folder.glob("d5suite-slurm/*/scripts/*.sh")
    text = script.read_text()
    assert "2 nodes (1 for giving, 1 for taking)." in text and "\n#SBATCH hetjob\n" in text
    assert text.count("#SBATCH --nodes=1\n") == 2 and " : " in text and "--het-group=1" in text
    jobs = next(site.folder.glob("d5suite-slurm/*/jobs"))
    assert not list(jobs.glob("*.couplings")) and not list(jobs.glob("*.meeting-*"))
    assert "measured" in site("status")


@pytest.mark.parametrize("victim", ["giving", "taking"])
def test_a_killed_side_ends_the_job_and_what_was_measured_is_kept(site: Site, victim: str) -> None:
    site(*run("memory", 1000, "--no-follow"))
    jobs = next(site.folder.glob("d5suite-slurm/*/jobs"))
    path = jobs / f"{next(jobs.glob('*.job.json')).name.removesuffix('.job.json')}.result.json"

    def kept() -> list[float]:
        made = Result.load(path).kept if path.exists() else {}
        return next(iter(made.values()), {}).get("series", {}).get("run_s", [])

    until(lambda: len(kept()) >= 2, "the second run")
    rank = ["giving", "taking"].index(victim)
    (beats,) = jobs.glob(f"*.meeting-*/rank{rank}.heartbeat")
    began = time.monotonic()
    os.kill(json.loads(beats.read_text())["pid"], signal.SIGKILL)
    until(lambda: site.state(site.number).split()[0] == "FAILED", "the end of the job")
    assert time.monotonic() - began < 10
    said = site("collect", code=1)
    assert f"rank {rank} of 2 ({victim}) on n{rank + 1} died of SIGKILL" in said
    assert "while measuring pair-memory/workflow: " in said
    assert len(kept()) >= 2
