"""`d5suite network` knows which variants of an operator a backend lacks before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.backends import discover
from d5suite.errors import NetworkError, UnsupportedOperatorError
from d5suite.network import Network
from d5suite.network.user_network import load_user_network
from d5suite.network.variants import POOLS
from d5suite.validate.network.oracle import NetworkOracle
from tests.test_cli import d5suite

EVERY = {"torch", "tensorflow", "keras", "mxnet", "jax", "deep500"}


def _saved(
    folder: Path, operator: str, shape: list[Any], attributes: Mapping[str, Any], **more: np.ndarray | list[Any]
) -> Path:
    """Write one node; arrays are its weights, lists the shapes of further inputs."""
    info = helper.make_tensor_value_info
    fed = {name: list(sizes) for name, sizes in more.items() if not isinstance(sizes, np.ndarray)}
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", *more], ["y"], "node", **attributes)],
        "variant",
        [info("x", TensorProto.FLOAT, shape), *(info(name, TensorProto.INT64, sizes) for name, sizes in fed.items())],
        [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(each, name) for name, each in more.items() if isinstance(each, np.ndarray)],
    )
    path = folder / "variant.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), path)
    return path


def _weights(gates: int, *, hidden: int = 3, size: int = 2) -> dict[str, np.ndarray]:
    return {
        "w": np.full((1, gates * hidden, size), 0.25, np.float32),
        "r": np.full((1, gates * hidden, hidden), 0.125, np.float32),
    }


NONE, DOUBLED = np.zeros(0, np.float32), np.array([1, 1, 2, 2], np.float32)

SCATTER = {"i": np.zeros((1, 4), np.int64), "u": np.ones((1, 4), np.float32)}

VARIANTS: Mapping[str, tuple[tuple[str, list[Any], dict[str, Any], dict[str, Any]], set[str], str]] = {
    "clip": (("LSTM", [5, 1, 2], {"hidden_size": 3, "clip": 2.0}, _weights(4)), EVERY, "clipped cells"),
    "coupled": (("LSTM", [5, 1, 2], {"hidden_size": 3, "input_forget": 1}, _weights(4)), EVERY, "coupled"),
    "activations": (
        ("GRU", [5, 1, 2], {"hidden_size": 3, "activations": ["Tanh", "Tanh"]}, _weights(3)),
        EVERY,
        "the activations tanh, tanh",
    ),
    "fed sizes": (
        ("Expand", [2, 1], {}, {"sizes": [2]}), EVERY, "its input 'sizes' is not known before the network runs",
    ),
    "usual": (("LSTM", [5, 1, 2], {"hidden_size": 3}, _weights(4)), set(), ""),
    "multiplied": (
        ("ScatterElements", [2, 4], {"reduction": "mul"}, SCATTER), {"tensorflow", "mxnet"}, "multiplies",
    ),
    "largest": (("ScatterElements", [2, 4], {"reduction": "max"}, SCATTER), {"mxnet"}, "compares"),
    "added": (("ScatterElements", [2, 4], {"reduction": "add"}, SCATTER), set(), ""),
    "even": (("LRN", [2, 6, 4, 4], {"size": 4}, {}), {"onnxruntime"}, "odd sizes"),
    "volume": (
        ("Col2Im", [1, 8, 8], {"strides": [2, 2, 2]}, {"image": np.array([4, 4, 4]), "block": np.array([2, 2, 2])}),
        {"mxnet"},
        "col2im",
    ),
    "overlapping": (
        ("MaxUnpool", [1, 1, 2, 2], {"kernel_shape": [2, 2], "strides": [1, 1]}, {"i": [1, 1, 2, 2]}),
        {"mxnet"},
        "windows overlap",
    ),
    "convolved in four axes": (
        ("Conv", [1, 2, 4, 4, 4, 4], {}, {"w": np.ones((3, 2, 2, 2, 2, 2), np.float32)}), EVERY, "spatial axes",
    ),
    "convolved back in four axes": (
        ("ConvTranspose", [1, 2, 4, 4, 4, 4], {}, {"w": np.ones((2, 3, 2, 2, 2, 2), np.float32)}), EVERY,
        "spatial axes",
    ),
    **{
        f"pooled in four axes, {operator}": (
            (operator, [1, 2, 4, 4, 4, 4], {} if operator.startswith("Global") else {"kernel_shape": [2] * 4}, {}),
            {*EVERY, "onnxruntime"},
            "" if operator == "GlobalLpPool" else "spatial axes",
        )
        for operator in POOLS
    },
}  # fmt: skip
"""By name: a node, the backends that lack it, and a word of the reason."""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_judged_and_not_its_operator_alone(name: str, tmp_path: Path) -> None:
    (operator, shape, attributes, more), lacking, word = VARIANTS[name]
    network = load_user_network(_saved(tmp_path, operator, shape, attributes, **more), shapes={}, batch_size=1).network
    backends = discover()[0]
    found = {each: backends[each].lacks_of(network) for each in (*EVERY, "onnxruntime")}
    assert {each for each, lacks in found.items() if lacks} == lacking
    for lacks in found.values():
        assert all(each.operator == operator and each.nodes == ("node",) and word in each.reason for each in lacks)


WHOLE: Mapping[str, tuple[tuple[str, list[Any], dict[str, Any], dict[str, Any]], int, set[str]]] = {
    "resized, int32": (("Resize", [1, 1, 2, 2], {}, {"r": NONE, "s": DOUBLED}), TensorProto.INT32, set()),
    "resized, int64": (("Resize", [1, 1, 2, 2], {}, {"r": NONE, "s": DOUBLED}), TensorProto.INT64, {"onnxruntime"}),
    "interpolated": (
        ("Resize", [1, 1, 2, 2], {"mode": "linear"}, {"r": NONE, "s": DOUBLED}), TensorProto.UINT8,
        {*EVERY, "onnxruntime"},
    ),
    "pooled": (("MaxPool", [1, 1, 2, 2], {"kernel_shape": [2, 2]}, {}), TensorProto.INT8, {"mxnet"}),
    "blocks": (("SpaceToDepth", [1, 1, 2, 2], {"blocksize": 2}, {}), TensorProto.INT32, {"onnxruntime"}),
    "padded": (("Pad", [1, 2], {}, {"pads": np.array([0, 1, 0, 0])}), TensorProto.INT64, {"mxnet"}),
    "root": (("ReduceL2", [1, 2], {}, {}), TensorProto.INT32, EVERY),
}  # fmt: skip
"""By name: a node whose first input becomes integers of a type, and the backends that lack it."""


@pytest.mark.parametrize("name", WHOLE)
def test_integers_without_a_kernel_are_lacking_and_others_are_computed(name: str, tmp_path: Path) -> None:
    (operator, shape, attributes, more), kind, lacking = WHOLE[name]
    model = onnx.load(_saved(tmp_path, operator, shape, attributes, **more))
    node = model.graph.node[0]
    node.input[0], node.output[0] = "whole", "result"
    casts = [
        helper.make_node("Cast", ["x"], ["whole"], to=kind),
        helper.make_node("Cast", ["result"], ["y"], to=TensorProto.FLOAT),
    ]
    del model.graph.node[:]
    model.graph.node.extend([casts[0], node, casts[1]])
    network = Network(model)
    backends = discover()[0]
    assert {each for each in (*EVERY, "onnxruntime") if backends[each].lacks_of(network)} == lacking
    x = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    for each in {"torch", "deep500", "onnxruntime"} - lacking:
        executor = backends[each].executor(network)
        found = executor.fetch(executor.forward(executor.feed({"x": x})))["y"]
        np.testing.assert_allclose(found, NetworkOracle(network, training=False).outputs(x)["y"], err_msg=each)


def test_it_is_told_before_anything_runs(tmp_path: Path) -> None:
    path = _saved(tmp_path, "LSTM", [5, 1, 2], {"hidden_size": 3, "clip": 2.0}, **_weights(4))
    done = d5suite("network", str(path), "--json")
    assert done.returncode == 0, done.stderr
    for name, each in json.loads(done.stdout)["backends"].items():
        if name in EVERY:
            assert not each["can"]
            assert each["lacks"] == [
                {"operator": "LSTM", "nodes": ["node"], "reason": "no adapter has clipped cells"}
            ], name
        elif name == "onnxruntime":
            assert each["can"] == ["inference"]
    network = load_user_network(path, shapes={}, batch_size=1).network
    with pytest.raises(UnsupportedOperatorError, match=r"node node.*clipped cells"):
        discover()[0]["torch"].executor(network)


@pytest.mark.parametrize(
    ("to", "shown"), [(TensorProto.FLOAT8E4M3FN, "FLOAT8E4M3FN"), (TensorProto.INT4, "INT4")], ids=str
)
def test_types_of_quantised_networks_are_refused_by_the_reader(to: int, shown: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=f"'node' is of type {shown}"):
        load_user_network(_saved(tmp_path, "Cast", [2, 4], {"to": to}), shapes={}, batch_size=1)


@pytest.mark.parametrize(
    ("operator", "word"),
    [
        ("com.microsoft::FusedConv", "give the original file"),
        ("ai.onnx.ml::Scaler", "classical"),
        ("com.acme::Fused", "not one of ONNX's own"),
    ],
)
def test_a_foreign_operator_has_a_reason_and_what_is_behind_it_is_not_judged(
    operator: str, word: str, tmp_path: Path
) -> None:
    """Behind it no shape is known, and so no size that a Reshape takes from one."""
    make, (domain, _, kind) = helper.make_node, operator.rpartition("::")
    nodes = [
        make(kind, ["x"], ["a"], "fused", domain=domain),
        make("Relu", ["a"], ["b"], "relu"),
        make("Shape", ["b"], ["sizes"], "sizes"),
        make("Slice", ["sizes", "zero", "one"], ["batch"], "first"),
        make("Concat", ["batch", "rest"], ["target"], "target", axis=0),
        make("Reshape", ["b", "target"], ["y"], "flat"),
    ]
    constants = [numpy_helper.from_array(np.array([n]), name) for name, n in (("zero", 0), ("one", 1), ("rest", -1))]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "fused", [info("x", TensorProto.FLOAT, [2, 4])], [info("y", TensorProto.FLOAT, None)], constants
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    network = load_user_network(tmp_path / "m.onnx", shapes={}, batch_size=1).network
    for name in (*EVERY, "onnxruntime"):
        (lack,) = discover()[0][name].lacks_of(network)
        assert (lack.operator, lack.nodes) == (operator, ("fused",)) and word in lack.reason, name


def test_a_mask_that_is_drawn_is_lacking_where_it_is_read(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Dropout", ["x"], ["y", "mask"], "drop"), helper.make_node("Cast", ["mask"], ["z"], to=1)],
        "masked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("y", "z")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    network = load_user_network(tmp_path / "m.onnx", shapes={}, batch_size=1).network
    (lack,) = discover()[0]["jax"].lacks_of(network)
    assert "further output 'mask' is read" in lack.reason


def test_an_operator_of_no_backend_is_told_though_the_cost_is_not_known(tmp_path: Path) -> None:
    path = _saved(tmp_path, "NonZero", [2, 4], {})
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    onnx.save(model, path)
    shown = d5suite("network", str(path))
    assert shown.returncode == 0, shown.stderr  # onnxruntime has it
    assert "cost not known: the size of tensor 'y' is not known" in shown.stdout
    found = json.loads(d5suite("network", str(path), "--json").stdout)
    assert found["macs"] is None and found["parameters"] == 0
    for name in EVERY:
        (lack,) = found["backends"][name]["lacks"]
        assert (lack["operator"], lack["nodes"]) == ("NonZero", ["node"]) and "depends on values" in lack["reason"]
