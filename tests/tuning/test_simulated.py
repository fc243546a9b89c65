"""Whole searches with a simulated worker: goals, models, bad starts, and what cannot take turns."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import discover
from d5suite.errors import ConfigurationError
from d5suite.levels.knobs import UPDATE, TuningKnob
from d5suite.models.ceilings import Ceilings
from d5suite.models.roofline import TimedWork
from d5suite.tuning.confirm import MOST_ROUNDS
from d5suite.tuning.profiles import space_of
from d5suite.tuning.proposals import StepLayers, by_cores, by_layers, by_memory, first_of_knobs
from d5suite.tuning.space import Change
from d5suite.tuning.trials import FEWEST_BLOCKS
from d5suite.tuning.tune import TuningRequest
from tests.tuning.simulated import ITEMS, simulate, tuning

BATCHES = TuningKnob("batch_size", ("8", "32", "4096"), "the user")


def of(change: Change, variable: str) -> str:
    return change.environment.get(variable, "")


@pytest.mark.parametrize("goal", ["p99", "memory", "energy", "energy_delay"])
def test_each_goal_is_made_small_and_confirmed(goal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One knob makes the step shorter and no more; another halves what the goal is about."""

    def cost(change: Change) -> dict[str, Any]:
        helps = of(change, "OMP_PROC_BIND") == "close"
        fast = 0.9 if of(change, "THP_MEM_ALLOC_ENABLE") and goal in ("memory", "energy") else 1.0
        return {
            "step_s": 0.02 * fast, "memory": 100 / (1 + helps * (goal == "memory")),
            "joules": 50 / (1 + helps * goal.startswith("energy")), "slow": 3.0 / (1 + helps),
        }  # fmt: skip

    simulate(monkeypatch, cost)
    plan = TuningRequest(60, goal, most=9, only=("OMP_PROC_BIND", "THP_MEM_ALLOC_ENABLE"))
    found = tuning(tmp_path, plan)
    tuned = found.run()
    assert tuned is not None, found.course["decision"]
    assert tuned.knobs["OMP_PROC_BIND"] == "close"
    if goal in ("memory", "energy"):  # what only makes it faster gives nothing for the goal
        assert "THP_MEM_ALLOC_ENABLE" not in tuned.knobs
    value, low, high = tuned.figures[f"{goal}_versus_default"]
    assert low <= value <= high < 1 and value == pytest.approx(0.5, abs=0.03)
    assert tuned.figures["versus_default"][0] == pytest.approx(1.0, abs=0.11)
    rounds = found.course["confirmed"]["rounds"]["tuned"]
    assert min(map(len, rounds)) == MOST_ROUNDS  # they cost no time here, and the budget has some left


def test_a_trial_of_long_steps_has_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, lambda change: {"step_s": 2.0})
    monkeypatch.setattr("d5suite.tuning.trials.BLOCKS_S", 0.0)
    found = tuning(tmp_path, TuningRequest(60, most=3, only=("OMP_PROC_BIND",)))
    found.run()
    assert {trial["blocks"] for trial in found.course["trials"]} == {FEWEST_BLOCKS}


@pytest.mark.parametrize("larger", [-1, 0], ids=["less", "enough"])
def test_the_least_budget_that_is_named_is_enough(larger: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, lambda change: {"step_s": 0.02 / (1 + (of(change, "OMP_PROC_BIND") == "close"))})
    importlib.import_module("optuna")  # takes a second, which is not the search's
    plan = TuningRequest(1, only=("OMP_PROC_BIND", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    small = tuning(tmp_path, plan)
    assert small.run() is None
    (least,) = re.findall(r"([0-9]+) s is the least", small.course["decision"]["reason"])
    again = tuning(tmp_path, replace(plan, budget_s=int(least) + larger))
    taken = again.run()
    assert (taken is None) == (larger < 0), again.course["decision"]


def test_a_goal_without_a_sensor_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, lambda change: {"step_s": 0.01})
    with pytest.raises(ConfigurationError, match=r"no energy of .* here: this machine counts no energy of its CPU"):
        tuning(tmp_path, TuningRequest(60, "energy", only=("OMP_PROC_BIND",))).run()


def test_larger_batches_count_per_item_in_trials_ablation_and_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 32 costs 13 ms, one of 8 costs 7 ms; another knob makes all 1.25 times as fast."""

    def cost(change: Change) -> dict[str, Any]:
        items = ITEMS * math.exp(change.items)
        fast = 0.8 if of(change, "OMP_PROC_BIND") == "close" else 1.0
        return {"step_s": (5e-3 + items * 0.25e-3) * fast, "memory": 2**20, "alive": 2**10}

    simulate(monkeypatch, cost)
    plan = TuningRequest(60, most=30, further=[TuningKnob("batch_size", ("8", "32"), "the user")],
                only=("OMP_PROC_BIND", "batch_size"))  # fmt: skip
    found = tuning(tmp_path, plan)
    tuned = found.run()
    assert tuned is not None
    assert tuned.figures["versus_default"][0] == pytest.approx(0.8 * 13 / 28, rel=0.02)
    gives = {part["knob"]: part["without"] for part in found.course["ablation"]}
    assert gives["OMP_PROC_BIND"] == pytest.approx(1.25, rel=0.02)
    assert gives["batch_size"] == pytest.approx(28 / 13, rel=0.02)


def test_a_batch_that_cannot_fit_is_never_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 1 MiB of activations for an image; 2 GiB are allowed, half of them for a worker."""

    def cost(change: Change) -> dict[str, Any]:
        items = ITEMS * math.exp(change.items)
        return {"step_s": 1e-3 * items, "memory": 2**28 + items * 2**20, "alive": items * 2**20}

    simulation, said = simulate(monkeypatch, cost), list[str]()
    plan = TuningRequest(60, most=20, further=[BATCHES], only=("batch_size", "OMP_WAIT_POLICY"))
    found = tuning(tmp_path, plan, said=said, memory_bytes=2**31)
    found.run()
    batches = {change.settings.get("batch_size", 8) for change in simulation.changes}
    assert batches == {8, 32}
    assert any("left out: batch_size=4096: 4.25 GiB are needed by the memory model" in each for each in said)
    assert found.course["proposed"][-1]["knobs"] == {"batch_size": "32"}


def test_batches_are_not_judged_without_a_memory_record(tmp_path: Path) -> None:
    space = tuning(tmp_path, TuningRequest(60, further=[BATCHES])).space
    assert by_memory(space, {}, 1.0) == ([], {})


@pytest.mark.parametrize(
    ("start", "threads"), [("one thread", 1), ("oversubscribed", 16), ("a spinning pool beside a loader", 2)]
)
def test_it_comes_back_from_a_bad_start_to_within_2_percent(
    start: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own space, on a simulated machine of two cores, of which a loader may need one."""
    monkeypatch.setattr("d5suite.tuning.profiles.allowed_cpus", lambda: [0, 1])
    monkeypatch.setattr("d5suite.tuning.proposals.count_cores", lambda: 2)

    def cost(change: Change) -> dict[str, Any]:
        used = change.settings.get("threads", threads)
        step = 0.1 / min(used, 2) * (1 + 2.0 * max(0, used - 2) / 14)
        spins = of(change, "OMP_WAIT_POLICY") != "passive" and of(change, "GOMP_SPINCOUNT") != "0"
        if "loader" in start and spins and used > 1:
            step *= 3.0
        return {"step_s": step * (0.97 if change.mode == "channels_last" else 1.3 if change.mode else 1.0)}

    simulate(monkeypatch, cost)
    found = tuning(tmp_path, TuningRequest(300, most=60), threads=threads)
    tuned = found.run()
    assert tuned is not None, found.course["decision"]
    best = 0.1 / 2 * 0.97
    reached = tuned.figures["versus_default"][0] * cost(Change())["step_s"]
    assert reached < 1.02 * best


def test_training_to_a_target_is_tuned_by_whole_runs_and_drift_cancels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch is 2% slower than the one before. One knob is 1.5 times as fast, one fails."""

    def cost(change: Change) -> dict[str, Any]:
        if of(change, "OMP_PROC_BIND") == "spread":
            return {"step_s": 5.0, "fails": "1 of 1 runs did not reach top-1 accuracy 0.97"}
        return {"step_s": 6.0 / (1.5 if of(change, "OMP_WAIT_POLICY") == "passive" else 1.0)}

    simulation = simulate(monkeypatch, cost, drift=0.02)
    plan = TuningRequest(60, "time_to_accuracy", most=12, only=("OMP_PROC_BIND", "OMP_WAIT_POLICY"))
    found = tuning(tmp_path, plan, takes_turns=False, trains=True, name="time_to_accuracy")
    tuned = found.run()
    assert tuned is not None, found.course["decision"]
    assert tuned.knobs == {"OMP_WAIT_POLICY": "passive"}
    assert tuned.figures["versus_default"][0] == pytest.approx(1 / 1.5, rel=0.03)
    trials = [each for each in found.course["trials"] if each["status"] == "measured"]
    assert math.exp(trials[0]["value"]) == pytest.approx(1.0, abs=0.005)  # without the base after it: 1.02
    failed = next(each for each in found.course["trials"] if each["status"] == "failed")
    assert "did not reach" in failed["reason"]
    assert simulation.changes[:3] == [Change()] * 3


def roofs() -> Ceilings:
    entries = [
        {"what": what, "threads": threads, "device": "cpu", "value": value * threads, "source": "planted", **more}
        for threads in (1, 2)
        for what, value, more in (("flops", 1e9, {"precision": "fp32"}), ("bandwidth", 1e12, {"level": "memory"}))
    ]
    return Ceilings("planted", {}, entries)


def test_models_say_what_comes_first_and_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 0.11 s, most of it in convolutions; on one thread even the roof takes 0.2 s."""
    monkeypatch.setattr("d5suite.tuning.profiles.allowed_cpus", lambda: [0, 1])
    simulation = simulate(
        monkeypatch,
        lambda change: {"step_s": 0.11, "layers": {"planted": 1}},
    )
    layers = StepLayers({"Conv": 0.7, "Relu": 0.2}, [TimedWork(2e8, 1e6, 0.1)])
    plan = TuningRequest(600, most=12, read_layers=lambda record: layers if record["layers"] else StepLayers(),
                ceilings=roofs(), only=("mode", "threads", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"))  # fmt: skip
    found = tuning(tmp_path, plan, takes_layers=True)
    found.run()
    proposed = [(each["knobs"], each["reason"]) for each in found.course["proposed"]]
    assert ({"mode": "channels_last"}, "Conv takes 70% of the step") in proposed
    assert ({"ATEN_CPU_CAPABILITY": "avx2"}, "the step is bound by arithmetic, by its roofline") in proposed
    (left_out,) = found.course["ruled_out"]
    assert left_out["value"] == "1" and "at the roof of 1 thread a step takes 0.2 s" in left_out["reason"]
    assert all(change.settings.get("threads") != 1 for change in simulation.changes)
    assert found.course["trials"][1]["knobs"] == proposed[0][0]


def test_as_many_threads_as_cores_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d5suite.tuning.profiles.allowed_cpus", lambda: list(range(8)))
    space = tuning(tmp_path, TuningRequest(60), threads=8).space
    assert [space.differences(each) for each in by_cores(space, 4)] == [{"threads": "4"}, {"threads": "2"}]
    assert by_cores(space, 3) == [space.changed(space.default, threads="1")]


def test_a_knob_of_the_update_brings_what_it_depends_on(tmp_path: Path) -> None:
    space, first = by_layers(space_of(discover()[0]["mxnet"], threads=1), {UPDATE: 0.5, "Conv": 0.1})
    assert first == ["MXNET_OPTIMIZER_AGGREGATION_SIZE"]
    (candidate,) = first_of_knobs(space, first)
    assert space.differences(candidate) == {"mode": "stock", "MXNET_OPTIMIZER_AGGREGATION_SIZE": "45"}
