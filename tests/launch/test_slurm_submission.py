"""How ``d5suite slurm`` submits, with stand-ins for Slurm's commands where no cluster refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d5suite.errors import ConfigurationError
from d5suite.job import Distributed, Failure, Job, NetworkCase, Result, WorkflowCase, of_rank, result_path
from d5suite.launch.slurm import client
from d5suite.launch.slurm.client import likely_causes
from d5suite.launch.slurm.profile import ClusterProfile, ProfileFile, read_profile
from d5suite.launch.slurm.run import SlurmRun, Submission, submit
from d5suite.launch.slurm.script import batch_script, nodes_of_components
from d5suite.launch.slurm.status import describe, follow, job_statuses
from tests.conftest import plugin_environment

COMMANDS = {
    "sbatch": """
        env > environment
        script="${@: -1}"
        last=$(sed -n 's/#SBATCH --array=0-//p' "$script")
        name=$(sed -n 's/#SBATCH --job-name=//p' "$script")
        nodes=$(sed -n 's/#SBATCH --nodes=//p' "$script")
        if [ -e refusal$nodes ]; then cat refusal$nodes >&2; exit 1; fi
        count=$((${last:-0} + 1)) room=$(cat room)
        if [ $count -gt $room ]; then
            echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
            echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit,"\\
                "user's size and/or time limits)" >&2
            exit 1
        fi
        echo $((room - count)) > room
        number=$(wc -l < sizes)
        echo $count >> sizes
        if [ -z "$last" ]; then echo "$name|$number" >> jobs
        else for each in $(seq 0 $last); do echo "$name|${number}_$each" >> jobs; done; fi
        echo $number
    """,
    "squeue": "sed 's/$/|CANCELLED|n1|None/' jobs; echo 2 > room",
    "scontrol": 'echo "MaxArraySize            = 4"',
    "scancel": "true",
}
"""A site that takes ``room`` jobs, arrays of 4, and has cancelled every job when next asked."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f'#!/bin/bash\ncd "$(dirname "$0")"\n{text}\n')
        (folder / name).chmod(0o755)
    for name, text in (("room", "6\n"), ("sizes", ""), ("jobs", "")):
        (folder / name).write_text(text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


Runs = Callable[..., SlurmRun]


@pytest.fixture
def made(tmp_path: Path) -> Runs:
    """A run with jobs of one measurement, without pytest."""

    def make(count: int, ranks: int = 1, **keys: object) -> SlurmRun:
        own = ClusterProfile(1, **keys)  # type: ignore[arg-type]
        profile = ProfileFile(own, "site.toml", dict.fromkeys(keys, 1))
        run = SlurmRun.make(tmp_path / "runs", cwd=str(tmp_path), arguments=[], out="", profile=profile)
        case = NetworkCase(
            "case", "smoke", ["step"], dataset={"kind": "imagenet", "root": "/absent"}, optimizer={"name": "sgd"},
            network={"zoo": "lenet5", "classes": 4, "image_size": 32},
        )  # fmt: skip
        how = Distributed(communicator="gloo", launcher="process")
        for number in range(count):
            job = Job({"name": "deep500", "mode": "any"}, "cpu", "fp32", ranks, 0, [case], ranks=ranks, distributed=how)
            job.save(run.job_path(f"job{number:02}"))
            run.jobs[f"job{number:02}"] = []
        run.save()
        return run

    return make


def test_more_jobs_than_the_site_takes_are_submitted_in_waves(site: Path, made: Runs) -> None:
    run = made(11, qos="short")
    submit(run, list(run.jobs))
    assert (site / "sizes").read_text().split() == ["4", "2"]  # an array has 4 at most, and 6 jobs are taken
    assert len(run.kept_back) == 5
    assert not any(SlurmRun.load(run.folder).jobs[name] for name in run.kept_back)
    told = []
    follow(run, lambda statuses, remark: told.append([describe(run, each) for each in statuses]))
    assert any("is submitted once another job has ended" in line for line in told[0])
    sizes = [int(each) for each in (site / "sizes").read_text().split()]
    assert sum(sizes) == 11 and max(sizes[2:]) == 2 and run.kept_back == []
    starts = list(run.jobs.values())
    assert [len(own) for own in starts] == [1] * 11
    assert len({own[0].number for own in starts}) == 11
    assert len(list(run.folder.glob("scripts/*.sh"))) == len(sizes)  # nothing is left of what was refused


def test_where_the_site_takes_no_job_at_all_the_limit_is_said(site: Path, made: Runs) -> None:
    (site / "room").write_text("0\n")
    run = made(3, qos="short", account="a")
    with pytest.raises(client.RefusedError, match="QOSMaxSubmitJobPerUserLimit") as raised:
        submit(run, list(run.jobs))
    assert str(raised.value).splitlines()[1:] == ['  site.toml:1: qos = "short"']
    assert (site / "sizes").read_text() == "" and not any(run.jobs.values())


def test_neither_the_users_shell_nor_an_allocation_changes_a_job(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ("SBATCH_PARTITION", "SBATCH_EXPORT", "SLURM_EXPORT_ENV", "SLURM_MEM_PER_CPU", "SLURM_JOB_ID",
              "SLURM_STEP_NODELIST", "SLURMD_NODENAME", "SQUEUE_PARTITION", "SCANCEL_STATE", "PMI_RANK",
              "CUDA_VISIBLE_DEVICES")  # fmt: skip
    for name in others:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_CLUSTERS", "big")
    (tmp_path / "a.sh").write_text("#SBATCH --job-name=a\n#SBATCH --nodes=1\n")
    client.submit(str(tmp_path / "a.sh"))
    seen = dict(line.split("=", 1) for line in (site / "environment").read_text().splitlines() if "=" in line)
    assert not seen.keys() & set(others)
    assert (seen["SLURM_CONF"], seen["SLURM_CLUSTERS"]) == ("/etc/slurm.conf", "big")
    monkeypatch.delenv("SLURM_JOB_ID")
    client.submit(str(tmp_path / "a.sh"))
    assert "CUDA_VISIBLE_DEVICES=1" in (site / "environment").read_text()  # the user's own


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("message", "given", "keys"),
    [
        ("Invalid account or account/partition combination specified", "partition account qos", ["account"]),
        ("Invalid account or account/partition combination specified", "partition", ["account", "partition"]),
        ("Invalid qos specification", "partition account qos", ["qos"]),
        (POLICY, "partition account qos time", ["qos"]),
        (f"QOSMaxWallDurationPerJobLimit; {POLICY}", "partition account qos time", ["time"]),
        (f"AssocMaxNodePerJobLimit; {POLICY}", "account qos most_nodes", ["most_nodes"]),
        (f"AssocMaxSubmitJobLimit; {POLICY}", "account qos", ["account"]),
        ("Requested time limit is invalid (missing or exceeds some limit)", "partition time", ["time"]),
        ("Requested partition configuration not available now", "partition qos", ["partition"]),
        ("invalid partition specified: nosuch; Invalid partition name specified", "partition account", ["partition"]),
        ("Requested node configuration is not available", "cores_per_node memory", ["cores_per_node", "memory"]),
        ("Access denied to requested reservation", "partition reservation", ["reservation"]),
        ("Invalid generic resource (gres) specification", "gres cores_per_node", ["gres"]),
        ("Invalid feature specification", "constraint", ["constraint"]),
        ("Memory specification can not be satisfied", "memory partition", ["memory"]),
        ("unrecognized option '--account-x'", "options account", ["options"]),
        ("no reason given", "partition", []),
    ],
)
def test_the_line_that_slurm_refuses_is_blamed_and_no_other(message: str, given: str, keys: list[str]) -> None:
    assert likely_causes(f"sbatch: {message}", given.split()) == keys


def bash(tmp_path: Path, profile: ClusterProfile) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run a batch script with stand-ins; return also the words of each call of srun."""
    for name, text in (("srun", 'printf "%s\\n" "$@" --- >> "$0.calls"'), ("squeue", "true")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "srun.calls"
    calls.unlink(missing_ok=True)
    script = tmp_path / "script.sh"
    script.write_text(batch_script(
        [tmp_path / "a.job.json"], name="d5", profile=profile, nodes=1, device="cpu", folder=tmp_path,
        output=tmp_path / "log", pythons={},
    ))  # fmt: skip
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1",
                   "SCRATCH": "/s p", "HOME": "/home/me"}  # fmt: skip
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=300)
    text = calls.read_text() if calls.exists() else ""
    return done, [each.splitlines() for each in text.split("---\n") if each]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"modules": ["nosuch"]}, "modules: exit status 127 of: module load nosuch"),
        ({"setup": ["module() { false; true && test $2 = old; }"], "modules": ["old", "new"]},
         "modules: exit status 1 of: module load new"),
        ({"setup": ["if true; then", "  export A=1", "  bash -c 'exit 3'", "fi"]},
         "setup: exit status 3 of:   bash -c 'exit 3'"),
        ({"environment": "~/nosuch"}, 'environment: exit status 1 of: source "$HOME/nosuch"/bin/activate'),
    ],
)  # fmt: skip
def test_a_line_that_fails_before_the_worker_stops_the_job(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    done, calls = bash(tmp_path, ClusterProfile(4, **keys))  # type: ignore[arg-type]
    assert done.returncode == 1 and calls == []
    assert f"d5suite: a line failed: {said}\n" in done.stderr


def test_setup_comes_before_modules_and_variables_of_the_containers_command_expand(tmp_path: Path) -> None:
    (tmp_path / "activate").write_text("false\nfalse || true\n")
    setup = [f"source {tmp_path}/activate", f'module() {{ echo "$*" >> {tmp_path}/modules; }}', "module use /shared",
             "grep -q nosuch /dev/null || true"]  # fmt: skip
    container = """apptainer exec --bind $SCRATCH:/data --env 'A=$HOME "b"' --pwd "$SCRATCH/x y" \\$Z i.sif"""
    profile = ClusterProfile(4, setup=setup, modules=["a/1"], container=container, scratch="~/tmp!")
    done, (mkdir, worker) = bash(tmp_path, profile)
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "modules").read_text().splitlines() == ["use /shared", "load a/1"]
    assert mkdir == ["--export=ALL", "--ntasks-per-node=1", "mkdir", "-p", "/home/me/tmp!"]
    assert "--export=ALL" in worker[: worker.index("apptainer")]
    assert worker[worker.index("apptainer") :] == [
        "apptainer", "exec", "--bind", "/s p:/data", "--env", 'A=$HOME "b"', "--pwd", "/s p/x y", "$Z", "i.sif",
        "python3", "-m", "d5suite.worker", str(tmp_path / "a.job.json"),
    ]  # fmt: skip


def test_an_error_of_any_rank_before_the_first_measurement_is_said(made: Runs) -> None:
    run = made(1, ranks=3)
    (name,) = run.jobs
    path = result_path(run.job_path(name))
    ended = {"name": "FAILED", "reason": "NonZeroExitCode", "nodes": "n[1-3]"}
    run.jobs[name] = [Submission(f"d5suite-{run.identity}-1", None, "7", ended)]
    (run.folder / "scripts/01-nodes3.sh").touch()
    (run.folder / "scripts/01-nodes3.log").write_text("srun: error: n2: task 1: Exited with exit code 1\n")
    path.with_name(f"{name}.rank1.log").write_text("the interpreter on n2 is too old\n")
    (status,) = job_statuses(run)
    assert "the interpreter on n2 is too old" in describe(run, status)  # without any result
    for rank, message in ((2, "no module named torch"), (0, "rank 2 is gone"), (1, None)):
        error = Failure("JobError", message) if message else None
        Result(phase="importing torch", error=error).save(of_rank(path, rank))
    os.utime(of_rank(path, 2), (1, 1))
    (status,) = job_statuses(run)
    assert describe(run, status) == "job 7 on n[1-3] failed: rank 2 of 3: no module named torch"


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    recipe = Path(__file__).parents[2] / "recipes" / "test_digits_lenet.py"
    return subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "slurm", words[0], str(recipe), "--profile", "site.toml",
         *words[1:]],
        cwd=folder, env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_refusal_halfway_says_what_goes_on_and_blames_the_account(site: Path, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('partition = "cpu"\naccount = "me"\ncores_per_node = 2\ngres = "gpu:4"\n')
    (site / "squeue").write_text('#!/bin/bash\ncd "$(dirname "$0")"\nsed \'s/$/|RUNNING|n1|None/\' jobs\n')
    (site / "refusal2").write_text(
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n"
    )
    done = command(tmp_path, "run", "--nodes", "1,2", "--backend", "deep500", "--", "-k", "distributed_step")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == ['  site.toml:2: account = "me"']
    assert 'note: site.toml:4: gres = "gpu:4" requests GPUs, and this run measures the CPU' in done.stdout
    (numbers,) = re.findall(r"jobs go on; collect later: .* \(Slurm's numbers: (.*)\)", done.stdout)
    assert numbers == "0"


def test_ranks_of_mpi_are_refused_without_sruns_mpi(site: Path, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('cores_per_node = 2\ngres = "gpu:4"\n')
    done = command(tmp_path, "run", "--nodes", "2", "--backend", "deep500", "--communicator", "mpi", "--device", "cpu")
    assert done.returncode == 2
    assert "site.toml: mpi is not given: ranks of MPI do not meet without srun --mpi" in done.stderr
    assert "note:" not in done.stdout and (site / "sizes").read_text() == ""
    assert list(tmp_path.glob("d5suite-slurm/*")) == []


def test_a_profile_says_whether_it_requests_gpus(tmp_path: Path) -> None:
    for line, key in (
        ('gres = "gpu:a100:4"', "gres"), ('gres = "shard:2"', None), ('options = ["--gpus-per-node=4"]', "options"),
        ('options = ["--gres=gpu"]', "options"), ('options = ["-G4"]', "options"), ('options = ["--gid=4"]', None),
    ):  # fmt: skip
        (tmp_path / "site.toml").write_text(f"cores_per_node = 4\n{line}\n")
        assert read_profile(tmp_path / "site.toml").profile.gpus == key, line


def workflow_job(ranks: int, placement: str = "packed") -> Job:
    parts = (("simulation", None), ("learner", 1))
    components: list[dict[str, Any]] = [
        {"name": name, "program": "p", "file": None, "ranks": count, "options": {}} for name, count in parts
    ]
    case = WorkflowCase("pair", "smoke", ["workflow"], components=components, placement=placement)
    how = Distributed(communicator="gloo", launcher="process")
    return Job({"name": "deep500", "mode": "any"}, "cpu", "fp32", ranks, 0, [case], ranks=ranks, distributed=how)


def test_components_of_a_workflow_become_a_heterogeneous_job(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        'cores_per_node = 4\npartition = "cpu"\n[components.learner]\npartition = "gpu"\ngres = "gpu:1"\n'
    )
    source = read_profile(tmp_path / "site.toml")
    assert source.lines["components.learner.gres"] == 5 and "gres" not in source.lines
    components = nodes_of_components(workflow_job(3), source.profile)
    assert components == {"simulation": 2, "learner": 1}
    text = batch_script(
        [tmp_path / "a.job.json"], name="d5", profile=source.profile, nodes=3, device="cpu", folder=tmp_path,
        output=tmp_path / "log", pythons={}, components=components,
    )  # fmt: skip
    first, second = (part.splitlines() for part in text.split("#SBATCH hetjob\n"))
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=cpu", "#SBATCH --job-name=d5"} <= set(first)
    asked = {"#SBATCH --nodes=1", "#SBATCH --partition=gpu", "#SBATCH --gres=gpu:1", "#SBATCH --job-name=d5"}
    assert asked <= set(second)
    (line,) = (line for line in second if line.startswith("srun"))
    one, other = line.split(" : ")
    assert "--nodes=2 --ntasks=2" in one and "--het-group=0" in one
    assert "--nodes=1 --ntasks=1" in other and "--het-group=1" in other and not other.startswith("srun")
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=300).returncode == 0
    shared = ClusterProfile(4, ranks_per_node=2)
    assert nodes_of_components(workflow_job(4), shared) == {}  # three ranks do not fill nodes
    assert nodes_of_components(workflow_job(3, "interleaved"), source.profile) == {}


def test_a_table_of_a_component_has_the_options_of_nodes(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('cores_per_node = 4\n[components.learner]\ntime = "1"\n')
    with pytest.raises(ConfigurationError, match=r"components must be tables \[components.NAME\] of partition, "):
        read_profile(path)


def test_the_parts_of_a_heterogeneous_job_are_one_job(site: Path) -> None:
    (site / "squeue").write_text(
        "#!/bin/bash\necho 'd5|17+1|CANCELLED|n3|None'\necho 'd5|17+0|FAILED|n[1-2]|NonZeroExitCode'\n"
    )
    assert client.states(["d5"]) == {("d5", "17"): client.SlurmState("FAILED", "NonZeroExitCode", "n[1-2],n3")}


def test_the_killed_rank_of_a_component_is_named(made: Runs) -> None:
    run = made(1)
    (name,) = run.jobs
    workflow_job(2).save(run.job_path(name))
    ended = {"name": "FAILED", "reason": "NonZeroExitCode", "nodes": "n1,n2"}
    run.jobs[name] = [Submission(f"d5suite-{run.identity}-1", None, "7", ended)]
    (run.folder / "scripts/01-nodes2.sh").touch()
    (run.folder / "scripts/01-nodes2.log").write_text("srun: error: n2: task 0: Killed\n")
    for rank, node in enumerate(("n1", "n2")):
        found = Result(phase="measuring pair/workflow: step 3", environment={"slurm": {"node": node}})
        found.save(of_rank(result_path(run.job_path(name)), rank))
    (status,) = job_statuses(run)
    assert "rank 1 of 2 (learner) on n2 died of SIGKILL" in describe(run, status)
