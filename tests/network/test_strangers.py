"""Files of strangers: valid ones are read, others are refused for the right reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import d5suite
from d5suite.errors import NetworkError
from d5suite.network import Network
from d5suite.validate.network.oracle import inference

FLOAT = TensorProto.FLOAT


def _saved(
    folder: Path,
    nodes: list[onnx.NodeProto],
    shape: list[int | str],
    *,
    initializers: dict[str, np.ndarray] | None = None,
    opsets: list[onnx.OperatorSetIdProto] | None = None,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "stranger",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in (initializers or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=opsets or [helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, folder / "stranger.onnx")
    return folder / "stranger.onnx"


def _answer(path: Path, *shape: int) -> np.ndarray:
    return inference(Network.load(path), np.ones(shape, np.float32), threads=1)[0]


def test_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    constants = [helper.make_node("Constant", [], [f"c{n}"], "anon", value_float=float(n)) for n in (2, 3)]
    nodes = [
        *constants,
        helper.make_node("Mul", ["x", "c2"], ["m"], "anon"),
        helper.make_node("Add", ["m", "c3"], ["y"]),
    ]
    path = _saved(tmp_path, nodes, ["n", 4])
    network = Network.load(path)
    names = [node.name for node in network.nodes]
    assert len(set(names)) == len(names)
    assert _answer(path, 2, 4) == pytest.approx(np.full((2, 4), 5.0))


def _conditional(name: str, *, inner: bool) -> onnx.NodeProto:
    """An If whose branches state no types, which another one may hold."""
    branches = {}
    for word, value in (("then", 2.0), ("else", 7.0)):
        node = (
            _conditional(f"{name}.{word}", inner=False)
            if inner
            else helper.make_node("Constant", [], [f"{name}.{word}"], value_float=value)
        )
        output = onnx.ValueInfoProto(name=node.output[0])
        if not inner:
            output = helper.make_tensor_value_info(node.output[0], FLOAT, None)
        branches[f"{word}_branch"] = helper.make_graph([node], word, [], [output])
    return helper.make_node("If", ["yes"], [name], name, **branches)


def test_nested_conditionals_need_not_state_their_types(tmp_path: Path) -> None:
    """The result of the first is an input of what computes the condition of the second."""
    nodes = [
        _conditional("factor", inner=True),
        helper.make_node("Shape", ["factor"], ["rank"]),
        helper.make_node("Size", ["rank"], ["size"]),
        helper.make_node("Equal", ["size", "zero"], ["scalar"]),
        helper.make_node(
            "If", ["scalar"], ["more"],
            then_branch=helper.make_graph(
                [helper.make_node("Constant", [], ["a"], value_float=1.0)], "a", [],
                [helper.make_tensor_value_info("a", FLOAT, None)],
            ),
            else_branch=helper.make_graph(
                [helper.make_node("Constant", [], ["b"], value_float=9.0)], "b", [],
                [helper.make_tensor_value_info("b", FLOAT, None)],
            ),
        ),
        helper.make_node("Mul", ["x", "factor"], ["m"]),
        helper.make_node("Add", ["m", "more"], ["y"]),
    ]  # fmt: skip
    path = _saved(tmp_path, nodes, ["n", 4], initializers={"yes": np.array(True), "zero": np.array(0)})
    assert _answer(path, 2, 4) == pytest.approx(np.full((2, 4), 3.0))


def test_a_zero_state_of_another_width_is_refused(tmp_path: Path) -> None:
    """PyTorch's newer exporter writes such a file for an LSTM with a projection."""
    weights = {
        "w": np.ones((1, 16, 3), np.float32), "r": np.ones((1, 16, 4), np.float32),
        "h": np.zeros((1, 2, 4), np.float32), "c": np.zeros((1, 2, 9), np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "", "", "h", "c"], ["s"], "lstm", hidden_size=4),
        helper.make_node("Identity", ["s"], ["y"]),
    ]
    path = _saved(tmp_path, nodes, [5, 2, 3], initializers=weights)
    with pytest.raises(NetworkError, match=r"LSTM: initial state 'c' has shape \[1, 2, 9\], but hidden_size is 4"):
        Network.load(path)


def test_shapes_that_do_not_fit_are_not_the_files_fault(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("AveragePool", ["x"], ["half"], kernel_shape=[2], strides=[2]),
        helper.make_node("Resize", ["half", "", "twice"], ["back"], mode="nearest"),
        helper.make_node("Concat", ["x", "back"], ["y"], axis=1),
    ]
    path = _saved(tmp_path, nodes, [1, 1, "w"], initializers={"twice": np.array([1, 1, 2], np.float32)})
    assert Network.load(path, shapes={"x": (1, 1, 6)}).shapes["y"] == (1, 2, 6)
    with pytest.raises(NetworkError, match="the network does not take these shapes: x 1x1x5"):
        Network.load(path, shapes={"x": (1, 1, 5)})


def test_a_model_without_onnxs_own_operators_is_no_old_one(tmp_path: Path) -> None:
    node = helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="MAX")
    path = _saved(tmp_path, [node], ["n", 4], opsets=[helper.make_opsetid("ai.onnx.ml", 3)])
    with pytest.raises(NetworkError, match=r"it has only operators of ai\.onnx\.ml"):
        Network.load(path)


def test_a_global_maximum_of_one_axis_has_a_reference(tmp_path: Path) -> None:
    from d5suite.validate.network.oracle import NetworkOracle

    path = _saved(tmp_path, [helper.make_node("GlobalMaxPool", ["x"], ["y"])], ["n", 3, 5])
    images = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    answer, _ = NetworkOracle(Network.load(path), training=False).run(images)
    np.testing.assert_array_equal(answer, images.max(2, keepdims=True))


def test_what_onnxruntime_loads_but_cannot_run_has_onnxs_reference(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    node = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", dilations=[2])
    weight = np.ones((1, 1, 3), np.float32)
    network = Network.load(_saved(tmp_path, [node], ["n", 1, 8], initializers={"w": weight}))
    output, evaluator = inference(network, np.ones((2, 1, 8), np.float32), threads=1)
    assert evaluator == "onnx.reference"
    np.testing.assert_array_equal(output[0, 0], [2, 2, 3, 3, 3, 3, 2, 2])
    backend = d5suite.backend("onnxruntime")
    (lack,) = backend.lacks_of(network)
    assert (lack.operator, lack.reason) == ("Conv", "onnxruntime has no dilations with auto_pad SAME_UPPER")
    executor = backend.load("network").Executor(network, mode="all", device="cpu", precision="fp32")
    with pytest.raises(d5suite.errors.BackendError, match="onnxruntime cannot run this network"):
        executor.forward(executor.feed(network.arrays(np.ones((2, 1, 8), np.float32))))
