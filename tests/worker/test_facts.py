"""What a result says of versions, memory and first calls is not taken from the adapter's word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import backend
from d5suite.levels.contract import ContractError
from tests.conftest import made_once, run_several


def _results(folder: Path, small_onnx: Path, imagenet_tree: Path) -> dict[str, Any]:
    case = {
        "kind": "network",
        "name": "small",
        "preset": "smoke",
        "measurements": ["inference"],
        "sampling": {"max_time_s": 0.05, "min_rounds": 20, "warmup": "off"},
        "network": {"onnx": str(small_onnx), "classes": 4, "image_size": 32},
        "dataset": {"kind": "imagenet", "root": str(imagenet_tree)},
        "batch_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "validation_steps": 2,
    }
    modes = ("good", "builds", "third", "later", "loading")
    for mode in modes:
        job = {
            "schema": "d5suite-job-3",
            "backend": {"name": "faulty", "mode": mode},
            "device": "cpu",
            "precision": "fp32",
            "threads": 1,
            "seed": 0,
            "loader_workers": 0,
            "passes": ["memory", "time"],
            "cases": [case],
        }
        (folder / f"{mode}.job.json").write_text(json.dumps(job))
    run_several([["d5suite.worker", str(folder / f"{mode}.job.json")] for mode in modes], folder)
    return {mode: json.loads((folder / f"{mode}.result.json").read_text()) for mode in modes}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_onnx: Path, imagenet_tree: Path) -> dict[str, Any]:
    """The worker's results by mode of the faulty backend."""
    folder = tmp_path_factory.mktemp("jobs")
    results: dict[str, Any] = made_once(tmp_path_factory, "facts", lambda: _results(folder, small_onnx, imagenet_tree))
    return results


def _of(result: dict[str, Any], name: str) -> dict[str, Any]:
    assert not result["failures"], result["failures"]
    part: dict[str, Any] = result["measurements"]["small/inference"]["passes"][name]
    return part


def test_the_first_call_includes_what_is_compiled_where_the_executor_is_made(found: dict[str, Any]) -> None:
    assert _of(found["builds"], "time")["samples"]["first_call_s"] > 1
    assert _of(found["good"], "time")["samples"]["first_call_s"] < 1


def test_memory_of_the_third_call_is_in_the_peak(found: dict[str, Any]) -> None:
    grown = [_of(found[mode], "memory")["peak_bytes"] for mode in ("good", "third")]
    assert grown[1] - grown[0] > 400 * 2**20


def test_memory_taken_while_timed_is_no_result(found: dict[str, Any]) -> None:
    assert "memory taken after the first calls" in found["later"]["failures"]["small/inference"]["message"]


def test_memory_that_loading_weights_takes_is_not_of_the_timed_step(found: dict[str, Any]) -> None:
    """A framework that copies VGG-16's largest weight to load it was said to take 392 MiB more."""
    assert _of(found["loading"], "time")["samples"]["median_s"] > 0


def test_a_version_that_is_not_the_installed_ones_is_refused() -> None:
    onnxruntime = backend("onnxruntime")
    version = onnxruntime.version() or ""
    onnxruntime.check_version({"onnxruntime": f"{version}+cpu"})
    with pytest.raises(ContractError, match=r"it says 99\.0, and"):
        onnxruntime.check_version({"onnxruntime": "99.0"})
