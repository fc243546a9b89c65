"""Recipes that train to accuracy: their results, curves and missed targets."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.conftest import Run as RunPytest
from tests.training.small import needs_torch

RECIPE = """
from d5suite.optimizers.schedules import Cosine
from d5suite.optimizers.settings import SGD
from d5suite.cases.recipe import Acceptance, Preset, Recipe, Training

RECIPE = Recipe(
    name="few_digits", network="lenet5", dataset="digits", optimizer=SGD(2.0**-4, momentum=0.9), label_smoothing=0.1,
    measurements=("step_breakdown", "time_to_accuracy"), acceptance=Acceptance(trajectory_steps=3),
    presets={
        "smoke": Preset(
            32, 32, 10, max_time_s=0.1, training=Training(target=0.9, epochs=9, runs=2, schedule=Cosine(epochs=9))
        ),
        "hopeless": Preset(32, 32, 10, max_time_s=0.1, training=Training(target=1.1, epochs=1, accumulate=4)),
        "none": Preset(32, 32, 10, leaves_out={"step_breakdown": "it is short"}),
    },
)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "test_few_digits.py").write_text(RECIPE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "test_few_digits.py"


@needs_torch
def test_a_recipe_is_trained_to_accuracy_and_its_curves_are_drawn(
    run_pytest: RunPytest, recipe: Path, tmp_path: Path
) -> None:
    done = run_pytest(str(recipe), "--backend", "torch", "--threads", "1", "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, json.loads((Path(__file__).parents[2] / "results" / "schema.json").read_text()))
    broken, trained = (bench["extra_info"]["d5suite"] for bench in result["benchmarks"])
    assert all(value >= 0 for key, value in broken["breakdown_s"].items() if key in ("data_wait", "forward", "other"))
    assert sum(broken["breakdown_s"].values()) == pytest.approx(broken["sum_over_step"] * broken["median_s"])
    assert [run["seed"] for run in trained["runs"]] == [0, 1]
    assert all(run["top-1 accuracy"] >= 0.9 == trained["target"]["value"] for run in trained["runs"])
    assert trained["runs"][0]["seconds"] in result["benchmarks"][1]["stats"]["data"]
    assert result["d5suite"]["pictures"] == ["out.few_digits.png"]
    assert (tmp_path / "out.few_digits.png").read_bytes().startswith(b"\x89PNG")


@needs_torch
@pytest.mark.slow
def test_a_run_that_misses_its_target_is_no_number(run_pytest: RunPytest, recipe: Path) -> None:
    options = ("--backend", "torch", "--threads", "1", "--preset", "hopeless", "-k", "time_to_accuracy")
    done = run_pytest(str(recipe), *options)
    assert done.returncode == 1
    assert "1 of 1 runs did not reach top-1 accuracy 1.1: the run with seed 0 ended after 1 epochs at 0." in done.stdout


@needs_torch
def test_a_preset_without_a_target_says_where_there_is_one(run_pytest: RunPytest, recipe: Path) -> None:
    options = ("--backend", "torch", "--threads", "1", "-rs")
    done = run_pytest(str(recipe), *options, "--preset", "none")
    assert done.returncode == 5 and "2 skipped" in done.stdout
    assert "trained to accuracy at other presets only: smoke, hopeless" in done.stdout
    assert "'none' leaves out step_breakdown: it is short" in done.stdout
