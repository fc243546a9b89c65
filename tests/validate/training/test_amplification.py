"""Training that amplifies roundings beyond use is proved one step at a time, and a wrong framework
is still caught.

The workers run in one interpreter, as in ``tests/measurements/test_timed.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from d5suite.backends import discover
from d5suite.network.builder import Builder
from tests.conftest import made_once, run_several

pytestmark = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

DEPTH = 32
"""Layers of BatchNormalization whose statistics are of two images, the last ones of 8 pixels."""

FAULTS = {
    "wrong:right": "",
    "wrong:dampening": "",
    "wrong:unbiased": "running statistics (unbiased fp32) vs right fp64",
    "wrong:thousandth": "each gradient against its own sensitivity (thousandth fp32) vs right fp64",
    "stale:timed": "the first timed steps",
    "stale:unwaited": "parameters of each of 10 steps from the float64 state",
    "stale:hasty": "parameters after 2 back-to-back steps",
}
"""By backend and mode: a part of the message."""


def deep_network() -> onnx.ModelProto:
    """A deep network without label and loss."""
    b = Builder("deep", seed=0, image_size=32)
    x = b.image
    for i in range(DEPTH):
        x = b.relu(b.batch_norm(b.conv(x, f"conv{i}", 8, 3, stride=2 if i < 4 else 1), f"bn{i}"))
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "fc", 4))
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    del model.graph.node[-1], model.graph.output[-1], model.graph.input[-1]
    return model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, imagenet_tree: Path) -> dict[str, Any]:
    """The worker's results by backend and mode."""
    results: dict[str, Any] = made_once(
        tmp_path_factory, "amplification", lambda: _results(tmp_path_factory, imagenet_tree)
    )
    return results


def _results(tmp_path_factory: pytest.TempPathFactory, imagenet_tree: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("jobs")
    onnx.save(deep_network(), folder / "deep.onnx")
    case = {
        "preset": "smoke",
        "sampling": {"max_time_s": 0.02, "min_rounds": 30, "warmup": "off"},
        "kind": "network",
        "name": "deep",
        "measurements": ["training_step"],
        "network": {"onnx": str(folder / "deep.onnx"), "classes": 4, "image_size": 32},
        "dataset": {"kind": "imagenet", "root": str(imagenet_tree)},
        "batch_size": 2,
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
        "validation_steps": 10,
        "reference": str(folder / "deep.h5"),
    }
    content = {"schema": "d5suite-job-3", "device": "cpu", "precision": "fp32", "threads": 1, "seed": 0,
               "loader_workers": 0, "passes": ["time"], "cases": [case]}  # fmt: skip
    paths = {}
    for selection in FAULTS:
        name, mode = selection.split(":")
        paths[selection] = folder / f"{name}-{mode}.job.json"
        paths[selection].write_text(json.dumps(content | {"backend": {"name": name, "mode": mode}}))
    run_several([["d5suite.worker", str(path)] for path in paths.values()], folder)
    return {key: json.loads(Path(str(path).replace(".job.", ".result.")).read_text()) for key, path in paths.items()}


@pytest.mark.parametrize("selection", FAULTS)
def test_a_wrong_framework_is_caught_where_roundings_are_amplified(found: dict[str, Any], selection: str) -> None:
    result = found[selection]
    assert result["status"] == "done", result["error"]
    if selection == "wrong:right":
        assert set(result["measurements"]) == {"deep/training_step"}, result["failures"]
    else:
        failure = result["failures"]["deep/training_step"]
        assert failure["type"] == "ValidationError" and FAULTS[selection] in failure["message"], failure


def test_the_result_says_how_steps_were_proved(found: dict[str, Any]) -> None:
    validation = found["wrong:right"]["validation"]["deep/training_step"]
    assert validation["training"]["proof"] == "one step at a time"
    assert validation["training"]["amplification"]["fp32"] > 1e3
    (run,) = [each for each in validation["checks"] if each["name"].startswith("losses of 10 steps")]
    assert "drift apart by" in run["name"] and run["error"] > 0.01  # more than float32 is accepted elsewhere
