"""Files that d5suite does not read, on a backend that reads files itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.backends import backend
from d5suite.errors import NetworkError
from d5suite.network.as_written import WrittenNetwork, load_as_written
from d5suite.network.user_network import load_user_network
from d5suite.validate.network.inference import check_inference
from tests.test_cli import d5suite

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
KERNEL = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32) / 2

node, info = helper.make_node, helper.make_tensor_value_info


def looping(folder: Path, kernel: str = "kernel") -> Path:
    """Three products in a loop, whose body reads a weight of the graph around it."""
    body = helper.make_graph(
        [node("MatMul", ["inner", kernel], ["product"]), node("Tanh", ["product"], ["next"]),
         node("Identity", ["going"], ["goes_on"])],
        "body",
        [info("i", INT64, []), info("going", BOOL, []), info("inner", FLOAT, None)],
        [info("goes_on", BOOL, []), info("next", FLOAT, None)],
    )  # fmt: skip
    weights = {"kernel": KERNEL, "times": np.array(3), "on": np.array(True)}
    return _saved(folder / "loop.onnx", [node("Loop", ["times", "on", "x"], ["y"], body=body)], ["N", 4], **weights)


def _saved(path: Path, nodes: list[onnx.NodeProto], output: list[Any], **weights: np.ndarray) -> Path:
    graph = helper.make_graph(
        nodes, path.stem, [info("x", FLOAT, ["N", 4])], [info("y", FLOAT, output)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def _compressed(folder: Path) -> Path:
    """An operator that no adapter has, because it makes sizes from values."""
    nodes = [node("MatMul", ["x", "kernel"], ["z"]), node("Compress", ["z", "which"], ["y"], axis=1)]
    return _saved(folder / "some.onnx", nodes, ["N", None], kernel=KERNEL, which=np.array([True, False, True, True]))


def _executor(network: WrittenNetwork) -> Any:
    return backend("onnxruntime").executor(network)


def test_a_loop_is_run_as_it_is_written_by_what_reads_files(tmp_path: Path) -> None:
    given = load_user_network(looping(tmp_path), shapes={}, batch_size=2)
    assert isinstance(given.network, WrittenNetwork) and given.network.batch_size is None
    assert given.unread == given.untrainable
    assert given.unread.startswith("d5suite does not read loop.onnx: control flow is not supported: node")
    batch = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    (check,) = check_inference(_executor(given.network), batch, tolerance=5e-5, threads=1)
    assert check.passed and "vs onnx.reference" in check.name
    found = backend("onnxruntime").executor(given.network)
    answer = found.fetch(found.forward(found.feed({"x": batch})))["y"]
    expected = batch.astype(np.float64)
    for _ in range(3):
        expected = np.tanh(expected @ KERNEL)
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(NetworkError, match=r"lacks 1 operator.*Loop.*d5suite does not read the file"):
        backend("deep500").check_operators(given.network)


def test_a_wrong_answer_to_a_written_file_is_caught(tmp_path: Path) -> None:
    executor = _executor(load_as_written(looping(tmp_path), shapes={}))
    right = executor.forward
    executor.forward = lambda feed: right({"x": executor.feed({"x": feed["x"].numpy() * np.float32(1.001)})["x"]})
    batch = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    (check,) = check_inference(executor, batch, tolerance=5e-5, threads=1)
    assert not check.passed


def test_an_operator_that_no_adapter_knows_is_run_as_written(tmp_path: Path) -> None:
    path = _compressed(tmp_path)
    given = load_user_network(path, shapes={}, batch_size=2)
    assert not given.unread
    assert backend("onnxruntime").runs_as_written(given.network)
    assert not backend("deep500").runs_as_written(given.network)
    batch = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    (check,) = check_inference(_executor(load_as_written(path, shapes={})), batch, tolerance=5e-5, threads=1)
    assert check.passed
    drawing = _saved(tmp_path / "draws.onnx", [node("Bernoulli", ["x"], ["y"])], ["N", 4])
    assert not backend("onnxruntime").runs_as_written(load_user_network(drawing, shapes={}, batch_size=2).network)


def test_a_file_that_is_not_valid_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="control flow is not supported"):
        load_user_network(looping(tmp_path, "nothing"), shapes={}, batch_size=2)


def test_the_table_says_who_can_run_it_and_why_the_others_cannot(tmp_path: Path) -> None:
    done = d5suite("network", str(looping(tmp_path)), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["backends"]
    assert found["onnxruntime"]["can"] == ["inference"]
    assert found["torch"]["can"] == [] and "control flow is not supported" in found["torch"]["reasons"][0]
    found = json.loads(d5suite("network", str(_compressed(tmp_path)), "--json").stdout)["backends"]
    assert found["onnxruntime"]["can"] == ["inference"] and not found["onnxruntime"]["lacks"]
    assert found["torch"]["can"] == [] and found["torch"]["lacks"][0]["operator"] == "Compress"
