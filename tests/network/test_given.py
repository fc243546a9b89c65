"""A user's own network: its loss, and what its inputs may hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.errors import ConfigurationError, NetworkError
from d5suite.network.given import load_given, parse_shapes, ranges
from d5suite.validate.network.oracle import Oracle

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
    network = load_given(_text(tmp_path), shapes={}, batch_size=2).network
    assert network.inputs == ("ids", "kinds_of", "attention_mask")
    assert ranges(network) == {"ids": (0, 50), "kinds_of": (0, 2), "attention_mask": (1, 2)}


def test_the_loss_takes_the_first_output_of_class_scores(tmp_path: Path) -> None:
    given = load_given(_text(tmp_path), shapes={}, batch_size=2)
    assert not given.untrainable
    network = given.network
    assert network.output == "scores" and network.outputs == ("features", "scores")
    assert network.loss is not None and network.batch_size is None


def test_an_output_that_no_loss_fits_is_named(tmp_path: Path) -> None:
    weight = np.ones((2, 3), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y0"]), helper.make_node("ReduceSum", ["y0", "one"], ["y"])]
    given = load_given(_save(tmp_path, nodes, [("x", FLOAT, [2, 5, 4, 2])], [("y", FLOAT, [2, 1, 4, 3])], w=weight,
                             one=np.array([1])), shapes={}, batch_size=8)  # fmt: skip
    assert given.untrainable.endswith("or scores of classes per token or pixel: y (2, 1, 4, 3)")
    assert given.network.loss is None and given.network.batch_size == 2


def test_inputs_without_a_common_batch_are_one_sample(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["c"]), helper.make_node("Add", ["c", "w"], ["y"])]
    path = _save(tmp_path, nodes, [("a", FLOAT, [2, 5]), ("b", FLOAT, [5, 3])], [("y", FLOAT, [2, 3])],
                 w=np.ones(3, np.float32))  # fmt: skip
    given = load_given(path, shapes={}, batch_size=8)
    assert "no common first axis" in given.untrainable
    assert given.network.batch_size == 1
    batch = np.zeros(1, [("a", np.float32, (2, 5)), ("b", np.float32, (5, 3))])
    assert {name: each.shape for name, each in given.network.arrays(batch).items()} == {"a": (2, 5), "b": (5, 3)}


def test_open_dimensions_must_be_stated(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = _save(tmp_path, nodes, [("x", FLOAT, ["N", "T"])], [("y", FLOAT, ["N", "T"])])
    with pytest.raises(NetworkError, match=r"input 'x' has shape \(\?, \?\).*\n.*--shape x=NxN"):
        load_given(path, shapes={}, batch_size=4)
    assert load_given(path, shapes={"x": (3, 6)}, batch_size=4).network.batch_size == 3
    with pytest.raises(NetworkError, match="no input 'z'"):
        load_given(path, shapes={"x": (3, 6), "z": (1,)}, batch_size=4)


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
    network = load_given(_save(tmp_path, nodes, [inputs], [("y", FLOAT, output)], **weights),
                         shapes={}, batch_size=2).network  # fmt: skip
    cells = [n for place, n in enumerate(output) if place not in (0, axis)]
    assert network.shapes["label"] == (None, *cells)
    drawn = generator.integers(0, 11, (2, 7)) if inputs[0] == "ids" else generator.standard_normal((2, *inputs[2][1:]))
    arrays = drawn if inputs[0] == "ids" else drawn.astype(np.float32)
    labels = generator.integers(0, 5, (2, *cells))
    scores = np.moveaxis(Oracle(network, training=False).run(arrays)[0], axis, -1)
    chosen = np.take_along_axis(scores, labels[..., None], -1)[..., 0]
    expected = np.mean(np.log(np.exp(scores).sum(-1)) - chosen)
    assert float(Oracle(network, training=True).run(arrays, labels)[0]) == pytest.approx(float(expected), rel=1e-12)
