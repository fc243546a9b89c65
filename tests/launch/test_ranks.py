"""Ranks that are killed, hang, fail or run out of memory end their job, are named, and leave
nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from d5suite.backends import discover
from d5suite.distributed.communicators import COMMUNICATORS, problem
from d5suite.errors import ConfigurationError
from d5suite.job import Distributed, Job, NetworkCase, Result, log_path, of_rank, result_path
from d5suite.launch.base import MEETING, Launch, Limits, Outcome
from d5suite.launch.mpi import mpiexec
from d5suite.launch.ranks import SHARED_MEMORY
from d5suite.launch.run import run_job
from tests.conftest import is_dead, plugin_environment, wait_until
from tests.launch import ranked_fault

HERE = socket.gethostname()
MEMORY = {"gloo": 2**31, "mpi": 2**30}
"""Bytes that two ranks do not use together unless one hoards them; Gloo brings PyTorch along."""


def left_by(pid: int) -> list[Path]:
    """Folders in which ranks met that a process started; Open MPI keeps its files there, too."""
    places = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    return [path for place in places if place.is_dir() for path in place.glob(f"d5suite-{pid}-*")]


def running(job: Path) -> list[int]:
    """Processes that have to do with a job."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        if (
            str(job.parent) in " ".join(each.info["cmdline"] or ())
            and each.pid != os.getpid()
            and not is_dead(each.pid)
        ):
            found.append(each.pid)
    return found


@pytest.fixture
def job(small_onnx: Path, imagenet_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where to write a job; afterwards nothing of it may be left."""
    for name, value in plugin_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ranked_fault.NOTE, str(tmp_path / "note"))
    path = tmp_path / "ranked.job.json"
    yield path
    wait_until(lambda: not running(path), "the ranks' end")
    assert not left_by(os.getpid())


def case_of(name: str, measurement: str, small_onnx: Path, imagenet_tree: Path) -> NetworkCase:
    return NetworkCase(
        name, "smoke", [measurement], files={measurement: ranked_fault.__file__}, validation_steps=1, batch_size=4,
        network={"onnx": str(small_onnx), "classes": 4, "image_size": 32},
        dataset={"kind": "imagenet", "root": str(imagenet_tree)}, optimizer={"name": "sgd", "learning_rate": 0.1},
    )  # fmt: skip


def write(job: Path, small_onnx: Path, imagenet_tree: Path, communicator: str, **changes: object) -> None:
    how = Distributed(communicator=communicator, launcher=COMMUNICATORS[communicator].launcher, oversubscribe=True)
    Job(
        {"name": "faulty", "mode": "good"}, "cpu", "fp32", threads=2, seed=0, ranks=2, distributed=how,
        cases=[case_of(name, "adding", small_onnx, imagenet_tree) for name in ("sound", "faulty")],
    ).save(job)  # fmt: skip


def run(job: Path, memory: int = 2**40) -> Outcome:
    return run_job(Job.load(job), job, Launch(Limits(200, memory)))


def needs(communicator: str, *more: object, slow: bool = True) -> object:
    marks = [pytest.mark.skipif(problem(communicator) is not None, reason=f"{communicator} is not installed")]
    return pytest.param(communicator, *more, marks=[*marks, pytest.mark.slow] if slow else marks)


@pytest.mark.parametrize(
    ("communicator", "fault", "said"),
    [
        needs("mpi", "killed", "died of SIGKILL", slow=False),
        needs("mpi", "stopped", "hung (no heartbeat for 6 s, stopped by a signal)", slow=False),
        needs("mpi", "stopped inside", "hung (no heartbeat for 6 s, stopped by a signal)"),
        needs("gloo", "killed", "died of SIGKILL"),
        needs("mpi", "hangs", "hung ("),
        needs("gloo", "hangs", "hung ("),
        needs("gloo", "spins", "s in a step; at most"),
        needs("gloo", "orphan", "hung ("),
        needs("mpi", "crashes", "died of SIGSEGV (it crashed)"),
        needs("mpi", "raises", "the kernel is missing"),
        needs("gloo", "memory", "(--job-memory), and was killed"),
        needs("mpi", "memory", "(--job-memory), and was killed"),
    ],
)  # fmt: skip
def test_a_rank_that_fails_is_named_soon_and_leaves_nothing(
    communicator: str, fault: str, said: str, job: Path, small_onnx: Path, imagenet_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The watch is one for all launchers, which only differ in how ranks start and end."""
    monkeypatch.setenv(ranked_fault.FAULT, fault)
    write(job, small_onnx, imagenet_tree, communicator)
    outcome = run(job, MEMORY[communicator] if fault == "memory" else 2**40)
    took = time.monotonic() - float((job.parent / "note").read_text())
    assert took < (60 if fault == "memory" else 30)  # it is 10 s on an idle machine
    assert not outcome.ok and outcome.rank == 1
    assert outcome.reason.startswith(f"rank 1 of 2 on {HERE} ") and said in outcome.reason
    assert "measuring faulty/adding" in outcome.reason
    assert "(last seen in step " in outcome.reason
    if "hung" in said:
        where = outcome.reason.partition("\nWhere each rank was last seen:\n")[2]
        assert where.startswith(("  rank 0: waits for others, in ", "  ranks 0, 1: waits for others, in "))
        assert "stopped" in fault or "misbehave (ranked_fault.py:" in where
    assert list(Result.load(result_path(job)).measurements) == ["sound/adding"]
    assert of_rank(result_path(job), 1).exists()
    assert "measuring sound/adding" in job.with_name("ranked.rank1.log").read_text()


def native(backend: str, scheme: str, rank: int) -> object:
    found = discover()[0][backend]
    lacking = found.problem() or found.lacks_scheme(scheme, mode=found.default_mode, device="cpu", precision="fp32")
    return pytest.param(backend, scheme, rank, marks=[pytest.mark.skipif(bool(lacking), reason=lacking or "")])


@pytest.mark.slow
@pytest.mark.skipif(problem("gloo") is not None, reason="gloo is not installed")
@pytest.mark.parametrize(
    ("backend", "scheme", "rank"),
    [
        native("torch", "ddp", 1),
        native("torch", "ddp", 0),
        native("torch", "horovod", 1),
        native("jax", "sharded", 1),  # others wait after the step, which has only begun it
    ],
)
def test_a_rank_that_hangs_outside_its_frameworks_step_is_named(
    backend: str, scheme: str, rank: int, job: Path, small_onnx: Path, imagenet_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(ranked_fault.FAULT, "hangs")
    monkeypatch.setenv(ranked_fault.WHERE, str(rank))
    how = Distributed(communicator="gloo", launcher="process", oversubscribe=True, scheme=scheme, native=True)
    case = case_of("faulty", "training", small_onnx, imagenet_tree)
    named = {"name": backend, "mode": discover()[0][backend].default_mode}
    Job(named, "cpu", "fp32", threads=2, seed=0, ranks=2, distributed=how, cases=[case]).save(job)
    outcome = run(job)
    took = time.monotonic() - float((job.parent / "note").read_text())
    assert took < 30  # it is 10 s on an idle machine
    assert outcome.reason.startswith(f"rank {rank} of 2 on {HERE} hung (no work for "), outcome.reason
    assert "measuring faulty/training (last seen in step " in outcome.reason


@pytest.mark.parametrize(
    ("communicator", "fault", "rank", "said"),
    [
        needs("mpi", "lies", 1, "sum afterwards: relative error 1 exceeds 0", slow=False),
        needs("gloo", "lies", 1, "sum afterwards: relative error 1 exceeds 0"),
        needs("mpi", "disk", 0, "exited with status 1"),
        needs("gloo", "disk", 0, "exited with status 1"),
        needs("gloo", "disk", 1, "exited with status 1"),
    ],
)
def test_a_rank_that_fails_after_timing_costs_that_measurement_only(
    communicator: str, fault: str, rank: int, said: str, job: Path, small_onnx: Path, imagenet_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What one rank cannot prove, or no longer write, is a result of none."""
    monkeypatch.setenv(ranked_fault.FAULT, fault)
    monkeypatch.setenv(ranked_fault.WHERE, str(rank))
    write(job, small_onnx, imagenet_tree, communicator)
    outcome = run(job)
    assert not outcome.ok and outcome.rank == rank
    assert outcome.reason.startswith(f"rank {rank} of 2 on {HERE} ") and said in outcome.reason
    assert list(Result.load(result_path(job)).measurements) == ["sound/adding"]


def test_a_job_that_another_session_runs_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Exception):
        pass

    def locked(job: Path) -> None:
        raise Waits

    job = tmp_path / "ranked.job.json"
    files = [of_rank(of(job), rank) for of in (result_path, log_path) for rank in range(2)]
    for file in files:
        file.write_text("of the other session")
    monkeypatch.setattr("d5suite.launch.supervisor.locked", locked)
    for ranks in (1, 2):
        with pytest.raises(Waits):
            run_job(Job({}, "cpu", "fp32", 1, 0, [], ranks=ranks), job, Launch(Limits(1, 2**40)))
    assert all(file.read_text() == "of the other session" for file in files)


@pytest.mark.parametrize("communicator", [needs("mpi"), needs("gloo")])
def test_ranks_that_disagree_are_named_before_they_train(
    communicator: str, job: Path, small_onnx: Path, imagenet_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranked_fault.FAULT, "disagrees")
    write(job, small_onnx, imagenet_tree, communicator)
    outcome = run(job)
    assert not outcome.ok and outcome.rank is not None
    assert f"the ranks disagree on version of library: 1.1 on rank 1 ({HERE}), 1.0 on rank 0 ({HERE})" in outcome.reason
    assert not Result.load(result_path(job)).measurements


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("communicator", [needs("mpi"), needs("gloo")])
def test_ranks_end_with_who_started_them(
    communicator: str, signum: int, job: Path, small_onnx: Path, imagenet_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranked_fault.FAULT, "hangs")
    write(job, small_onnx, imagenet_tree, communicator)
    started = subprocess.Popen([sys.executable, "-m", "d5suite.worker", str(job)], stderr=subprocess.DEVNULL)
    wait_until(lambda: (job.parent / "note").exists(), "the fault")
    started.send_signal(signum)
    started.wait(timeout=300)
    wait_until(lambda: not left_by(started.pid), "the meeting folder's end")


@pytest.mark.parametrize("communicator", [needs("mpi"), needs("gloo")])
def test_ranks_are_run_by_hand_and_each_has_its_cores(
    communicator: str, job: Path, small_onnx: Path, imagenet_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranked_fault.FAULT, "none")
    write(job, small_onnx, imagenet_tree, communicator)
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.worker", str(job)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    results = [Result.load(of_rank(result_path(job), rank)) for rank in range(2)]
    assert all(set(each.measurements) == {"sound/adding", "faulty/adding"} for each in results)
    assert results[0].threads["budget"] == 1
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(results[0].threads["cpus"]) & set(results[1].threads["cpus"])


@pytest.mark.slow
@pytest.mark.skipif(problem("mpi") is not None, reason="no MPI")
@pytest.mark.parametrize(("fault", "rank"), [("hangs", 1), ("hangs", 0), ("stopped", 0)])
def test_ranks_that_a_user_started_watch_each_other(
    fault: str, rank: int, job: Path, small_onnx: Path, imagenet_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 watches all, and rank 1 rank 0, which may be unable to say anything."""
    monkeypatch.setenv(ranked_fault.FAULT, fault)
    monkeypatch.setenv(ranked_fault.WHERE, str(rank))
    write(job, small_onnx, imagenet_tree, "mpi")
    meeting = job.parent / "meeting"
    meeting.mkdir()
    done = subprocess.run(
        [*mpiexec(2, oversubscribe=True), sys.executable, "-m", "d5suite.worker", str(job)],
        env=os.environ | {MEETING: str(meeting)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    took = time.monotonic() - float((job.parent / "note").read_text())
    assert done.returncode != 0 and took < 40, done.stderr  # it is 10 s on an idle machine
    says = 1 if fault == "stopped" else 0
    result = Result.load(of_rank(result_path(job), says))
    assert result.error is not None
    assert result.error.message.startswith(f"rank {rank} of 2 on {HERE} hung (no ")
    assert "while measuring faulty/adding (last seen in step " in result.error.message
    assert result.failures["faulty/adding"] == result.error and list(result.measurements) == ["sound/adding"]


def test_without_mpiexec_one_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"mpiexec, which is not installed\n  .*pip install 'd5suite\[mpi\]'"):
        mpiexec(2, python=str(tmp_path / "python"))


@pytest.mark.slow
@pytest.mark.skipif(problem("mpi") is not None, reason="no MPI")
def test_a_rank_that_works_for_long_is_not_blamed(
    job: Path, small_onnx: Path, imagenet_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends no heartbeats meanwhile, because native code keeps the interpreter to itself."""
    monkeypatch.setenv(ranked_fault.FAULT, "works")
    write(job, small_onnx, imagenet_tree, "mpi")
    outcome = run(job)
    assert outcome.ok, outcome.reason
    assert list(Result.load(result_path(job)).measurements) == ["sound/adding", "faulty/adding"]
