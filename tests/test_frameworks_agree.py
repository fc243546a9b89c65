"""Two frameworks through one small recipe, from image files to results: all measurements, all checks, one answer."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from d5suite.backends import discover
from tests.conftest import Run

SCHEMA = json.loads((Path(__file__).parents[1] / "results" / "schema.json").read_text())
INSTALLED = [name for name in ("tensorflow", "torch") if discover()[0][name].problem() is None]


@pytest.mark.skipif(len(INSTALLED) < 2, reason="needs two frameworks installed")
def test_two_frameworks_agree_and_are_measured(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    done = run_pytest(
        str(recipe_folder), "--backend", ",".join(INSTALLED), "--benchmark-json", "out.json",
        "--optimizer", "learning_rate=0.125,momentum=0.9,nesterov=true,weight_decay=1e-4",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, SCHEMA)
    names = {bench["name"] for bench in result["benchmarks"]}
    measurements = ("inference", "gradient", "training_step", "input_pipeline")
    assert names == {f"test_{m}[{backend}]" for m in measurements for backend in INSTALLED}
    checks = {
        check["name"]: check["error"]
        for bench in result["benchmarks"]
        for check in bench["extra_info"]["d5suite"]["validation"]["checks"]
    }
    agreement = [name for name in checks if "fp64 vs tensorflow fp64" in name]
    assert len(agreement) == 2, sorted(checks)  # losses, and every parameter and statistic
    assert all(checks[name] < 1e-8 for name in agreement)
    for bench in result["benchmarks"]:
        info = bench["extra_info"]["d5suite"]
        assert info["peak_memory_bytes"] > 50 << 20
        assert info["cpus"]
        assert info["optimizer"]["nesterov"] is True
