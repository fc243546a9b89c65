"""onnxruntime as a backend: it is the others' reference, but not its own."""

from __future__ import annotations

import numpy as np

from d5suite.backends.onnxruntime import BACKEND
from d5suite.validate.network.inference import check_inference
from tests.conftest import small_network


def test_it_is_proved_against_onnxs_reference_evaluator() -> None:
    network = small_network()
    executor = BACKEND.executor(network)
    images = np.random.default_rng(0).standard_normal((6, 3, 32, 32), np.float32)
    (check,) = check_inference(executor, images, tolerance=1e-5, threads=1)
    assert check.passed and check.name == "output (all fp32) vs onnx.reference"
    executor.load_parameters({name: 1.01 * network.initializers[name] for name in network.parameters})
    (check,) = check_inference(executor, images, tolerance=1e-5, threads=1)
    assert not check.passed
