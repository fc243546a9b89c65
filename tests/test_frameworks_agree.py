"""All frameworks give one answer: one small recipe, from files to results."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jsonschema
import pytest

from d5suite.backends import discover
from d5suite.validate.norms import FLOAT64
from tests.conftest import Run

SCHEMA = json.loads((Path(__file__).parents[1] / "results" / "schema.json").read_text())
BUILT_IN = ("deep500", "jax", "keras", "mxnet", "tensorflow", "torch")
INSTALLED = [name for name in BUILT_IN if discover()[0][name].problem() is None]


@pytest.mark.parametrize(
    "frameworks",
    [
        pytest.param([name for name in INSTALLED if name in ("mxnet", "torch")], id="two", marks=pytest.mark.quick),
        pytest.param(INSTALLED, id="all", marks=pytest.mark.slow),
    ],
)
def test_frameworks_agree_and_are_measured(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, frameworks: list[str]
) -> None:
    if len(frameworks) < 2:
        pytest.skip("needs two frameworks installed")
    done = run_pytest(
        str(recipe_folder), "--backend", ",".join(frameworks), "--benchmark-json", "out.json",
        "--optimizer", "learning_rate=0.125,momentum=0.875,nesterov=true,weight_decay=0.0009765625",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, SCHEMA)
    names = {bench["name"] for bench in result["benchmarks"]}
    measurements = ("inference", "gradient", "training_step", "input_pipeline")
    assert names == {f"test_{m}[{backend}]" for m in measurements for backend in frameworks}
    checks = {
        (bench["param"], check["name"]): check["error"]
        for bench in result["benchmarks"]
        for check in bench["extra_info"]["d5suite"]["validation"]["checks"]
    }
    comparable = [name for name in frameworks if not discover()[0][name].reduced]
    first = min(comparable, key=lambda name: bool(discover()[0][name].slow_float64))
    for earlier, later in itertools.permutations(comparable, 2):  # two that prove at once may not meet
        agreement = [key for key in checks if key[0] == later and f"fp64 vs {earlier} fp64" in key[1]]
        assert len(agreement) in ({2} if earlier == first else {0, 2}), sorted(checks)  # losses, and all tensors
        assert all(checks[key] < FLOAT64 for key in agreement)
    for bench in result["benchmarks"]:
        info = bench["extra_info"]["d5suite"]
        assert info["preset"] == ("smoke" if bench["param"] in comparable else "reduced")
        assert info["peak_memory_bytes"] > 50 << 20
        assert info["cpus"]
        assert info["optimizer"]["nesterov"] is True


@pytest.mark.slow
@pytest.mark.skipif("torch" not in INSTALLED, reason="the mistake is made in PyTorch")
def test_a_run_proved_by_the_formula_proves_the_next_backends(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path
) -> None:
    """The formula names a wrong run, which proves nothing of the backends after it."""
    done = run_pytest(
        str(recipe_folder), "--backend", "wrong,dampened,torch", "-k", "training_step",
        "--benchmark-json", "out.json",
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "dampening fp64 vs the update formula: relative error" in done.stdout, done.stdout
    found = {
        bench["param"]: {
            check["name"].rpartition(" vs ")[2]
            for check in bench["extra_info"]["d5suite"]["validation"]["checks"]
            if check["name"].startswith("parameters after") and "timed" not in check["name"]
        }
        for bench in json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    }
    assert found == {"wrong": {"the update formula, 12 tensors"}, "torch": {"wrong fp64, 12 tensors"}}
