"""What ``d5suite slurm`` does without a cluster: profiles, scripts, places of ranks, slow nodes."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from d5suite.cli import main
from d5suite.errors import ConfigurationError
from d5suite.job import Distributed, Job, reason_path, results_of
from d5suite.launch.slurm.draft import Partition, drafted
from d5suite.launch.slurm.profile import ClusterProfile, read_profile
from d5suite.launch.slurm.script import batch_script
from d5suite.session.nodes import slow_nodes
from d5suite.worker.__main__ import await_shared
from d5suite.worker.ranks import RankInfo, share_resources
from tests.conftest import plugin_environment


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cores_per_node = 4\npartitoin = 'cpu'\n", ":2: there is no key 'partitoin'"),
        ("cores_per_node = 4\n\n[sbatch]\nx = 1\n", ":3: there is no key 'sbatch'"),
        ("partition = 'cpu'\n", "cores_per_node is not given"),
        ("cores_per_node = '4'\n", ":1: cores_per_node must be a whole number, at least 1"),
        ("cores_per_node = 4\nexclusive = 'no'\n", ":2: exclusive must be true or false"),
        ("cores_per_node = 4\ntime = 'soon'\n", ":2: 'soon' is not a time limit"),
        ("cores_per_node = 4\naccount = 'a\\nrm -r'\n".replace("'", '"'), ":2: account must be a text of one line"),
        ("cores_per_node = 4\nmodules = [1]\n", ":2: modules must be a list of lines of text"),
        ("cores_per_node = 2\nranks_per_node = 4\n", ":2: 4 ranks share 2 cores"),
        ("cores_per_node = \n", "not valid TOML"),
    ],
)
def test_a_profile_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        read_profile(path)
    assert said in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("path", "said"), [("/dev/zero", "not a regular file"), ("huge.toml", "more than the 1,048,576 that are read")]
)
def test_no_more_of_a_profile_is_read_than_one_has(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "huge.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigurationError, match=said):
        read_profile(tmp_path / path)


def test_files_beside_a_result_have_their_place_before_a_job_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.h5").mkdir()
    (tmp_path / "test_x.py").touch()
    (tmp_path / "site.toml").write_text("cores_per_node = 2\n")
    assert main(["slurm", "run", "test_x.py", "--nodes", "1", "--profile", "site.toml", "--out", "taken.json"]) == 2
    assert "taken.h5: results cannot be written here: a folder or a device is there" in capsys.readouterr().err


def test_the_documented_profiles_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/slurm.md").read_text()
    found = []
    for title in ("A CPU partition with 36 cores per node:", "A partition with four V100 per node,"):
        block = page.partition(title)[2].partition("\n\n")[2]
        lines = itertools.takewhile(lambda line: line.startswith("    "), block.splitlines())
        path = tmp_path / "site.toml"
        path.write_text(textwrap.dedent("\n".join(lines)))
        found.append(read_profile(path).profile)
    cpu, gpu = found
    assert (cpu.cores_per_node, cpu.ranks_per_node, cpu.threads_per_rank, cpu.gres) == (36, 2, 18, "")
    assert cpu.environment == "/home/project42/venv" and cpu.options == ["--hint=nomultithread"]
    assert (gpu.cores_per_node, gpu.ranks_per_node, gpu.threads_per_rank) == (40, 4, 10)
    assert gpu.gres == "gpu:v100:4" and gpu.container == "apptainer exec --nv /shared/d5suite.sif"
    for each in found:
        subprocess.run(["bash", "-n"], input=script(each, "/jobs/a.job.json"), text=True, check=True)


def script(profile: ClusterProfile, *jobs: str, device: str = "cpu") -> str:
    return batch_script(
        [Path(each) for each in jobs], name="d5", profile=profile, nodes=2, device=device, folder=Path("/a b"),
        output=Path("/runs/01"), pythons={},
    )  # fmt: skip


def test_a_script_asks_for_what_the_profile_says_and_is_valid_bash() -> None:
    profile = ClusterProfile(
        40, ranks_per_node=4, partition="gpu", gres="gpu:v100:4", modules=["a; rm -r /"], scratch='/scratch/$USER`x`"',
        container="apptainer exec x.sif", gpu_bind="single:1", options=["--comment=two words"],
    )  # fmt: skip
    text = script(profile, "/jobs/a.job.json", "/jobs/b c.job.json", device="cuda")
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=10", "#SBATCH --gres=gpu:v100:4",
        "#SBATCH --exclusive", "#SBATCH --array=0-1", "#SBATCH '--chdir=/a b'", "#SBATCH '--comment=two words'",
        "module load 'a; rm -r /'", 'export TMPDIR="/scratch/$USER\\`x\\`\\""', "    '/jobs/b c'",
        "export D5SUITE_SRUN=bound", "export OMP_NUM_THREADS=10",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert "CUDA_VISIBLE_DEVICES" not in text
    assert " --gpu-bind=single:1 apptainer exec x.sif " in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    alone = script(ClusterProfile(4, exclusive=False), "/jobs/a.job.json")
    assert "--array" not in alone and "--exclusive" not in alone and "export CUDA_VISIBLE_DEVICES=''" in alone
    subprocess.run(["bash", "-n"], input=alone, text=True, check=True)


def test_a_draft_is_a_profile(tmp_path: Path) -> None:
    text = drafted(Partition("gpu", 8, 40, "192000", "gpu:v100:4(S:0-1)", "20:00", "skylake", True))
    (tmp_path / "site.toml").write_text(text)
    profile = read_profile(tmp_path / "site.toml").profile
    assert (profile.partition, profile.gres, profile.ranks_per_node) == ("gpu", "gpu:v100:4", 4)
    assert (profile.cores_per_node, profile.most_nodes, profile.time) == (40, 8, "00:20:00")


def test_ranks_of_several_nodes_have_their_part_of_the_threads(tmp_path: Path) -> None:
    environment = {
        "D5SUITE_SRUN": "free", "D5SUITE_MEETING": str(tmp_path), "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
    }  # fmt: skip
    assert RankInfo.from_environment(environment) == RankInfo(3, 4, 1, 2, tmp_path, False)
    bound = RankInfo.from_environment({**environment, "D5SUITE_SRUN": "bound"})
    assert bound is not None
    job = Job({"name": "torch", "mode": "eager"}, "cpu", "fp32", 40, 0, [], loader_workers=40, ranks=4,
              distributed=Distributed(communicator="gloo", launcher="process"))  # fmt: skip
    own, cpus = share_resources(job, bound, [])
    assert (own.threads, own.loader_workers, cpus) == (10, 10, None)
    assert (
        RankInfo.from_environment({name: value for name, value in environment.items() if name != "D5SUITE_SRUN"})
        is None
    )


def test_a_slow_node_is_named() -> None:
    times = {"n1": 1.0, "n2": 1.02, "n3": 1.3}
    nodes = [{"name": name, "computing_s": value} for name, value in times.items()]
    (said,) = slow_nodes(nodes)
    assert said.startswith("node n3 is slow: its ranks compute 1.29 times as long")
    assert not slow_nodes(nodes[:2]) and not slow_nodes(nodes[:1])


def test_results_of_a_job_that_started_again_come_in_their_order(tmp_path: Path) -> None:
    names = ["a.result.json", "a.start10.result.json", "a.start2.result.json", "a.rank1.result.json", "ab.result.json"]
    for each in names:
        (tmp_path / each).touch()
    job = tmp_path / "a.job.json"
    assert [path.name for path in results_of(job)] == ["a.start2.result.json", "a.start10.result.json", "a.result.json"]
    assert reason_path(job).name == "a.reason"


def test_a_late_file_is_waited_for(tmp_path: Path) -> None:
    late = tmp_path / "late"
    thread = threading.Timer(0.2, late.touch)
    thread.start()
    await_shared(late)
    assert late.exists()
    thread.join()


@pytest.mark.parametrize(("expected", "outcome"), [("", "1 skipped"), ("1", "1 error")])
def test_where_slurm_was_installed_its_tests_are_not_skipped(tmp_path: Path, expected: str, outcome: str) -> None:
    test = Path(__file__).parent / "slurm/test_regression_script.py::test_a_call_without_sides_says_how"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-m", "slurm", str(test)],
        env=plugin_environment() | {"PATH": str(tmp_path), "D5SUITE_HAS_SLURM": expected},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert outcome in done.stdout and "Slurm is not installed: no munged" in done.stdout, done.stdout + done.stderr
    assert done.returncode == bool(expected)


def test_a_login_node_needs_no_framework(tmp_path: Path) -> None:
    """Nor Horovod, though a backend that never has a scheme is refused there, too."""
    (tmp_path / "site.toml").write_text("cores_per_node = 8\nranks_per_node = 2\n")
    for name in ("torch", "tensorflow", "keras", "mxnet", "jax", "mpi4py", "horovod"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a framework was imported')\n")
    recipe = Path(__file__).parents[2] / "recipes" / "test_digits_lenet.py"
    environment = plugin_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "slurm", "script", str(recipe), "--nodes", "1,2", "--backend",
         "torch,jax", "--scheme", "all_reduce,top_k,horovod", "--profile", "site.toml"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (jobs,) = tmp_path.glob("d5suite-slurm/*/jobs")
    found = {path.name.removesuffix(".job.json"): Job.load(path) for path in jobs.iterdir()}
    assert {f"digits_lenet-torch-{each}" for each in ("all_reduce-gloo-2", "all_reduce-gloo-4", "top_k-gloo-4")} < set(
        found
    )
    assert {"digits_lenet-torch-horovod-2", "digits_lenet-torch-horovod-4"} < set(found)
    assert not [name for name in found if "jax-horovod" in name]
    assert found["digits_lenet-jax-all_reduce-gloo-4"].threads == 16
    assert found["digits_lenet-jax-all_reduce-gloo-2"].threads == 8
