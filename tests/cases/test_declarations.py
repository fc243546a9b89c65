"""Recipes and problems whose declaration makes no sense are refused when they are declared."""

from __future__ import annotations

from typing import Any

import pytest

from d5suite.backends import select
from d5suite.cases.case import Settings, Shared
from d5suite.cases.problem import Problem, Problems
from d5suite.cases.recipe import Acceptance, Preset, Recipe
from d5suite.cases.user_network import UserNetworkRecipe
from d5suite.errors import ConfigurationError
from d5suite.measurements import discover
from d5suite.measurements.distributed.distributed_step import DistributedTraining
from d5suite.optimizers.settings import SGD
from tests.job.test_job import BAD_NAMES


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0}, {"batch_size": -4}, {"batch_size": 4.0}, {"batch_size": True}, {"batch_size": 2**31},
        {"batch_size": None}, {"image_size": -1}, {"image_size": "32"}, {"image_size": 10**9}, {"classes": -1},
        {"classes": 2.5}, {"max_time_s": -1}, {"max_time_s": float("nan")}, {"max_time_s": "5"},
    ],
)  # fmt: skip
def test_numbers_of_a_preset_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=f"Preset: {name} is "):
        Preset(**{"image_size": 32, "batch_size": 4, "classes": 4, **wrong})


@pytest.mark.parametrize("steps", [0, -3, 2.0, True, "many"])
def test_a_number_of_training_steps_that_makes_no_sense_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="Acceptance: trajectory_steps is "):
        Acceptance(trajectory_steps=steps)


def test_a_presets_acceptance_replaces_the_recipes() -> None:
    presets = {"smoke": Preset(32, 4, 10, acceptance=Acceptance(4)), "standard": Preset(32, 4, 10)}
    recipe = Recipe("fine", "lenet5", "digits", SGD(learning_rate=0.1), presets, acceptance=Acceptance(7))
    for preset, steps in (("smoke", 4), ("standard", 7)):
        job = recipe.job(select("torch"), Settings(preset=preset), ["training_step"], {}, Shared("", ""))
        assert job.validation_steps == steps


def test_only_a_given_network_leaves_sizes_open() -> None:
    for preset in (Preset(image_size=0, batch_size=4, classes=4), Preset(image_size=32, batch_size=4, classes=0)):
        UserNetworkRecipe("fine", "", "inputs", SGD(learning_rate=0.1), {"smoke": preset})
        with pytest.raises(ConfigurationError, match="preset 'smoke' needs an image size and classes"):
            Recipe("fine", "lenet5", "imagenet", SGD(learning_rate=0.1), {"smoke": preset})


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_plain_file_names_are_refused(name: str) -> None:
    preset = Preset(image_size=32, batch_size=4, classes=4)
    for recipe, its_preset in ((name, "smoke"), ("fine", name)):
        with pytest.raises(ConfigurationError, match="cannot be called"):
            Recipe(recipe, "lenet5", "imagenet", SGD(learning_rate=0.1), {its_preset: preset})
    problem = Problem("relu", "Relu", {"x": (2, 3)})
    with pytest.raises(ConfigurationError, match="cannot be called"):
        Problems(name, [problem], [problem], [problem])


def test_measurements_of_ranks_follow_those_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Served(DistributedTraining):
        name = "served"
        ranks_of = "inference"

    known = {**discover(), "served": Served}
    monkeypatch.setattr("d5suite.cases.recipe.discover", lambda: known)
    preset = Preset(image_size=32, batch_size=4, classes=4)
    for own, ranked in (("inference", "served"), ("training_step", "distributed_step"), ("gradient", None)):
        recipe = Recipe("fine", "lenet5", "imagenet", SGD(learning_rate=0.1), {"smoke": preset}, [own])
        assert [each.name for each in recipe.kinds()] == [own, *([ranked] if ranked else [])]
