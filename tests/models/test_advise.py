"""``d5suite advise`` and machine files, as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.models.advice import advise, deciding_figure
from d5suite.models.machine import read_machine
from d5suite.models.plan import Plan
from d5suite.models.step_time import step_time
from d5suite.models.transformer import Transformer

MACHINES = Path(__file__).parents[2] / "examples" / "machines"
SMALL, LARGE = MACHINES / "a100-40gb.json", MACHINES / "a100-80gb.json"
NETWORK = Transformer(24, 2048, 16, 1024)
NAME = "gpt:layers=24,hidden=2048,heads=16,sequence=1024"


def test_the_table_names_the_best_plan_and_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", NAME, "--machine", str(SMALL), "--batch", "64"]) == 0
    text = capsys.readouterr().out
    assert "8 × 1 × 1" in text and "computing is" in text
    assert "within the model's error, so measure both" in text
    assert "It rests most on" in text


@pytest.mark.parametrize("goal", ["memory", "cost"])
def test_plans_ranked_by_another_goal_have_no_lead_in_time(goal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", NAME, "--machine", str(SMALL), "--batch", "64", "--goal", goal]) == 0
    text = capsys.readouterr().out
    assert "The first:" in text and "times as long" not in text


def test_json_holds_all_plans_with_parts_that_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", NAME, "--machine", str(SMALL), "--batch", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert len(found) > 100
    for each in found:
        parts = [value for name, value in each["time_s"].items() if name != "total"]
        assert sum(parts) == pytest.approx(each["time_s"]["total"])
        assert each["interval_s"][0] < each["time_s"]["total"] < each["interval_s"][1]
        assert each["memory_bytes"]["total"] <= 0.9 * 40 * 2**30
    totals = [each["time_s"]["total"] for each in found]
    assert totals == sorted(totals)


def test_goals_order_differently() -> None:
    machine = read_machine(LARGE)
    by = {goal: advise(NETWORK, machine, nodes=2, batch=64, goal=goal)[0] for goal in ("time", "memory", "cost")}
    assert by["memory"].memory.total < by["time"].memory.total
    assert by["cost"].plan.devices < by["time"].plan.devices == 16
    assert by["time"].time.total < by["cost"].time.total


def test_a_network_too_large_says_what_the_least_needs() -> None:
    with pytest.raises(Exception, match=r"no plan fits into 36 GiB a device: the least, .*recompute full.* needs"):
        advise(Transformer(96, 12288, 96), read_machine(SMALL), nodes=1, batch=8)


@pytest.mark.parametrize("network", ["resnet50", "model.onnx"])
def test_it_says_no_where_it_has_no_model(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", network, "--machine", str(SMALL), "--batch", "8"]) == 2
    assert "only GPT-like transformers are known without results" in capsys.readouterr().err


def test_replicas_on_several_nodes_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", NAME, "--machine", str(LARGE), "--nodes", "2", "--batch", "64"]) == 0
    assert "no measurement stands behind gradients that cross the network" in capsys.readouterr().out


def test_the_deciding_figure_is_the_one_that_differs() -> None:
    machine = read_machine(LARGE)
    near = Plan(1, 1, 1, 64, 8)
    far = Plan(1, 8, 1, 64, 8, sequence_parallel=True)
    slow = replace(machine, link_bandwidth=1e9)
    figure, _ = deciding_figure(NETWORK, slow, near, far)
    assert figure == "link_bandwidth"


def test_a_longer_pipeline_waits_longer() -> None:
    machine = read_machine(LARGE)
    times = [step_time(NETWORK, machine, Plan(1, 1, pipeline, 64, 1)) for pipeline in (1, 2, 4, 8)]
    shares = [each.bubble / each.total for each in times]
    assert shares == sorted(shares) and shares[0] == 0


def _edited(tmp_path: Path, edit: dict[str, Any]) -> Path:
    content = json.loads(SMALL.read_text(encoding="utf-8")) | edit
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({"schema": "other"}, "this is not a machine file"),
        ({"peak_flops": None}, 'this must be {"value": NUMBER, "source": TEXT}'),
        ({"peak_flops": {"value": 3e14}}, "this figure has no source"),
        ({"peak_flops": {"value": 3e14, "source": " "}}, "this figure has no source"),
        ({"peak_flops": {"value": -1, "source": "x"}}, "-1 is not a positive number"),
        ({"peak_flops": {"value": True, "source": "x"}}, "True is not a positive number"),
        ({"devices_per_node": {"value": 7.5, "source": "x"}}, "this must be a whole number"),
        ({"flops": {"value": 1, "source": "x"}}, "unknown: flops"),
        ({"name": ""}, "the machine has no name"),
        ({"calibration": None}, "the machine has no calibration"),
    ],
)
def test_a_bad_machine_file_is_refused(
    tmp_path: Path, edit: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", NAME, "--machine", str(_edited(tmp_path, edit)), "--batch", "8"]) == 2
    text = capsys.readouterr().err
    assert problem in text and "machine.json" in text


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": NaN}'])
def test_what_is_no_machine_file_ends_in_one_sentence(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content, encoding="utf-8")
    assert main(["advise", NAME, "--machine", str(path), "--batch", "8"]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_missing_machine_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", NAME, "--machine", str(tmp_path / "no.json"), "--batch", "8"]) == 2
    assert "no.json" in capsys.readouterr().err
