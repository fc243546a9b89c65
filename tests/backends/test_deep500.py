"""deep500's adapter: repairs, replaced operators, optimizers, and the bridge to deep500."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.backends.deep500 import BACKEND
from d5suite.errors import BackendError, NetworkError
from d5suite.levels.network import Executor
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.optimizers.settings import SGD, Adagrad, AdamW, Optimizer, RMSProp
from d5suite.testing.cases import one_operator
from d5suite.testing.networks import classifier, random_batch
from d5suite.validate.network.gradient import check_gradient_float64
from d5suite.validate.norms import relative_l2
from d5suite.validate.training.formulas import update

if BACKEND.problem():
    pytest.skip(BACKEND.problem() or "", allow_module_level=True)

operators = BACKEND.load("operators")
repairs = BACKEND.load("repairs")
bridge = BACKEND.load("bridge")
deep500, native = repairs.deep500, repairs.custom_op_python


def small() -> Network:
    """Return a small residual network with few multiplications, as each takes a microsecond."""
    b = Builder("small", image_size=6)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 4, 3), "bn1", momentum=0.75))
    y = b.add(b.conv(x, "conv2", 4, 1, bias=True), x, "add")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(y, "average"), "flatten"), "fc", 3))


def fed(network: Network, size: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    images, labels = random_batch(network, size, seed)
    return {"image": images, "label": labels}


def difference(executor: Executor, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return executor.fetch(executor.forward_backward(executor.feed(arrays)))


# Repairs.


def test_importing_deep500_leaves_python_and_numpy_as_they_were() -> None:
    code = (
        "from d5suite.backends.deep500 import repairs\n"
        "import collections, sys, numpy\n"
        "assert not hasattr(collections, 'Iterator') and not hasattr(numpy, 'string_')\n"
        "assert not [m for m in sys.modules if m.startswith('mpi4py') or m.endswith('distributed_optimizers')]\n"
        "repairs.deep500.ops.TensorDataType.from_numpy(numpy.float64)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_deep500s_own_reader_and_network_differentiate_a_shortcut(capsys: pytest.CaptureFixture[str]) -> None:
    """Build a graph by deep500 itself, with its own loss, in which x is read twice."""
    number = helper.make_tensor_value_info
    rng = np.random.default_rng(0)
    w, v = rng.standard_normal((3, 3)).astype(np.float32), rng.standard_normal((3, 2)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
            helper.make_node("Relu", ["h"], ["r"], "relu"),
            helper.make_node("Add", ["r", "h"], ["s"], "shortcut"),
            helper.make_node("MatMul", ["s", "v"], ["y"], "second"),
        ],
        "own",
        [number("x", TensorProto.FLOAT, [4, 3])],
        [number("y", TensorProto.FLOAT, [4, 2])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(v, "v")],
    )
    model = deep500.parser.parse_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)]))
    model.add_operation(deep500.ops.MeanSquaredError(["y", "target"], "loss"))
    executor = repairs.ReferenceGraphExecutor(model, deep500.CPUDevice(), [], use_python_ops=True)
    x, target = rng.standard_normal((4, 3)).astype(np.float32), np.zeros((4, 2), np.float32)
    hidden = x @ w
    summed = np.maximum(hidden, 0) + hidden
    above = 2 * (summed @ v) / 8
    expected = {"v": summed.T @ above, "w": x.T @ ((above @ v.T) * (1 + (hidden > 0)))}
    executor.inference({"x": x, "target": target})
    capsys.readouterr()
    for _ in range(2):
        loss = executor.inference_and_backprop({"x": x, "target": target})["loss"]
        assert loss == pytest.approx(np.mean((summed @ v) ** 2), rel=1e-6)
        found = dict(executor.network.gradient())
        assert set(found) == {"v", "w"} == set(executor.network.get_params())
        for name, value in expected.items():
            assert relative_l2(executor.network.fetch_tensor(found[name]), value) < 1e-6, name
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["AdamOptimizer", "AdaGradOptimizer"])
def test_repaired_optimizers_follow_their_formulas(name: str) -> None:
    network = small()
    executor = BACKEND.executor(network, precision="fp64")
    optimizer = getattr(repairs.optimizers, name)(bridge.BridgedExecutor(executor), lr=0.0625)
    other = BACKEND.executor(network, precision="fp64")
    p = {k: v for k, v in other.parameters().items() if k in network.parameters}
    first, second = ({k: np.zeros_like(v) for k, v in p.items()} for _ in "ab")
    for step in range(1, 4):
        arrays = fed(network, seed=step)
        optimizer.step(arrays)
        gradients = difference(other, arrays)
        for k in p:
            g = gradients[k]
            if name == "AdamOptimizer":
                first[k] = 0.9 * first[k] + 0.1 * g
                second[k] = 0.999 * second[k] + 0.001 * g**2
                p[k] = p[k] - 0.0625 * first[k] / (1 - 0.9**step) / np.sqrt(second[k] / (1 - 0.999**step) + 1e-8)
            else:
                second[k] = second[k] + g**2
                p[k] = p[k] - 0.0625 * g / (1e-6 + np.sqrt(second[k]))
        other.load_parameters(p)
    found = executor.parameters()
    assert max(relative_l2(found[k], value) for k, value in p.items()) < 1e-12


# Replaced operators: each assertion states a fault of deep500 0.2.0, and fails once it is repaired.


def _descriptors(inputs: int = 1) -> tuple[list[Any], list[Any]]:
    return [deep500.TensorDescriptor(np.float64, [])] * inputs, [deep500.TensorDescriptor(np.float64, [])]


def test_the_faults_of_replaced_operators_exist() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5))
    image = np.zeros((1, 1, 3, 3))
    image[0, 0, 1, 1] = 1
    pool = native.MaxPoolOp(*_descriptors(), kernel_shape=[2, 2], strides=[1, 1])
    output = pool.forward(image)
    (gradient,) = pool.backward([np.ones_like(output)], [image], [output])
    assert gradient.sum() == 1 != output.size  # all four windows have the same maximum
    average = native.AveragePoolOp(*_descriptors(), kernel_shape=[3, 3], pads=[1, 0, 1, 0])
    with pytest.raises(IndexError):
        average.forward(image)
    assert native.GlobalAveragePoolOp(*_descriptors()).forward(x).shape != (2, 3, 1)
    assert native.ReluOp(*_descriptors()).backward([x], [np.zeros_like(x)], [x])[0].any()
    assert not np.allclose(native.SoftmaxOp(*_descriptors(), axis=1).forward(x).sum(1), 1)
    gemm = native.GemmOp(*_descriptors(3))
    with pytest.raises(ValueError, match="reshape"):
        gemm.backward([np.ones((1, 2))], [np.ones((1, 3)), np.ones((3, 2)), np.ones(2)], [np.ones((1, 2))])
    a = np.ones((2, 4, 3))
    with pytest.raises(ValueError, match="matmul"):
        native.MatMulOp(*_descriptors(2)).backward([np.ones((2, 4, 5))], [a, np.ones((2, 3, 5))], [np.ones((2, 4, 5))])


def test_deep500s_own_operator_runs_where_it_is_right() -> None:
    chosen = {}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("Conv", {}),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("Add", {}),
        ("GlobalAveragePool", {}),
    ]
    for operator, attributes in cases:
        inputs = {"w": np.ones((4, 4, 1, 1), np.float32)} if operator in ("Add", "Conv") else {}
        network = one_operator(operator, (2, 4, 6, 6), inputs, **attributes)
        context = operators.Context(shapes=network.shapes, constants=network.initializers)
        chosen[operator] = type(operators.OPERATORS[operator](network.nodes[0], context))
    assert all(kind.__module__.startswith("deep500.") for kind in chosen.values()), chosen


def test_a_batch_of_one_image() -> None:
    network = classifier()
    images, labels = random_batch(network, 1)
    checks = check_gradient_float64(BACKEND.executor(network, precision="fp64"), images, labels)
    assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", np.float32), ("fp64", np.float64)])
def test_everything_keeps_its_precision(precision: str, dtype: type) -> None:
    """Also of gradients: those of deep500's BatchNormalization are always float64."""
    network = small()
    executor: Any = BACKEND.executor(network, precision=precision)
    trainers = [
        BACKEND.trainer(executor, optimizer)
        for optimizer in (
            SGD(0.125, momentum=0.5, nesterov=True, weight_decay=0.25, clip_value=0.5, clip_norm=0.5),
            RMSProp(0.125, momentum=0.5),
            AdamW(0.125),
        )
    ]
    feed = executor.feed(fed(network))
    answers = [executor.forward(feed), executor.forward_backward(feed)]
    for answer in answers + [trainer.step(feed, feed) for trainer in trainers]:
        assert {np.asarray(value).dtype for value in answer.values()} == {np.dtype(dtype)}
    tensors = executor.training.network.variables
    assert {value.dtype for name, value in tensors.items() if name != "label"} == {np.dtype(dtype)}


# Training.


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (SGD(0.25), "GradientDescent"),
        (SGD(0.125, momentum=0.75), "MomentumOptimizer"),
        (SGD(0.125, weight_decay=0.0625), "GradientDescent"),
        (SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125), "NesterovOptimizer"),
        (Adagrad(0.125, epsilon=0.25, weight_decay=0.0625), "AdaGradOptimizer"),
    ],
)
def test_deep500s_optimizer_follows_the_formula(optimizer: Optimizer, kind: str) -> None:
    network = small()
    executor, other = (BACKEND.executor(network, precision="fp64") for _ in range(2))
    trainer: Any = BACKEND.trainer(executor, optimizer)
    assert type(trainer._optimizer).__name__ == kind
    p = {name: value for name, value in other.parameters().items() if name in network.parameters}
    state: dict[str, np.ndarray] = {}
    for step in range(4):
        arrays = fed(network, seed=step)
        loss = executor.fetch(trainer.step(executor.feed(arrays)))["loss"]
        answer = difference(other, arrays)
        assert relative_l2(loss, answer["loss"]) < 1e-14
        update(optimizer, p, answer, state)
        other.load_parameters(p)
    found = executor.parameters()
    assert max(relative_l2(found[name], value) for name, value in p.items()) < 1e-14


def test_inference_follows_training() -> None:
    network = small()
    executor, other = (BACKEND.executor(network) for _ in range(2))
    trainer = BACKEND.trainer(executor, SGD(0.5))
    feed = executor.feed(fed(network))
    before = executor.fetch(executor.forward(feed))["fc"]
    trainer.step(feed)
    other.load_parameters(executor.parameters())
    after = executor.fetch(executor.forward(feed))["fc"]
    assert relative_l2(after, before) > 1e-2
    np.testing.assert_array_equal(after, other.fetch(other.forward(feed))["fc"])


def test_tensor_names_that_deep500_needs_are_refused() -> None:
    network = small()
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["fc.weight_grad" if name == "average" else name for name in names]
    with pytest.raises(NetworkError, match="weight_grad"):
        BACKEND.executor(Network(model, input="image", output="fc", label="label", loss="loss"))


def test_what_is_absent_is_said() -> None:
    with pytest.raises(BackendError, match="bfloat16"):
        BACKEND.executor(small(), precision="bf16")
    with pytest.raises(BackendError, match="GPU"):
        BACKEND.executor(small(), device="cuda")
    with pytest.raises(BackendError, match="reads no image files"):
        BACKEND.load("loader")


# The bridge: other backends as executors of deep500.


@pytest.fixture
def bridged() -> Any:
    pytest.importorskip("torch")
    from d5suite.backends import backend

    return bridge.BridgedExecutor(backend("torch").executor(small(), precision="fp64"))


def _errors(results: list[Any], metrics: int) -> list[float]:
    """Return the last metric's results: one per output."""
    return [float(result) for result in results[metrics - 1 :: metrics]]


def test_deep500s_tests_judge_another_backends_executor(bridged: Any) -> None:
    network = small()
    reference: Any = BACKEND.executor(network, precision="fp64")
    graph_executor = reference.training  # deep500's own executor, not through the bridge
    arrays = fed(network)
    doubles = reference.feed(arrays)
    expected = reference.inference.inference({"image": doubles["image"]})
    metrics = [deep500.WallclockTime(reruns=2, avg_over=1), deep500.L2Error(), deep500.MaxError()]
    results = deep500.test_executor_inference(bridged, dict(arrays), expected, metrics)
    assert _errors(results, 3)[0] < 1e-12
    assert len(results[0]) == 2 and min(results[0]) > 0

    loss = graph_executor.inference_and_backprop(doubles, "loss")
    names = [f"{name}_grad" for name in network.parameters]
    gradients = dict(zip(names, graph_executor.network.fetch_tensors(names), strict=True))
    results = deep500.test_executor_backprop(bridged, "loss", dict(arrays), loss | gradients, [deep500.MaxError()])
    assert len(results) == 1 + len(names)
    assert max(_errors(results, 1)) < 1e-12


def test_deep500s_tests_report_a_wrong_executor(bridged: Any) -> None:
    network = small()
    reference = bridge.BridgedExecutor(BACKEND.executor(network, precision="fp64"))
    arrays = fed(network)
    wrong = bridged.network.fetch_tensor("conv2.bias") + 0.125
    bridged.network.feed_tensor("conv2.bias", wrong)
    results = deep500.test_executor_inference(bridged, dict(arrays), reference.inference(arrays), [deep500.MaxError()])
    assert _errors(results, 1)[0] > 1e-2
    expected = reference.inference_and_backprop(arrays)
    results = deep500.test_executor_backprop(bridged, "loss", dict(arrays), expected, [deep500.MaxError()])
    assert max(_errors(results, 1)) > 1e-2


def test_deep500s_optimizer_trains_another_backend(bridged: Any) -> None:
    network = small()
    ours = BACKEND.executor(network, precision="fp64")
    trainer = BACKEND.trainer(ours, SGD(0.125, momentum=0.75))
    optimizer = repairs.optimizers.MomentumOptimizer(bridged, lr=0.125, momentum=0.75)
    for step in range(3):
        arrays = fed(network, seed=step)
        loss = optimizer.step(arrays)["loss"]
        assert relative_l2(loss, ours.fetch(trainer.step(ours.feed(arrays)))["loss"]) < 1e-12
    found = bridged.network.executor.parameters()
    assert max(relative_l2(found[name], value) for name, value in ours.parameters().items()) < 1e-12


def test_the_bridge_makes_up_inputs_and_says_what_it_cannot() -> None:
    executor = bridge.BridgedExecutor(BACKEND.executor(small()), batch_size=2)
    results = deep500.test_executor_backprop(executor, "loss", metrics=[deep500.WallclockTime(reruns=1, avg_over=1)])
    assert len(results) == 1 + len(executor.network.get_params())
    with pytest.raises(NetworkError, match="only the loss"):
        executor.inference_and_backprop(fed(small()), "fc")
    with pytest.raises(NetworkError, match="only parameters"):
        executor.network.fetch_tensor("add")
    with pytest.raises(NetworkError, match="besides its output"):
        executor.network.add_output("add")
    with pytest.raises(NetworkError, match="nothing has been"):
        bridge.BridgedExecutor(BACKEND.executor(small())).network.gradient()
