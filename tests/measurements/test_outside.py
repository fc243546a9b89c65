"""A measurement from one file outside the package, as docs/write-a-measurement.md has it, and
from a plug-in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest

from d5suite.backends import discover
from d5suite.errors import ConfigurationError
from d5suite.measurements import find
from d5suite.report.schema import result_schema
from tests.conftest import plugin_environment

PAGE = Path(__file__).parents[2] / "docs" / "write-a-measurement.md"

needs_torch = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")


def source() -> str:
    """The page's recipe file."""
    return sources()[0]


def sources() -> list[str]:
    """The page's files: a recipe with a measurement, and a pass."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def measure(tmp_path: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_fetched.py").write_text(code)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_fetched.py", "--backend", "torch", "--jobs",
         "jobs", "--benchmark-json", "out.json", *options],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def result(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "out.json").read_text())


@needs_torch
def test_one_file_brings_a_measurement(tmp_path: Path) -> None:
    done = measure(tmp_path, source())
    assert done.returncode == 0, done.stdout
    benchmarks = {bench["name"]: bench for bench in result(tmp_path)["benchmarks"]}
    assert set(benchmarks) == {"test_inference[torch]", "test_fetch[torch]"}  # collected beside d5suite's own
    info = benchmarks["test_fetch[torch]"]["extra_info"]["d5suite"]
    checks = {check["name"] for check in info["validation"]["checks"]}
    memory = "memory taken after the first calls, whose peak is recorded"
    assert checks == {"scores fetched again", "scores that are not finite", memory}  # proved
    assert info["median_s"] > 0 and info["throughput"]["unit"] == "images/s"  # timed
    assert info["peak_memory_bytes"] > 10 << 20  # its memory taken
    assert info["bytes_per_s"] == pytest.approx(8 * 10 * 4 / info["median_s"])  # written
    described = result(tmp_path)["d5suite"]["measurements"]
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(result(tmp_path), result_schema(described))  # checked against its schema
    broken = result(tmp_path)
    del broken["benchmarks"][-1]["extra_info"]["d5suite"]["bytes_per_s"]
    with pytest.raises(jsonschema.ValidationError, match="bytes_per_s"):
        jsonschema.validate(broken, result_schema(described))
    with h5py.File(tmp_path / "out.h5") as file:
        assert any(group.attrs["fullname"].endswith("test_fetch[torch]") for group in file.values())
    assert re.search(r"fetch +\n +torch\*? +[\d.]+ +[\d.]+ +[\d.]+ +0 *\n", done.stdout)  # shown after the run

    # and compared where nobody knows the class
    (tmp_path / "test_fetched.py").unlink()
    shown = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "compare", "--tables", "out.json", "out.json"],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    heading = next(line for line in shown.splitlines() if "MB/s" in line)
    assert heading.split() == ["median", "ms", "p99", "ms", "MB/s", "÷", "first", "err/tol"]
    assert len(re.findall(r"torch\*? \([12]\) +[\d.]+ +[\d.]+ +[\d.]+ +1\.000 +0", shown)) == 2

    # and its figure is judged there
    quiet = result(tmp_path)
    for bench in quiet["benchmarks"]:
        bench["extra_info"]["d5suite"]["machine"] |= {"disturbed": False, "reasons": []}
    (tmp_path / "quiet.json").write_text(json.dumps(quiet))
    quiet["benchmarks"][-1]["extra_info"]["d5suite"]["p99_s"] *= 50
    (tmp_path / "tail.json").write_text(json.dumps(quiet))
    judged = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "compare", "quiet.json", "tail.json", "--json", "-"],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert judged.returncode == 1, judged.stderr
    found = {each["name"]: each["regressions"] for each in json.loads(judged.stdout)["benchmarks"]}
    assert found == {"fetched/inference torch": [], "fetched/fetch torch": ["p99 ms"]}


@pytest.mark.slow
@needs_torch
def test_it_adds_what_needs_all_results_of_a_run(tmp_path: Path) -> None:
    derive = """
    derived = ("of_all",)

    @classmethod
    def derive(cls, records):
        for each in records:
            each["of_all"] = each["bytes_per_s"] / max(other["bytes_per_s"] for other in records)

    def prepare("""
    code = (
        source()
        .replace("\n    def prepare(", derive, 1)
        .replace('"required": ["bytes_per_s", "p99_s"]', '"required": ["bytes_per_s", "p99_s", "of_all"]')
    )
    assert code.count("of_all") == 3
    done = measure(tmp_path, code, "-k", "test_fetch and not inference", "--backend", "torch,torch:stock")
    assert done.returncode == 0, done.stdout
    parts = [bench["extra_info"]["d5suite"]["of_all"] for bench in result(tmp_path)["benchmarks"]]
    assert len(parts) == 2 and max(parts) == 1.0


MISTAKES = {
    "wrong": (
        ("relative_l2(again, step.scores)", "1.0"),
        "scores fetched again: relative error 1 exceeds 0",
    ),
    "off_schema": (
        ("self.scores.nbytes / samples.median_s", "-1.0"),
        "bytes_per_s: -1.0 is less than or equal to the minimum",
    ),
    "raises": (
        ("return self.executor.fetch(self.output)\n", "raise OSError('gone')\n"),
        "OSError: gone",
    ),
    "right_until_timed": (
        (
            "    level = 1\n",
            "    level = 1\n    checks_after = (lambda workload, step: [Check('scores after timing', 0.5, 0.1)],)\n",
        ),
        "scores after timing: relative error 0.5 exceeds 0.1",
    ),
}
"""A change of the page's file and what is said of it, by the name of the measurement."""


@needs_torch
def test_its_mistakes_are_found(tmp_path: Path) -> None:
    """Each costs its own measurement; all are in one recipe, so that one worker takes them."""
    code = source()
    begin, end = code.index("class FetchStep"), code.index("RECIPE = ")
    classes, right = [], code[begin:end]
    for name, (change, _) in MISTAKES.items():
        assert right.count(change[0]) == 1
        wrong = right.replace(*change).replace('name = "fetch"', f'name = "{name}"')
        classes.append(wrong.replace("FetchStep", f"Step_{name}").replace("class Fetch(", f"class {name}("))
    recipe = code[end:].replace("Fetch)", f"{', '.join(MISTAKES)})")
    done = measure(tmp_path, code[:begin] + "".join(classes) + recipe)
    assert done.returncode == 1
    for _, message in MISTAKES.values():
        assert message in done.stdout + done.stderr, done.stdout
    assert [bench["name"] for bench in result(tmp_path)["benchmarks"]] == ["test_inference[torch]"]
    (path,) = (tmp_path / "jobs").rglob("fetched-torch.result.json")
    found = json.loads(path.read_text())
    failed = {name.removeprefix("fetched/"): each["message"] for name, each in found["failures"].items()}
    assert set(failed) == set(MISTAKES) - {"off_schema"}, failed  # found only when the file is written
    for name, message in failed.items():
        assert MISTAKES[name][1].removeprefix("OSError: ") in message
    assert set(found["measurements"]) == {"fetched/inference", "fetched/off_schema"}


def test_a_measurement_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="there is no measurement 'flying'") as caught:
        find("flying")
    assert "gradient" in str(caught.value)


PLUGIN = """
from d5suite.measurements.network.inference import Inference
class Patient(Inference):
    name = "patient"
"""


def test_a_plug_in_brings_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "patient.py").write_text(PLUGIN)
    info = tmp_path / "patient-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n")
    code = "from d5suite.measurements import find, file_of\nprint(find('patient'), file_of(find('patient')))"
    for entry, message in (("patient", "<class 'patient.Patient'> None"), ("other", "called 'other'")):
        (info / "entry_points.txt").write_text(f"[d5suite.measurements]\n{entry} = patient:Patient\n")
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**plugin_environment(), "PYTHONPATH": f"{tmp_path}:{plugin_environment()['PYTHONPATH']}"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert message in done.stdout + done.stderr
