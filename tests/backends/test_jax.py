"""Tests of what is specific to JAX: donation, layouts, 64-bit types, random keys, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.backends.jax import BACKEND
from d5suite.errors import BackendError, NetworkError, UnsupportedOperatorError
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD, AdamW
from d5suite.validate.network.gradient import check_gradient_float64
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.norms import relative_l2
from d5suite.validate.training.formulas import update

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

OPTIMIZER = SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125)
ADAMW = AdamW(0.0625)


@pytest.fixture(autouse=True, scope="module")
def _configured() -> None:
    BACKEND.load("runtime").configure(threads=1, seed=0, device="cpu")


def small() -> Network:
    b = Builder("small", image_size=8)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 4, 3, bias=True), "bn1", momentum=0.75))
    y = b.batch_norm(b.conv(x, "conv2", 4, 3, groups=2), "bn2", epsilon=1e-3)
    x = b.max_pool(b.relu(b.add(x, y, "add")), "pool", 3, stride=2, padding=1)
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 3))


def dropping() -> Network:
    b = Builder("dropping", image_size=8)
    ratio = b.constant("ratio", np.array(0.5, np.float32))
    x = b.node("Dropout", "dropped", [b.conv(b.image, "conv", 8, 3), ratio], 8)
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 3))


def batch(seed: int = 0, size: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.standard_normal((size, 3, 8, 8)).astype(np.float32),
        "label": rng.integers(0, 3, size, dtype=np.int64),
    }


def test_stock_donates_nothing() -> None:
    for mode in ("jit", "stock"):
        executor: Any = BACKEND.executor(small(), mode=mode)
        trainer = BACKEND.trainer(executor, OPTIMIZER)
        before = executor.trained
        executor.fetch(trainer.step(executor.feed(batch(0))))
        assert {array.is_deleted() for array in before.values()} == {mode == "jit"}, mode


@pytest.mark.parametrize("mode", list(BACKEND.modes))
def test_step_follows_the_formulas(mode: str) -> None:
    """Parameters, velocities and running statistics, the latter by ONNX's reference."""
    network = small()
    executor, reference = (BACKEND.executor(network, mode=mode, precision="fp64") for _ in range(2))
    trainer = BACKEND.trainer(executor, OPTIMIZER)
    p = {name: value for name, value in reference.parameters().items() if name in network.parameters}
    statistics = {name: network.initializers[name].astype(np.float64) for name in network.statistics}
    state: dict[str, np.ndarray] = {}
    oracle = NetworkOracle(network, training=True)
    for step in range(3):
        arrays = batch(step)
        loss = executor.fetch(trainer.step(executor.feed(arrays)))["loss"]
        expected, statistics = oracle.run(arrays["image"], arrays["label"], {**p, **statistics})
        assert abs(float(loss) - float(expected)) < 1e-13
        answer = reference.fetch(reference.forward_backward(reference.feed(arrays)))
        update(OPTIMIZER, p, answer, state)
        reference.load_parameters(p)
    found = executor.parameters()
    assert max(relative_l2(found[name], value) for name, value in {**p, **statistics}.items()) < 1e-13


def test_donation_takes_nothing_that_is_still_held() -> None:
    """Feeds, fetched and loaded arrays, and the executor itself survive steps that donate."""
    executor: Any = BACKEND.executor(small())
    trainer, other = (BACKEND.trainer(executor, OPTIMIZER) for _ in range(2))
    start = executor.parameters()
    copies = {name: value.copy() for name, value in start.items()}
    executor.load_parameters(start)
    feed = executor.feed(batch())
    before = executor.fetch(executor.forward_backward(feed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as JAX warns of buffers that cannot be donated
        old = executor.trained
        for each in (trainer, other, trainer):
            each.step(feed)
            executor.synchronize()
    assert all(array.is_deleted() for array in old.values())
    for name, value in start.items():
        np.testing.assert_array_equal(value, copies[name])
    executor.load_parameters(start)
    after = executor.fetch(executor.forward_backward(feed))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def test_each_program_is_compiled_once() -> None:
    """Loading and setting keep every argument's type; more batches in a step change nothing."""
    executor: Any = BACKEND.executor(small())
    trainer: Any = BACKEND.trainer(executor, ADAMW)
    feed = executor.feed(batch())
    start, state = executor.parameters(), trainer.state()
    for index in range(3):
        trainer.set_learning_rate(0.5 / (1 + index))
        trainer.step(feed)
        executor.forward_backward(feed)
        executor.forward(feed)
        executor.load_parameters(start)
        trainer.load_state(state)
    assert [program._cache_size() for program in (trainer._step, executor._gradient, executor._forward)] == [1, 1, 1]
    for count in (2, 3, 4, 5):
        trainer.step(*[feed] * count)
    assert [program._cache_size() for program in (trainer._step, trainer._add)] == [2, 2]


def test_float64_leaves_the_default_types_alone() -> None:
    exact = BACKEND.executor(small(), precision="fp64")
    assert {value.dtype for value in exact.forward_backward(exact.feed(batch())).values()} == {np.dtype(np.float64)}
    assert jax.numpy.ones(1).dtype == np.float32
    single = BACKEND.executor(small())
    assert {value.dtype for value in single.forward_backward(single.feed(batch())).values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("precision", "narrow"), [("bf16", jax.numpy.bfloat16), ("fp16", np.float16)])
def test_16_bits_round_weights_and_activations_and_nothing_else(precision: str, narrow: Any) -> None:
    executor, exact = (BACKEND.executor(small(), precision=each) for each in (precision, "fp64"))
    feed = executor.feed(batch())
    assert feed["image"].dtype == narrow
    answer = executor.forward_backward(feed)
    assert {value.dtype for value in answer.values()} == {np.dtype(np.float32)}
    expected = exact.fetch(exact.forward_backward(exact.feed(batch())))
    assert 1e-6 < relative_l2(executor.fetch(answer)["fc.weight"], expected["fc.weight"]) < 0.05
    before = executor.parameters()["conv1.weight"]
    BACKEND.trainer(executor, SGD(2.0**-17)).step(feed)
    change = np.abs(executor.parameters()["conv1.weight"] - before) / np.abs(before)
    assert 0 < np.median(change) < 2.0**-12  # a weight of 16 bits could not have moved so little


def test_the_seed_decides_what_dropout_draws() -> None:
    runtime = BACKEND.load("runtime")
    losses = []
    for seed in (1, 1, 2**40 + 2):
        runtime.configure(threads=1, seed=seed, device="cpu")
        executor = BACKEND.executor(dropping())
        feed = executor.feed(batch())
        losses.append([float(executor.forward_backward(feed)["loss"]) for _ in range(3)])
    assert losses[0] == losses[1] != losses[2]
    assert len({*losses[0]}) == 3
    runtime.configure(threads=1, seed=0, device="cpu")


def shuffled() -> Network:
    """A grouped convolution and a channel shuffle, whose transposition the layouts absorb."""
    b = Builder("shuffled", image_size=8)
    x = b.conv(b.conv(b.image, "conv1", 6, 3), "conv2", 6, 3, groups=3)
    split, merged = (b.constant(name, np.array(n)) for name, n in (("a", [0, 3, 2, 8, 8]), ("b", [0, 6, 8, 8])))
    x = b.node("Transpose", "x2", [b.node("Reshape", "x1", [x, split], 6)], 6, perm=[0, 2, 1, 3, 4])
    x = b.conv(b.node("Reshape", "x3", [x, merged], 6), "conv3", 6, 3, groups=2)
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 3))


def test_layouts_survive_a_channel_shuffle() -> None:
    executor: Any = BACKEND.executor(shuffled(), precision="fp64")
    checks = check_gradient_float64(executor, *batch().values())
    assert [check for check in checks if not check.passed] == []
    with executor.scope():
        image = {"image": executor.feed(batch())["image"]}
        text = executor._forward.lower(executor.trained, {}, image).as_text()
    assert text.count("stablehlo.transpose") == 2  # the shuffle, and nothing but the axes of one pixel


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 0, 1, 1]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    ],
    ids=["dilated", "ceil"],
)
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_gradient_through_pooling(operator: str, attributes: dict[str, list[int]]) -> None:
    """XLA's windows start at -inf or 0 and have no dilated gradient of their own."""
    b = Builder("pooling", image_size=8)
    x = b.node(operator, "pooled", [b.conv(b.image, "conv", 4, 3)], 4, **attributes)
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 3))
    checks = check_gradient_float64(BACKEND.executor(network, precision="fp64"), *batch().values())
    assert [check for check in checks if not check.passed] == []


_MAXIMA: dict[str, dict[str, Any]] = {
    "GlobalMaxPool": {},
    "ReduceMax": {"axes": [2, 3]},
    "ReduceMin": {"axes": [2, 3]},
    "MaxPool": {"kernel_shape": [2, 2], "dilations": [2, 2]},
}


def normalised(operator: str, attributes: dict[str, Any]) -> Network:
    """A maximum over standardised images, which XLA computes again for its gradient."""
    rng = np.random.default_rng(1)
    axes: dict[str, Any] = {"axes": [2, 3]}
    values = {"w": rng.standard_normal((6, 3, 3, 3)) * 0.3, "wo": rng.standard_normal((6, 5))}
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("ReduceMean", ["c"], ["mean"], **axes),
        helper.make_node("Sub", ["c", "mean"], ["d"]),
        helper.make_node("Mul", ["d", "d"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["variance"], **axes),
        helper.make_node("Sqrt", ["variance"], ["deviation"]),
        helper.make_node("Div", ["d", "deviation"], ["n"]),
        helper.make_node(operator, ["n"], ["maximum"], **attributes),
        helper.make_node("Mul", ["maximum", "maximum"], ["again"]),
        helper.make_node("GlobalAveragePool", ["again"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "wo"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "normalised",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [8, 3, 9, 9])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Network(model).with_classification_loss()


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("operator", list(_MAXIMA))
def test_a_maximum_that_is_computed_twice_keeps_its_gradient(operator: str, precision: str) -> None:
    """Under ``jit`` as operator by operator: see docs/findings.md."""
    network = normalised(operator, _MAXIMA[operator])
    label, found = network.require_loss()[0], []
    rng = np.random.default_rng(0)
    images = [rng.standard_normal((8, 3, 9, 9)).astype(np.float32) for _ in range(4)]
    for mode, digits in (("jit", precision), ("eager", "fp64")):
        executor = BACKEND.executor(network, mode=mode, precision=digits)
        feeds = [executor.feed({"image": image, label: np.zeros(8, np.int64)}) for image in images]
        found.append([executor.fetch(executor.forward_backward(feed)) for feed in feeds])
    for jitted, exact in zip(*found, strict=True):
        assert relative_l2(jitted["w"], exact["w"]) < (1e-12 if precision == "fp64" else 1e-4)


@pytest.mark.parametrize("operator", ["GlobalMaxPool", "ReduceMax"])
@pytest.mark.parametrize("mode", list(BACKEND.modes))
def test_the_first_of_equal_elements_takes_a_maximums_gradient(mode: str, operator: str) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "w"], ["y"]),
            helper.make_node(operator, ["y"], ["z"], **_MAXIMA[operator]),
            helper.make_node("Flatten", ["z"], ["scores"]),
        ],
        "tied",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 2, 2])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones((1, 2, 2, 2), np.float32), "w")],  # of two classes
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    network = Network(model).with_classification_loss()
    executor = BACKEND.executor(network, mode=mode)
    label = network.require_loss()[0]
    feed = executor.feed({"x": np.ones((1, 1, 2, 2), np.float32), label: np.zeros(1, np.int64)})
    gradient = executor.fetch(executor.forward_backward(feed))["w"]
    np.testing.assert_allclose(gradient.reshape(2, 4), np.outer([-0.5, 0.5], [1, 0, 0, 0]), rtol=1e-6)


def test_wrong_input_is_named() -> None:
    executor = BACKEND.executor(small())
    with pytest.raises(NetworkError, match=r"'image' has shape \(2, 3, 9, 9\), not \(any, 3, 8, 8\)"):
        executor.feed({"image": np.zeros((2, 3, 9, 9), np.float32)})
    with pytest.raises(NetworkError, match="no input 'picture'"):
        executor.feed({"picture": np.zeros((2, 3, 8, 8), np.float32)})
    with pytest.raises(NetworkError, match=r"no parameter 'fc\.wait'"):
        executor.load_parameters({"fc.wait": np.zeros(3, np.float32)})
    with pytest.raises(NetworkError, match=r"'fc.bias' has shape \(4,\), not \(3\)"):
        executor.load_parameters({"fc.bias": np.zeros(4, np.float32)})
    graph = helper.make_graph(
        [
            helper.make_node("Dropout", ["x"], ["y", "mask"], "drop"),
            helper.make_node("Flatten", ["mask"], ["z"], "flat"),
        ],
        "further",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("z", TensorProto.BOOL, [1, 48])],
    )
    network = Network(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    with pytest.raises(UnsupportedOperatorError, match=r"node drop.*its further output 'mask' is read"):
        BACKEND.executor(network)


@pytest.mark.slow
def test_baseline_trains_like_the_adapter() -> None:
    network = build("resnet50", classes=5, image_size=32)
    images, labels = np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32), np.arange(4)
    optimizer = SGD(2.0**-7, momentum=0.875, nesterov=True, weight_decay=2.0**-13)
    baseline = BACKEND.load("baseline").resnet50_training_step(
        network, optimizer, images, labels, mode="jit", device="cpu", precision="fp64"
    )
    executor = BACKEND.executor(network, precision="fp64")
    trainer = BACKEND.trainer(executor, optimizer)
    feed = executor.feed({"image": images, "label": labels})
    for _ in range(3):
        loss = float(executor.fetch(trainer.step(feed))["loss"])
        baseline.step()
        baseline.synchronize()
        assert abs(baseline.loss() - loss) < 1e-10 * loss
    ours, theirs = executor.parameters(), baseline.parameters()
    assert set(theirs) == set(network.parameters)
    assert max(relative_l2(theirs[name], ours[name]) for name in theirs) < 1e-10
    with pytest.raises(NetworkError, match="not a ResNet-50"):
        BACKEND.load("baseline").resnet50_training_step(
            small(), optimizer, images, labels, mode="jit", device="cpu", precision="fp32"
        )


def test_there_is_no_loader() -> None:
    with pytest.raises(BackendError, match="JAX has no image loader"):
        BACKEND.load("loader")


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_xla_gets_the_threads_of_the_budget() -> None:
    code = (
        "from pathlib import Path; from d5suite.backends.jax import BACKEND\n"
        "BACKEND.load('runtime').configure(threads=3, seed=0, device='cpu')\n"
        "import jax; jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))\n"
        "print(sum('XLAEigen' in p.read_text() for p in Path('/proc/self/task').glob('*/comm')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 3


def test_runtime_reports_this_machine() -> None:
    runtime = BACKEND.load("runtime")
    assert runtime.versions()["jax"] == BACKEND.version()
    assert runtime.device_problem("cpu") is None
    assert runtime.device_name("cpu")
    assert runtime.device_memory("cpu") is None
    assert "CUDA" in runtime.device_problem("cuda")  # as the tests have chosen the CPU


def test_constants_of_any_type_are_allowed() -> None:
    """A scalar that the graph computes with, in every precision."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "half"], ["y"], "mul")],
        "half",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3, 4, 4])],
        [numpy_helper.from_array(np.array(0.5, np.float32), "half")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    network = Network(onnx.shape_inference.infer_shapes(model))
    for precision in BACKEND.precisions:
        executor = BACKEND.executor(network, precision=precision)
        answer = executor.forward(executor.feed({"x": np.ones((2, 3, 4, 4), np.float32)}))
        assert answer["y"].dtype == executor.feed({"x": np.ones((2, 3, 4, 4), np.float32)})["x"].dtype
        np.testing.assert_array_equal(executor.fetch(answer)["y"], 0.5)


def test_a_constant_of_integers_serves_executors_of_both_precisions() -> None:
    """JAX remembers a constant's type by the array, and float64 programs have 64-bit integers."""
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["one", "x"], ["sum"], "sum"),
            helper.make_node("Cast", ["sum"], ["y"], "cast", to=TensorProto.FLOAT),
        ],
        "integers",
        [helper.make_tensor_value_info("x", TensorProto.INT64, [None, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 3])],
        [numpy_helper.from_array(np.ones((1, 3), np.int64), "one")],
    )
    network = Network(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    for precision in ("fp32", "fp64"):
        executor = BACKEND.executor(network, precision=precision)
        answer = executor.fetch(executor.forward(executor.feed({"x": np.arange(6).reshape(2, 3)})))
        assert np.array_equal(answer["y"], [[1, 2, 3], [4, 5, 6]])
