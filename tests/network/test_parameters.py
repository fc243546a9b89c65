"""Weights and constants of files are told apart, and sizes are those that onnxruntime computes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.network import Network
from d5suite.network.user_network import load_user_network
from d5suite.validate.network.oracle import inferences
from d5suite.validate.norms import relative_l2

pytestmark = pytest.mark.filterwarnings("ignore")

ORT = pytest.importorskip("onnxruntime")


def reals(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def graph_of(
    nodes: list[onnx.NodeProto], given: Mapping[str, Any], outputs: Mapping[str, int], constants: Mapping[str, Any]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in given.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def require_same_answers(model: onnx.ModelProto, x: np.ndarray) -> Network:
    """Compare onnxruntime's answers for a file with those for the graph as d5suite reads it."""
    network = Network(model)
    (found,), evaluator = inferences(network, [x], threads=1)
    assert evaluator == "onnxruntime"
    session = ORT.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, wanted in zip(network.outputs, session.run(list(network.outputs), {network.input: x}), strict=True):
        assert found[name].shape == wanted.shape
        assert relative_l2(found[name], wanted) < 1e-5
        stated = network.shapes[name]
        assert all(n in (None, m) for n, m in zip(stated, wanted.shape, strict=True)), stated
    return network


def exported(module: Any, x: np.ndarray, *, newer: bool, signed: bool = True) -> Network:
    import torch

    file, given = io.BytesIO(), (torch.from_numpy(x),)
    if newer:
        pytest.importorskip("onnxscript")
        torch.onnx.export(module.eval(), given, dynamo=True, verbose=False).save(file)
    else:
        torch.onnx.export(module.eval(), given, file, dynamo=False)
    model = onnx.load_model_from_string(file.getvalue())
    for part in () if signed else (model, model.graph, *model.graph.value_info, *model.graph.initializer):
        part.ClearField("metadata_props")
    return Network(model)


def count(network: Network) -> int:
    return sum(network.initializers[name].size for name in network.parameters)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_sizes_in_32_bits_follow_an_open_batch(kind: str) -> None:
    to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Cast", ["sizes"], ["cast"], to=to),
        helper.make_node("Gather", ["cast", "zero"], ["batch"]),
        helper.make_node("Cast", ["batch"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["x", "number"], ["mean"]),
        helper.make_node("Gather", ["cast", "one"], ["width"]),
        helper.make_node("Concat", ["minus", "width"], ["wanted"], axis=0),
        helper.make_node("Cast", ["wanted"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["mean", "wide"], ["y"]),
    ]
    constants = {"zero": 0, "one": [1], "minus": np.array([-1], kind)}
    require_same_answers(graph_of(nodes, {"x": ["N", 6]}, {"y": TensorProto.FLOAT}, constants), reals(3, 6))


@pytest.mark.parametrize(("places", "axis"), [(512, 1), (512, -1), (80, 1)])
def test_many_constants_are_gathered(places: int, axis: int) -> None:
    nodes = [
        helper.make_node("GatherElements", ["table", "indices"], ["kinds"], axis=axis),
        helper.make_node("Cast", ["kinds"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "numbers"], ["y"]),
    ]
    constants = {"table": np.arange(places)[None], "indices": np.arange(8)[None] * 7 % places}
    require_same_answers(graph_of(nodes, {"x": ["N", 8]}, {"y": TensorProto.FLOAT}, constants), reals(2, 8))


@pytest.mark.parametrize("scale", [10 / 7, 13 / 9, 1.4444444, 5 / 3, 0.7, 1.1])
@pytest.mark.parametrize("length", [7, 9, 10, 18, 33])
def test_an_image_is_resized_to_the_size_in_float32(scale: float, length: int) -> None:
    nodes = [helper.make_node("Resize", [x, "", "scales"], [y], mode="linear") for x, y in (("x", "h"), ("h", "y"))]
    constants = {"scales": np.array([1, 1, scale, scale], np.float32)}
    model = graph_of(nodes, {"x": ["N", 1, length, 6]}, {"y": TensorProto.FLOAT}, constants)
    require_same_answers(model, reals(2, 1, length, 6))


def test_a_file_without_weights_among_its_inputs_may_be_an_old_one() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = graph_of(nodes, {"x": ["N", 4]}, {"y": TensorProto.FLOAT}, {"w": reals(4, 3)})
    model.ir_version = 3
    model.opset_import[0].version = 9
    assert require_same_answers(model, reals(2, 4)).parameters == ("w",)


@pytest.mark.parametrize("newer", [False, True])
def test_a_layer_that_is_called_again_has_one_weight(newer: bool) -> None:
    torch = pytest.importorskip("torch")

    class Again(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            return self.layer(torch.relu(self.layer(torch.relu(self.layer(x)))))

    assert count(exported(Again(), reals(2, 3, 6), newer=newer)) == 42


def test_equal_layers_have_weights_of_their_own() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2)  # deep copies
    found = exported(module, reals(2, 3, 8), newer=False)
    assert count(found) == sum(p.numel() for p in module.parameters())


def test_equal_weights_in_one_place_are_one() -> None:
    nodes = [
        helper.make_node("Identity", ["w"], ["a"]),
        helper.make_node("Identity", ["w"], ["b"]),
        helper.make_node("Identity", ["ones"], ["c"]),
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("MatMul", ["h", "b"], ["i"]),
        helper.make_node("Mul", ["i", "ones"], ["j"]),
        helper.make_node("Mul", ["j", "c"], ["y"]),
    ]
    constants = {"w": reals(4, 4), "ones": np.ones(4, np.float32)}
    found = require_same_answers(graph_of(nodes, {"x": ["N", 4]}, {"y": TensorProto.FLOAT}, constants), reals(2, 4))
    assert count(found) == 16 + 2 * 4


@pytest.mark.parametrize(("newer", "signed"), [(False, True), (True, True), (True, False)])
def test_a_learned_number_is_a_parameter(newer: bool, signed: bool) -> None:
    torch = pytest.importorskip("torch")

    class Gated(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.alpha = torch.nn.Parameter(torch.tensor(0.5))
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return x + self.alpha.exp() * self.layer(x) / 3

    found = exported(Gated(), reals(2, 4), newer=newer, signed=signed)
    assert count(found) == 21
    trained = found.with_classification_loss()
    assert count(trained) == 21 and trained.parameters == found.parameters


@pytest.mark.parametrize("newer", [False, True])
def test_what_a_module_states_in_its_code_is_no_parameter(newer: bool) -> None:
    torch = pytest.importorskip("torch")

    class Edges(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(1, 2, 1)

        def forward(self, x: Any) -> Any:
            kernel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]]).view(1, 1, 3, 3)
            return self.layer(torch.nn.functional.conv2d(x, kernel))

    assert count(exported(Edges(), reals(2, 1, 5, 5), newer=newer)) == 4


def test_a_loss_is_of_an_output_that_weights_reach(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["same"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = graph_of(nodes, {"x": ["N", 4]}, {"same": TensorProto.FLOAT, "y": TensorProto.FLOAT}, {"w": reals(4, 3)})
    onnx.save(model, tmp_path / "x.onnx")
    assert load_user_network(str(tmp_path / "x.onnx"), shapes={}, batch_size=2).network.output == "y"
    model = graph_of(
        nodes[:1], {"x": ["N", 4]}, {"same": TensorProto.FLOAT, "w": TensorProto.FLOAT}, {"w": reals(4, 3)}
    )
    model.graph.node.append(helper.make_node("ArgMax", ["w"], ["best"], axis=1))
    model.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, None))
    del model.graph.output[1]
    onnx.save(model, tmp_path / "y.onnx")
    assert "depends on a parameter" in load_user_network(str(tmp_path / "y.onnx"), shapes={}, batch_size=2).untrainable


def test_a_network_without_dropout_keeps_its_mask() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Dropout", ["h"], ["y", "mask"])]
    model = graph_of(nodes, {"x": ["N", 4]}, {"y": TensorProto.FLOAT, "mask": TensorProto.BOOL}, {"w": reals(4, 3)})
    network = Network(model).without_dropout()
    (found,), _ = inferences(network, [reals(2, 4)], threads=1)
    assert found["mask"].all() and found["mask"].shape == (2, 3)
