"""The ways to search of ``benchmarks/bench_tune.py``, with a simulated worker."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_tune
from d5suite.cases.case import Settings
from d5suite.errors import ConfigurationError
from d5suite.session.session import Session
from d5suite.tuning.space import Change
from d5suite.tuning.tune import TuningRequest
from tests.tuning.simulated import simulate, tuning


@pytest.mark.parametrize("way", ["d5suite", "random", "tpe"])
def test_each_way_finds_a_large_gain(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(change: Change) -> dict[str, Any]:
        return {"step_s": 0.05 if change.environment.get("OMP_WAIT_POLICY") == "passive" else 0.1}

    simulation = simulate(monkeypatch, cost)
    monkeypatch.setattr(bench_tune, "TrialJob", simulation.job)
    own = tuning(tmp_path, TuningRequest(60, only=("OMP_WAIT_POLICY", "OMP_PROC_BIND")))
    session, launches = Session(Settings(threads=2, jobs=tmp_path)), itertools.count(1)
    common = (session, own._wanted, own.space, 60.0 if way == "d5suite" else 1.0, launches)  # it ends with the space
    if way == "d5suite":
        found = bench_tune.by_pairs(*common)
    else:
        propose = {"random": bench_tune.at_random, "tpe": bench_tune.by_tpe}[way](own.space)
        found = bench_tune.by_medians(*common, propose)
    assert found.environment["OMP_WAIT_POLICY"] == "passive"
    session.close()


def test_a_network_names_its_recipe() -> None:
    assert bench_tune.recipe_of("lenet").endswith("test_digits_lenet.py")
    with pytest.raises(ConfigurationError, match="no recipe has 'nothing' in its name"):
        bench_tune.recipe_of("nothing")
