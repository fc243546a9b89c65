"""A user's own network: its loss, and what its inputs may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.backends import backend
from d5suite.errors import ConfigurationError, NetworkError, ValidationError
from d5suite.network import Network
from d5suite.network.analysis import analyse
from d5suite.network.user_network import input_ranges, load_user_network, parse_shapes
from d5suite.testing.networks import random_batch, regressor
from d5suite.testing.subject import difference
from d5suite.validate.network.gradient import check_gradient_float64
from d5suite.validate.network.inference import check_inference, check_reading
from d5suite.validate.network.oracle import NetworkOracle, inferences

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def _save(folder: Path, nodes: list[onnx.NodeProto], inputs: list, outputs: list, **weights: np.ndarray) -> Path:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "given", [info(*each) for each in inputs], [info(*each) for each in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    path = folder / "given.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def _text(folder: Path) -> Path:
    """Ids of tokens and of their kinds, and a mask, to features and scores."""
    node = helper.make_node
    nodes = [
        node("Gather", ["words", "ids"], ["w"], "words_at"),
        node("Unsqueeze", ["kinds_of", "one"], ["k1"]),
        node("Squeeze", ["k1", "one"], ["k2"]),
        node("Gather", ["kinds", "k2"], ["k"]),
        node("Add", ["w", "k"], ["e"]),
        node("Cast", ["attention_mask"], ["m"], to=FLOAT),
        node("Unsqueeze", ["m", "two"], ["m3"]),
        node("Mul", ["e", "m3"], ["features"]),
        node("ReduceMean", ["features", "one"], ["pooled"], keepdims=0),
        node("Gemm", ["pooled", "head"], ["scores"]),
    ]
    inputs = [("ids", INT64, ["N", 7]), ("kinds_of", INT64, ["N", 7]), ("attention_mask", INT64, ["N", 7])]
    outputs = [("features", FLOAT, ["N", 7, 4]), ("scores", FLOAT, ["N", 3])]
    generator = np.random.default_rng(0)
    tables = {name: generator.standard_normal((rows, 4), np.float32) for name, rows in (("words", 50), ("kinds", 2))}
    head = generator.standard_normal((4, 3), np.float32)
    return _save(folder, nodes, inputs, outputs, **tables, head=head, one=np.array([1]), two=np.array([2]))


def test_integers_index_the_tables_they_are_looked_up_in_and_masks_are_ones(tmp_path: Path) -> None:
    network = load_user_network(_text(tmp_path), shapes={}, batch_size=2).network
    assert network.inputs == ("ids", "kinds_of", "attention_mask")
    assert input_ranges(network) == {"ids": (0, 50), "kinds_of": (0, 2), "attention_mask": (1, 2)}
    model = onnx.load(tmp_path / "given.onnx")
    model.graph.input[2].name = next(n for n in model.graph.node if n.op_type == "Cast").input[0] = "src_padding_mask"
    assert input_ranges(Network(model))["src_padding_mask"] == (0, 1)


def test_the_loss_takes_the_first_output_of_class_scores(tmp_path: Path) -> None:
    given = load_user_network(_text(tmp_path), shapes={}, batch_size=2)
    assert not given.untrainable
    network = given.network
    assert network.output == "scores" and network.outputs == ("features", "scores")
    assert network.loss is not None and network.batch_size is None


def test_an_output_without_classes_is_compared_with_targets(tmp_path: Path) -> None:
    weight = np.ones((2, 3), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y0"]), helper.make_node("ReduceSum", ["y0", "one"], ["y"])]
    path = _save(
        tmp_path, nodes, [("x", FLOAT, [2, 5, 4, 2])], [("y", FLOAT, [2, 1, 4, 3])], w=weight, one=np.array([1])
    )
    given = load_user_network(path, shapes={}, batch_size=8)
    assert given.loss == "squared error of y" and not given.untrainable and given.network.batch_size == 2
    assert given.network.has_targets and given.network.shapes["label"] == (2, 1, 4, 3)


def test_inputs_without_a_common_batch_are_one_sample(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["c"]), helper.make_node("Add", ["c", "w"], ["y"])]
    path = _save(tmp_path, nodes, [("a", FLOAT, [2, 5]), ("b", FLOAT, [5, 3])], [("y", FLOAT, [2, 3])],
                 w=np.ones(3, np.float32))  # fmt: skip
    given = load_user_network(path, shapes={}, batch_size=8)
    assert given.loss == "squared error of y" and given.network.shapes["label"] == (1, 6)
    assert given.network.batch_size == 1
    batch = np.zeros(1, [("a", np.float32, (2, 5)), ("b", np.float32, (5, 3))])
    assert {name: each.shape for name, each in given.network.arrays(batch).items()} == {"a": (2, 5), "b": (5, 3)}


def test_open_dimensions_must_be_stated(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", "T"])], [("y", FLOAT, ["N", "T"])])
    with pytest.raises(NetworkError, match=r"input 'x' has shape \(\?, \?\).*\n.*--shape x=NxN"):
        load_user_network(path, shapes={}, batch_size=4)
    assert load_user_network(path, shapes={"x": (3, 6)}, batch_size=4).network.batch_size == 3
    with pytest.raises(NetworkError, match="no input 'z'"):
        load_user_network(path, shapes={"x": (3, 6), "z": (1,)}, batch_size=4)


def test_shapes_are_read() -> None:
    assert parse_shapes(["a=1x3x224x224", "b=c=7"]) == {"a": (1, 3, 224, 224), "b=c": (7,)}
    for wrong in ("a", "a=", "=3", "a=3x", "a=0x2", "a=-1", "a=3,4", "a=٣", "a=99999999999"):
        with pytest.raises(ConfigurationError, match="not an input with its dimensions"):
            parse_shapes([wrong])
    with pytest.raises(ConfigurationError, match="two shapes"):
        parse_shapes(["a=1", "a=2"])


@pytest.mark.parametrize(
    ("inputs", "output", "axis"),
    [
        (("ids", INT64, ["N", 7]), ["N", 7, 5], 2),
        (("signal", FLOAT, ["N", 3, 7]), ["N", 5, 7], 1),
        (("image", FLOAT, ["N", 3, 8, 6]), ["N", 5, 4, 3], 1),
    ],
)
def test_an_output_that_scores_every_token_or_pixel_has_a_label_for_each(
    tmp_path: Path, inputs: tuple[str, int, list], output: list, axis: int
) -> None:
    node, generator = helper.make_node, np.random.default_rng(0)
    table = generator.standard_normal((11, 5), np.float32)
    kernel = generator.standard_normal((5, 3, *([1] * (len(output) - 2))), np.float32)
    steps = [2] * (len(output) - 2) if inputs[0] == "image" else [1] * (len(output) - 2)
    nodes = (
        [node("Gather", ["table", "ids"], ["y"])]
        if inputs[0] == "ids"
        else [node("Conv", [inputs[0], "kernel"], ["y"], strides=steps)]
    )
    weights = {"table": table} if inputs[0] == "ids" else {"kernel": kernel}
    network = load_user_network(_save(tmp_path, nodes, [inputs], [("y", FLOAT, output)], **weights),
                         shapes={}, batch_size=2).network  # fmt: skip
    cells = [n for place, n in enumerate(output) if place not in (0, axis)]
    assert network.shapes["label"] == (None, *cells)
    drawn = generator.integers(0, 11, (2, 7)) if inputs[0] == "ids" else generator.standard_normal((2, *inputs[2][1:]))
    arrays = drawn if inputs[0] == "ids" else drawn.astype(np.float32)
    labels = generator.integers(0, 5, (2, *cells))
    scores = np.moveaxis(NetworkOracle(network, training=False).run(arrays)[0], axis, -1)
    chosen = np.take_along_axis(scores, labels[..., None], -1)[..., 0]
    expected = np.mean(np.log(np.exp(scores).sum(-1)) - chosen)
    assert float(NetworkOracle(network, training=True).run(arrays, labels)[0]) == pytest.approx(
        float(expected), rel=1e-12
    )


HEAD = np.random.default_rng(0).standard_normal((4, 3), np.float32)
BATCH = np.random.default_rng(1).standard_normal((4, 4), np.float32)


def test_a_scalar_output_has_no_loss(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("ReduceSum", ["m"], ["y"], keepdims=0)]
    given = load_user_network(_save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, [])], w=HEAD),
                       shapes={}, batch_size=4)  # fmt: skip
    assert given.untrainable == "no output has the batch as its first axis, and other axes that are known: y ()"
    assert given.network.loss is None and not given.loss


def detector(folder: Path) -> Path:
    """A map of an image, boxes of a batch of them, their number, and rows that are no samples."""
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "kernel"], ["filtered"], pads=[1, 1, 1, 1]),
        node("Reshape", ["filtered", "pixels"], ["map"]),
        node("Reshape", ["map", "cells"], ["boxes"]),
        node("Reshape", ["map", "rows"], ["all_boxes"]),
        node("ArgMax", ["map"], ["best"], axis=1),
    ]
    outputs = [("all_boxes", FLOAT, ["M", 4]), ("best", INT64, ["N", 1, 16]), ("map", FLOAT, ["N", 8, 16]),
               ("boxes", FLOAT, ["N", 32, 4])]  # fmt: skip
    kernel = np.random.default_rng(0).standard_normal((8, 3, 3, 3), np.float32)
    return _save(folder, nodes, [("image", FLOAT, ["N", 3, 4, 4])], outputs, kernel=kernel,
                 pixels=np.array([0, 8, 16]), cells=np.array([0, 32, 4]), rows=np.array([-1, 4]))  # fmt: skip


def test_all_outputs_of_whole_samples_are_compared_with_targets(tmp_path: Path) -> None:
    """Rows that are no samples have no batch; to fix its size tells them apart."""
    given = load_user_network(detector(tmp_path), shapes={}, batch_size=3)
    network = given.network
    assert given.loss == "squared error of map, boxes" and network.outputs[0] == "all_boxes"
    assert network.batch_size == 3 and network.shapes["label"] == (3, 128 + 128)
    generator = np.random.default_rng(1)
    images = generator.standard_normal((3, 3, 4, 4)).astype(np.float32)
    targets = generator.standard_normal((3, 256)).astype(np.float32)
    ((found,), _) = inferences(network, [images], threads=1)
    joined = np.concatenate([found["map"].reshape(3, -1), found["boxes"].reshape(3, -1)], 1)
    loss = NetworkOracle(network, training=True).run(images, targets)[0]
    assert float(loss) == pytest.approx(np.mean(np.square(joined - targets, dtype=np.float64)), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_squared_error_is_computed_in_float32(precision: str) -> None:
    """In 16 bits a square of 300 is infinite, and a loss has two or three digits."""
    pytest.importorskip("torch")
    network = regressor("map", "features")
    images, targets = random_batch(network)
    executor = backend("torch").executor(network, mode="eager", device="cpu", precision=precision)
    found = executor.fetch(executor.forward(executor.feed({"image": images})))
    joined = np.concatenate([found["map"].reshape(6, -1), found["features"]], 1).astype(np.float64)
    far = np.float32(256) + 8 * np.round(8 * targets)  # a number of every precision
    loss = difference(executor, images, far)["loss"]
    assert float(loss) == pytest.approx(np.mean((joined - far) ** 2), rel=1e-5)


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("", lambda right: right),
        ("ReduceMean", lambda right: lambda node, context: lambda x: x.sum()),
        ("Sub", lambda right: lambda node, context: lambda x, target: x - target.flip(0)),
        ("Mul", lambda right: lambda node, context: lambda x, _: x.abs()),
        ("Cast", lambda right: lambda node, context: lambda x: right(node, context)(x).round(decimals=2)),
    ],
)
def test_another_loss_than_the_squared_error_is_caught(
    operator: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum for the mean, another target, another power, rounded values."""
    pytest.importorskip("torch")
    operators = backend("torch").load("operators").OPERATORS
    if operator:
        monkeypatch.setitem(operators, operator, wrong(operators[operator]))
    network = regressor("map", "features")
    executor = backend("torch").executor(network, mode="eager", device="cpu", precision="fp64")
    checks = check_gradient_float64(executor, *random_batch(network))
    assert checks[0].name.startswith("loss ") and checks[0].passed == (not operator)
    assert all(check.passed for check in checks) == (not operator)


def test_an_output_that_is_a_constant_is_written_by_a_node(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Constant", [], ["c"], value_floats=[1.0] * 3)]
    nodes += [node("Add", ["c", "c"], ["d"]), node("Expand", ["d", "shape"], ["z"])]
    outputs = [("y", FLOAT, ["N", 3]), ("z", FLOAT, [2, 3])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], outputs, w=HEAD, shape=np.array([2, 3]))
    network = load_user_network(path, shapes={}, batch_size=4).network
    written = {name for node in network.nodes for name in node.outputs}
    assert {"y", "z"} <= written and network.parameters == ("w",)
    ((found,), _) = inferences(network, [BATCH], threads=1)
    np.testing.assert_array_equal(found["z"], np.full((2, 3), 2))


@pytest.mark.parametrize("operator", ["Size", "Split"])
def test_sizes_and_parts_of_an_open_batch_wait_for_its_size(tmp_path: Path, operator: str) -> None:
    node = helper.make_node
    nodes = [node("Size", ["x"], ["n"]), node("Cast", ["n"], ["f"], to=FLOAT), node("Div", ["x", "f"], ["y"])]
    if operator == "Split":
        nodes = [node("Split", ["x"], ["a", "b"], axis=0, num_outputs=2), node("Add", ["a", "b"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["M", 4])])
    network = load_user_network(path, shapes={}, batch_size=4).network
    assert operator not in {each.op_type for each in network.nodes} and network.shapes["x"] == (4, 4)


@pytest.mark.parametrize("kind", [FLOAT, TensorProto.DOUBLE])
def test_float64_files_are_read_as_float32(tmp_path: Path, kind: int) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("MatMul", ["wide", "w"], ["m"]),
        helper.make_node("Add", ["m", "least"], ["y"]),
    ]
    least = np.array([0, 1, np.finfo(np.float64).min])
    path = _save(tmp_path, nodes, [("x", kind, ["N", 4])], [("y", TensorProto.DOUBLE, ["N", 3])],
                 w=HEAD.astype(np.float64), least=least)  # fmt: skip
    network = load_user_network(path, shapes={}, batch_size=4).network
    assert {network.dtypes[name] for name in ("x", "w", "y")} == {np.dtype(np.float32)}
    ((found,), _) = inferences(network, [BATCH], threads=1)
    np.testing.assert_allclose(found["y"][:, :2], (BATCH @ HEAD + [0, 1, 0])[:, :2], rtol=1e-5)
    assert np.isfinite(found["y"]).all()


def test_an_operator_set_that_says_nothing_new_is_named_as_the_older_one(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 3])], w=HEAD)
    model = onnx.load(path)
    model.opset_import[0].version = onnx.defs.onnx_opset_version()
    onnx.save(model, path)
    network = Network.load(path)
    assert network.model.opset_import[0].version == 21
    assert inferences(network, [BATCH], threads=1)[1] == "onnxruntime"


def test_an_input_with_an_axis_of_0_says_how_to_state_it(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, [0, 4])], [("y", FLOAT, [0, 3])], w=HEAD)
    with pytest.raises(NetworkError, match=r"is empty\n.*--shape x=Nx4"):
        load_user_network(path, shapes={}, batch_size=4)
    assert load_user_network(path, shapes={"x": (2, 4)}, batch_size=4).network.batch_size == 2


def test_onnxruntime_is_fed_the_weights_of_a_large_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend, too: a model of 2 GiB cannot be serialized."""
    pytest.importorskip("onnxruntime")
    weight = np.random.default_rng(0).standard_normal((4, 1000), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 1000])], w=weight)
    module = backend("onnxruntime").load("network")
    monkeypatch.setattr(module, "LARGE", 0)
    executor = module.Executor(Network.load(path), mode="all", device="cpu", precision="fp32")
    assert check_inference(executor, BATCH, tolerance=1e-5, threads=1)[0].passed
    assert list(executor._fed) == ["w"]


def test_what_is_read_is_held_to_the_file(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 3])], w=HEAD)
    network = Network.load(path)
    assert check_reading(path, network, BATCH, threads=1) == ""
    other = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 3])], w=HEAD * 1.001)
    wrong = load_user_network(other, shapes={}, batch_size=4).network
    _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 3])], w=HEAD)
    with pytest.raises(ValidationError, match=r"d5suite reads the network wrongly: output 'y' is off by 0\.001"):
        check_reading(path, wrong, BATCH, threads=1)


def test_a_file_in_16_bits_is_not_compared(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], ["y"], to=FLOAT),
    ]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 4])])
    assert check_reading(path, Network.load(path), BATCH, threads=1) == "the file computes in 16 bits"


def test_a_network_that_is_not_finite_itself_is_to_blame(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = _save(tmp_path, [helper.make_node("Sqrt", ["x"], ["y"])], [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 4])])
    network = Network.load(path)
    executor = backend("onnxruntime").load("network").Executor(network, mode="all", device="cpu", precision="fp32")
    for check in (
        lambda: check_inference(executor, BATCH, tolerance=1e-5, threads=1),
        lambda: check_reading(path, network, BATCH, threads=1),
    ):
        with pytest.raises(NetworkError, match="the network's own output 'y' is not finite"):
            check()


def test_constants_of_the_code_are_no_parameters(tmp_path: Path) -> None:
    """Positions, zeros and windows that exporters write as nodes; PyTorch has no weights there."""
    node = helper.make_node
    nodes = [
        node("Range", ["zero", "four", "one"], ["places"]),
        node("Cast", ["places"], ["positions"], to=FLOAT),
        node("Cos", ["positions"], ["waves"]),
        node("ConstantOfShape", ["shape"], ["zeros"]),
        node("Constant", [], ["window"], value_floats=[1.0, 2.0, 3.0, 4.0]),
        node("Add", ["x", "waves"], ["a"]),
        node("Mul", ["a", "window"], ["b"]),
        node("Concat", ["b", "zeros"], ["c"], axis=0),
        node("Transpose", ["kernel"], ["turned"]),
        node("MatMul", ["c", "turned"], ["m"]),
        node("Neg", ["bias"], ["negative"]),
        node("Add", ["m", "negative"], ["y"]),
    ]
    numbers = {name: np.array(value) for name, value in (("zero", 0), ("four", 4), ("one", 1))}
    path = _save(tmp_path, nodes, [("x", FLOAT, [2, 4])], [("y", FLOAT, [3, 3])],
                 kernel=HEAD.T.copy(), bias=HEAD[0], shape=np.array([1, 4]), **numbers)  # fmt: skip
    network = Network.load(path)
    assert set(network.parameters) == {"turned", "bias"}
    assert Network(network.model).parameters == network.parameters  # and after a rewrite
    assert check_reading(path, network, BATCH[:2], threads=1) == ""


def test_constants_are_weights_where_a_file_has_no_others(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(HEAD))
    path = _save(tmp_path, [constant, helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", FLOAT, ["N", 4])],
                 [("y", FLOAT, ["N", 3])])  # fmt: skip
    assert Network.load(path).parameters == ("w",)


def test_what_is_computed_from_weights_is_no_other_weight(tmp_path: Path) -> None:
    """A table looked up at fixed places, a kernel that is standardised: training changes both."""
    node, random = helper.make_node, np.random.default_rng(0)
    nodes = [
        node("Gather", ["table", "places"], ["looked"]),
        node("ReduceMean", ["kernel", "one"], ["mean"]),
        node("Sub", ["kernel", "mean"], ["centred"]),
        node("Transpose", ["centred"], ["turned"], perm=[1, 0]),
        node("Add", ["x", "looked"], ["a"]),
        node("MatMul", ["a", "turned"], ["y"]),
    ]
    given = {"table": random.standard_normal((7, 4), np.float32), "kernel": random.standard_normal((3, 4), np.float32)}
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 3, 4])], [("y", FLOAT, ["N", 3, 3])], **given,
                 places=np.array([0, 2, 2]), one=np.array([1]))  # fmt: skip
    assert Network.load(path).parameters == ("table", "kernel")


def test_a_weight_that_several_turn_stays_one(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("Transpose", ["kernel"], ["one"], perm=[1, 0]),
        node("Transpose", ["kernel"], ["two"], perm=[1, 0]),
        node("Sub", ["one", "bias"], ["shifted"]),
        node("MatMul", ["x", "shifted"], ["m"]),
        node("Mul", ["m", "m"], ["squared"]),
        node("MatMul", ["squared", "two"], ["y"]),
    ]
    kernel, bias = np.random.default_rng(0).standard_normal((4, 4), np.float32), np.ones(4, np.float32)
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 4])], kernel=kernel, bias=bias)
    assert set(Network.load(path).parameters) == {"kernel", "bias"}


@pytest.mark.parametrize("uniform", [False, True])
def test_a_head_that_is_the_embedding_written_again_is_tied(tmp_path: Path, uniform: bool) -> None:
    node, table = helper.make_node, np.random.default_rng(0).standard_normal((7, 4), np.float32)
    table = np.ones_like(table) if uniform else table  # those of two layers are alike by chance
    nodes = [node("Gather", ["table", "ids"], ["e"]), node("MatMul", ["e", "head"], ["y"])]
    path = _save(tmp_path, nodes, [("ids", TensorProto.INT64, ["N", 5])], [("y", FLOAT, ["N", 5, 7])],
                 table=table, head=table.T.copy())  # fmt: skip
    assert set(Network.load(path).parameters) == ({"table", "head"} if uniform else {"table"})


def test_pytorchs_newer_exporter_says_what_its_parameters_are(tmp_path: Path) -> None:
    signature = "\n# inputs\np_scale: PARAMETER target='m.scale'\nb_wave: BUFFER target='m.wave' persistent=False\n"
    nodes = [
        helper.make_node("Mul", ["x", "turned"], ["a"]),
        helper.make_node("Add", ["a", "m.wave"], ["b"]),
        helper.make_node("Add", ["b", "unsqueeze_1"], ["y"]),
    ]
    weights = {name: np.arange(4, dtype=np.float32) + 1 for name in ("turned", "m.wave", "unsqueeze_1")}
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 4])], **weights)
    assert set(Network.load(path).parameters) == set(weights)
    model = onnx.load(path)
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    for name, sources in (("turned", "['m.scale']"), ("unsqueeze_1", "['arange', 'm.wave']")):
        value = helper.make_tensor_value_info(name, FLOAT, [4])
        value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=sources)
        model.graph.value_info.append(value)
    onnx.save(model, path)
    assert Network.load(path).parameters == ("turned",)


@pytest.mark.parametrize("axes", [["N", 5], [4, 5], [4]])
def test_a_head_that_is_tied_to_the_embedding_is_one_parameter(tmp_path: Path, axes: list) -> None:
    node, table = helper.make_node, np.random.default_rng(0).standard_normal((7, 4), np.float32)
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        node("MatMul", ["e", "turned"], ["y"]),
    ]
    path = _save(tmp_path, nodes, [("ids", INT64, axes)], [("y", FLOAT, [*axes, 7])], table=table)
    network = load_user_network(path, shapes={}, batch_size=4).network
    assert network.parameters == ("table",)
    batch = np.random.default_rng(0).integers(0, 7, (4, *axes[1:]))
    assert check_reading(path, network, batch, threads=1) == ""


def test_a_class_token_of_a_known_batch_is_one_parameter(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Expand", ["token", "shape"], ["tokens"]),
        helper.make_node("Concat", ["tokens", "x"], ["all"], axis=1),
        helper.make_node("MatMul", ["all", "w"], ["y"]),
    ]
    token = np.random.default_rng(0).standard_normal((1, 1, 4), np.float32)
    path = _save(tmp_path, nodes, [("x", FLOAT, [4, 2, 4])], [("y", FLOAT, [4, 3, 3])],
                 w=HEAD, token=token, shape=np.array([4, 1, 4]))  # fmt: skip
    network = load_user_network(path, shapes={}, batch_size=4).network
    assert sum(network.initializers[name].size for name in network.parameters) == HEAD.size + 4
    batch = np.random.default_rng(0).standard_normal((4, 2, 4), np.float32)
    assert check_reading(path, network, batch, threads=1) == ""


@pytest.mark.parametrize("operator", ["Cast", "Concat", "Mul", "Tile"])
def test_a_mask_of_minus_infinity_is_no_weight(tmp_path: Path, operator: str) -> None:
    node = helper.make_node
    reader = {
        "Cast": node("Cast", ["mask"], ["m"], to=FLOAT),
        "Concat": node("Concat", ["mask", "x"], ["m"], axis=0),
        "Mul": node("Mul", ["mask", "x"], ["m"]),
        "Tile": node("Tile", ["mask", "twice"], ["m"]),
    }[operator]
    mask = np.array([[0, -np.inf, 0, -np.inf]], np.float32)
    path = _save(tmp_path, [reader, node("Max", ["m", "x"], ["y"])], [("x", FLOAT, [1, 4])], [("y", FLOAT, ["M", 4])],
                 mask=mask, twice=np.array([2, 1]))  # fmt: skip
    assert Network.load(path).parameters == ()


def _saved(folder: Path, node: onnx.NodeProto, shape: list, **weights: np.ndarray) -> Path:
    return _save(folder, [node], [("x", FLOAT, shape)], [("y", FLOAT, None)], **weights)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Gather", ["x", "last"], ["y"], "last", axis=0),
        helper.make_node("Slice", ["x", "zero", "one"], ["y"], "first"),
        helper.make_node("Slice", ["x", "zero", "one", "axis"], ["y"], "first by axis"),
        helper.make_node("Pad", ["x", "more"], ["y"], "padded", mode="edge"),
    ],
    ids=lambda node: node.name,
)
def test_a_part_of_an_open_first_axis_needs_its_size(tmp_path: Path, node: onnx.NodeProto) -> None:
    every = {
        "last": np.array(-1), "zero": np.array([0]), "one": np.array([1]), "axis": np.array([-2]),
        "more": np.array([1, 0, 0, 0]),
    }  # fmt: skip
    path = _saved(tmp_path, node, ["N", 4], **{name: value for name, value in every.items() if name in node.input})
    network = load_user_network(path, shapes={}, batch_size=3).network
    assert network.batch_size == 3
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    executor = backend("torch").executor(network)
    y = executor.fetch(executor.forward(executor.feed({"x": x})))["y"]
    assert y.tolist() == {"last": x[-1], "padded": x[[0, 0, 1, 2]]}.get(node.name, x[:1]).tolist()


def test_a_part_of_another_axis_leaves_the_batch_open(tmp_path: Path) -> None:
    node = helper.make_node("Slice", ["x", "zero", "one", "axis"], ["y"], "columns")
    path = _saved(tmp_path, node, ["N", 4], zero=np.array([0]), one=np.array([1]), axis=np.array([1]))
    assert load_user_network(path, shapes={}, batch_size=3).network.batch_size is None


def test_a_batch_that_was_opened_afterwards_is_open_everywhere(tmp_path: Path) -> None:
    """The usual recipe: the input's first dimension is given a name, and all other shapes stay."""
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, [1, 4])], [("y", FLOAT, [1, 5])], w=np.ones((4, 5), np.float32))
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    assert model.graph.value_info
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(model, path)
    given = load_user_network(path, shapes={}, batch_size=2)
    assert given.network.shapes["y"] == (None, 5) and not given.untrainable


@pytest.mark.parametrize("taken", ["label", "loss"])
def test_a_tensor_may_be_called_label_or_loss(tmp_path: Path, taken: str) -> None:
    nodes = [helper.make_node("Relu", ["x"], [taken]), helper.make_node("MatMul", [taken, "w"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", 4])], [("y", FLOAT, ["N", 5])], w=np.ones((4, 5), np.float32))
    network = load_user_network(path, shapes={}, batch_size=2).network
    label, loss = network.require_loss()
    assert {label, loss} == {f"d5suite.{name}" if name == taken else name for name in ("label", "loss")}
    executor = backend("torch").executor(network)
    feed = {"x": np.ones((2, 4), np.float32), label: np.array([0, 1])}
    assert executor.fetch(executor.forward_backward(executor.feed(feed)))[loss] == pytest.approx(np.log(5))


def test_a_third_of_an_image_is_every_third_pixel(tmp_path: Path) -> None:
    """As PyTorch exports it and onnxruntime reads it: in float64, 1 / float32(1/3) is below 3."""
    node = helper.make_node(
        "Resize", ["x", "", "scales"], ["y"], "third", mode="nearest", nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )  # fmt: skip
    scales = np.array([1, 1, 1 / 3], np.float32)
    network = load_user_network(_saved(tmp_path, node, [1, 1, 12], scales=scales), shapes={}, batch_size=1).network
    executor = backend("torch").executor(network)
    x = np.arange(12, dtype=np.float32).reshape(1, 1, 12)
    assert executor.fetch(executor.forward(executor.feed({"x": x})))["y"].ravel().tolist() == [0, 3, 6, 9]


def test_a_batch_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    """Video networks split the batch into clips of several frames."""
    nodes = [
        helper.make_node("Reshape", ["x", "clips"], ["c"]),
        helper.make_node("ReduceMean", ["c", "one"], ["y"], keepdims=0),
    ]
    path = _save(
        tmp_path, nodes, [("x", FLOAT, ["N", 5])], [("y", FLOAT, [None, 5])], clips=np.array([-1, 4, 5]),
        one=np.array([1]),
    )  # fmt: skip
    network = Network.load(path)
    assert analyse(network, batch_size=8).macs >= 0
    with pytest.raises(NetworkError, match="do not fit a batch of 1"):
        analyse(network, batch_size=1)
