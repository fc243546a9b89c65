"""``d5suite bench``: the recipes that d5suite ships, from any folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from d5suite.cli import main
from tests.conftest import plugin_environment

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pytest is called with; it measures nothing."""
    called: list[str] = []

    def record(given: list[str]) -> int:
        called.extend(given)
        return 5

    monkeypatch.setattr(pytest, "main", record)
    return called


def test_what_follows_the_names_goes_to_pytest(arguments: list[str]) -> None:
    words = ["digits_lenet", "imagenet_vgg16", "--backend", "deep500", "-k", "inference", "--list", "-h"]
    assert main(["bench", *words]) == 5
    assert arguments[:2] == [f"{RECIPES}/test_{name}.py" for name in words[:2]]
    assert arguments[-6:] == words[2:]
    result = arguments[arguments.index("--benchmark-json") + 1]
    assert re.fullmatch(r"d5suite-\d{4}-\d\d-\d\d-\d{6}\.json", result)


def test_a_result_may_have_another_name(arguments: list[str]) -> None:
    main(["bench", "--", "--benchmark-json=mine.json"])
    assert arguments[0] == str(RECIPES)
    assert (
        "--" not in arguments and "--benchmark-json" not in arguments and arguments[-1] == "--benchmark-json=mine.json"
    )


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    said = capsys.readouterr().out
    for path in RECIPES.glob("test_*.py"):
        assert f" {path.stem.removeprefix('test_')} " in said
    assert "* imagenet_resnet50  " in said and "  digits_lenet  " in said and str(RECIPES) in said


def test_an_unknown_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "resnet50"]) == 2
    said = capsys.readouterr().err
    assert "there is no recipe 'resnet50'" in said and "imagenet_resnet50" in said


def test_without_a_framework_the_extras_are_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("d5suite.levels.description._is_installed", lambda module: False)
    assert main(["bench"]) == 2
    said = capsys.readouterr().err
    assert "no framework is installed" in said and "pip install 'd5suite[torch]'" in said
    assert not arguments
    monkeypatch.setenv("D5SUITE_PYTHON_JAX", sys.executable)  # another environment's
    assert main(["bench"]) == 5 and arguments


def test_it_measures_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --of-another-project\n")
    command = ["bench", "digits_lenet", "--backend", "deep500", "-k", "inference", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", *command], cwd=tmp_path, env=plugin_environment(),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "digits_lenet" in done.stdout
    (result,) = tmp_path.glob("d5suite-*.json")
    assert [each["group"] for each in json.loads(result.read_text())["benchmarks"]] == ["digits_lenet/inference"]
    left = {each.name for each in tmp_path.iterdir()} - {".benchmarks"}  # pytest-benchmark's
    assert left == {"pytest.ini", ".d5suite", result.name, f"{result.stem}.h5"}
