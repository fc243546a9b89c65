"""In a deep network, where roundings move float32 gradients by percents, each is held to its own
sensitivity.

The workers run in one interpreter, as in ``tests/measurements/test_timed.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from d5suite.backends import discover
from d5suite.network.builder import Builder
from d5suite.validate.network.sensitivity import FEW, FINE, FINE_LENGTH, Sensitivity
from tests.conftest import made_once, run_several

pytestmark = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

DEPTH = 16
OWN = "each gradient against its own sensitivity"
FAULTS = {"rounded": OWN, "half_backward": "gradient", "first_scale": OWN, "last_scale": OWN}
"""By mode: a part of the message. All gradients are in bfloat16, or one vector is 1% too long."""


def deep_network() -> onnx.ModelProto:
    """A deep network without label and loss."""
    b = Builder("deep", seed=0, image_size=32)
    x = b.image
    for i in range(DEPTH):
        x = b.relu(b.batch_norm(b.conv(x, f"conv{i}", 16, 3, stride=2 if i in (0, 8) else 1), f"bn{i}"))
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "fc", 4))
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    del model.graph.node[-1], model.graph.output[-1], model.graph.input[-1]
    return model


def run(folder: Path, tree: Path, network: dict[str, Any], modes: Sequence[str] = ("right", *FAULTS)) -> dict[str, Any]:
    """Return the worker's results by mode."""
    case = {
        "preset": "smoke",
        "sampling": {"max_time_s": 0.02, "min_rounds": 3, "warmup": "off"},
        "kind": "network",
        "name": "deep",
        "measurements": ["gradient"],
        "network": network,
        "dataset": {"kind": "imagenet", "root": str(tree)},
        "batch_size": 8,
        "optimizer": {"name": "sgd", "learning_rate": 0.125, "momentum": 0.5},
        "validation_steps": 3,
        "reference": str(folder / "deep.h5"),
    }
    content = {"schema": "d5suite-job-3", "device": "cpu", "precision": "fp32", "threads": 1, "seed": 0,
               "loader_workers": 0, "passes": ["time"], "cases": [case]}  # fmt: skip
    for mode in modes:
        job = content | {"backend": {"name": "wrong", "mode": mode}}
        (folder / f"{mode}.job.json").write_text(json.dumps(job))
    run_several([["d5suite.worker", str(folder / f"{mode}.job.json")] for mode in modes], folder)
    return {mode: json.loads((folder / f"{mode}.result.json").read_text()) for mode in modes}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, imagenet_tree: Path) -> dict[str, Any]:
    """The results of a small deep network."""

    def make() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("jobs")
        onnx.save(deep_network(), folder / "deep.onnx")
        return run(folder, imagenet_tree, {"onnx": str(folder / "deep.onnx"), "classes": 4, "image_size": 32})

    results: dict[str, Any] = made_once(tmp_path_factory, "own_sensitivity", make)
    return results


def require(results: dict[str, Any], mode: str) -> None:
    result = results[mode]
    assert result["status"] == "done", result["error"]
    if mode == "right":
        assert set(result["measurements"]) == {"deep/gradient"}, result["failures"]
        checks = result["validation"]["deep/gradient"]["checks"]
        (whole,) = [check for check in checks if check["name"].startswith("gradient (right fp32) vs right fp64")]
        assert whole["tolerance"] > 0.02  # 1% or bfloat16 would pass
    else:
        message = result["failures"]["deep/gradient"]["message"]
        assert FAULTS[mode] in message and f"({mode} fp32) vs" in message, message


@pytest.mark.parametrize("mode", ["right", *FAULTS])
def test_a_gradient_that_is_slightly_wrong_is_caught_in_a_deep_network(deep: dict[str, Any], mode: str) -> None:
    require(deep, mode)


@pytest.mark.slow
def test_a_gradient_that_is_slightly_wrong_is_caught_in_resnet50(tmp_path: Path, imagenet_tree: Path) -> None:
    """With a fault in all vectors, and with one in a vector that is sensitive to roundings.

    The right gradient passes in ``make bench``.
    """
    network = {"zoo": "resnet50", "classes": 4, "image_size": 64}
    results = run(tmp_path, imagenet_tree, network, ("half_backward", "first_scale"))
    for mode in results:
        require(results, mode)


def test_a_tensors_limits_follow_its_own_sensitivity() -> None:
    own = {"smooth": 1e-6, "flipped": 0.04, "few": 1e-9}
    found = Sensitivity(0.04, 0.0, own, {"smooth": 1e-6, "flipped": 1e-3, "few": 1e-9}).limits(
        {"smooth": 100, "flipped": 1600, "few": FEW - 1}
    )
    assert found["smooth"] == (FINE, FINE_LENGTH)
    assert found["flipped"][0] == 0.04 and found["flipped"][1] == pytest.approx(2 * 0.04 / 10)
    assert found["few"][0] == FINE >= np.median(list(own.values()))
