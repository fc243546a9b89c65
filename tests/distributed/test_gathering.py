"""Values that ranks exchange, and facts on which they disagree."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from d5suite.distributed.communicators.threads import run
from d5suite.distributed.gathering import disagreements, gather
from d5suite.errors import JobError
from d5suite.instruments.nvml import RUN_GPUS
from d5suite.job import Distributed, Job
from d5suite.worker.ranks import RankInfo, code_digest, share_resources


def test_every_rank_gets_the_values_of_all() -> None:
    values = [{"rank": 0}, [math.inf, "ä"], None]
    found = run(3, lambda communicator: gather(communicator, values[communicator.rank]), algorithm="ring")
    assert found == [values] * 3


def test_a_disagreement_names_what_differs_and_the_ranks() -> None:
    same = {"seed": "0", "network": "ab12", "data": "cd34"}
    facts = [same, same | {"seed": "1", "data": "ee"}, same]
    assert disagreements(facts, ["a", "b", "c"]) == [
        "seed: 1 on rank 1 (b), 0 on the others",
        "data: ee on rank 1 (b), cd34 on the others",
    ]
    assert disagreements([same, same | {"seed": "1"}], ["a", "b"]) == ["seed: 1 on rank 1 (b), 0 on rank 0 (a)"]
    assert not disagreements([same] * 3, ["a", "b", "c"])


def test_code_has_one_digest() -> None:
    assert code_digest() == code_digest() != ""


def test_a_launcher_says_which_rank_a_process_is(tmp_path: Path) -> None:
    assert RankInfo.from_environment({}) is None
    ours = {"D5SUITE_RANK": "1", "D5SUITE_RANKS": "4", "D5SUITE_MEETING": str(tmp_path)}
    assert RankInfo.from_environment(ours) == RankInfo(1, 4, 1, 4, tmp_path)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    of_mpi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, (5, 8, 1, 4), strict=True)}
    assert RankInfo.from_environment(of_mpi) == RankInfo(5, 8, 1, 4)


def job(ranks: int, *, oversubscribe: bool) -> Job:
    how = Distributed(communicator="gloo", launcher="process", oversubscribe=oversubscribe)
    backend = {"name": "torch", "mode": "eager"}
    return Job(backend, "cpu", "fp32", threads=2, seed=0, loader_workers=2, ranks=ranks, distributed=how, cases=[])


def test_more_ranks_than_cores_are_refused_or_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d5suite.instruments.threads.allowed_cpus", lambda: [0, 1])
    notes: list[str] = []
    parts = [share_resources(job(2, oversubscribe=False), RankInfo(rank, 2, rank, 2), notes) for rank in range(2)]
    assert [(own.threads, own.loader_workers, cpus) for own, cpus in parts] == [(1, 1, [0]), (1, 1, [1])]
    assert not notes
    with pytest.raises(JobError, match="3 ranks share 2 CPUs"):
        share_resources(job(3, oversubscribe=False), RankInfo(0, 3, 0, 3), notes)
    share_resources(job(3, oversubscribe=True), RankInfo(2, 3, 2, 3), notes)
    assert notes == ["3 ranks share 2 CPUs"]
    with pytest.raises(JobError, match="the job has 2 ranks, and 3 were started"):
        share_resources(job(2, oversubscribe=True), RankInfo(0, 3, 0, 3), notes)


def test_each_rank_has_a_gpu_and_knows_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d5suite.instruments.threads.allowed_cpus", lambda: [0, 1])
    monkeypatch.setenv(RUN_GPUS, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    share_resources(replace(job(2, oversubscribe=False), device="cuda"), RankInfo(1, 2, 1, 2), [])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert os.environ[RUN_GPUS] == "3,1"


def test_ranks_share_cpus_without_overlap() -> None:
    from d5suite.instruments.threads import share_cpus

    for ranks in (1, 2, 3, 5):
        shares = [share_cpus(8, ranks, rank, range(8)) for rank in range(ranks)]
        assert len(np.unique(np.concatenate(shares))) == sum(map(len, shares))
        assert {len(each) for each in shares} == {8 // ranks}
