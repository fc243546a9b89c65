"""Recipes for continuous integration: valid by the forges' own schemas, run as they would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import plugin_environment, write_recipe

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github/actions/paired-comparison"
WORKFLOWS = [
    *sorted((ROOT / ".github/workflows").glob("*.yml")),
    ROOT / "examples/ci/pull-request-gate.yml",
]
HERE = Path(sys.executable).parents[1]
"""This environment, whose d5suite is measured."""


@pytest.mark.parametrize(
    ("schema", "files", "options"),
    [
        ("github-workflows", WORKFLOWS, []),
        ("github-actions", [ACTION / "action.yml"], []),
        ("gitlab-ci", [ROOT / "examples/ci/gitlab-ci.yml"], ["--data-transform", "gitlab-ci"]),
    ],
)
def test_the_files_are_valid(schema: str, files: list[Path], options: list[str], tmp_path: Path) -> None:
    def check(*paths: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *options]
        return subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)

    done = check(*files)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / files[0].name
    wrong.write_text(files[0].read_text().replace("timeout", "time_out").replace("runs:", "run:"))
    assert check(wrong).returncode == 1


@pytest.mark.parametrize(("longest", "all_run"), [("100", True), ("-1", False)], ids=["quick", "slow"])
def test_a_slow_machine_leaves_the_long_tests_out_and_says_so(tmp_path: Path, longest: str, all_run: bool) -> None:
    wanted = ("clang", "g++", "sbatch", "chromium", "otf2-print", "redis-server")
    for name in (*wanted, "apt-get", "make"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 1\n")  # SimGrid is no program
    done = subprocess.run(
        [str(ROOT / ".ci/run")], capture_output=True, text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LONGEST": longest, "CXX": "g++"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [line.removeprefix("make ") for line in done.stdout.splitlines() if line.startswith("make ")]
    assert made == ["lint", "horovod FRAMEWORKS=torch", "test", *["test-long"] * all_run]
    assert ("make test-long was left out" in done.stdout) != all_run
    assert done.stdout.endswith("== all passed\n") == all_run


def test_a_night_with_failures_is_compared_and_an_old_one_never(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/regression.yml").read_text())
    steps = {each.get("name"): each for each in workflow["jobs"]["history"]["steps"]}
    names = [name for name in steps if name]
    measure, compare, add = "Measure", "Compare with the nights before", "Add the night to the history"
    assert names.index(measure) < names.index(compare) < names.index(add)
    assert steps[compare]["if"] == "always() && hashFiles('night.json') != ''"
    assert steps[add]["if"] == "always()"
    program = tmp_path / ".venv/bin/pytest"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 1\n")  # before it has saved anything
    program.chmod(0o755)
    for kind in ("json", "md"):
        (tmp_path / f"night.{kind}").write_text("of an earlier night")
    done = subprocess.run(["bash", "-e", "-c", steps[measure]["run"]], cwd=tmp_path)
    assert done.returncode == 1 and not list(tmp_path.glob("night.*"))


def run_action(
    folder: Path, inputs: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> tuple[int, str, Path]:
    """Run the action's commands as a runner does: exit code, output, and the runner's folder."""
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    given = {name: str(each.get("default", "")) for name, each in action["inputs"].items()} | dict(inputs)
    runner = folder / "runner"
    runner.mkdir(exist_ok=True)
    said = ""
    for step in action["runs"]["steps"]:
        if "run" not in step:
            continue
        own: dict[str, Any] = {"GITHUB_ACTION_PATH": str(ACTION), "RUNNER_TEMP": str(runner)}
        own |= {name: str(runner / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for name, value in step["env"].items():  # ${{ inputs.NAME }}
            own[name] = given[value.removeprefix("${{ inputs.").removesuffix(" }}")]
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", step["run"]], cwd=folder,
            env={**(environment or os.environ), **own}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        said += done.stdout + done.stderr
        if done.returncode:
            return done.returncode, said, runner
    return 0, said, runner


def test_every_input_reaches_a_step_as_a_variable() -> None:
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert not [step for step in steps if "${{" in step.get("run", "")]  # GitHub would paste it into the script
    used = "".join(f"{step.get('env')} {step.get('with')}" for step in steps)
    assert not [name for name in action["inputs"] if f"inputs.{name} " not in used]


def environment_that_ends_with(folder: Path, code: int) -> Path:
    """An environment whose d5suite notes its arguments, writes a summary, and ends with a code."""
    program = folder / "environment/bin/d5suite"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        f"pathlib.Path({str(folder / 'called')!r}).write_text(json.dumps(sys.argv[1:]))\n"
        "if '--markdown' in sys.argv and %d != 2:\n"
        "    pathlib.Path(sys.argv[sys.argv.index('--markdown') + 1]).write_text('| the verdicts |')\n"
        "raise SystemExit(%d)\n" % (code, code)
    )
    program.chmod(0o755)
    return folder / "environment"


@pytest.mark.parametrize(
    ("code", "uncertain", "ends"), [(0, "warn", 0), (1, "warn", 1), (2, "warn", 2), (3, "warn", 3), (4, "warn", 4),
                                    (5, "warn", 5), (6, "warn", 0), (6, "fail", 6), (0, "ignore", 2)],
)  # fmt: skip
def test_the_job_ends_as_the_comparison_does(code: int, uncertain: str, ends: int, tmp_path: Path) -> None:
    inputs = {"a": "rev:HEAD~1", "uncertain": uncertain, "environment": str(environment_that_ends_with(tmp_path, code))}
    found, said, runner = run_action(tmp_path, inputs)
    assert found == ends, said
    assert ("::warning" in said) == (code == 6 and uncertain == "warn")
    if uncertain == "ignore":
        assert "neither warn nor fail" in said
        return
    summary = (runner / "GITHUB_STEP_SUMMARY").read_text()
    assert summary == "| the verdicts |" if code != 2 else "ended with 2 before it had a verdict" in summary
    assert (runner / "GITHUB_OUTPUT").read_text() == f"code={code}\n"


def test_inputs_are_arguments_and_never_commands(tmp_path: Path) -> None:
    hostile = f"env:A=$(touch {tmp_path}/obeyed);`touch {tmp_path}/obeyed`"
    inputs = {
        "a": hostile, "b": "here; exit 7", "backend": "torch,jax:eager", "effect": "0.02",
        "recipes": "recipes/test_digits_lenet.py::x\n mine.py", "options": "--device=cuda\n\n-k two words\n",
        "environment": str(environment_that_ends_with(tmp_path, 0)),
    }  # fmt: skip
    code, said, runner = run_action(tmp_path, inputs)
    assert code == 0, said
    assert not (tmp_path / "obeyed").exists()
    called = json.loads((tmp_path / "called").read_text())
    results = runner / "d5suite-comparison"
    assert called == [
        "ab", "--a", hostile, "--b", "here; exit 7", f"{ROOT}/recipes/test_digits_lenet.py::x", "mine.py",
        "--preset", "smoke", "--backend", "torch,jax:eager", "--effect", "0.02",
        "--json", f"{results}/comparison.json", "--markdown", f"{results}/comparison.md",
        "--junit", f"{results}/comparison.xml", "--", "--device=cuda", "-k two words",
    ]  # fmt: skip


def test_an_environment_without_d5suite_is_named(tmp_path: Path) -> None:
    code, said, _ = run_action(tmp_path, {"a": "here", "environment": str(tmp_path)})
    assert (code, "has no bin/d5suite" in said) == (2, True)


@pytest.mark.slow
def test_a_verdict_fails_the_job_and_is_in_its_page(tmp_path: Path, small_onnx: Path, imagenet_tree: Path) -> None:
    write_recipe(tmp_path, small_onnx)
    inputs = {
        "a": "here", "b": "env:FAULTY_FAULT=wrong:4", "recipes": "recipes", "backend": "faulty",
        "options": f"--imagenet={imagenet_tree}\n--threads=1\n-k\ninference", "environment": str(HERE),
    }  # fmt: skip
    code, said, runner = run_action(tmp_path, inputs, plugin_environment())
    assert code == 3, said
    summary = (runner / "GITHUB_STEP_SUMMARY").read_text().replace("\\", "")
    assert "small/inference faulty" in summary and "invalid" in summary
    results = runner / "d5suite-comparison"
    assert json.loads((results / "comparison.json").read_text())["exit"] == 3
    assert (results / "comparison.xml").exists()
