"""``d5suite slurm`` against a real cluster of two nodes, through sbatch, srun and scancel."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from d5suite.job import Result
from d5suite.report.schema import result_schema
from tests.conftest import end_with_tests, plugin_environment
from tests.launch.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RECIPE = """
import os, threading, time
from pathlib import Path
import numpy as np
from d5suite import Recipe, SGD
from d5suite.cases.recipe import Preset
from d5suite.instruments.sampling import Samples
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.tables import TIMES
from d5suite.validate.check import Check

HERE = Path(__file__).parent

class QuickStep(Step):
    def __init__(self, workload):
        self.workload = workload

    def run(self):
        values = np.ones(4)
        self.workload.communicator.all_reduce(values)
        return values

    def synchronize(self):
        pass

    def time(self, settings):
        times = [0.001, 0.002, 0.003, 0.004, 0.005]
        return Samples(times[0], [], times, True, "rounds", settings.confidence)

class HeldStep(QuickStep):
    def time(self, settings):
        communicator, hoard = self.workload.communicator, []
        last = communicator.rank == communicator.size - 1
        if last:
            (HERE / "held").write_text(str(os.getpid()))
        while (HERE / "hold").exists():
            if (HERE / "hold").read_text() == "memory":
                hoard.append(np.ones(16 << 20))
            if (HERE / "hold").read_text() == "last":
                if last:
                    threading.Event().wait()
                self.run()
            time.sleep(0.1)
        return super().time(settings)

class Quick(Measurement):
    name = "quick"
    level = 3
    table = TIMES

    def prepare(self, workload):
        return QuickStep(workload)

    def prove(self, workload, step):
        yield Check("sum", float(abs(step.run() - workload.communicator.size).max()), 0.0)

class Held(Quick):
    name = "held"

    def prepare(self, workload):
        return HeldStep(workload)

RECIPE = Recipe(name="luck", network=NETWORK, dataset="imagenet", optimizer=SGD(learning_rate=0.0625),
    measurements=(Quick, Held), presets={"smoke": Preset(image_size=32, batch_size=4, classes=4, max_time_s=0.05)})
"""
"""Two measurements: the second one goes on for as long as there is a file ``hold``."""

DIGITS = """
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Preset
RECIPE = Recipe(name='digits', network='lenet5', dataset='digits', on_request=True,
    optimizer=SGD(learning_rate=0.0625, momentum=0.5), measurements=('training_step',),
    presets={name: Preset(image_size=32, batch_size=8, classes=10, max_time_s=0.05)
             for name in ('smoke', 'reduced')})
"""

PROFILE = """
partition = "cpu"
time = "00:10:00"
cores_per_node = 1
"""


def until(condition: Callable[[], bool], what: str) -> None:
    """Return once a condition holds; fail after a time that no busy machine needs."""
    deadline = time.monotonic() + 500
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)  # each question starts a command


class Site:
    """A folder with a profile and recipes, and ``d5suite slurm`` in it."""

    def __init__(self, folder: Path, cluster: Cluster, imagenet: Path) -> None:
        self.folder, self.cluster, self.imagenet = folder, cluster, imagenet
        self.hold, self.held, self.out = folder / "hold", folder / "held", folder / "out.json"

    def profile(self, *lines: str) -> None:
        (self.folder / "d5suite-slurm.toml").write_text("\n".join([PROFILE.strip(), *lines, ""]))

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "d5suite.cli", "slurm", *arguments], cwd=self.folder, text=True,
            env=plugin_environment() | self.cluster.environment | environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_tests,
        )  # fmt: skip

    def submitters(self) -> list[str]:
        """What runs in this folder to submit, follow or gather."""
        found = []
        for each in psutil.process_iter(["cmdline", "cwd", "status"]):
            words = each.info["cmdline"] or []
            if each.info["cwd"] == str(self.folder) and {"d5suite.cli", "d5suite.pytest_plugin.preload"} & set(words):
                found.append(" ".join(words))
        return found

    def __call__(self, *arguments: str, code: int = 0, **environment: str) -> str:
        process = self.start(*arguments, **environment)
        try:
            said, _ = process.communicate(timeout=500)
        finally:
            process.kill()
        assert process.returncode == code, said
        return said

    def luck(self, *more: str) -> list[str]:
        """The words that run the recipe of two measurements on one node."""
        return ["run", "test_luck.py", "--nodes", "1", "--backend", "faulty:good", "--imagenet", str(self.imagenet),
                "--out", "out.json", *more]  # fmt: skip

    def submitted(self) -> str:
        """Submit it, and return the number of its job once its second measurement is on."""
        self.hold.write_text("")
        self(*self.luck("--no-follow"))
        until(self.held.exists, "the held measurement")
        return self.number

    @property
    def number(self) -> str:
        """Slurm's number of the latest job."""
        (starts,) = json.loads(self.ledger.read_text())["jobs"].values()
        return str(starts[-1]["number"])

    @property
    def ledger(self) -> Path:
        (found,) = self.folder.glob("d5suite-slurm/*/run.json")
        return found

    def state(self, job: str) -> str:
        return self.cluster.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def waits(self, job: str) -> float:
        """Seconds until Slurm may start a job."""
        said = self.cluster.ask("scontrol", "show", "job", job)
        eligible = next(word.split("=")[1] for word in said.split() if word.startswith("EligibleTime="))
        return (datetime.fromisoformat(eligible) - datetime.now()).total_seconds()

    def starts_again(self, job: str, first: str) -> None:
        """Wait until a job that was held has started once more."""

        def started() -> bool:
            if self.state(job) == "PENDING" and self.waits(job) > 10:  # Slurm waits for two minutes otherwise
                # In the second in which it ended the job, a node takes a new start for the old one.
                self.cluster.ask("scontrol", "update", f"jobid={job}", "starttime=now+3")
            return self.held.read_text() not in (first, "")

        until(started, "the second start")

    def ends(self, job: str, state: str) -> None:
        """Wait until a job has ended in a state."""
        until(lambda: self.state(job) == state, f"{state} of job {job}")

    def results(self) -> dict[str, dict[str, Any]]:
        """The records of the result file by test, after checking it against its schema."""
        import jsonschema

        content = json.loads(self.out.read_text())
        jsonschema.Draft202012Validator(result_schema()).validate(content)
        found = {}
        for bench in content["benchmarks"]:
            info = bench["extra_info"]["d5suite"]
            found[f"{bench['param']} {info['measurement']}"] = info
        return found


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path, small_onnx: Path, imagenet_tree: Path) -> Iterator[Site]:
    found = Site(tmp_path, slurm, imagenet_tree)
    found.profile()
    (tmp_path / "test_digits.py").write_text(DIGITS)
    (tmp_path / "test_luck.py").write_text(RECIPE.replace("NETWORK", repr(str(small_onnx))))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    yield found
    found.hold.unlink(missing_ok=True)


LUCK = "faulty-all_reduce-local-1"
BOTH = [f"{LUCK} quick", f"{LUCK} held"]


def test_a_cancelled_job_keeps_what_it_measured_and_resume_submits_the_rest(site: Site) -> None:
    job = site.submitted()
    said = site("status", code=1)
    assert f"job {job} runs on n1: measuring luck/held" in said
    site.cluster.ask("scancel", job)
    until(lambda: site.state(job) == "CANCELLED", "the end of the job")
    said = site("collect", code=1)
    assert f"job {job} was cancelled on n1" in said and "while measuring luck/held" in said
    assert list(site.results()) == [f"{LUCK} quick"]
    site.hold.unlink()
    said = site("run", "--resume")
    assert "submitted 1 job of 1" in said
    assert list(site.results()) == BOTH
    assert "submitted 0 jobs" in site("run", "--resume")


def test_cancel_ends_what_runs_and_what_waits_and_nothing_else(site: Site) -> None:
    site.profile("exclusive = false", 'memory = "1000"')
    other = site.cluster.ask("sbatch", "--parsable", "--output=/dev/null", "--mem=100", "--wrap=sleep 600").strip()
    job = site.submitted()
    site.profile('options = ["--hold"]')
    site(*site.luck("--folder", "second", "--no-follow", "--nodes", "2", "--out", "second.json"))
    (waiting,) = site.folder.glob("second/*")
    ((start,),) = json.loads((waiting / "run.json").read_text())["jobs"].values()
    assert site.state(start["number"]) == "PENDING"
    assert "cancelled 1 job; what was measured stays" in site("cancel", str(waiting))
    assert site.state(job) == "RUNNING"
    assert "cancelled 1 job; what was measured stays" in site("cancel")
    until(lambda: site.cluster.ask("squeue", "--noheader", "--format=%A").split() == [other], "the end of both jobs")
    said = site("collect", code=1)
    assert f"job {job} was cancelled" in said and "while measuring luck/held" in said
    assert list(site.results()) == BOTH[:1]
    assert "cancelled 0 jobs" in site("cancel")
    site.cluster.ask("scancel", other)


def test_a_script_that_is_submitted_by_hand_is_collected(site: Site) -> None:
    said = site("script", *site.luck("--nodes", "1,2")[1:])
    scripts = sorted(site.folder.glob("d5suite-slurm/*/scripts/*.sh"))
    assert [each.name for each in scripts] == ["01-nodes1.sh", "02-nodes2.sh"]
    for each in scripts:
        assert f"{each.relative_to(site.folder)}: " in said
        done = subprocess.run(
            ["sbatch", "--wait", str(each)], cwd=site.folder, env=plugin_environment() | site.cluster.environment,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "measured" in site("status")
    site("collect")
    assert sorted(site.results()) == sorted([*BOTH, *(each.replace("local-1", "gloo-2") for each in BOTH)])


def test_a_killed_submitter_costs_nothing_and_every_shell_gathers_the_same_file(site: Site) -> None:
    other = site.cluster.ask(
        "sbatch", "--parsable", "--output=/dev/null", "--ntasks=1", "--mem=500", "--nodelist=n1", "--wrap=sleep 600"
    )
    site.profile("exclusive = false", 'memory = "1000"')
    site.hold.write_text("")
    process = site.start(*site.luck("--backend", "faulty:good,faulty:orphan"), COLUMNS="100")
    until(site.held.exists, "the held measurement")
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=300)
    until(lambda: site.submitters() == [], "the end of what would have gathered")
    assert "#SBATCH --array=0-1" in next(site.folder.glob("d5suite-slurm/*/scripts/*.sh")).read_text()
    assert not site.out.exists()
    site.hold.unlink()
    until(lambda: site.cluster.ask("squeue", "--noheader").split()[:1] == [other.strip()], "the end of both jobs")
    site("collect")
    found = site.results()
    assert list(found) == [*BOTH, "faulty:orphan-all_reduce-local-1 quick", "faulty:orphan-all_reduce-local-1 held"]
    assert found[BOTH[0]]["other_jobs"] == [f"{other.strip()} of root on n1"]
    assert found[BOTH[0]]["machine"]["disturbed"] and found[BOTH[0]]["nodes"][0]["name"] in ("n1", "n2")
    first, series = site.out.read_bytes(), site.out.with_suffix(".h5").read_bytes()
    site.out.unlink()
    assert "submitted 0 jobs of 2" in site("run", "--resume")
    assert site.out.read_bytes() == first and site.out.with_suffix(".h5").read_bytes() == series


def test_ctrl_c_leaves_the_jobs_and_no_process(site: Site) -> None:
    site.hold.write_text("")
    process = site.start(*site.luck())
    until(site.held.exists, "the held measurement")
    until(lambda: len(site.submitters()) == 2, "what is to gather the results")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert said.splitlines()[-2].startswith("jobs go on; collect later: d5suite slurm collect d5suite-slurm/")
    assert said.splitlines()[-1] == "interrupted" and site.submitters() == []
    site.hold.unlink()
    site.ends(site.number, "COMPLETED")
    site("collect")
    assert list(site.results()) == BOTH


@pytest.mark.parametrize(
    ("accident", "state", "said"),
    [
        (
            "time",
            "TIMEOUT",
            "ran out of time on n1 (TimeLimit), while measuring luck/held\n  d5suite-slurm.toml:2: time",
        ),
        (
            "memory",
            "OUT_OF_MEMORY",
            "ran out of memory on n1, while measuring luck/held\n  d5suite-slurm.toml:4: memory",
        ),
    ],
)
def test_a_job_without_time_or_memory_names_the_line_of_the_profile(
    site: Site, accident: str, state: str, said: str
) -> None:
    site.profile('memory = "700"')
    job = site.submitted()
    if accident == "time":
        site.cluster.ask("scontrol", "update", f"jobid={job}", "endtime=now+1")
    else:
        site.hold.write_text("memory")
    until(lambda: site.state(job) in (state, "FAILED"), f"{state} of job {job}")
    assert said in site("collect", code=1)
    assert list(site.results()) == BOTH[:1]


@pytest.mark.parametrize(
    ("accident", "on", "said"),
    [
        ("killed", "n2", "died of SIGKILL (killed from outside, or out of memory)"),
        ("hangs", socket.gethostname(), "hung (no work for "),
    ],
    ids=["killed", "hangs"],
)
def test_a_rank_that_is_killed_or_hangs_is_named_with_its_node_and_phase(
    site: Site, accident: str, on: str, said: str
) -> None:
    site.hold.write_text("last")
    process = site.start(*site.luck("--nodes", "2"))
    until(site.held.exists, "the held measurement")
    began = time.monotonic()
    if accident == "killed":
        os.kill(int(site.held.read_text()), signal.SIGKILL)
    found, _ = process.communicate(timeout=300)
    assert time.monotonic() - began < 60, found  # it is 15 s on an idle machine, with the gathering
    assert process.returncode == 1, found
    assert f"failed: rank 1 of 2 on {on} {said}" in found and "while measuring luck/held" in found
    (quick,) = site.results()
    assert quick == "faulty-all_reduce-gloo-2 quick"
    (path,) = site.folder.glob("d5suite-slurm/*/jobs/*gloo-2.result.json")
    failure = Result.load(path).failures["luck/held"].message
    assert failure.startswith(f"rank 1 of 2 on {on} {said}") and failure.splitlines()[0] in " ".join(found.split())


@pytest.mark.parametrize("accident", ["requeued", "preempted"])
def test_a_job_that_starts_again_keeps_what_it_had_measured(site: Site, accident: str) -> None:
    job = site.submitted()
    first = site.held.read_text()
    if accident == "requeued":
        site.cluster.ask("scontrol", "requeue", job)
    else:
        site.cluster.ask(
            "sbatch",
            "--output=/dev/null",
            "--partition=urgent",
            "--nodes=2",
            "--exclusive",
            "--mem=100",
            "--wrap=sleep 1",
        )

    site.starts_again(job, first)
    site.hold.unlink()
    site.ends(job, "COMPLETED")
    site("collect")
    assert list(site.results()) == BOTH
    assert len(list(site.folder.glob("d5suite-slurm/*/jobs/*.start1.result.json"))) == 1


def test_a_silent_controller_is_waited_for_and_a_late_result_too(site: Site) -> None:
    late = site.folder / "python"  # moves the result away as the worker ends, and back later
    late.write_text(
        f'#!/bin/bash\n{sys.executable} "$@"; code=$?\n'
        'result="${@: -1}"; result="${result%.job.json}.result.json"\n'
        'mv "$result" "$result.late"\n'
        f'setsid nohup bash -c "until [ -e {site.folder}/back ]; do sleep 0.1; done; mv $result.late $result" '
        "> /dev/null 2>&1 &\nexit $code\n"
    )
    late.chmod(0o755)
    site.profile(f'python = "{late}"')
    site.hold.write_text("")
    process = site.start(*site.luck())
    until(site.held.exists, "the held measurement")
    site.cluster.stop_controller()
    try:
        assert process.stdout is not None
        said = ""
        while "does not answer" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
    finally:
        site.cluster.start_controller()
    site.hold.unlink()
    site.ends(site.number, "COMPLETED")
    (site.folder / "back").touch()
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + rest
    assert list(site.results()) == BOTH


def test_what_slurm_refuses_is_said_in_its_words_with_the_line_of_the_profile(site: Site) -> None:
    for line, words in (
        ('constraint = "gpu"', "sbatch: Batch job submission failed: Invalid feature specification"),
        ('gres = "gpu:4"', "sbatch: Invalid generic resource (gres) specification"),
        ('options = ["--nosuch"]', "unrecognized option"),
    ):
        site.profile(line)
        said = site(*site.luck(), code=2)
        assert words in said and f"d5suite-slurm.toml:4: {line}" in said
    site.profile("most_nodes = 1")
    said = site(*site.luck("--nodes", "2"), code=2)
    assert "2 nodes are more than d5suite-slurm.toml:4: most_nodes = 1" in said
    profile = site.folder / "d5suite-slurm.toml"
    profile.write_text(profile.read_text().replace("00:10:00", "03:00:00"))
    said = site(*site.luck("--nodes", "1"), code=2)
    assert "waits (PartitionTimeLimit) and will never start" in said
    assert 'd5suite-slurm.toml:2: time = "03:00:00"' in said
    assert site.cluster.ask("squeue", "--noheader") == ""


def test_runs_of_one_folder_do_not_mix_and_another_users_may_only_be_read(site: Site) -> None:
    site(*site.luck("-k", "quick")[:-2], "--", "-k", "quick")
    (old,) = site.folder.glob("d5suite-slurm/*")
    site.out.unlink()
    said = site("script", *site.luck()[1:])
    (new,) = set(site.folder.glob("d5suite-slurm/*")) - {old}
    assert f"d5suite slurm collect d5suite-slurm/{new.name}" in said
    assert "not submitted" in site("collect", str(new), code=1) and not site.out.exists()
    for each in (old, *old.iterdir()):
        os.chown(each, 65534, 65534)
    said = site("run", "--resume", str(old), code=2)
    assert "this run is nobody's" in said
    assert "measured" in site("status", str(old))
    site("collect", str(old), "--out", "copy.json")
    assert (site.folder / "copy.json").exists()


def test_one_and_two_nodes_become_one_result_file_with_a_plot(site: Site) -> None:
    site("run", "test_digits.py", "--nodes", "1,2", "--backend", "torch", "--scheme", "all_reduce", "--out", "out.json")
    found = site.results()
    single, pair = (f"torch-all_reduce-{each} distributed_step" for each in ("local-1", "gloo-2"))
    assert list(found) == [single, pair]
    assert found[pair]["scaling"]["baseline"]["ranks"] == 1
    assert (site.folder / "out.digits.png").exists() and (site.folder / "out.h5").exists()
    assert not list(site.folder.glob("d5suite-slurm/*/jobs/*meeting*"))


def test_a_job_whose_node_goes_down_starts_again_on_another(site: Site) -> None:
    """What the first node had measured is kept, and counts where the second one has nothing."""
    job = site.submitted()
    first = site.held.read_text()
    node = site.cluster.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    site.cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    site.cluster.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")  # it would come back

    site.starts_again(job, first)
    site.hold.unlink()
    site.ends(job, "COMPLETED")
    site("collect")
    found = site.results()
    assert list(found) == BOTH
    assert {found[each]["nodes"][0]["name"] for each in BOTH} == {"n1", "n2"} - {node}
    assert len(list(site.folder.glob("d5suite-slurm/*/jobs/*.start1.result.json"))) == 1


def test_without_another_node_status_names_the_one_that_went_down(site: Site) -> None:
    site.profile('options = ["--no-requeue"]')
    job = site.submitted()
    node = site.cluster.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    site.cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    site.ends(job, "NODE_FAIL")
    said = site("collect", code=1)
    assert f"job {job} lost a node on {node} (NodeDown)" in said and "while measuring luck/held" in said
    assert list(site.results()) == BOTH[:1]


def test_init_asks_slurm_and_what_it_drafts_runs(site: Site) -> None:
    draft = site.folder / "d5suite-slurm.toml"
    draft.unlink()
    said = site("init")
    assert "d5suite-slurm.toml" in said
    text = draft.read_text()
    cores = site.cluster.ask("sinfo", "--noheader", "--nodes=n1", "--partition=cpu", "--format=%c").strip()
    for line in ('partition = "cpu"', f"cores_per_node = {cores}", "most_nodes = 2"):
        assert f"{line}\n" in text
    site("init", code=2)  # it does not overwrite what somebody has edited
    assert draft.read_text() == text
    site(*site.luck("--loader-workers", "1"))  # a node says that it has two CPUs, and may have one
    assert list(site.results()) == BOTH


def test_neither_options_nor_the_shell_nor_an_allocation_change_what_ranks_get(site: Site) -> None:
    (site.folder / "python").write_text(
        f'#!/bin/bash\nenv > {site.folder}/seen$SLURM_PROCID\nexec {sys.executable} "$@"\n'
    )
    (site.folder / "python").chmod(0o755)
    configuration, plugins = site.cluster.environment["SLURM_CONF"], plugin_environment()["PYTHONPATH"]
    site.profile(
        'options = ["--export=NONE"]', 'memory = "1000M"', f'python = "{site.folder}/python"',
        f'scratch = "{site.folder}/temporary"',
        f'setup = ["export SLURM_CONF={configuration}", "export PYTHONPATH={plugins}"]',
    )  # fmt: skip
    site(
        *site.luck("--nodes", "2"), SBATCH_PARTITION="urgent", SBATCH_TIMELIMIT="1", SLURM_MEM_PER_CPU="500",
        SLURM_EXPORT_ENV="NONE", SLURM_JOB_ID="1", SQUEUE_PARTITION="urgent", SQUEUE_STATES="PENDING",
    )  # fmt: skip
    assert list(site.results()) == [each.replace("local-1", "gloo-2") for each in BOTH]
    job = site.cluster.ask("scontrol", "show", "job", site.number)
    assert "Partition=cpu" in job and "TimeLimit=00:10:00" in job
    for rank in range(2):
        seen = (site.folder / f"seen{rank}").read_text().splitlines()
        for line in ("D5SUITE_SRUN=free", "CUDA_VISIBLE_DEVICES=", "PYTHONHASHSEED=0",
                     f"TMPDIR={site.folder}/temporary"):  # fmt: skip
            assert line in seen


def test_a_module_that_is_not_there_stops_the_job_and_is_named(site: Site) -> None:
    site.profile('modules = ["nosuch"]')
    said = site(*site.luck(), code=1)
    assert "failed: exit status 127 of: module load nosuch\n  d5suite-slurm.toml:4: modules = [" in said
    assert not site.out.exists()


def test_an_error_of_rank_1_before_the_first_measurement_is_named(site: Site) -> None:
    recipe = site.folder / "test_luck.py"
    trouble = 'if os.environ.get("SLURM_PROCID") == "1": raise RuntimeError("no data on this node")\n'
    recipe.write_text(recipe.read_text().replace("HERE =", f"{trouble}HERE ="))
    said = site(*site.luck("--nodes", "2"), code=1)
    assert "failed: rank 1 of 2: RuntimeError: no data on this node" in said


def test_arrays_are_as_long_as_the_site_allows(site: Site) -> None:
    site.profile('options = ["--hold"]')
    said = site(*site.luck("--backend", "faulty:good,faulty:orphan,faulty:later", "--no-follow"))
    assert "submitted 3 jobs of 3" in said
    scripts = sorted(site.folder.glob("d5suite-slurm/*/scripts/*.sh"))
    assert ["--array=0-1" in each.read_text() for each in scripts] == [True, False]
    assert "cancelled 3 jobs" in site("cancel")
