"""Files of networks that make no sense: one `NetworkError` with the file, the node or tensor, and
what is wrong, before anything is allocated and before a backend could be blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from d5suite.errors import NetworkError
from d5suite.network import Network
from d5suite.network.analysis import analyse

NODES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "conv": ("Conv", ["w", "b"], {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1] * 4, "dilations": [1, 1],
                                  "group": 1}),
    "bn": ("BatchNormalization", ["scale", "bias", "mean", "variance"], {"epsilon": 1e-5}),
    "lrn": ("LRN", [], {"size": 3, "alpha": 1e-4}),
    "max": ("MaxPool", [], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0] * 4, "dilations": [1, 1],
                            "ceil_mode": 0, "storage_order": 0}),
    "up": ("ConvTranspose", ["up_w"], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0] * 4, "group": 1,
                                       "output_padding": [0, 0], "dilations": [1, 1]}),
    "mean": ("AveragePool", [], {"kernel_shape": [2, 2], "strides": [2, 2], "count_include_pad": 0}),
    "same": ("MaxPool", [], {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "turn": ("Transpose", [], {"perm": [0, 1, 3, 2]}),
    "sum": ("ReduceMean", ["axes"], {"keepdims": 1}),
    "flat": ("Flatten", [], {"axis": 1}),
    "fc": ("Gemm", ["fc_w", "fc_b"], {"alpha": 1.0, "transB": 0}),
    "soft": ("Softmax", [], {"axis": -1}),
}  # fmt: skip
"""A chain of nodes: operator, further inputs, attributes."""

SHAPES = {"w": (8, 3, 3, 3), "up_w": (8, 4, 2, 2), "fc_w": (4, 10), "fc_b": (10,), **dict.fromkeys(
    ("b", "scale", "bias", "mean", "variance"), (8,))}  # fmt: skip


def small() -> onnx.ModelProto:
    nodes, at = [], "image"
    for name, (operator, inputs, attributes) in NODES.items():
        nodes.append(helper.make_node(operator, [at, *inputs], [f"{name}.y"], name, **attributes))
        at = f"{name}.y"
    weights = [numpy_helper.from_array(np.full(shape, 0.5, np.float32), name) for name, shape in SHAPES.items()]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info(at, TensorProto.FLOAT, ["N", 10])],
        [*weights, numpy_helper.from_array(np.array([2, 3]), "axes")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def load(folder: Path, model: onnx.ModelProto) -> Network:
    (folder / "x.onnx").write_bytes(model.SerializeToString())
    return Network.load(folder / "x.onnx")


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if each.name == name)


def attribute(model: onnx.ModelProto, name: str, key: str) -> onnx.AttributeProto:
    return next(each for each in node(model, name).attribute if each.name == key)


def weight(model: onnx.ModelProto, name: str, value: float) -> None:
    (tensor,) = (each for each in model.graph.initializer if each.name == name)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[-1] = value
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def put(name: str, key: str, place: int, value: int) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        found = attribute(model, name, key)
        if found.ints:
            found.ints[place] = value
        else:
            found.i = value

    return change


WRONG: list[tuple[Callable[[onnx.ModelProto], object], str]] = [
    (lambda m: weight(m, "w", float("nan")), "1 of 216 values of initializer 'w' are NaN or infinite"),
    (lambda m: weight(m, "fc_b", float("inf")), "initializer 'fc_b'"),
    (lambda m: weight(m, "mean", -float("inf")), "initializer 'mean'"),
    (lambda m: weight(m, "variance", -1), "bn: BatchNormalization: the variance 'variance' has -1.0"),
    (lambda m: setattr(attribute(m, "bn", "epsilon"), "f", float("nan")), "bn: BatchNormalization: epsilon is nan"),
    (lambda m: setattr(attribute(m, "bn", "epsilon"), "f", -1.0), "bn: BatchNormalization: epsilon is -1.0"),
    (lambda m: setattr(attribute(m, "fc", "alpha"), "f", float("inf")), "fc: Gemm: alpha is inf"),
    (lambda m: setattr(m.opset_import[0], "version", 99), "opset 99 is newer than the installed onnx"),
    (lambda m: setattr(m.opset_import[0], "version", -5), "opset -5 is too old"),
    (lambda m: m.opset_import.append(helper.make_opsetid("", 18)), "it names several opsets: 18, 21"),
    (lambda m: setattr(m, "ir_version", 99), "ir_version 99 is newer than the installed onnx"),
    (lambda m: node(m, "lrn").output.__setitem__(0, "conv.y"), "two outputs of nodes are called 'conv.y'"),
    (lambda m: node(m, "lrn").output.__setitem__(0, "w"), "lrn: LRN writes 'w', which is an input or an initializer"),
    (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "two initializers are called 'w'"),
    (lambda m: m.graph.output.append(m.graph.output[0]), "two outputs of the graph are called 'soft.y'"),
    (put("conv", "group", 0, 0), "conv: Conv: group has 0, not a number from 1"),
    (put("conv", "group", 0, -1), "conv: Conv: group has -1"),
    (put("conv", "group", 0, 3), "conv: Conv: with 3 group(s)"),
    (put("conv", "group", 0, 1 << 62), "conv: Conv: group has 4611686018427387904"),
    (put("up", "group", 0, -1), "up: ConvTranspose: group has -1"),
    (put("conv", "pads", 2, -1), "conv: Conv: pads has -1"),
    (put("conv", "pads", 2, 10**6), "conv: Conv: pads [1, 1000000] of an image of 16"),
    (put("conv", "pads", 0, (1 << 63) - 1), "conv: Conv: pads has 9223372036854775807"),
    (put("max", "pads", 0, 7), "max: MaxPool: a window of [2, 2] would see only padding"),
    (put("up", "pads", 0, 100), "up"),
    (put("conv", "strides", 1, 0), "conv: Conv: strides has 0"),
    (put("conv", "strides", 1, -1 << 63), "conv: Conv: strides has -9223372036854775808"),
    (put("conv", "dilations", 0, 0), "conv: Conv: dilations has 0"),
    (put("conv", "dilations", 0, 9), "conv: a window of 19 does not fit an image of 16 with padding 1+1"),
    (put("max", "dilations", 0, (1 << 31) - 1), "max"),
    (put("max", "kernel_shape", 0, 99), "max"),
    (put("same", "kernel_shape", 0, 10**9), "same: MaxPool: pads"),
    (put("up", "strides", 0, 10**9), "up: ConvTranspose: 'up.y' of shape"),
    (put("lrn", "size", 0, 1 << 31), "lrn: LRN: size has 2147483648"),
    (put("flat", "axis", 0, 1 << 62), "flat: Flatten: axis has 4611686018427387904"),
    (put("fc", "transB", 0, 1 << 40), "fc: Gemm: transB has 1099511627776, not a number from 0 to 1"),
    (lambda m: attribute(m, "same", "auto_pad").__setattr__("s", b"\xff\xfe"), "same: MaxPool: auto_pad is"),
    (lambda m: m.graph.input[0].type.tensor_type.shape.dim[2].__setattr__("dim_value", 0), "conv"),
    (lambda m: m.graph.initializer[0].__setattr__("raw_data", bytes(8000)), "initializer's data do not fit"),
]


def test_the_network_itself_makes_sense(tmp_path: Path) -> None:
    assert analyse(load(tmp_path, small())).macs > 0


@pytest.mark.parametrize(("damage", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_what_makes_no_sense_is_one_error_that_names_it(
    tmp_path: Path, damage: Callable[[onnx.ModelProto], object], said: str
) -> None:
    model = small()
    damage(model)
    with pytest.raises(NetworkError) as error:
        load(tmp_path, model)
    assert said in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "x.onnx"))


def test_an_empty_weight_is_refused(tmp_path: Path) -> None:
    model = small()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((0, 3, 3, 3), np.float32), "w"))
    with pytest.raises(NetworkError, match="between 8 and 0"):
        load(tmp_path, model)


def test_a_constant_that_does_not_fill_its_shape_is_refused(tmp_path: Path) -> None:
    model = small()
    value = TensorProto(dims=[3], data_type=TensorProto.FLOAT, raw_data=bytes(8), name="half")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["half"], "stated", value=value))
    with pytest.raises(NetworkError, match="stated: this constant's data do not fit its shape and type"):
        load(tmp_path, model)


def test_nodes_without_names_get_names_of_their_own(tmp_path: Path) -> None:
    model = small()
    node(model, "conv").name = ""
    node(model, "soft").name = "Conv_0"
    names = [each.name for each in load(tmp_path, model).nodes]
    assert len({*names}) == len(names) == len(NODES)


ODD = st.sampled_from(
    [-(1 << 63), -(1 << 31), -7, -1, 0, 1, 2, 3, 5, 100, 10**6, (1 << 31) - 1, 1 << 31, (1 << 63) - 1]
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_attributes_load_with_their_meaning_or_are_one_error(tmp_path: Path, data: st.DataObject) -> None:
    model = small()
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = data.draw(st.sampled_from(list(model.graph.node)))
        found = data.draw(st.sampled_from(list(chosen.attribute)))
        if found.type == found.INTS and data.draw(st.booleans()):
            del found.ints[:]
            found.ints.extend(data.draw(st.lists(ODD, max_size=5)))
        elif found.type == found.INTS and found.ints:
            found.ints[data.draw(st.integers(0, len(found.ints) - 1))] = data.draw(ODD)
        elif found.type == found.INT:
            found.i = data.draw(ODD)
        elif found.type == found.FLOAT:
            found.f = data.draw(st.floats(width=32))
        else:
            found.s = data.draw(st.binary(max_size=8))
    try:
        network = load(tmp_path, model)
        shapes = [shape for name, shape in network.shapes.items() if name not in network.constants]
        assert all(n is None or 0 < n < 1 << 31 for shape in shapes for n in shape)
        analyse(network)
    except NetworkError:
        pass
