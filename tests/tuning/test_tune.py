"""``d5suite tune`` as a user runs it: a planted gain, a planted wrong answer, a crash, a hang."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from d5suite.backends import discover, select
from d5suite.cases.case import Settings
from d5suite.cli import main
from d5suite.commands.tune import chosen_targets, further_knobs, layers_of, seconds_of, summary
from d5suite.errors import ConfigurationError
from d5suite.job import Distributed, Ranks
from d5suite.tuning.course import pareto
from d5suite.tuning.tune import Tuning, TuningRequest
from tests.conftest import made_once, plugin_environment, write_recipe

SLOW = {"FAULTY_FAULT": "slow=4:4"}
"""The default takes four times as long as it could."""

TUNE = """
import sys
from d5suite.cli import main
from d5suite.tuning import confirm, trials
confirm.ROUNDS_S = confirm.LONGEST_S = trials.BLOCKS_S = 0.3
sys.exit(main(["tune", *sys.argv[1:]]))
"""
"""The command, but it measures for a shorter time: what is planted is large."""


def tune(folder: Path, images: Path, *options: str, further: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command on a backend whose default is slow."""
    return subprocess.run(
        [sys.executable, "-c", TUNE, "recipes", "--backend", "faulty", "--decide-disturbed",
         "--launches", "3", *options, "--", "--imagenet", str(images), "--threads", "1", *further],
        cwd=folder, env=plugin_environment() | SLOW, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, small_onnx: Path, imagenet_tree: Path) -> Any:
    """The folder of a run, the finished process, and the course that it wrote."""

    def make() -> tuple[str, int, str, str]:
        folder = tmp_path_factory.mktemp("tune")
        write_recipe(folder, small_onnx)
        done = tune(
            folder, imagenet_tree, "--knobs", "FAULTY_FAULT", "--plot", "course.svg", "--budget", "20m", "--trials", "4"
        )
        return str(folder), done.returncode, done.stdout, done.stderr

    place, *ended = made_once(tmp_path_factory, "tuned", make)
    course = json.loads((Path(place) / "tuned.json").read_text())["courses"][0]
    return Path(place), subprocess.CompletedProcess("", *ended), course


@pytest.mark.slow
def test_a_planted_gain_is_found_and_confirmed(tuned: Any) -> None:
    folder, done, course = tuned
    assert done.returncode == 0, done.stderr
    assert course["decision"]["taken"] and course["confirmed"]["knobs"] == {"FAULTY_FAULT": "none:4"}
    value, *interval = course["confirmed"]["versus_default"]
    assert 0.1 < value < 0.6 and interval[1] < 1
    (part,) = course["ablation"]
    assert part["knob"] == "FAULTY_FAULT" and part["stays"] and part["without"] > 1.5
    assert "versus_stock" not in course["confirmed"]  # it has no such mode
    assert "without it" in done.stdout and "times as long as d5suite's default" in done.stdout
    assert (folder / "course.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_a_planted_wrong_answer_is_listed_and_never_taken(tuned: Any) -> None:
    _, done, course = tuned
    (wrong,) = course["wrong"]
    assert wrong["knobs"] == {"FAULTY_FAULT": "wrong:4"} and "output" in wrong["reason"]
    assert "wrong: FAULTY_FAULT=wrong:4" in done.stdout
    assert {"FAULTY_FAULT": "wrong:4"} not in [each["knobs"] for each in course["pareto"]]


@pytest.mark.slow
def test_a_crash_costs_its_own_trial(tuned: Any) -> None:
    _, _, course = tuned
    (crashed,) = [each for each in course["trials"] if each["status"] == "failed"]
    assert crashed["knobs"] == {"FAULTY_FAULT": "segfault:4"} and "SIGSEGV" in crashed["reason"]
    assert [each["status"] for each in course["trials"]].count("measured") >= 2


@pytest.mark.slow
def test_the_settings_are_used_and_recorded(tuned: Any, imagenet_tree: Path) -> None:
    folder, _, _ = tuned
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "recipes", "-k", "inference", "--backend", "faulty",
         "--tuned", "tuned.toml", "--threads", "1", "--imagenet", str(imagenet_tree), "--benchmark-json", "out.json"],
        cwd=folder, env=plugin_environment() | SLOW, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "out.json").read_text())["benchmarks"]
    (result,) = [each for each in results if each["group"] == "small/inference"]
    record = result["extra_info"]["d5suite"]
    assert record["environment"]["environment_variables"]["FAULTY_FAULT"] == "none:4"
    assert record["backend"]["mode"] == "good"


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tuned: Any, small_onnx: Path, imagenet_tree: Path, tmp_path: Path) -> None:
    """One trial was lost. None of the others is better than the default: no launch follows."""
    _, _, course = tuned
    write_recipe(tmp_path, small_onnx)
    kept = [dict(each) for each in course["trials"] if each["knobs"] != {"FAULTY_FAULT": "wrong:4"}]
    for each in kept:
        if each["knobs"] == {"FAULTY_FAULT": "none:4"}:
            each |= {"status": "failed", "reason": "planted"}
    earlier = {"schema": "d5suite-tune-1", "courses": [{**course, "trials": kept}]}
    (tmp_path / "again.json").write_text(json.dumps(earlier))
    done = tune(tmp_path, imagenet_tree, "--knobs", "FAULTY_FAULT", "--resume", "--out", "again.toml",
                "--trials", "4")  # fmt: skip
    assert done.returncode == 1, done.stderr
    again = json.loads((tmp_path / "again.json").read_text())["courses"][0]
    made = [line.partition(": trial ")[2].partition(": ")[2] for line in done.stderr.splitlines() if ": trial " in line]
    assert made[0].startswith("the default") and made[1].startswith("FAULTY_FAULT=wrong:4") and len(made) == 2
    assert [each["status"] for each in again["trials"]][1:4] == ["wrong", "failed", "failed"]
    assert "no candidate was better" in done.stdout


@pytest.mark.slow  # a hang takes its time limit
def test_a_hang_and_a_hoard_cost_their_own_trials(small_onnx: Path, imagenet_tree: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, small_onnx)
    done = tune(tmp_path, imagenet_tree, "--knobs", "FAULTY_FAULT,FAULTY_MORE", "--budget", "10m",
                further=("--job-timeout", "45", "--job-memory", "1500M"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    course = json.loads((tmp_path / "tuned.json").read_text())["courses"][0]
    failed = {
        each["knobs"].get("FAULTY_MORE"): each["reason"] for each in course["trials"] if each["status"] == "failed"
    }
    assert "did not finish within" in failed["hangs"] and "over its limit" in failed["memory"]
    assert course["confirmed"]["knobs"] == {"FAULTY_FAULT": "none:4"}


def test_too_small_a_budget_keeps_the_default(small_onnx: Path, imagenet_tree: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, small_onnx)
    done = tune(tmp_path, imagenet_tree, "--budget", "2s")
    assert done.returncode == 1, done.stderr
    assert "the default is kept: the budget is too small to find anything" in done.stdout
    assert "[[tuned]]" not in (tmp_path / "tuned.toml").read_text()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--budget", "soon"], "'soon' is not a time"),
        (["--launches", "2"], "--launches from 3"),
        (["--out", "tuned.json"], "the file must end in .toml"),
        (["--batch-sizes", "8"], "two or more"),
        (["--precisions", "fp32,fp32"], "all different"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "recipes", *options]) == 2
    assert what in capsys.readouterr().err


def test_the_first_batch_and_precision_are_those_of_the_default() -> None:
    given = argparse.Namespace(precisions="bf16,fp32", batch_sizes="8,16")
    wanted: Any = SimpleNamespace(
        selection=select("torch"),
        case=SimpleNamespace(name="small"),
        ranks=None,
        measurement=SimpleNamespace(name="inference", loads=False),
    )
    plan = TuningRequest(60.0, further=further_knobs(given), only=("batch_size", "precision"))
    tuning = Tuning(wanted, Settings(threads=2, batch_size=32), plan, print, print)
    assert (tuning.settings.batch_size, tuning.settings.precision) == (8, "bf16")
    change = tuning.space.change(tuning.space.complete({"batch_size": "16"}))
    assert change.settings == {"batch_size": 16} and change.items == pytest.approx(math.log(2))


def test_budgets_are_times() -> None:
    assert [seconds_of(each) for each in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]
    with pytest.raises(ConfigurationError):
        seconds_of("0s")


def test_the_pareto_list_has_what_nothing_beats() -> None:
    def trial(time: float, memory: float, status: str = "measured") -> dict[str, Any]:
        return {"status": status, "time": time, "knobs": {"k": f"{time}"}, "figures": {"memory_bytes": memory}}

    found = pareto([trial(0.0, 10.0), trial(-0.1, 20.0), trial(-0.1, 30.0), trial(-0.5, 5.0, "wrong")])
    assert [each["knobs"]["k"] for each in found] == ["0.0", "-0.1"]
    assert found[1]["memory_bytes"] == 20.0


def test_an_interrupted_course_says_so() -> None:
    course = {"case": "c", "measurement": "m", "backend": "b", "size": 3, "trials": []}
    assert "it was interrupted" in "\n".join(summary(course))


@pytest.mark.slow  # searches with real workers
@pytest.mark.alone  # beside other tests a 99th percentile tells of them
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (("--goal", "p99", "--knobs", "FAULTY_FAULT", "--launches", "6"), {"FAULTY_FAULT": "none:4"}),
        (("--goal", "energy", "--knobs", "FAULTY_FAULT"), None),
    ],
    ids=["p99", "energy"],
)
def test_other_goals_run_on_real_workers(
    options: tuple[str, ...], taken: dict[str, str] | None, small_onnx: Path, imagenet_tree: Path, tmp_path: Path
) -> None:
    write_recipe(tmp_path, small_onnx)
    done = tune(tmp_path, imagenet_tree, "--budget", "20m", "--trials", "4", *options)
    if taken is None and done.returncode == 2:
        assert "there is no energy of this measurement here: this machine counts no energy" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    course = json.loads((tmp_path / "tuned.json").read_text())["courses"][0]
    assert taken is None or course["confirmed"]["knobs"] == taken
    assert f"{course['goal']}_versus_default" in course["confirmed"]


def test_what_is_tuned_follows_the_goal() -> None:
    def target(name: str, level: int, *, turns: bool = True, trains: bool = False, ranks: Any = None) -> Any:
        kind = SimpleNamespace(name=name, level=level, takes_turns=turns, trains=trains)
        wanted = SimpleNamespace(runner=f"torch{ranks or ''}")
        return SimpleNamespace(case=SimpleNamespace(name="c"), measurement=kind, ranks=ranks, wanted=wanted)

    plain = [target("inference", 1), target("training_step", 2), target("input_pipeline", 2, turns=False),
             target("time_to_accuracy", 2, turns=False, trains=True)]  # fmt: skip
    ranked = target("distributed_step", 3, turns=False, ranks=Ranks(2, Distributed()))

    def names(targets: list[Any], *more: Any) -> list[str]:
        return [each.measurement.name for each in chosen_targets(targets, *more)]

    assert names(plain, None) == ["training_step"]
    assert names(plain, None, "time_to_accuracy") == ["time_to_accuracy"]
    assert names(plain, "input_pipeline") == ["input_pipeline"]
    assert names([*plain, ranked], None) == ["distributed_step"]
    with pytest.raises(ConfigurationError, match="there is nothing to tune"):
        names(plain[:3], None, "time_to_accuracy")
    with pytest.raises(ConfigurationError, match="does not train to a target"):
        names(plain, "inference", "time_to_accuracy")


def test_layer_times_become_parts_of_a_step() -> None:
    graph = {"a": {"op_type": "Conv", "flops": 10, "bytes": 2}, "b": {"op_type": "Relu", "flops": 1, "bytes": 2}}
    seconds = {"a": 0.6, "b": 0.2}
    times = [{"nodes": [name], "direction": "forward", "seconds": each, "calls": 1.0} for name, each in seconds.items()]
    found = layers_of({"layers": {"times": times, "graph": graph, "other": {"optimizer": 0.2}}})
    assert found.shares == pytest.approx({"Conv": 0.6, "Relu": 0.2, "update": 0.2})
    assert [each.flops for each in found.works] == [10, 1]
    assert not layers_of({"layers": {"missing": "no profiler"}}).shares


DIGITS = """
from d5suite.cases.recipe import Preset, Recipe, Training
from d5suite.optimizers.settings import SGD
RECIPE = Recipe(
    name="digits", network="lenet5", dataset="digits", optimizer=SGD(learning_rate=0.0625, momentum=0.9),
    measurements=("inference", "time_to_accuracy"),
    presets={name: Preset(32, 64, 10, max_time_s=0.1, training=Training(target=0.2, epochs=20))
             for name in ("smoke", "reduced")},
)
"""


@pytest.mark.slow  # searches with real workers
@pytest.mark.parametrize(
    ("backend", "options", "knobs"),
    [
        ("onnxruntime",
         ("--measurement", "inference", "--goal", "memory", "--batch-sizes", "512,8", "--knobs", "batch_size"),
         {"batch_size": "8"}),
        ("deep500", ("--goal", "time_to_accuracy", "--batch-sizes", "64,16", "--knobs", "batch_size"), None),
    ],
    ids=["memory", "time_to_accuracy"],
)  # fmt: skip
def test_goals_on_frameworks(
    backend: str, options: tuple[str, ...], knobs: dict[str, str] | None, tmp_path: Path
) -> None:
    if backend not in {name for name, each in discover()[0].items() if each.problem() is None}:
        pytest.skip(f"{backend} is not installed")
    (tmp_path / "test_digits.py").write_text(DIGITS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-c", TUNE, "test_digits.py", "--backend", backend, "--decide-disturbed",
         "--launches", "3", "--budget", "30m", "--trials", "3", *options, "--", "--threads", "1"],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    course = json.loads((tmp_path / "tuned.json").read_text())["courses"][0]
    assert {each["status"] for each in course["trials"]} <= {"measured", "pruned"} and len(course["trials"]) > 1
    if knobs is not None:
        assert done.returncode == 0 and course["confirmed"]["knobs"] == knobs
        assert course["confirmed"]["memory_versus_default"][2] < 1
