"""TensorFlow's adapter against ONNX's reference evaluator, NumPy and finite differences."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from d5suite.backends.tensorflow import BACKEND
from d5suite.errors import NetworkError, UnsupportedOperatorError
from d5suite.levels.network import Executor
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.graph import node_of
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD, AdamW, Optimizer, RMSProp
from d5suite.validate.training.trajectory import train, train_by_formula
from tests.conftest import require_installed

require_installed("tensorflow")


@pytest.fixture(scope="module", autouse=True)
def _configured() -> None:
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.random.set_seed(0)


def one_node(
    operator: str,
    shapes: list[tuple[int, ...]],
    constants: Mapping[int, np.ndarray] | None = None,
    *,
    prologue: bool = False,
    **attributes: Any,
) -> Network:
    """Return a network of one operator: its first input is the image, the others constants or
    random.

    With a prologue, a 1×1 convolution brings the image into the layout that TensorFlow stores
    images in.
    """
    rng = np.random.default_rng(1)
    names = ["x"]
    initializers: list[TensorProto] = []
    nodes: list[onnx.NodeProto] = []
    if prologue:
        names = ["image"]
        channels = shapes[0][1]
        weight = rng.standard_normal((channels, channels) + (1,) * (len(shapes[0]) - 2)).astype(np.float32)
        initializers.append(numpy_helper.from_array(weight, "prologue"))
        nodes.append(helper.make_node("Conv", ["x", "prologue"], ["image"]))
    for i in range(1, len(shapes) + len(constants or {})):
        constant = (constants or {}).get(i)
        value = rng.standard_normal(shapes.pop(1)).astype(np.float32) if constant is None else constant
        if operator == "BatchNormalization" and i == 4:
            value = np.abs(value) + np.float32(0.5)
        names.append(f"p{i}" if value.size else "")
        if value.size:
            initializers.append(numpy_helper.from_array(value, names[-1]))
    nodes.append(helper.make_node(operator, names, ["y"], **attributes))
    graph = helper.make_graph(
        nodes,
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shapes[0])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return Network(onnx.shape_inference.infer_shapes(model), input="x", output="y")


def reference(network: Network, x: np.ndarray) -> np.ndarray:
    """Return the output in float64."""
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    outputs = ReferenceEvaluator(model).run([network.output], {network.input: x.astype(np.float64)})
    return np.asarray(next(iter(outputs)))


def relative(answer: np.ndarray, wanted: np.ndarray) -> float:
    assert answer.shape == wanted.shape
    return float(np.linalg.norm(answer.astype(np.float64) - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


NONE = np.zeros(0, np.float32)
IMAGE = (2, 4, 7, 6)

# ONNX's evaluator of LRN (1.23) skips channels beyond the batch size: use as many images as
# channels.
CASES: dict[str, tuple[str, list[tuple[int, ...]], dict[int, np.ndarray], dict[str, Any]]] = {
    "conv": ("Conv", [IMAGE, (5, 4, 3, 3), (5,)], {}, {"pads": [1, 1, 1, 1]}),
    "conv strided, uneven pads": ("Conv", [IMAGE, (5, 4, 3, 2)], {}, {"pads": [0, 1, 2, 0], "strides": [2, 3]}),
    "conv same upper": ("Conv", [IMAGE, (5, 4, 3, 3)], {}, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "conv same lower": ("Conv", [IMAGE, (5, 4, 4, 4)], {}, {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "conv grouped": ("Conv", [IMAGE, (6, 2, 3, 3), (6,)], {}, {"group": 2, "pads": [1, 0, 1, 1]}),
    "conv depthwise": ("Conv", [IMAGE, (8, 1, 3, 3), (8,)], {}, {"group": 4, "pads": [1, 1, 0, 1], "strides": [2, 2]}),
    "conv depthwise, two strides": ("Conv", [IMAGE, (4, 1, 3, 3)], {}, {"group": 4, "strides": [2, 1]}),
    "conv depthwise dilated": ("Conv", [IMAGE, (4, 1, 3, 3)], {}, {"group": 4, "dilations": [2, 2], "pads": [1] * 4}),
    "conv dilated": ("Conv", [IMAGE, (5, 4, 3, 2)], {}, {"dilations": [2, 3], "pads": [2, 0, 1, 2], "strides": [2, 1]}),
    "conv grouped dilated": ("Conv", [IMAGE, (6, 2, 2, 2)], {}, {"group": 2, "dilations": [2, 1]}),
    "conv 1-D": ("Conv", [(2, 4, 9), (6, 2, 3), (6,)], {}, {"group": 2, "pads": [2, 1], "strides": [2]}),
    "conv 1-D dilated": ("Conv", [(2, 4, 9), (6, 4, 3)], {}, {"dilations": [2]}),
    "conv 3-D": (
        "Conv", [(1, 2, 5, 4, 6), (3, 2, 2, 3, 3), (3,)], {},
        {"pads": [1, 0, 1, 0, 1, 1], "strides": [1, 2, 1]},
    ),
    "conv 3-D grouped": ("Conv", [(1, 4, 5, 4, 6), (4, 2, 2, 3, 3)], {}, {"group": 2, "dilations": [2, 1, 2]}),
    "max pool": ("MaxPool", [IMAGE], {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max pool uneven": ("MaxPool", [IMAGE], {}, {"kernel_shape": [3, 2], "strides": [1, 2], "pads": [0, 1, 2, 0]}),
    "max pool ceil": ("MaxPool", [IMAGE], {}, {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
    "max pool dilated": (
        "MaxPool", [IMAGE], {},
        {"kernel_shape": [2, 2], "dilations": [3, 2], "pads": [1] * 4, "strides": [2, 1]},
    ),
    "max pool 1-D": ("MaxPool", [(2, 3, 9)], {}, {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    "max pool 3-D": (
        "MaxPool", [(1, 2, 5, 4, 6)], {},
        {"kernel_shape": [2, 2, 3], "strides": [2, 1, 2], "pads": [1, 0, 1, 0, 1, 1]},
    ),
    "average pool": ("AveragePool", [IMAGE], {}, {"kernel_shape": [3, 3], "strides": [2, 2]}),
    "average pool padded": ("AveragePool", [IMAGE], {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "average pool uneven": (
        "AveragePool", [IMAGE], {},
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [0, 1, 1, 0]},
    ),
    "average pool same": (
        "AveragePool", [IMAGE], {},
        {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
    ),
    "average pool with pad": (
        "AveragePool", [IMAGE], {},
        {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1},
    ),
    "average pool ceil": ("AveragePool", [IMAGE], {}, {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
    "average pool ceil with pad": (
        "AveragePool", [IMAGE], {},
        {"kernel_shape": [3, 3], "strides": [3, 2], "pads": [1, 1, 0, 1], "ceil_mode": 1, "count_include_pad": 1},
    ),
    "average pool 3-D": ("AveragePool", [(1, 2, 5, 4, 6)], {}, {"kernel_shape": [2, 2, 2], "pads": [0, 0, 1, 0, 1, 0]}),
    "global average pool": ("GlobalAveragePool", [IMAGE], {}, {}),
    "global max pool": ("GlobalMaxPool", [IMAGE], {}, {}),
    "batch norm": ("BatchNormalization", [IMAGE, (4,), (4,), (4,), (4,)], {}, {"epsilon": 1e-3}),
    "batch norm 3-D": ("BatchNormalization", [(2, 4, 3, 2, 3), (4,), (4,), (4,), (4,)], {}, {}),
    "batch norm matrix": ("BatchNormalization", [(5, 4), (4,), (4,), (4,), (4,)], {}, {}),
    "lrn": ("LRN", [(7, 7, 3, 4)], {}, {"size": 5, "alpha": 0.3, "beta": 0.6, "bias": 1.5}),
    "lrn even": ("LRN", [(7, 7, 3, 4)], {}, {"size": 4, "alpha": 0.3}),
    "relu": ("Relu", [IMAGE], {}, {}),
    "leaky relu": ("LeakyRelu", [IMAGE], {}, {"alpha": 0.3}),
    "sigmoid": ("Sigmoid", [IMAGE], {}, {}),
    "tanh": ("Tanh", [IMAGE], {}, {}),
    "identity": ("Identity", [IMAGE], {}, {}),
    "dropout": ("Dropout", [IMAGE], {1: scalar(0.5)}, {}),
    "clip": ("Clip", [IMAGE], {1: scalar(-0.5), 2: scalar(0.7)}, {}),
    "clip above": ("Clip", [IMAGE], {1: NONE, 2: scalar(0.7)}, {}),
    "add same": ("Add", [IMAGE, IMAGE], {}, {}),
    "add per channel": ("Add", [IMAGE, (4, 1, 1)], {}, {}),
    "sub row": ("Sub", [IMAGE, (6,)], {}, {}),
    "mul per pixel": ("Mul", [IMAGE, (7, 6)], {}, {}),
    "mul one": ("Mul", [IMAGE], {1: scalar(1.5)}, {}),
    "div batch": ("Div", [IMAGE, (2, 1, 1, 6)], {}, {}),
    "mul wider": ("Mul", [(4, 3), (2, 1, 4, 1)], {}, {}),
    "sum": ("Sum", [IMAGE, (4, 1, 1), (7, 6)], {}, {}),
    "sum same": ("Sum", [IMAGE, IMAGE, IMAGE], {}, {}),
    "concat channels": ("Concat", [IMAGE, (2, 3, 7, 6), (2, 1, 7, 6)], {}, {"axis": 1}),
    "concat last": ("Concat", [IMAGE, (2, 4, 7, 2)], {}, {"axis": -1}),
    "softmax": ("Softmax", [(3, 5)], {}, {}),
    "softmax channels": ("Softmax", [IMAGE], {}, {"axis": 1}),
    "log softmax": ("LogSoftmax", [IMAGE], {}, {"axis": -2}),
    "flatten": ("Flatten", [IMAGE], {}, {}),
    "flatten axis 2": ("Flatten", [IMAGE], {}, {"axis": 2}),
    "flatten axis 0": ("Flatten", [IMAGE], {}, {"axis": 0}),
    "flatten negative": ("Flatten", [IMAGE], {}, {"axis": -1}),
    "reshape": ("Reshape", [IMAGE], {1: integers(0, -1, 6)}, {}),
    "reshape split channels": ("Reshape", [IMAGE], {1: integers(0, 2, 2, 7, 6)}, {}),
    "reshape flat": ("Reshape", [IMAGE], {1: integers(-1, 12)}, {}),
    "transpose": ("Transpose", [IMAGE], {}, {"perm": [2, 0, 3, 1]}),
    "transpose reversed": ("Transpose", [IMAGE], {}, {}),
    "squeeze": ("Squeeze", [(2, 1, 3, 1)], {1: integers(1)}, {}),
    "squeeze all": ("Squeeze", [(2, 1, 3, 1)], {}, {}),
    "squeeze negative": ("Squeeze", [(2, 1, 3, 1)], {1: integers(-1, 1)}, {}),
    "unsqueeze": ("Unsqueeze", [IMAGE], {1: integers(0, -1)}, {}),
    "pad": ("Pad", [IMAGE], {1: integers(0, 1, 2, 0, 1, 0, 0, 3), 2: scalar(0.5)}, {}),
    "pad axes": ("Pad", [IMAGE], {1: integers(1, 2, 0, 3), 2: NONE, 3: integers(1, -1)}, {}),
    "gemm": ("Gemm", [(3, 5), (5, 4), (4,)], {}, {}),
    "gemm transposed": ("Gemm", [(5, 3), (4, 5), (4,)], {}, {"transA": 1, "transB": 1}),
    "gemm scaled": ("Gemm", [(3, 5), (5, 4), (3, 1)], {}, {"alpha": 0.5, "beta": 2.0}),
    "gemm without bias": ("Gemm", [(3, 5), (4, 5)], {}, {"transB": 1}),
    "matmul": ("MatMul", [(2, 3, 5), (5, 4)], {}, {}),
    "matmul of images": ("MatMul", [(2, 1, 17, 5), (5, 4)], {}, {}),
    "matmul vector": ("MatMul", [(2, 3, 5), (5,)], {}, {}),
    "matmul vector left": ("MatMul", [(5,), (2, 5, 3)], {}, {}),
}  # fmt: skip


def case_network(name: str, *, prologue: bool = False) -> Network:
    operator, shapes, constants, attributes = CASES[name]
    return one_node(operator, list(shapes), constants, prologue=prologue, **attributes)


@pytest.mark.parametrize("name", CASES)
def test_operator_equals_the_onnx_reference(name: str) -> None:
    shape = CASES[name][1][0]
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    for prologue in (False, True) if 3 <= len(shape) <= 5 else (False,):
        network = case_network(name, prologue=prologue)
        executor = BACKEND.executor(network, mode="eager", precision="fp64")
        answer = executor.fetch(executor.forward(executor.feed({"x": x})))
        assert relative(answer["y"], reference(network, x)) < 1e-12, f"prologue: {prologue}"


@pytest.mark.parametrize(("behind", "padding"), [("Add", "VALID"), ("Relu", [(0, 0), (1, 1), (1, 1), (0, 0)])])
def test_a_depthwise_convolution_is_padded_first_where_what_is_behind_may_be_fused(
    behind: str, padding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's graph optimizer aborts the process otherwise: see docs/findings.md."""
    import tensorflow as tf

    network = one_node("Conv", [IMAGE, (4, 1, 3, 3)], group=4, strides=[2, 2], pads=[1, 1, 1, 1])
    model = network.model
    model.graph.node[0].output[0] = "c"
    bias = [numpy_helper.from_array(np.full((1, 4, 1, 1), 2, np.float32), "bias")] if behind == "Add" else []
    model.graph.initializer.extend(bias)
    model.graph.node.append(helper.make_node(behind, ["c", *(each.name for each in bias)], ["y"]))
    network = Network(onnx.shape_inference.infer_shapes(model), input="x", output="y")
    found, convolve = [], tf.nn.depthwise_conv2d

    def recorded(x: Any, kernel: Any, strides: Any, padding: Any, *more: Any) -> Any:
        found.append(padding)
        return convolve(x, kernel, strides, padding, *more)

    monkeypatch.setattr(tf.nn, "depthwise_conv2d", recorded)
    executor = BACKEND.executor(network, mode="eager", precision="fp64")
    x = np.random.default_rng(2).standard_normal(IMAGE).astype(np.float32)
    answer = executor.fetch(executor.forward(executor.feed({"x": x})))
    assert relative(answer["y"], reference(network, x)) < 1e-12
    assert found == [padding]


def test_the_average_of_a_window_in_the_padding_is_zero() -> None:
    network = one_node("AveragePool", [(1, 2, 3, 4)], kernel_shape=[1, 1], pads=[1] * 4)
    x = np.random.default_rng(2).standard_normal((1, 2, 3, 4)).astype(np.float32)
    executor = BACKEND.executor(network, mode="eager", precision="fp64")
    answer = executor.fetch(executor.forward(executor.feed({"x": x})))
    np.testing.assert_array_equal(answer["y"], np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))))


def with_square_loss(network: Network) -> Network:
    """Return the network with a scalar loss of every output element: cross-entropy over all."""
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    sizes = [1, int(np.prod([size or 1 for size in network.shapes[network.output]]))]
    model.graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), "sizes"))
    model.graph.node.append(helper.make_node("Reshape", ["y", "sizes"], ["logits"]))
    model.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "label"], ["loss"]))
    model.graph.input.append(helper.make_tensor_value_info("label", TensorProto.INT64, [1]))
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return Network(model, input="x", output="y", label="label", loss="loss")


def check_gradients(executor: Executor, feed: Mapping[str, np.ndarray], tolerance: float = 1e-7) -> None:
    """Compare the gradient along one random direction of all parameters with central
    differences."""
    network, native = executor.network, executor.feed(feed)
    start = executor.parameters()
    gradients = executor.fetch(executor.forward_backward(native))
    rng = np.random.default_rng(3)
    for name in network.parameters:
        direction = rng.standard_normal(start[name].shape)
        losses = []
        for step in (1e-5, -1e-5):
            executor.load_parameters({**start, name: start[name] + step * direction})
            losses.append(float(executor.fetch(executor.forward_backward(native))[str(network.loss)]))
        executor.load_parameters(start)
        slope = (losses[0] - losses[1]) / 2e-5
        assert float(np.sum(gradients[name] * direction)) == pytest.approx(slope, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize(
    "name",
    [
        "conv strided, uneven pads", "conv grouped", "conv depthwise dilated", "conv dilated", "conv 1-D",
        "conv 3-D grouped", "gemm transposed", "mul per pixel", "lrn", "max pool uneven", "average pool uneven",
        "reshape split channels", "concat channels", "max pool dilated",
    ],
)  # fmt: skip
def test_gradient_equals_finite_differences(name: str) -> None:
    shape = CASES[name][1][0]
    network = with_square_loss(case_network(name, prologue=len(shape) > 2))
    executor = BACKEND.executor(network, mode="eager", precision="fp64")
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    check_gradients(executor, {"x": x, "label": np.array([3])})


def small(classes: int = 3) -> Network:
    """Convolution, BatchNormalization, pooling, a residual and a classifier, on 8 pixels."""
    b = Builder("small", image_size=8)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 4, 3), "bn1", momentum=0.75))
    y = b.batch_norm(b.conv(x, "conv2", 4, 3), "bn2", epsilon=1e-3)
    x = b.max_pool(b.relu(b.add(x, y, "add")), "pool", 3, stride=2, padding=1)
    x = b.flatten(b.global_average_pool(x, "average"), "flat")
    return b.classifier(b.linear(x, "fc", classes))


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "image": rng.standard_normal((6, 3, 8, 8)).astype(np.float32),
        "label": rng.integers(0, 3, 6).astype(np.int64),
    }


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [None, 1])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_equals_the_onnx_reference(
    reduction: str, ignored: int | None, shape: tuple[int, ...], weighted: bool
) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal(shape)
    labels = rng.integers(0, 3, (shape[0], *shape[2:]))
    weights = [np.array([0.5, 2.0, 1.25])] if weighted else []
    names = ["x", "label", *(["w"] if weighted else [])]
    attributes: dict[str, Any] = {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})}
    node = helper.make_node("SoftmaxCrossEntropyLoss", names, ["loss"], **attributes)
    outputs = ReferenceEvaluator(node).run(None, dict(zip(names, [x, labels, *weights], strict=True)))
    wanted = next(iter(outputs))

    import tensorflow as tf

    from d5suite.backends.tensorflow.operators import OPERATORS, Context

    loss = OPERATORS[node.op_type](node_of(node, 0), Context(shapes={"x": shape}, constants={}))
    answer = loss(tf.constant(x), tf.constant(labels), *[tf.constant(w) for w in weights])
    assert float(answer) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("mode", BACKEND.modes)
def test_batch_norm_moves_its_statistics_by_the_biased_variance(
    batch: dict[str, np.ndarray], mode: str, precision: str
) -> None:
    executor = BACKEND.executor(small(), mode=mode, precision=precision)
    feed = executor.feed(batch)
    start = executor.parameters()
    seen = _convolved(start, batch["image"])
    mean, variance = start["bn1.running_mean"], start["bn1.running_var"]
    for _ in range(2):
        executor.forward_backward(feed)
        mean = 0.75 * mean + 0.25 * seen.mean((0, 2, 3))
        variance = 0.75 * variance + 0.25 * seen.var((0, 2, 3))
    after = executor.parameters()
    tolerance = 1e-12 if precision == "fp64" else 1e-6
    assert relative(after["bn1.running_mean"], mean) < tolerance
    assert relative(after["bn1.running_var"], variance) < tolerance
    assert all(np.array_equal(after[name], start[name]) for name in executor.network.parameters)

    fresh = BACKEND.executor(small(), mode="eager", precision=precision)
    fresh.load_parameters(after)
    output = executor.network.output
    answers = [e.fetch(e.forward(e.feed(batch)))[output] for e in (executor, fresh)]
    assert relative(answers[0], answers[1].astype(np.float64)) < 10 * tolerance


def _convolved(weights: Mapping[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return the output of the small network's first convolution, in float64."""
    inputs = {
        "x": images.astype(np.float64),
        "w": weights["conv1.weight"].astype(np.float64),
    }
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    return np.asarray(next(iter(ReferenceEvaluator(node).run(None, inputs))))


@pytest.mark.parametrize("mode", BACKEND.modes)
@pytest.mark.parametrize(
    ("optimizer", "accumulate"),
    [
        (SGD(0.1, momentum=0.75, nesterov=True, weight_decay=0.25), 1),
        (RMSProp(0.01, momentum=0.7, epsilon=0.1, clip_norm=0.1), 1),
        (AdamW(0.02, epsilon=0.001, clip_value=0.01), 2),
    ],
    ids=["nesterov", "rmsprop", "adamw"],
)
def test_every_mode_follows_the_formulas_and_is_traced_once(mode: str, optimizer: Optimizer, accumulate: int) -> None:
    """XLA's optimizer kernels differ from the graph's; a new learning rate causes no new trace."""
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((6, 3, 8, 8)).astype(np.float32), rng.integers(0, 3, 6)) for _ in range(4)]
    executor: Any = BACKEND.executor(small(), mode=mode, precision="fp64")
    eager = BACKEND.executor(small(), mode="eager", precision="fp64")
    calls, differentiate = [], executor.loss_and_gradients

    def counted(inputs: Any, scale: Any = None) -> Any:
        calls.append(inputs)
        return differentiate(inputs, scale)

    executor.loss_and_gradients = counted
    course: dict[str, Any] = {"rates": (0.01, 0.3, 0.1), "accumulate": accumulate}
    expected = train_by_formula(eager, optimizer, batches, **course)
    (found,) = train(BACKEND.trainer(executor, optimizer), batches, **course)
    assert len(calls) == (len(batches) if mode == "eager" else accumulate)
    assert relative(found.losses, expected.losses) < 1e-11
    assert max(relative(found.parameters[name], value) for name, value in expected.parameters.items()) < 1e-10


def test_modes_agree(batch: dict[str, np.ndarray]) -> None:
    answers = []
    for mode in BACKEND.modes:
        executor = BACKEND.executor(small(), mode=mode, precision="fp64")
        feed = executor.feed(batch)
        answers.append({**executor.fetch(executor.forward(feed)), **executor.fetch(executor.forward_backward(feed))})
        executor.synchronize()
    for other in answers[1:]:
        assert other.keys() == answers[0].keys()
        assert max(relative(other[name], value) for name, value in answers[0].items()) < 1e-11


def test_channels_first_agrees(batch: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA gets this layout in fp32; XLA runs it on the CPU, too."""
    from d5suite.backends.tensorflow.operators.context import IMAGES_LAST

    wanted = BACKEND.executor(small(), precision="fp64")
    monkeypatch.setitem(IMAGES_LAST, ("cpu", "fp64"), False)
    executor = BACKEND.executor(small(), mode="xla", precision="fp64")
    values, reference_values = (e.fetch(e.forward_backward(e.feed(batch))) for e in (executor, wanted))
    assert max(relative(values[name], value) for name, value in reference_values.items()) < 1e-11


@pytest.mark.parametrize(("precision", "dtype", "largest"), [("bf16", "bfloat16", 0.05), ("fp16", "float16", 0.01)])
def test_short_precisions_round_weights_and_activations_only(
    batch: dict[str, np.ndarray], precision: str, dtype: str, largest: float
) -> None:
    import tensorflow as tf

    short = tf.as_dtype(dtype)
    executor = BACKEND.executor(small(), precision=precision)
    exact = BACKEND.executor(small())
    feed = executor.feed(batch)
    assert feed["image"].dtype == short
    output = executor.network.output
    native = executor.forward(feed)
    assert native[output].dtype == short
    values = executor.fetch(executor.forward_backward(feed))
    assert {value.dtype for value in values.values()} == {np.dtype(np.float32)}
    gradient = executor.forward_backward(feed)
    assert all(gradient[name].dtype == tf.float32 for name in (*executor.network.parameters, "loss"))
    # The weights themselves are not rounded.
    assert np.array_equal(executor.parameters()["conv1.weight"], executor.network.initializers["conv1.weight"])
    wanted = exact.fetch(exact.forward_backward(exact.feed(batch)))
    assert 1e-7 < relative(values["loss"], wanted["loss"].astype(np.float64)) < largest
    # Statistics are those of the rounded convolution output, in float32: 16 bits could not hold
    # them.
    seen = _convolved(executor.parameters(), batch["image"])
    mean = executor.parameters()["bn1.running_mean"]
    assert relative(mean / (1 - 0.75**2), seen.mean((0, 2, 3))) < largest
    assert not np.array_equal(mean, tf.cast(tf.cast(mean, short), tf.float32).numpy())


@pytest.mark.parametrize(
    ("precision", "steps", "tolerance"),
    [
        ("fp64", 1, 1e-12),
        pytest.param("fp32", 3, 1e-5, marks=pytest.mark.slow),
        pytest.param("fp16", 3, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_baseline_is_the_same_computation(precision: str, steps: int, tolerance: float) -> None:
    from d5suite.backends.tensorflow.baseline import resnet50_training_step

    network = build("resnet50", classes=4, image_size=32)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((4, 3, 32, 32)).astype(np.float32)
    labels = rng.integers(0, 4, 4).astype(np.int64)
    optimizer = SGD(0.0625, 0.5, nesterov=True, weight_decay=0.125)
    where = {"mode": "eager", "device": "cpu", "precision": precision}
    baseline = resnet50_training_step(network, optimizer, images, labels, **where)
    assert baseline.parameters().keys() == set(network.parameters)
    executor = BACKEND.executor(network, **where)
    trainer = BACKEND.trainer(executor, optimizer)
    feed = executor.feed({network.input: images, network.require_loss()[0]: labels})
    for _ in range(steps):
        baseline.step()
        baseline.synchronize()
        assert executor.fetch(trainer.step(feed))["loss"] == pytest.approx(baseline.loss(), rel=tolerance)
    ours, theirs = executor.parameters(), baseline.parameters()
    assert max(relative(ours[name], value.astype(np.float64)) for name, value in theirs.items()) < 10 * tolerance


def test_channel_shuffle_keeps_its_meaning() -> None:
    """The layout passes through grouped convolution, reshape, transpose, reshape and
    convolution."""
    rng = np.random.default_rng(0)
    weights = {"w1": (8, 2, 1, 1), "w2": (5, 8, 3, 3)}
    shapes = {"split": integers(2, 4, 2, 5, 6), "merge": integers(2, 8, 5, 6)}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], group=4),
        helper.make_node("Reshape", ["a", "split"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[0, 2, 1, 3, 4]),
        helper.make_node("Reshape", ["c", "merge"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["y"]),
    ]
    initializers = [
        numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), name) for name, s in weights.items()
    ]
    initializers += [numpy_helper.from_array(value, name) for name, value in shapes.items()]
    graph = helper.make_graph(
        nodes,
        "shuffle",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8, 5, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    network = Network(onnx.shape_inference.infer_shapes(model))
    x = rng.standard_normal((2, 8, 5, 6)).astype(np.float32)
    executor = BACKEND.executor(network, precision="fp64")
    assert relative(executor.fetch(executor.forward(executor.feed({"x": x})))["y"], reference(network, x)) < 1e-12


def test_unsupported_operators_are_all_listed() -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["a"], name="first"),
        helper.make_node("Bernoulli", ["a"], ["y"], name="second"),
    ]
    graph = helper.make_graph(
        nodes,
        "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(UnsupportedOperatorError, match=r"Bernoulli \(node second\).*RandomNormalLike \(node first\)"):
        BACKEND.executor(Network(onnx.shape_inference.infer_shapes(model)))


def test_what_cannot_be_built_is_said_before_anything_runs() -> None:
    inference_only = BACKEND.executor(case_network("conv"))
    with pytest.raises(NetworkError, match="no loss"):
        inference_only.forward_backward(inference_only.feed({"x": np.zeros(IMAGE, np.float32)}))


def test_native_loader_gives_the_neutral_pixels_and_leaves_nothing(imagenet_tree: Path) -> None:
    import psutil
    import tensorflow as tf

    from d5suite.backends.tensorflow.loader import native_loader
    from d5suite.data.decode import decode_image
    from d5suite.data.imagenet import ImageNet
    from d5suite.data.transforms import EvalTransform, TrainTransform

    dataset = ImageNet(imagenet_tree, "train")  # which has greyscale, CMYK and PNG files
    transform = EvalTransform(32)
    expected = np.stack([transform(decode_image(path)).transpose(1, 2, 0) for path in dataset.files])
    before = psutil.Process().num_threads()
    batches = native_loader(dataset, transform, batch_size=4, workers=2, seed=0)
    for _ in range(len(dataset) // 4):
        images, labels = next(batches)
        assert images.dtype == tf.float32
        assert labels.dtype == tf.int64
        for image, label in zip(images.numpy(), labels.numpy(), strict=True):
            errors = np.abs(expected - image).max((1, 2, 3))
            assert errors.min() < 0.02  # one level of 255
            assert dataset.labels[errors.argmin()] == label
    batches.close()
    batches = native_loader(dataset, TrainTransform(32), batch_size=3, workers=1, seed=0)
    for _ in range(12):  # more than one epoch
        assert next(batches)[0].shape == (3, 32, 32, 3)
    batches.close()
    # TensorFlow's own pools stay and grow with the cores; no worker stays.
    assert psutil.Process().num_threads() <= before + 3 + 2 * len(os.sched_getaffinity(0))


def test_random_crops_lie_inside_and_cover_the_asked_area() -> None:
    import tensorflow as tf

    from d5suite.backends.tensorflow.loader import _random_resized_crop

    for height, width in ((300, 400), (20, 400), (400, 20), (1, 1)):
        crops = np.array([_random_resized_crop(tf.constant(height), tf.constant(width)) for _ in range(50)])
        top, left, tall, wide = crops.T
        assert (crops >= 0).all()
        assert (tall >= 1).all()
        assert (wide >= 1).all()
        assert (top + tall <= height).all()
        assert (left + wide <= width).all()
        if min(height, width) > 100:
            assert 0.3 < (tall * wide).mean() / (height * width) < 0.75
            assert (tall * wide >= 0.07 * height * width).all()


def test_runtime_reports_this_machine() -> None:
    import tensorflow as tf

    runtime = BACKEND.load("runtime")
    assert runtime.versions()["tensorflow"] == BACKEND.version()
    assert runtime.device_problem("cpu") is None
    assert runtime.device_name("cpu")
    assert runtime.device_memory("cpu") is None
    if not tf.config.list_physical_devices("GPU"):
        assert "CUDA" in runtime.device_problem("cuda")


def test_configure_sets_threads_precision_and_seed() -> None:
    """Run in its own process: TensorFlow reads its thread counts once."""
    code = (
        "from d5suite.backends.tensorflow import runtime\n"
        "runtime.configure(threads=3, seed=5, device='cpu')\n"
        "import sys\n"
        "assert not {'jax', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "import tensorflow as tf\n"
        "assert tf.config.threading.get_intra_op_parallelism_threads() == 3\n"
        "assert not tf.config.experimental.tensor_float_32_execution_enabled()\n"
        "assert tf.config.experimental.get_synchronous_execution()\n"
        "drawn = float(tf.random.uniform([]))\n"
        "tf.random.set_seed(5)\n"
        "assert drawn == float(tf.random.uniform([])) != float(tf.random.uniform([]))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
