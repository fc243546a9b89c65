"""Every transport keeps the contract of `Communicator`, in real processes where it has any."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from d5suite.distributed.communicators import COMMUNICATORS, open_communicator, problem, threads
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import Communicator
from tests.conftest import wait_until
from tests.distributed import checks

ROOT = Path(__file__).parents[2]
RANKS = 3
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def under_mpi(*command: str, ranks: int = RANKS) -> subprocess.CompletedProcess[str]:
    """Run Python on several ranks."""
    assert MPIEXEC
    more = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    return subprocess.run(
        [MPIEXEC, *more, "-n", str(ranks), sys.executable, *command],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def in_processes(*command: str, ranks: int = RANKS) -> list[tuple[int, str]]:
    """Run Python once per rank, with rank and size as last arguments; return codes and output."""
    started = [
        subprocess.Popen(
            [sys.executable, *command, str(rank), str(ranks)],
            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=900)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


needs_mpi = pytest.mark.skipif(bool(problem("mpi")) or MPIEXEC is None, reason="no MPI")
needs_torch = pytest.mark.skipif(bool(problem("gloo")), reason="no torch")


@needs_mpi
def test_mpi_keeps_the_contract(tmp_path: Path) -> None:
    done = under_mpi(checks.__file__, "mpi", str(tmp_path))
    assert done.stdout.split() == ["held"] * RANKS, done.stdout + done.stderr


@needs_torch
def test_gloo_keeps_the_contract(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    for code, said in in_processes(checks.__file__, "gloo", str(meeting)):
        assert code == 0 and "held" in said.split(), said  # torch may warn of a lost rank
    assert not list(meeting.iterdir())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads_keep_the_contract(size: int) -> None:
    threads.run(size, checks.check_messages)


def test_a_single_rank_keeps_what_it_has() -> None:
    c = open_communicator("local", "ring")
    for length in checks.LENGTHS:
        checks.check_collectives(c, length, np.dtype(np.float32), root=0)
    assert c.traffic["all_reduce"].calls == len(checks.LENGTHS)
    assert not any(traffic.messages_sent or traffic.opaque_calls for traffic in c.traffic.values())
    with pytest.raises(D5Error, match="no other"):
        c.send(np.zeros(1), 0)
    with pytest.raises(ConfigurationError, match="local is one rank, not 2"):
        open_communicator("local", rank=0, size=2)


def test_what_is_unknown_or_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"no communicator 'smoke'\n  There are local, mpi"):
        open_communicator("smoke")
    with pytest.raises(ConfigurationError, match=r"no algorithm 'rng'\n  There are native, ring"):
        open_communicator("local", "rng")
    assert problem("local") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, module in (("mpi", "mpi4py"), ("gloo", "torch"), ("nccl", "torch")):
        assert f"{COMMUNICATORS[name].title} needs {module}, which is not installed: pip install" in str(problem(name))
    with pytest.raises(D5Error, match=r"MPI needs mpi4py, which is not installed\n  pip install 'd5suite\[mpi\]'"):
        open_communicator("mpi")


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(D5Error, match="contiguous"):
        open_communicator("local").all_reduce(np.zeros((4, 4))[:, 1])


def test_waiting_for_a_message_that_was_begun_before_is_a_call() -> None:
    """Else a rank that waits looks idle, and its waiting counts as computing."""
    both: dict[int, Communicator] = {}

    def work(c: Communicator) -> float:
        both[c.rank] = c
        array = np.full(3, c.rank)
        if c.rank == 0:
            request = c.ireceive(array, 1)
            assert c.activity == (1, False)
            request.wait()
            assert array.tolist() == [1, 1, 1] and c.activity == (1, False)
            return c.traffic["receive"].seconds
        wait_until(lambda: 0 in both and both[0].activity == (1, True), "the wait")
        begun = time.perf_counter()
        wait_until(lambda: time.perf_counter() - begun > 0.1, "a moment")
        c.isend(array, 0).wait()
        return 0.0

    assert threads.run(2, work)[0] > 0.05


KILLED = """
import os, signal, sys
from pathlib import Path
from d5suite.distributed.communicators import open_communicator

c = open_communicator("mpi")
lines = Path("/proc/self/maps").read_text().splitlines()
held = [line.split(maxsplit=5)[5].split()[0] for line in lines if "_segment." in line]
Path(sys.argv[1], str(c.rank)).write_text(" ".join(held))
if c.rank == 0:
    launcher = os.getppid()
    c.barrier()
    os.kill(launcher, signal.SIGKILL)
else:
    c.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_mpi
def test_killed_ranks_of_mpi_leave_no_shared_memory(tmp_path: Path) -> None:
    """Open MPI's launcher, killed too, removes nothing."""
    done = under_mpi("-c", KILLED, str(tmp_path), ranks=2)
    held = {Path(path) for rank in "01" for path in (tmp_path / rank).read_text().split()}
    assert done.returncode != 0 and not [path for path in held if path.exists()], held
