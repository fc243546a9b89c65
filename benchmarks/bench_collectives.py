"""Overhead of communicators: all-reduce through one against the transport's bare call, and our ring
against the transport's own algorithm.

Ranks are processes of this machine. Both calls alternate on the same array, after a barrier; rank
0's times count. The bare call is mpi4py's, or that of torch's process group, which does less than
``torch.distributed.all_reduce``. While the interval includes the limit, more rounds are taken.

``pytest benchmarks/bench_collectives.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``. ``python benchmarks/bench_collectives.py NAME CASE MEETING [RANK SIZE]`` is a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.distributed.communicators import COMMUNICATORS, open_communicator, problem
from d5suite.levels.distributed import Communicator
from d5suite.statistics.intervals import median_interval
from d5suite.statistics.ratios import paired_ratio


class Case(NamedTuple):
    """All-reduce of ``length`` float32 numbers, ``ours`` against ``theirs``.

    The limit is a ratio, or seconds added if the calls of a round are ``repeated``.
    """

    length: int
    ranks: int
    ours: str
    theirs: str
    limit: float
    repeated: int = 1


CASES = {
    "large": Case(25_600_000, 2, "native", "bare", 1.03),
    "small": Case(1, 2, "native", "bare", 3e-6, repeated=20),
    "small_alone": Case(1, 1, "native", "bare", 3e-6, repeated=20),
    "ring": Case(25_600_000, 4, "ring", "native", 1.5),
}
LEAST_ROUNDS = 15
BUDGET_S, LONGEST_S = 10.0, 60.0
"""Seconds of rounds: at least, and at most while the interval still includes the limit."""

ROOT = Path(__file__).parents[1]


def excess(case: Case, ours: list[float], theirs: list[float]) -> list[float]:
    """Seconds above the limit, by round."""
    if case.repeated > 1:
        return [x - y - case.limit for x, y in zip(ours, theirs, strict=True)]
    return [x - case.limit * y for x, y in zip(ours, theirs, strict=True)]


def undecided(case: Case, ours: list[float], theirs: list[float]) -> bool:
    low, high = median_interval(excess(case, ours, theirs))
    return low <= 0 <= high


def bare(communicator: Communicator, array: np.ndarray) -> Callable[[], object]:
    """Return the transport's own call, written by hand."""
    if communicator.name == "mpi":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        return lambda: world.Allreduce(MPI.IN_PLACE, array)
    import torch

    group, tensor = vars(communicator)["_group"], torch.from_numpy(array)
    return lambda: group.allreduce([tensor]).wait()


def rank(name: str, case: Case, meeting: str, number: int | None = None, size: int | None = None) -> None:
    """Alternate both calls on every rank; rank 0 decides when to stop and prints the times."""
    array = np.ones(case.length, np.float32)
    communicators = {
        algorithm: open_communicator(name, algorithm, rank=number, size=size, meeting=Path(meeting), timeout_s=120)
        for algorithm in dict.fromkeys((case.ours, "native"))
    }
    native = communicators["native"]
    ours = communicators[case.ours]
    calls: dict[str, Callable[[], object]] = {"ours": lambda: ours.all_reduce(array)}
    calls["theirs"] = bare(native, array) if case.theirs == "bare" else lambda: native.all_reduce(array)
    for call in calls.values():
        array[:] = 1
        call()
        assert (array == native.size).all(), "the calls do not do the same"
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    begin = time.perf_counter()
    goes_on = np.ones(1, np.uint8)
    while goes_on[0]:
        array[:] = 0
        for which in calls if len(times["ours"]) % 2 else reversed(calls):
            call = calls[which]
            native.barrier()
            start = time.perf_counter()
            for _ in range(case.repeated):
                call()
            times[which].append((time.perf_counter() - start) / case.repeated)
        seconds = time.perf_counter() - begin
        goes_on[0] = (
            len(times["ours"]) < LEAST_ROUNDS
            or seconds < BUDGET_S
            or (seconds < LONGEST_S and undecided(case, **times))
        )
        native.broadcast(goes_on)
    if native.rank == 0:
        print(json.dumps(times), flush=True)
    for communicator in communicators.values():
        communicator.close()


def measured(name: str, case: str, meeting: Path) -> dict[str, list[float]]:
    """Start the ranks and return rank 0's times."""
    size = CASES[case].ranks
    command = [sys.executable, __file__, name, case, str(meeting)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if COMMUNICATORS[name].launcher == "mpi":
        beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        commands = [[beside, *root, "--oversubscribe", "-n", str(size), *command]]
    else:
        commands = [[*command, str(number), str(size)] for number in range(size)]
    started = [subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True) for each in commands]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in started)
    times: dict[str, list[float]] = json.loads(said[0])
    return times


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["mpi", "gloo"])
def test_all_reduce_costs_what_the_bare_call_costs(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, case: str
) -> None:
    lacking = problem(name)
    if lacking:
        pytest.skip(lacking)
    times: dict[str, list[float]] = {}
    benchmark.pedantic(lambda: times.update(measured(name, case, tmp_path)), rounds=1)
    chosen, ratio = CASES[case], paired_ratio(times["ours"], times["theirs"])
    added = [x - y for x, y in zip(times["ours"], times["theirs"], strict=True)]
    (low, high), (least, most) = ratio.interval, median_interval(added)
    noise = ", undecided" if undecided(chosen, **times) else ""
    benchmark.extra_info.update(
        ratio=ratio.value, ratio_ci95=[low, high], rounds=ratio.n,
        added_s=statistics.median(added), added_s_ci95=[least, most], theirs_s=statistics.median(times["theirs"]),
    )  # fmt: skip
    limit = f"{chosen.limit * 1e6:g} µs added" if chosen.repeated > 1 else f"{chosen.limit:g}"
    with capsys.disabled():
        print(
            f"\n{name}, {case}: {chosen.length} float32 on {chosen.ranks} ranks, {chosen.ours} / {chosen.theirs} "
            f"({statistics.median(times['theirs']) * 1e6:.1f} µs): {ratio.value:.3f} ({low:.3f} to {high:.3f}), "
            f"{statistics.median(added) * 1e6:+.2f} µs ({least * 1e6:+.2f} to {most * 1e6:+.2f}), "
            f"{ratio.n} rounds (limit {limit}{noise})"
        )
    assert statistics.median(excess(chosen, **times)) <= 0


if __name__ == "__main__":
    rank(sys.argv[1], CASES[sys.argv[2]], sys.argv[3], *map(int, sys.argv[4:]))
