"""Workflows on threads: where time goes, what is wrong, and a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5suite.errors import ConfigurationError
from d5suite.job import placed
from d5suite.workflows.account import bottleneck
from d5suite.workflows.base import WorkflowCheckpoints
from d5suite.workloads.workflow import WorkflowWorkload
from tests.workflows.pair import case, measured, on_threads


def test_a_slow_writer_is_named(tmp_path: Path) -> None:
    found = measured(case(write_s=0.01), tmp_path)["workflow"]
    assert (found["bottleneck"]["kind"], found["bottleneck"]["where"]) == ("moving", "numbers")
    assert "giving spends" in found["bottleneck"]["sentence"] and "memory" in found["bottleneck"]["mend"]


def test_a_slow_learner_is_named(tmp_path: Path) -> None:
    found = measured(case(taker={"pause": 0.01}), tmp_path)["workflow"]
    assert (found["bottleneck"]["kind"], found["bottleneck"]["where"]) == ("computing", "taking")
    assert found["components"]["giving"]["waits_for"]["taking"] > 0.3
    of = found["couplings"]["numbers"]
    assert of["idle"] == "source" and of["efficiency"] < 0.3 and of["wait_for_room_s"] > of["wait_for_data_s"]


def test_a_slow_simulation_is_named(tmp_path: Path) -> None:
    found = measured(case(giver={"pauses": [0.01]}), tmp_path)["workflow"]
    assert (found["bottleneck"]["kind"], found["bottleneck"]["where"]) == ("computing", "giving")
    assert found["couplings"]["numbers"]["idle"] == "target"


@pytest.mark.parametrize(
    ("computing", "exchanging", "kind", "said"),
    [
        (0.9, 0.05, "computing", "solver computes 90% of the time; learner is idle 60%"),
        (0.6, 0.3, "computing", "computes 60% of the time and spends 30% in messages between its own ranks; learner"),
        (0.3, 0.6, "exchanging", "spends 60% of the time in messages between its own ranks and computes 30%; learner"),
    ],
)
def test_messages_between_own_ranks_are_no_computing(computing: float, exchanging: float, kind: str, said: str) -> None:
    def shares(**given: float) -> dict[str, Any]:
        return {"moving": 0.0, "waiting": 0.0, "ended": 0.0, "exchanging": 0.0, "waits_for": {}, **given}

    components = {
        "solver": shares(computing=computing, exchanging=exchanging), "learner": shares(computing=0.4, waiting=0.6)
    }  # fmt: skip
    found = bottleneck(components, {}, 1.0)
    assert (found["kind"], found["where"]) == (kind, "solver") and said in found["sentence"]


@pytest.mark.parametrize(("capacity", "kind"), [(1, "buffer"), (8, "none")])
def test_too_small_a_buffer_is_named(tmp_path: Path, capacity: int, kind: str) -> None:
    bursts: dict[str, Any] = {"pauses": [0.0] * 5 + [0.12]}  # the reader takes 0.02 s for each of six
    found = measured(case(capacity=capacity, steps=18, giver=bursts, taker={"pause": 0.02}), tmp_path)["workflow"]
    if kind == "buffer":
        assert (found["bottleneck"]["kind"], found["bottleneck"]["where"]) == ("buffer", "numbers")
        assert "its buffer of 1 is full and empty in turn" in found["bottleneck"]["sentence"]
    else:
        assert found["bottleneck"]["kind"] != "buffer"


def test_a_policy_discards_for_a_slow_reader(tmp_path: Path) -> None:
    found = measured(case(policy="drop_oldest", taker={"pause": 0.01}), tmp_path)["workflow"]
    of = found["couplings"]["numbers"]
    assert of["messages"] == 8 and of["dropped"] > 0 and of["taken"] == 8 - of["dropped"]
    assert found["components"]["giving"]["waiting"] == 0


@pytest.mark.parametrize(
    ("giver", "message"),
    [
        ({"unit": "Celsius"}, r"'value' is float64 \(4\) in Celsius of giving, and float64 \(4\) in K for taking"),
        ({"shape": [5]}, r"'value' is float64 \(5\) in K of giving, and float64 \(4\) in K for taking"),
    ],
)
def test_programs_that_disagree_are_named_at_the_start(tmp_path: Path, giver: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        on_threads(case(giver=giver), lambda workload: workload.program, tmp_path)


def proved(workload: WorkflowWorkload) -> dict[str, tuple[float, float]]:
    checks = {each.name: (each.error, each.tolerance) for each in workload.proved_run()}
    workload.close()
    return checks


@pytest.mark.parametrize("givers", [1, 2])
def test_a_restart_from_checkpoints_finds_the_same(tmp_path: Path, givers: int) -> None:
    (first, *_) = on_threads(case(checkpoint_every=3, givers=givers), proved, tmp_path, givers + 1)
    restarted = {name: values for name, values in first.items() if "restarted before step 7" in name}
    assert len(restarted) == givers + 1 and all(error <= limit for error, limit in first.values())
    assert not list(tmp_path.iterdir())


def test_a_restart_without_one_sides_state_is_caught(tmp_path: Path) -> None:
    (found, _) = on_threads(case(checkpoint_every=3, taker={"forgets": True}), proved, tmp_path)
    wrong = [name for name, (error, limit) in found.items() if error > limit]
    assert wrong == ["taking: a run restarted before step 7 vs the proved one, 1 tensors"]


def test_a_message_that_changes_on_its_way_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from d5suite.workflows.couplings import memory

    take = memory.Reader.take

    def changed(self: memory.Reader) -> Any:
        found = take(self)
        if found is not None and found[0]["number"][0] == 3:
            found[1]["value"][1] += 1
        return found

    monkeypatch.setattr(memory.Reader, "take", changed)
    (found, _) = on_threads(case(), proved, tmp_path)
    assert found["numbers (memory, block): 8 messages, lost, twice or changed"] == (1.0, 0.0)


def test_components_share_the_ranks() -> None:
    components: list[dict[str, Any]] = [{"name": "a", "ranks": None}, {"name": "b", "ranks": 1}]
    assert placed(components, 3) == {"a": [0, 1], "b": [2]}
    assert placed(components, 4, interleaved=True) == {"a": [0, 2, 3], "b": [1]}
    with pytest.raises(ConfigurationError, match="needs 2 or more ranks, not 1"):
        placed(components, 1)


@pytest.mark.parametrize(("policy", "taken"), [("block", 8), ("drop_oldest", 2), ("keep_latest", 1)])
def test_a_late_consumer_finds_what_the_policy_kept(tmp_path: Path, policy: str, taken: int) -> None:
    found = measured(case(policy=policy, taker={"late": 0.2}), tmp_path)["workflow"]
    numbers = found["couplings"]["numbers"]
    assert (numbers["messages"], numbers["taken"], numbers["dropped"]) == (8, taken, 8 - taken)
    assert (found["components"]["giving"]["waiting"] > 0) == (policy == "block")


def test_times_of_single_messages_are_those_that_simai_bench_reports(tmp_path: Path) -> None:
    found = measured(case(giver={"pauses": [0.01]}), tmp_path)["workflow"]
    iteration = found["components"]["giving"]["iteration_s"]
    assert 0.01 <= iteration["mean"] < 0.1 and iteration["std"] < iteration["mean"]
    numbers = found["couplings"]["numbers"]
    for verb in ("write", "read"):
        seconds, rate = numbers[f"message_{verb}_s"], numbers[f"message_{verb}_bytes_per_s"]
        assert 0 < 8 * seconds["mean"] <= numbers[f"{verb}_s"] * 1.001
        assert rate["mean"] >= 32 / seconds["mean"] * 0.99  # a mean of rates is at least the rate of the means


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="a checkpoint cannot be written: "):
        WorkflowCheckpoints(tmp_path / "file", 1, 0).save(1, {"total": np.zeros(1)})


def test_checkpoints_of_another_workflow_are_refused(tmp_path: Path) -> None:
    def failing(steps: int, *, continues: bool) -> Any:
        def work(workload: WorkflowWorkload) -> Any:
            workload.folder, workload.continues = tmp_path / "job", continues
            return dict(proved(workload))

        return on_threads(case(checkpoint_every=3, steps=steps), work, tmp_path)

    kept = WorkflowCheckpoints(tmp_path / "job.checkpoints", 3, 0)
    failing(8, continues=False)
    assert not kept.folder.exists()  # what has succeeded is not continued
    kept.folder.mkdir()
    (kept.folder / "workflow").write_text("another one")
    with pytest.raises(ConfigurationError, match="the checkpoints are of another workflow"):
        failing(8, continues=True)
