"""Files as exporters write them: shapes computed in the graph, functions, open batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from d5suite.errors import NetworkError
from d5suite.network import Network
from d5suite.network.operators import MORE_OPERATORS, ZOO_OPERATORS
from d5suite.network.user_network import load_user_network
from d5suite.validate.network.oracle import NetworkOracle, inference

SIZE = (3, 8, 8)

CACHE = np.linspace(0, 1, 64).reshape(2, 8, 4)
"""Cosines of a rotation, by image, position and pair of channels."""


def _exported(path: Path, *, dynamic: bool) -> Path:
    """A network whose shapes PyTorch's older exporter computes in the graph."""
    torch = pytest.importorskip("torch")

    class Shuffling(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Conv2d(3, 12, 3, stride=2)
            self.norm = torch.nn.BatchNorm2d(12)
            self.last = torch.nn.Linear(108, 5)

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.norm(self.wide(x)))
            images, channels, height, width = x.size()
            x = x.view(images, 3, channels // 3, height, width).transpose(1, 2).reshape(images, channels, height, width)
            return self.last(x.view(images, -1))

    axes = {"x": {0: "N"}, "y": {0: "N"}} if dynamic else None
    torch.manual_seed(0)
    torch.onnx.export(
        Shuffling().eval(), (torch.zeros(2, *SIZE),), path, dynamo=False, opset_version=17, dynamic_axes=axes,
        input_names=["x"], output_names=["y"], training=torch.onnx.TrainingMode.PRESERVE,
    )  # fmt: skip
    return path


def _same_answer(path: Path, network: Network, images: int, size: tuple[int, ...] = SIZE) -> None:
    batch = np.random.default_rng(0).standard_normal((images, *size)).astype(np.float32)
    ours, _ = inference(network, batch, threads=1)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(ours, session.run(None, {session.get_inputs()[0].name: batch})[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_shapes_that_the_graph_computes_become_constants(tmp_path: Path, dynamic: bool) -> None:
    path = _exported(tmp_path / "net.onnx", dynamic=dynamic)
    network = Network.load(path)
    assert network.batch_size == (None if dynamic else 2)
    assert {node.op_type for node in network.nodes} == {
        "Conv", "BatchNormalization", "Relu", "Reshape", "Transpose", "Gemm"
    }  # fmt: skip
    assert len(network.parameters) == 6  # nothing is fused: what is trained stays
    _same_answer(path, network, 2)
    if dynamic:
        _same_answer(path, network, 7)


def _model(
    nodes: list[onnx.NodeProto], constants: Mapping[str, list[int]], axes: str = "NCHW", **more: Any
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "computed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"{a}_" for a in axes])],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def test_an_open_batch_that_only_a_reshape_sees_stays_open(tmp_path: Path) -> None:
    model = _model(
        [
            helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
            helper.make_node("Concat", ["n", "rest"], ["shape"], axis=0),
            helper.make_node("Reshape", ["x", "shape"], ["y"]),
        ],
        {"rest": [8, -1]},
        "NCX",
    )
    network = Network(model)
    assert [node.op_type for node in network.nodes] == ["Reshape"]
    assert network.initializers[network.nodes[0].inputs[1]].tolist() == [-1, 8, 24]
    onnx.save(model, tmp_path / "m.onnx")
    _same_answer(tmp_path / "m.onnx", network, 3)


def test_a_batch_that_the_graph_computes_with_can_be_fixed() -> None:
    model = _model(
        [
            helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
            helper.make_node("Concat", ["n", "rest"], ["shape"], axis=0),
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
            helper.make_node("Concat", ["zeros", "x"], ["y"], axis=1),
        ],
        {"rest": [1, 8, 8]},
    )
    assert "Shape" in {node.op_type for node in Network(model).nodes}
    network = Network(model, shapes={"x": (4, *SIZE)})
    assert [node.op_type for node in network.nodes] == ["Concat"]
    assert network.shapes["y"] == (4, 4, 8, 8)


def test_a_function_is_inlined() -> None:
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 21)]
    )
    network = Network(_model([helper.make_node("Twice", ["x"], ["y"], domain="local")], {}, functions=[function]))
    assert [node.op_type for node in network.nodes] == ["Add"]


def test_a_function_of_an_older_operator_set_is_inlined_with_its_defaults() -> None:
    """The version converter drops functions, and ONNX's inliner their attributes' defaults."""
    bent = helper.make_node("LeakyRelu", ["a"], ["b"])
    bent.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    opsets, slope = [helper.make_opsetid("", 13)], [helper.make_attribute("slope", 0.5)]
    inner = helper.make_function("local", "Bent", ["a"], ["b"], [bent], opsets, attribute_protos=slope)
    call = helper.make_node("Bent", ["a"], ["b"], domain="local")
    opsets = [*opsets, helper.make_opsetid("local", 1)]
    outer = helper.make_function("local", "Outer", ["a"], ["b"], [call], opsets)
    graph = helper.make_graph(
        [helper.make_node("Outer", ["x"], ["m"], domain="local"),
         helper.make_node("Bent", ["m"], ["y"], domain="local", slope=0.25)],
        "functions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, *SIZE])],
    )  # fmt: skip
    network = Network(helper.make_model(graph, opset_imports=opsets, functions=[inner, outer], ir_version=9))
    assert [(node.op_type, node.attributes["alpha"]) for node in network.nodes] == [
        ("LeakyRelu", 0.5),
        ("LeakyRelu", 0.25),
    ]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [({"z": (1, *SIZE)}, "no input 'z'"), ({"x": (1, 3, 8)}, "has shape"), ({"x": (1, 3, 8, 9)}, "has shape")],
)
def test_a_shape_that_does_not_fit_is_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        Network(_model([helper.make_node("Relu", ["x"], ["y"])], {}), shapes=shapes)


def test_a_split_and_one_row_of_a_gather_become_slices(tmp_path: Path) -> None:
    model = _model(
        [
            helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=-3),
            helper.make_node("Gather", ["b", "last"], ["row"], axis=2),
            helper.make_node("ReduceMean", ["a", "axis"], ["mean"], keepdims=0),
            helper.make_node("Add", ["row", "mean"], ["y"]),
        ],
        {"sizes": [2, 1], "axis": [2]},
        "NCW",
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(-1), "last"))
    network = Network(model)
    assert [node.op_type for node in network.nodes] == ["Slice", "Slice", "Slice", "Squeeze", "ReduceMean", "Add"]
    onnx.save(model, tmp_path / "m.onnx")
    _same_answer(tmp_path / "m.onnx", network, 2)


def test_statistics_that_an_exporter_wrote_once_are_not_shared() -> None:
    model = _model(
        [
            helper.make_node("BatchNormalization", ["x", "ones", "zeros", "zeros", "ones"], ["a"]),
            helper.make_node("BatchNormalization", ["a", "ones", "zeros", "zeros", "ones"], ["y"]),
        ],
        {},
    )
    for name, value in (("ones", np.ones(3, np.float32)), ("zeros", np.zeros(3, np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    network = Network(model)
    assert set(network.parameters) == {"ones", "zeros"}
    assert len(set(network.statistics)) == 4 and not {"ones", "zeros"} & set(network.statistics)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_shapes_of_an_attention_with_a_class_token_become_constants(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Attending(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.token = torch.nn.Parameter(torch.randn(1, 1, 8))
            self.project = torch.nn.Linear(8, 8)
            self.places = torch.nn.Parameter(torch.randn(1, 30, 8))

        def forward(self, x: Any) -> Any:
            x = x.view(x.size(0), 24, -1)
            x = torch.cat((self.token.expand(x.size(0), -1, -1), x), 1)
            x = x + self.places[:, : x.size(1)]
            y = self.project(x).view(x.size(0), x.size(1), 2, 4).transpose(1, 2)
            y = (torch.softmax(y @ y.transpose(-2, -1), -1) @ y).transpose(1, 2)
            return x + y.reshape(x.size(0), x.size(1), -1)

    torch.manual_seed(0)
    path, axes = tmp_path / "net.onnx", {"x": {0: "N"}, "y": {0: "N"}}
    torch.onnx.export(
        Attending().eval(), (torch.zeros(2, *SIZE),), path, dynamo=False, opset_version=17, dynamic_axes=axes,
        input_names=["x"], output_names=["y"],
    )  # fmt: skip
    network = Network.load(path)
    assert {"Equal", "Shape", "Where"}.isdisjoint(node.op_type for node in network.nodes)
    for images in (1, 2, 7):
        _same_answer(path, network, images)


@pytest.mark.parametrize(
    "cut",
    [
        helper.make_node("Slice", ["table", "n", "most"], ["part"], "from"),
        helper.make_node("Slice", ["table", "zero", "n"], ["part"], "up to"),
        helper.make_node("Gather", ["table", "n"], ["part"], "at"),
    ],
    ids=lambda node: node.name,
)
def test_a_place_in_a_table_that_an_open_batch_decides_needs_it(cut: onnx.NodeProto, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
        cut,
        helper.make_node("ReduceSum", ["part", "zero"], ["sum"]),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    model = _with_weights(_model(nodes, {"zero": [0], "most": [(1 << 63) - 1]}), table=_random(7, *SIZE))
    onnx.save(model, tmp_path / "m.onnx")
    network = load_user_network(tmp_path / "m.onnx", shapes={}, batch_size=3).network
    assert network.batch_size == 3
    _same_answer(tmp_path / "m.onnx", network, 3)


def test_sizes_are_found_from_the_end(tmp_path: Path) -> None:
    """By negative bounds and indices, in shapes that the graph puts together."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "fourth", "third"], ["n"]),
        helper.make_node("Slice", ["sizes", "second", "most"], ["image"]),
        helper.make_node("Slice", ["sizes", "last", "least", "zero", "last"], ["backwards"]),
        helper.make_node("Concat", ["image", "backwards"], ["all"], axis=0),  # 8, 8, 8, 8, 3, N
        helper.make_node("Gather", ["all", "places"], ["some"]),
        helper.make_node("Concat", ["n", "some"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    numbers = {"fourth": -4, "third": -3, "second": -2, "last": -1, "zero": 0, "most": 9, "least": -(1 << 63) + 1}
    constants = {name: [value] for name, value in numbers.items()} | {"places": [-3, 0, -2]}
    onnx.save(_model(nodes, constants), tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    assert [node.op_type for node in network.nodes] == ["Reshape"] and network.batch_size is None
    assert network.shapes["y"] == (None, 8, 8, 3)
    for images in (1, 3):
        _same_answer(tmp_path / "m.onnx", network, images)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.INT32, TensorProto.BOOL])
def test_an_expand_to_an_open_batch_takes_the_batch_of_an_input(tmp_path: Path, kind: int) -> None:
    row = numpy_helper.from_array(np.arange(3).astype(helper.tensor_dtype_to_np_dtype(kind)).reshape(1, 3, 1, 1), "row")
    model = _model(
        [
            helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
            helper.make_node("Concat", ["n", "rest"], ["shape"], axis=0),
            helper.make_node("Expand", ["row", "shape"], ["rows"]),
            helper.make_node("Expand", ["rows", "shape"], ["same"]),
            helper.make_node("Cast", ["same"], ["y"], to=TensorProto.FLOAT),
        ],
        {"rest": [3, 2, 1]},
    )
    model.graph.initializer.append(row)
    onnx.save(model, tmp_path / "m.onnx")
    network = Network(model)
    assert "Shape" not in {node.op_type for node in network.nodes}
    _same_answer(tmp_path / "m.onnx", network, 3)
    (rows,), _ = inference(network, np.full((1, *SIZE), np.nan, np.float32), threads=1)
    assert np.isfinite(rows).all()


def test_an_open_size_equal_to_a_number_is_not_decided() -> None:
    model = _model(
        [
            helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
            helper.make_node("Equal", ["n", "one"], ["is_one"]),
            helper.make_node("Where", ["is_one", "two", "n"], ["times"]),
            helper.make_node("Concat", ["times", "rest"], ["shape"], axis=0),
            helper.make_node("Expand", ["row", "shape"], ["y"]),
        ],
        {"one": [1], "two": [2], "rest": [3, 2, 1]},
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "row"))
    assert "Equal" in {node.op_type for node in Network(model).nodes}


@pytest.mark.parametrize(
    ("operator", "constants", "attributes"),
    [
        ("MeanVarianceNormalization", {}, {}),
        ("Celu", {}, {"alpha": 2.0}),
        ("Shrink", {}, {"bias": 0.1}),
        ("Swish", {}, {}),
        ("ReduceLogSum", {"axes": np.array([1])}, {}),
        ("RotaryEmbedding", {"cos": np.ones((50, 4)), "sin": np.ones((50, 4)), "at": np.arange(16).reshape(2, 8)}, {}),
        ("RotaryEmbedding", {"cos": CACHE, "sin": 1 - CACHE}, {}),
        ("RotaryEmbedding", {"cos": CACHE, "sin": 1 - CACHE}, {"interleaved": 1}),
        ("RotaryEmbedding", {"cos": CACHE[..., :2], "sin": 1 - CACHE[..., :2]}, {"rotary_embedding_dim": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_operator_that_no_framework_has_becomes_onnxs_function(
    operator: str, constants: dict[str, np.ndarray], attributes: dict[str, Any]
) -> None:
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", *constants], ["y"], **attributes)],
        operator,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "C", "H", "W"])],
        [
            numpy_helper.from_array(value.astype(np.float32) if value.dtype == np.float64 else value, name)
            for name, value in constants.items()
        ],
    )
    version = max(21, onnx.defs.get_schema(operator).since_version)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=11)
    network = Network(model)
    assert {node.op_type for node in network.nodes} <= ZOO_OPERATORS | MORE_OPERATORS
    x = np.abs(np.random.default_rng(0).standard_normal((2, *SIZE))).astype(np.float32)
    answer, _ = NetworkOracle(network, training=False).run(x)
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(answer, np.asarray(expected)[0], rtol=1e-5, atol=1e-6)


def test_an_infinite_value_of_a_mask_is_no_weight(tmp_path: Path) -> None:
    """PyTorch's older exporter writes the infinity of a masked softmax as a vector of one."""
    nodes = [
        helper.make_node("Log", ["zero"], ["infinity"]),
        helper.make_node("Greater", ["x", "bound"], ["kept"]),
        helper.make_node("Where", ["kept", "x", "infinity"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["y"], axis=-1),
    ]
    model = _model(nodes, {})
    for key in ("zero", "bound"):
        model.graph.initializer.append(numpy_helper.from_array(np.array([0 if key == "zero" else -3], np.float32), key))
    path = tmp_path / "masked.onnx"
    onnx.save(model, path)
    network = Network.load(path)
    assert "infinity" in network.constants and network.parameters == ("bound",)
    _same_answer(path, network, 2)


def test_a_mask_of_minus_infinity_is_no_weight_and_a_bias_with_one_is_refused(tmp_path: Path) -> None:
    """Exporters write causal masks and distances so, added to attention's scores."""
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1) + np.arange(8, dtype=np.float32)
    for operator, inputs in (("Add", ["x", "mask"]), ("MatMul", ["x", "mask"])):
        model = _model(
            [helper.make_node(operator, inputs, ["scores"]), helper.make_node("Softmax", ["scores"], ["y"])], {}
        )
        model.graph.initializer.append(numpy_helper.from_array(mask, "mask"))
        onnx.save(model, tmp_path / f"{operator}.onnx")
    network = Network.load(tmp_path / "Add.onnx")
    assert network.constants == ("mask",) and network.parameters == ()
    _same_answer(tmp_path / "Add.onnx", network, 2)
    with pytest.raises(NetworkError, match="28 of 64 values of initializer 'mask' are NaN or infinite"):
        Network.load(tmp_path / "MatMul.onnx")


@pytest.mark.parametrize("axes", [2, 3])
def test_a_conditional_on_a_shape_becomes_the_branch_taken(tmp_path: Path, axes: int) -> None:
    """PyTorch's older exporter asks so whether to squeeze an axis; branches read the outside."""
    branches = {}
    for kind, operator in (("then", "Relu"), ("else", "Neg")):
        nodes = [helper.make_node(operator, ["twice"], ["inner"]), helper.make_node("Add", ["inner", "one"], [kind])]
        output = helper.make_tensor_value_info(kind, TensorProto.FLOAT, None)
        one = numpy_helper.from_array(np.array(1, np.float32), "one")
        branches[f"{kind}_branch"] = helper.make_graph(nodes, kind, [], [output], [one])
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"]),
        helper.make_node("Shape", ["twice"], ["shape"]),
        helper.make_node("Size", ["shape"], ["rank"]),
        helper.make_node("Greater", ["rank", "axes"], ["more"]),
        helper.make_node("If", ["more"], ["first"], **branches),
        helper.make_node("If", ["more"], ["second"], **branches),
        helper.make_node("Mul", ["first", "second"], ["y"]),
    ]
    model = _model(nodes, {})
    model.graph.initializer.append(numpy_helper.from_array(np.array(axes + 1), "axes"))
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    taken = "Relu" if axes == 2 else "Neg"
    assert [node.op_type for node in network.nodes if node.op_type in ("If", "Relu", "Neg")] == [taken, taken]
    _same_answer(tmp_path / "m.onnx", network, 2)


@pytest.mark.parametrize("shape", [[], [1]], ids=["scalar", "vector"])
def test_an_axis_may_be_a_scalar_or_a_vector_of_one(tmp_path: Path, shape: list[int]) -> None:
    """PyTorch's older exporter writes CumSum's as a vector, its newer one all as scalars."""
    nodes = [
        helper.make_node("ReduceMax", ["x", "axis"], ["most"]),
        helper.make_node("Sub", ["x", "most"], ["below"]),
        helper.make_node("CumSum", ["below", "axis"], ["sum"]),
        helper.make_node("Unsqueeze", ["sum", "axis"], ["y"]),
    ]
    for file, sizes in (("given", shape), ("vectors", [1])):
        model = _model(nodes, {}, axes="NXCHW")
        model.graph.initializer.append(numpy_helper.from_array(np.ones(sizes, np.int64), "axis"))
        onnx.save(model, tmp_path / f"{file}.onnx")
    network = Network.load(tmp_path / "given.onnx")
    ranks = {node.op_type: network.initializers[node.inputs[1]].ndim for node in network.nodes if node.op_type != "Sub"}
    assert ranks == {"ReduceMax": 1, "CumSum": 0, "Unsqueeze": 1}
    _same_answer(tmp_path / "vectors.onnx", network, 2)


def test_a_batch_norm_with_computed_statistics_has_none_of_its_own(tmp_path: Path) -> None:
    """PyTorch's newer exporter writes a layer so that keeps no running statistics."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
        helper.make_node("ReduceL2", ["x", "axes"], ["variance"], keepdims=0),
        helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "variance"], ["y"], epsilon=1e-3),
    ]
    model = _model(nodes, {"axes": [0, 2, 3]})
    for name in ("scale", "bias"):
        value = np.arange(1, 4, dtype=np.float32) * (1 if name == "scale" else -1)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    assert network.statistics == () and network.parameters == ("scale", "bias")
    _same_answer(tmp_path / "m.onnx", network, 2)


@pytest.mark.parametrize("outputs", [["z", "m", "r"], ["z", "m"], ["z", "", "r"]], ids="".join)
def test_what_a_layer_norm_says_of_its_input_is_read(tmp_path: Path, outputs: list[str]) -> None:
    nodes = [helper.make_node("LayerNormalization", ["x", "scale"], outputs, axis=2, epsilon=0.1)]
    for number, name in enumerate(filter(None, outputs[1:])):
        nodes.append(helper.make_node("Mul", [nodes[-1].output[0], name], [f"z{number}"]))
    nodes.append(helper.make_node("Relu", [nodes[-1].output[0]], ["y"]))
    model = _model(nodes, {})
    scale = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(8, 8)
    model.graph.initializer.append(numpy_helper.from_array(scale, "scale"))
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    assert network.parameters == ("scale",)
    _same_answer(tmp_path / "m.onnx", network, 2)


@pytest.mark.parametrize("operator", ["AveragePool", "MaxPool"])
def test_a_window_larger_than_its_image_is_cut_in_ceil_mode(tmp_path: Path, operator: str) -> None:
    """EfficientNet of `transformers` pools by a window as large as it has channels."""
    node = helper.make_node(operator, ["x"], ["y"], kernel_shape=[20, 5], strides=[20, 2], ceil_mode=1)
    onnx.save(_model([node], {}), tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    assert network.nodes[0].attributes["kernel_shape"] == [8, 5]
    _same_answer(tmp_path / "m.onnx", network, 2)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_an_rnn_is_written_step_by_step(tmp_path: Path, direction: str) -> None:
    """Adapters have LSTM and GRU; the simplest recurrence is three nodes per step."""
    random, both = np.random.default_rng(0), 2 if direction == "bidirectional" else 1
    weights = {"w": (both, 5, 8), "r": (both, 5, 5), "b": (both, 10), "start": (both, 8, 5)}
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["steps"]),
        helper.make_node("RNN", ["steps", *list(weights)[:3], "", "start"], ["all", "last"], hidden_size=5,
                         direction=direction, activations=["Relu", "Tanh"][:both]),
        helper.make_node("ReduceMax", ["all", "rows"], ["most"], keepdims=0),
        helper.make_node("Mul", ["most", "last"], ["y"]),
    ]  # fmt: skip
    model = _model(nodes, {"shape": [-1, 8, 8], "rows": [0]}, axes="DNH")
    for name, shape in weights.items():
        value = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx", shapes={"x": (2, *SIZE)})
    assert set(network.parameters) == set(weights) and "RNN" not in {node.op_type for node in network.nodes}
    _same_answer(tmp_path / "m.onnx", network, 2)


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("size", [[2, 3, 4, 5], [2, 3, 2, 4, 5]], ids=["image", "volume"])
def test_a_grid_of_points_is_a_product_with_theta(tmp_path: Path, corners: int, size: list[int]) -> None:
    """Spatial transformers compute where to look so; theta is the input's first rows."""
    rank = len(size) - 2
    nodes = [
        helper.make_node("Slice", ["x", "zeros", "shape", "axes"], ["cut"]),
        helper.make_node("Squeeze", ["cut", "first"], ["theta"]),
        helper.make_node("AffineGrid", ["theta", "size"], ["y"], align_corners=corners),
    ]
    constants = {"zeros": [0, 0, 0], "shape": [1, rank, rank + 1], "axes": [1, 2, 3], "first": [1], "size": size}
    model = _model(nodes, constants, axes="NDHWX" if rank == 3 else "NHWX")
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    assert network.parameters == () and "AffineGrid" not in {node.op_type for node in network.nodes}
    _same_answer(tmp_path / "m.onnx", network, 2)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("operator", [("Upsample", 9), ("Resize", 10)], ids=lambda value: value[0])
@pytest.mark.parametrize("scale", [2.0, 1.5, 0.6])
def test_an_image_resized_as_in_old_operator_sets_is_the_same(
    tmp_path: Path, operator: tuple[str, int], mode: str, scale: float
) -> None:
    """ONNX's converter makes another operator of it, with other coordinates."""
    kind, version = operator
    if scale < 1 and kind == "Upsample":
        pytest.skip("Upsample only enlarges (ONNX, operator set 9)")
    tall = scale if scale < 1 else 2.0
    scales = numpy_helper.from_array(np.array([1, 1, tall, scale], np.float32), "scales")
    inputs: dict[str, list[Any]] = {"x": ["N", *SIZE], "scales": [4]}
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", "scales"], ["y"], mode=mode)],
        kind,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
         for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3, int(8 * tall), int(8 * scale)])],
        [scales],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=4)
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    assert [node.op_type for node in network.nodes] == ["Resize"] and network.parameters == ()
    _same_answer(tmp_path / "m.onnx", network, 2)


def test_positions_of_tokens_times_positions_of_sequences_have_shapes(tmp_path: Path) -> None:
    """PyTorch's older exporter writes a mask so; ONNX's inference adds the values as vectors."""
    axes = {"first": [1, 2, 3], "second": [0, 2, 3]}
    nodes = [
        *(helper.make_node("Unsqueeze", [f"{name}.range", name], [f"{name}.places"]) for name in axes),
        helper.make_node("Add", ["first.places", "second.places"], ["places"]),
        helper.make_node("Cast", ["places"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "number"], ["y"]),
    ]
    ranges = [
        helper.make_node("Range", [f"{name}.start", f"{name}.stop", f"{name}.step"], [f"{name}.range"]) for name in axes
    ]
    model = _model([*ranges, *nodes], axes)
    for name, stop in (("first", 2), ("second", 3)):
        for key, value in (("start", 0), ("stop", stop), ("step", 1)):
            model.graph.initializer.append(numpy_helper.from_array(np.array(value), f"{name}.{key}"))
    onnx.save(model, tmp_path / "m.onnx")
    _same_answer(tmp_path / "m.onnx", Network.load(tmp_path / "m.onnx"), 2)


def test_further_outputs_of_a_recurrence_are_read_and_its_zero_states_are_no_parameters(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    weights = {
        "w": generator.standard_normal((1, 16, 8)), "r": generator.standard_normal((1, 16, 4)),
        "h": np.zeros((1, 8, 4)), "c": generator.standard_normal((1, 8, 4)),
    }  # fmt: skip
    model = _model(
        [
            helper.make_node("Reshape", ["x", "steps"], ["sequence"]),
            helper.make_node("LSTM", ["sequence", "w", "r", "", "", "h", "c"], ["", "last"], hidden_size=4),
            helper.make_node("Reshape", ["last", "image"], ["y"]),
        ],
        {"steps": [-1, 8, 8], "image": [1, 1, 8, 4]},
    )
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items())
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx", shapes={"x": (2, *SIZE)})
    assert set(network.parameters) == {"w", "r", "c"}
    _same_answer(tmp_path / "m.onnx", network, 2)


@pytest.mark.parametrize("version", [9, 13])
def test_a_graph_in_tf2onnxs_style_loads(tmp_path: Path, version: int) -> None:
    """Images with channels last between transposes, and sizes by Shape, Slice and Concat."""
    generator = np.random.default_rng(0)
    kernel = generator.standard_normal((4, 3, 3, 3)).astype(np.float32)
    dense = generator.standard_normal((4, 5)).astype(np.float32)
    node = helper.make_node
    squeezed: dict[str, Any] = {"axes": [0]} if version < 13 else {}
    axis = ["zero"] if version >= 13 else []
    up = node("Upsample", ["first", "scales"], ["up"], mode="nearest") if version == 9 else node(
        "Resize", ["first", "", "scales"], ["up"], mode="nearest", coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )  # fmt: skip
    mean = node("ReduceMean", ["last"], ["mean"], axes=[1, 2], keepdims=0)
    nodes = [
        node("Transpose", ["x"], ["nhwc"], perm=[0, 2, 3, 1]),
        node("Transpose", ["nhwc"], ["nchw"], perm=[0, 3, 1, 2]),
        node("Conv", ["nchw", "kernel"], ["conv"], auto_pad="SAME_UPPER", strides=[2, 2]),
        node("Transpose", ["conv"], ["back"], perm=[0, 2, 3, 1]),
        node("Relu", ["back"], ["relu"]),
        node("Transpose", ["relu"], ["first"], perm=[0, 3, 1, 2]),
        up,
        node("Transpose", ["up"], ["last"], perm=[0, 2, 3, 1]),
        mean,
        node("Shape", ["mean"], ["shape"]),
        node("Cast", ["shape"], ["shape32"], to=TensorProto.INT32),
        node("Slice", ["shape32"], ["batch"], axes=[0], starts=[0], ends=[1]) if version == 9
        else node("Slice", ["shape32", "zero", "one", "zero"], ["batch"]),
        node("Squeeze", ["batch", *axis], ["scalar"], **squeezed),
        node("Unsqueeze", ["scalar", *axis], ["n"], **squeezed),
        node("Concat", ["n", "four"], ["wanted32"], axis=0),
        node("Cast", ["wanted32"], ["wanted"], to=TensorProto.INT64),
        node("Reshape", ["mean", "wanted"], ["rows"]),
        node("MatMul", ["rows", "dense"], ["product"]),
        node("Add", ["product", "bias"], ["y"]),
    ]  # fmt: skip
    arrays = {
        "kernel": kernel, "dense": dense, "bias": dense[0] * 0 + 1, "scales": np.array([1, 1, 2, 2], np.float32),
        "four": np.array([4], np.int32), "zero": np.array([0]), "one": np.array([1]),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes, "tf2onnx", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["unk__1", *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["unk__2", 5])],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=7)
    onnx.save(model, tmp_path / "m.onnx")
    network = Network.load(tmp_path / "m.onnx")
    assert network.batch_size is None and set(network.parameters) == {"kernel", "dense", "bias"}
    assert {"Cast", "Concat", "Shape", "Slice"}.isdisjoint(each.op_type for each in network.nodes)
    for images in (1, 3):
        _same_answer(tmp_path / "m.onnx", network, images)


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
def test_what_keras_exports_loads(framework: str) -> None:
    """Files of ``model.export(…, format="onnx")`` of Keras 3.15: by tf2onnx 1.17, and by PyTorch.

    Strided, depthwise and 1×1 convolutions with channels last, BatchNormalization, ReLU6, a gate,
    pooling, UpSampling2D, Flatten and Dense, random weights; the former has LayerNormalization and
    swish, the latter GELU.
    """
    path = Path(__file__).parent / "exported" / f"keras_{framework}.onnx"
    network = Network.load(path)
    assert network.batch_size is None
    for images in (1, 3):
        _same_answer(path, network, images, (32, 32, 3))


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _with_weights(model: onnx.ModelProto, **weights: np.ndarray) -> onnx.ModelProto:
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


@pytest.mark.parametrize("version", [9, 14])
def test_a_file_exported_in_training_mode_is_inference(version: int) -> None:
    """As PyTorch's ``TrainingMode.TRAINING`` writes it: the batch's statistics, values dropped."""
    training: dict[str, Any] = {"training_mode": 1} if version > 9 else {}
    outputs = ["n", "m2", "v2"] if version > 9 else ["n"]
    nodes = [helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], outputs, **training)]
    if version > 9:
        nodes.append(helper.make_node("Dropout", ["n", "half", "yes"], ["y"]))
    else:
        nodes.append(helper.make_node("Dropout", ["n"], ["y"], ratio=0.5))
    vectors = {name: _random(3) for name in "sbm"}
    model = _with_weights(_model(nodes, {}), v=_random(3) ** 2, **vectors)
    model.graph.initializer.extend(
        [numpy_helper.from_array(np.array(0.5, np.float32), "half"), numpy_helper.from_array(np.array(True), "yes")]
    )
    model.opset_import[0].version = version
    model.ir_version = 8
    network = Network(model)
    batch = _random(2, *SIZE)
    s, b, m, v = (network.initializers[name].reshape(3, 1, 1) for name in "sbmv")
    expected = (batch - m) / np.sqrt(v + 1e-5) * s + b
    np.testing.assert_allclose(inference(network, batch, threads=1)[0], expected, rtol=1e-4, atol=1e-5)
    assert network.statistics == ("m", "v")


def test_statistics_of_a_batch_that_are_read_are_refused() -> None:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n", "m2", "v2"], "norm", training_mode=1),
        helper.make_node("ReduceMax", ["m2"], ["top"], keepdims=0),
        helper.make_node("Mul", ["n", "top"], ["y"]),
    ]
    model = _with_weights(_model(nodes, {}), **{name: _random(3) ** 2 for name in "sbmv"})
    with pytest.raises(NetworkError, match=r"BatchNormalization: its statistics .*'m2'.*\n.*evaluation mode"):
        Network(model)


@pytest.mark.parametrize("axis", [None, 1, 2, 3, -2])
def test_a_hardmax_of_an_old_operator_set_goes_over_all_further_axes(tmp_path: Path, axis: int | None) -> None:
    """ONNX's converter takes its own axis only."""
    stated: dict[str, Any] = {} if axis is None else {"axis": axis}
    node = helper.make_node("Hardmax", ["x"], ["y"], **stated)
    model = _model([node], {})
    model.opset_import[0].version = 11
    model.ir_version = 6
    onnx.save(model, tmp_path / "m.onnx")
    _same_answer(tmp_path / "m.onnx", Network.load(tmp_path / "m.onnx"), 2)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_constants_of_a_normalization_are_no_parameters(scale: float) -> None:
    constants = {"scale": np.full(3, scale, np.float32), "bias": np.zeros(3, np.float32)}
    nodes = [
        *(
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))
            for name, value in constants.items()
        ),
        helper.make_node("Conv", ["image", "kernel"], ["wide"]),
        helper.make_node("InstanceNormalization", ["wide", "scale", "bias"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "grouped",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", *SIZE])],
        [numpy_helper.from_array(np.ones((3, 3, 1, 1), np.float32), "kernel")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert Network(model).parameters == ("kernel",)


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_a_graph_cuts_by_computed_sizes_stay_parameters(tmp_path: Path) -> None:
    """PyTorch's older exporter cuts attention's projections apart by sizes that it computes."""
    pytest.importorskip("torch")
    import torch

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
            self.head = torch.nn.Linear(16, 5)

        def forward(self, tokens: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.layer(tokens, memory)[:, 0])
            return scores

    network, tokens = Decoder().eval(), torch.randn(2, 6, 16)
    path = tmp_path / "decoder.onnx"
    names = ["tokens", "memory"]
    torch.onnx.export(
        network, (tokens, tokens.flip(1)), path, dynamo=False, opset_version=17, input_names=names,
        dynamic_axes={name: {0: "N"} for name in names},
    )  # fmt: skip
    read = Network.load(path)
    assert sum(read.initializers[name].size for name in read.parameters) == sum(p.numel() for p in network.parameters())


def _same_as_onnxruntime(path: Path, model: onnx.ModelProto) -> Network:
    onnx.save(model, path)
    network = Network.load(path)
    _same_answer(path, network, 2)
    return network


@pytest.mark.parametrize("version", [18, 20])
def test_a_normalization_of_groups_with_a_scale_per_group(tmp_path: Path, version: int) -> None:
    graph = helper.make_graph(
        [helper.make_node("Concat", ["x", "x"], ["wide"], axis=1),
         helper.make_node("GroupNormalization", ["wide", "scale", "bias"], ["y"], num_groups=2, epsilon=0.1)],
        "groups",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 6, 8, 8])],
        [numpy_helper.from_array(_random(2), name) for name in ("scale", "bias")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
    assert set(_same_as_onnxruntime(tmp_path / "m.onnx", model).parameters) == {"scale", "bias"}


def test_a_clip_with_a_computed_bound(tmp_path: Path) -> None:
    model = _model(
        [
            helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
            helper.make_node("Mul", ["most", "half"], ["high"]),
            helper.make_node("Neg", ["high"], ["low"]),
            helper.make_node("Clip", ["x", "low"], ["a"]),
            helper.make_node("Clip", ["a", "", "high"], ["b"]),
            helper.make_node("Clip", ["b", "low", "high"], ["c"]),
            helper.make_node("Mul", ["c", "half"], ["y"]),
        ],
        {},
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    network = _same_as_onnxruntime(tmp_path / "m.onnx", model)
    assert [n.op_type for n in network.nodes if n.op_type in ("Max", "Min")] == ["Max", "Min", "Max", "Min"]


@pytest.mark.parametrize("scale", [1.5, 0.6])
def test_pixels_of_tensorflows_nearest_neighbour(tmp_path: Path, scale: float) -> None:
    """tf2onnx writes these coordinates below operator set 13, which has them no more."""
    settings = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor", "mode": "nearest"}
    scales = [np.zeros(0, np.float32), np.array([1, 1, scale, scale], np.float32)]
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "region", "scales"], ["y"], **settings)],
        "nearest",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3, int(8 * scale), int(8 * scale)])],
        [numpy_helper.from_array(value, name) for value, name in zip(scales, ("region", "scales"), strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=7)
    _same_as_onnxruntime(tmp_path / "m.onnx", model)


def test_onnxs_own_domain_by_its_other_name() -> None:
    model = _model([helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")], {})
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("ai.onnx", 17), helper.make_opsetid("", 17)])
    assert [node.op_type for node in Network(model).nodes] == ["Relu"]


def test_a_conditional_in_a_function_is_decided(tmp_path: Path) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(kind, ["a"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )
        for name, kind in (("then", "Neg"), ("else", "Abs"))
    }
    function = helper.make_function(
        "local", "Sign", ["a"], ["b"],
        [
            helper.make_node("Shape", ["a"], ["sizes"]),
            helper.make_node("Size", ["sizes"], ["rank"]),
            helper.make_node("Constant", [], ["four"], value_int=4),
            helper.make_node("Equal", ["rank", "four"], ["image"]),
            helper.make_node("If", ["image"], ["b"], **branches),
        ],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    model = _model([helper.make_node("Sign", ["x"], ["y"], domain="local")], {}, functions=[function])
    network = _same_as_onnxruntime(tmp_path / "m.onnx", model)
    assert [node.op_type for node in network.nodes if node.op_type != "Identity"] == ["Neg"]


def test_what_an_exporter_made_among_the_weights_is_no_parameter() -> None:
    """PyTorch's newer exporter keeps the ones and zeros that it folds as initializers."""
    arrays = {
        "kernel": _random(3, 3, 1, 1), "ones": np.ones(1, np.float32), "zeros": np.zeros(1, np.float32),
        "base": np.zeros(SIZE, np.float32), "own": np.ones(3, np.float32), "shift": np.zeros(3, np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["wide"]),
        helper.make_node("InstanceNormalization", ["wide", "own", "shift"], ["layer"]),
        helper.make_node("Reshape", ["layer", "groups"], ["apart"]),
        helper.make_node("InstanceNormalization", ["apart", "ones", "zeros"], ["normal"]),
        helper.make_node("Reshape", ["normal", "sizes"], ["together"]),
        helper.make_node("ReduceMean", ["together"], ["image"], axes=[0], keepdims=0),
        helper.make_node("Gather", ["image", "channels"], ["rows"]),
        helper.make_node("ScatterND", ["base", "places", "rows"], ["filled"]),
        helper.make_node("Add", ["together", "filled"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", *SIZE])],
        [
            *(numpy_helper.from_array(value, name) for name, value in arrays.items()),
            *(numpy_helper.from_array(np.array(value), name) for name, value in
              (("groups", [0, 1, -1]), ("sizes", [-1, *SIZE]), ("channels", [1, 2]), ("places", [[0], [2]]))),
        ],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert set(Network(model).parameters) == {"kernel", "own", "shift"}
