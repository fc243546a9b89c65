"""A pass from one file outside the package, as docs/write-a-measurement.md has it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import discover
from d5suite.errors import ConfigurationError
from d5suite.passes import DEFAULT, requested
from tests.conftest import plugin_environment, run_several
from tests.measurements.test_outside import sources

needs_torch = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

RECIPE = """
from d5suite.cases.recipe import Preset, Recipe
from d5suite.optimizers.settings import SGD

RECIPE = Recipe(
    name="small",
    network="lenet5",
    dataset="digits",
    optimizer=SGD(learning_rate=0.125),
    measurements=("inference", "training_step"),
    presets={"smoke": Preset(image_size=32, batch_size=8, classes=10, max_time_s=0.05)},
)
"""

ORDER = (
    "taking the memory pass of", "validating", "measuring", "proving what was timed of",
    "taking the page_faults pass of",
)  # fmt: skip
"""Phases of a measurement in the worker's log: a pass that disturbs follows the second proof."""


def run(tmp_path: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def measure(tmp_path: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_small.py").write_text(RECIPE)
    (tmp_path / "page_faults.py").write_text(code)
    return run(
        tmp_path, "pytest", "-p", "no:cacheprovider", "test_small.py", "--backend", "torch", "--jobs", "jobs",
        "--benchmark-json", "out.json", *options,
    )  # fmt: skip


def records(tmp_path: Path) -> dict[str, Any]:
    found = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    return {each["extra_info"]["d5suite"]["measurement"]: each["extra_info"]["d5suite"] for each in found}


@needs_torch
def test_one_file_brings_a_pass(tmp_path: Path) -> None:
    done = measure(tmp_path, sources()[1], "--passes", "memory,page_faults.py")
    assert done.returncode == 0, done.stdout
    found = records(tmp_path)
    assert set(found) == {"inference", "training_step"}
    for record in found.values():
        assert record["page_faults"]["per_step"] >= 0  # run and recorded
        assert record["peak_memory_bytes"] > 10 << 20 and record["median_s"] > 0  # beside d5suite's own
        assert "energy" not in record  # which was not requested
        assert set(record["passes"]) == {"page_faults"}
    job = next(path for path in (tmp_path / "jobs").rglob("*.job.json"))
    content = json.loads(job.read_text())
    file = str(tmp_path / "page_faults.py")
    assert content["passes"] == ["memory", "time", "page_faults"]
    assert content["pass_files"] == {"page_faults": file} and set(content["digests"]) == {file}
    log = job.with_name(job.name.replace(".job.json", ".log")).read_text()
    order = [log.index(f"{what} small/inference") for what in ORDER]
    assert order == sorted(order), log
    assert re.search(r"images/s .*faults +err/tol", done.stdout)  # shown after the run

    # shown and compared where nobody knows the class
    (tmp_path / "page_faults.py").unlink()
    earlier = json.loads((tmp_path / "out.json").read_text())
    for each in earlier["benchmarks"]:
        record = each["extra_info"]["d5suite"]
        del record["page_faults"], record["passes"]
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    more = json.loads((tmp_path / "out.json").read_text())
    for each in more["benchmarks"]:
        each["extra_info"]["d5suite"]["machine"] |= {"disturbed": False, "reasons": []}
    (tmp_path / "quiet.json").write_text(json.dumps(more))
    more["benchmarks"][0]["extra_info"]["d5suite"]["page_faults"]["per_step"] += 1e6
    (tmp_path / "more.json").write_text(json.dumps(more))
    shown, same, judged, page = run_several(
        [
            ["d5suite.cli", "compare", "--tables", "earlier.json", "out.json"],
            ["d5suite.cli", "compare", "out.json", "out.json"],
            ["d5suite.cli", "compare", "quiet.json", "more.json"],
            ["d5suite.cli", "report", "out.json", "-o", "page.html", "--csv", "numbers"],
        ],
        tmp_path,
    )
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"images/s +faults +÷ first +err/tol", shown.stdout), shown.stdout
    assert re.search(r"torch\*? \(1\) +.* – +1\.000 ", shown.stdout)
    assert re.search(r"torch\*? \(2\) +.* [\d.]+ +1\.000 ", shown.stdout)
    assert same.returncode in (0, 6)
    assert judged.returncode == 1 and "faults became" in judged.stdout, judged.stdout  # judged there, too
    assert page.returncode == 0, page.stderr
    assert "faults" in (tmp_path / "page.html").read_text()
    assert "page_faults.per_step" in (tmp_path / "numbers" / "results.csv").read_text().splitlines()[0]


@needs_torch
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            ("(faults() - before) / CALLS", "-1"),
            "page_faults.per_step: -1 is less than the minimum of 0",
            id="off-schema",
        ),
        pytest.param(
            ("{\"per_step\": (faults() - before) / CALLS}", "{}"),
            "page_faults: 'per_step' is a required property",
            id="lacks a figure",
            marks=pytest.mark.slow,
        ),
        pytest.param(("CALLS = 5", "CALLS = 5 / 0"), "ZeroDivisionError", id="not importable"),
        pytest.param(('"page_faults"', '"median_s"'), "which the record has already", id="would replace the samples"),
    ],
)  # fmt: skip
def test_a_faulty_pass_fails_the_run(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in sources()[1]
    done = measure(tmp_path, sources()[1].replace(*change), "--passes", "page_faults.py", "-k", "inference")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr, done.stdout


@needs_torch
def test_a_pass_that_cannot_be_taken_says_why(tmp_path: Path) -> None:
    code = sources()[1].replace("import Pass\n", "import Pass, PassError\n")
    code = code.replace(
        "        with step:\n", '        raise PassError("the kernel counts nothing")\n        with step:\n'
    )
    done = measure(tmp_path, code, "--passes", "page_faults.py", "-k", "inference")
    assert done.returncode == 0, done.stdout
    record = records(tmp_path)["inference"]
    assert record["page_faults"] == {"missing": "the kernel counts nothing"}
    assert record["peak_memory_bytes"] is None and "memory" not in record


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("memory,fly", "there is no pass 'fly'\n  Known: energy, layers, memory, time, trace."),
        ("memory,memory", "names a pass twice"),
        (",", "names no pass"),
        ("absent.py", "there is no such Python file"),
        ("test_small.py", "this file defines no pass"),
    ],
)
def test_what_is_no_pass_is_one_clear_error(tmp_path: Path, passes: str, message: str) -> None:
    done = measure(tmp_path, "", "--passes", passes)
    assert done.returncode == 4
    assert message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(sources()[1].replace('"page_faults"', '"energy"'))
    with pytest.raises(ConfigurationError, match="the name of the pass 'energy' is taken"):
        requested("own.py", tmp_path)


def test_time_is_always_taken_and_the_default_is_what_it_was(tmp_path: Path) -> None:
    assert list(requested("energy", tmp_path)) == ["energy", "time"]
    assert list(requested("time", tmp_path)) == ["time"]
    assert list(requested(None, tmp_path)) == list(DEFAULT) == ["memory", "energy", "time"]
