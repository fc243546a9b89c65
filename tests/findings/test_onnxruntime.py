"""Faults of onnxruntime, without d5suite: see docs/findings.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.findings.mended import require


@pytest.fixture(scope="module")
def onnxruntime() -> Any:
    return pytest.importorskip("onnxruntime")


def test_a_padding_fused_into_a_maximum_is_minus_infinity(onnxruntime: Any) -> None:
    graph = helper.make_graph(
        [helper.make_node("Pad", ["x", "pads"], ["padded"]),
         helper.make_node("MaxPool", ["padded"], ["y"], kernel_shape=[3])],
        "pooled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 1])],
        [numpy_helper.from_array(np.array([0, 0, 1, 0, 0, 1]), "pads")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    levels, found = onnxruntime.GraphOptimizationLevel, []
    for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_BASIC):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.append(session.run(None, {"x": np.full((1, 1, 1), -1, np.float32)})[0].item())
    assert found[0] == 0  # the largest of 0, -1, 0
    require(found[1] == -1, "onnxruntime", "d5suite/validate/network/oracle.py (_session)")


def test_a_small_sigmoid_is_good_to_a_part_of_1_only(onnxruntime: Any) -> None:
    graph = helper.make_graph(
        [helper.make_node("Sigmoid", ["x"], ["y"])],
        "sigmoid",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.linspace(-12, -9, 64, dtype=np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    error = float(np.abs(session.run(None, {"x": x})[0] / exact - 1).max())
    require(error > 1e-5, "onnxruntime", "d5suite/validate/network/inference.py (ExpectedOutputs.check)")
