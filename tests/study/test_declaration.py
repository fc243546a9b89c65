"""A study's file is read strictly; each part becomes commands that one could type."""

from __future__ import annotations

from pathlib import Path

import pytest

from d5suite.cli import main
from d5suite.errors import ConfigurationError
from d5suite.study.declaration import duration, read_study
from d5suite.study.run import plan
from d5suite.study.state import MachineRuns

ROOT = Path(__file__).parents[2]

GOOD = """
title = "Small"
budget = "10m"

[[question]]
ask = "Which?"
parts = ["one"]

[part.one]
title = "One"
share = 0.5
cost = "2m"
recipes = ["recipes/test_digits_lenet.py", "recipes/test_imagenet_resnet50.py"]
backends = ["torch:compile", "jax"]
preset = "smoke"
sweep = ["threads=1,2"]

[part.two]
title = "Two"
share = 0.5
cost = "1m"
command = ["machine", "--quick", "-o", "{out}"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def test_parts_become_commands_that_take_turns(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, GOOD), ROOT)
    planned = plan(study, MachineRuns(tmp_path / "raw" / "here"))
    assert [each.run.name for each in planned] == ["one.digits_lenet", "two", "one.imagenet_resnet50"]
    assert planned[0].command == (
        "pytest recipes/test_digits_lenet.py --backend torch:compile,jax --preset smoke --sweep threads=1,2 "
        "--jobs jobs/here/one.digits_lenet --benchmark-json raw/here/one.digits_lenet.json"
    )
    assert planned[1].command == "d5suite machine --quick -o raw/here/two.json"
    assert [each.seconds for each in planned] == [120, 60, 120]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "Small"', "", "title must be a text"),
        ('budget = "10m"', 'budget = "soon"', "'soon' is not a duration"),
        ('budget = "10m"', "", "budget is not given"),
        ('parts = ["one"]', 'parts = ["three"]', "there is no part 'three'"),
        ('parts = ["one"]', 'parts = ["one"]\ntopics = ["speed"]', "topics must be a list of kinds of results"),
        ('parts = ["one"]', 'parts = ["one"]\ntopic = "training"', "a question has ask, a text, and parts"),
        ("[[question]]", "[[questions]]", "there is no key 'questions'"),
        ("share = 0.5\ncost = \"2m\"", "share = 0.6\ncost = \"2m\"", "the shares of all parts are 1.1"),
        ("share = 0.5\ncost = \"2m\"", "cost = \"2m\"", "share is not given"),
        ('cost = "2m"', 'cost = { "recipes/test_digits_lenet.py" = "2m" }', "a duration to each recipe"),
        ('preset = "smoke"', 'preset = "tiny"', "preset must be one of smoke, standard, full"),
        ('preset = "smoke"', "pre_set = 1", "there is no key 'pre_set'"),
        ('"torch:compile"', '"torsh"', "there is no backend 'torsh'"),
        ('"torch:compile"', '"torch:fast"', "fast"),
        ("test_digits_lenet", "test_digits", "there is no such recipe"),
        ('"machine", "--quick"', '"rm", "-rf"', "'rm' is no command that a study runs"),
        ('"{out}"', '"out.json"', "must name its result once"),
        ('command = ["machine"', 'preset = "smoke"\ncommand = ["machine"', "preset is for recipes"),
        ("[part.two]", "[part.'../two']", "a part's name has letters"),
        ('preset = "smoke"', 'profile = "site.toml"', "profile is for runs through Slurm"),
        ('preset = "smoke"', "nodes = [1, 2]\nranks = [2]", "ranks follows from nodes"),
        ("[part.two]", "[part.two", "not valid TOML"),
    ],
)  # fmt: skip
def test_each_fault_has_one_clear_error(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(ConfigurationError) as caught:
        read_study(written(tmp_path, text), ROOT)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_durations() -> None:
    assert [duration(text, "") for text in ("3h", "2h30m", "45m", "90s")] == [10800, 9000, 2700, 90]
    for text in ("", "3", "h", "1.5h", "0s", "30m2h"):
        with pytest.raises(ConfigurationError):
            duration(text, "here")


@pytest.mark.parametrize("name", ["frameworks_2core_cpu", "v100_cluster"])
def test_the_studies_that_ship_can_be_planned(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    study = read_study(ROOT / "studies" / f"{name}.toml", ROOT)
    assert sum(run.cost_s for run in study.runs) <= study.budget_s
    for part in study.parts.values():
        assert sum(run.cost_s for run in part.runs) <= part.share * study.budget_s, part.name
    assert {part for question in study.questions for part in question.parts} | {"machine"} >= set(study.parts) - {
        "threads"
    }
    assert main(["study", f"studies/{name}.toml", "--plan", "--machine", "here"]) == 0
    said = capsys.readouterr().out
    assert "they fit" in said
    assert all(run.name in said for run in study.runs)


def test_the_shipped_study_takes_three_hours_at_most() -> None:
    assert read_study(ROOT / "studies" / "frameworks_2core_cpu.toml", ROOT).budget_s <= 3 * 3600


def test_parts_of_a_cluster_go_through_slurm() -> None:
    from d5suite.launch.slurm.profile import read_profile

    study = read_study(ROOT / "studies" / "v100_cluster.toml", ROOT)
    words = study.parts["scaling"].runs[0].words
    assert words[:6] == ("d5suite", "slurm", "run", "recipes/test_imagenet_resnet50.py", "--nodes", "1,2,4,8")
    assert read_profile(ROOT / words[words.index("--profile") + 1]).profile.ranks_per_node == 4
