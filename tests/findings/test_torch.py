"""Faults of PyTorch and its exporters, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest

from tests.findings.mended import require


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def test_the_older_exporter_merges_running_statistics_of_different_layers(torch: Any) -> None:
    onnx = pytest.importorskip("onnx")
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.BatchNorm2d(2)).eval()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (torch.ones(1, 2, 3, 3),), file, dynamo=False)
    stored = {tensor.name for tensor in onnx.load_from_string(file.getvalue()).graph.initializer}
    merged = len(stored & {"0.running_mean", "2.running_mean"}) < 2
    require(merged, "torch", "d5suite/network/normalise.py (_separate_statistics)")


def test_a_fused_update_pairs_elements_by_their_place_in_memory(torch: Any) -> None:
    """One step of SGD from zero with rate 1 is the negative gradient."""
    gradient = torch.arange(16.0).reshape(1, 4, 2, 2)
    parameter = torch.zeros(1, 4, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    parameter.grad = gradient.clone()
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    wrong = not torch.equal(parameter.detach(), -gradient)
    require(wrong, "torch", "d5suite/backends/torch/training.py (_laid_out)")
