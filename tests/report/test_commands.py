"""The command on a page repeats the measurement that it stands beside."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from d5suite.report.page.gather import command_of
from tests.conftest import plugin_environment
from tests.report.pages import RANKS, SMOKE

ROOT = Path(__file__).parents[2]


def _records(path: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(path.read_text())["benchmarks"]
    return {each["fullname"]: {**each["extra_info"]["d5suite"], "fullname": each["fullname"]} for each in found}


def _ours(path: Path, wanted: str) -> dict[str, Any]:
    return next(record for name, record in _records(path).items() if wanted in name)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        pytest.param(SMOKE, "test_inference[torch]", id="reference"),
        pytest.param(RANKS, "[torch-gossip-gloo-2]", id="ranks"),
        pytest.param(RANKS, "[deep500-all_reduce-local-1]", id="one rank", marks=pytest.mark.slow),
        pytest.param(RANKS, "[torch-ddp-2]", id="the framework's own", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("given", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["run", "record"])
def test_it_selects_that_benchmark_alone(path: Path, wanted: str, given: bool) -> None:
    record = _ours(path, wanted)
    command = command_of(record, json.loads(path.read_text())["d5suite"]["command"] if given else ())
    words = shlex.split(command)
    assert words[0] == "pytest" and words[-2:] == ["--benchmark-json", "again.json"]
    done = subprocess.run(
        [sys.executable, "-m", *words[:-2], "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT, env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "::" in line] == [record["fullname"]]


def test_options_of_the_run_are_repeated_and_its_files_are_not() -> None:
    record = _ours(SMOKE, "test_inference[torch]")
    run = [
        "pytest", "recipes/", "-k", "inference", "--backend=torch,jax", "--imagenet", "/data/my images", "--batch-size",
        "4", "--threads", "1", "--one-by-one", "--benchmark-json", "out.json", "recipes/test_imagenet_resnet50.py",
    ]  # fmt: skip
    words = shlex.split(command_of(record, run))
    assert words[:6] == ["pytest", record["fullname"], "--imagenet", "/data/my images", "--batch-size", "4"]
    assert words[6] == "--one-by-one" and "inference" not in words and "out.json" not in words
    assert words[words.index("--threads") + 1] == str(record["threads"])
    assert words.count("--backend") == 1 and words[words.index("--backend") + 1] == "torch"
    assert shlex.split(command_of({**record, "l2_cold": {"flushed_bytes": 1}}))[-3] == "--l2-cold"
