"""The torch adapter: its operators, statistics, optimizer, precisions and modes against ONNX and NumPy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from d5suite.backends.torch import BACKEND
from d5suite.errors import BackendError, NetworkError, UnsupportedOperatorError
from d5suite.levels.training import SGD
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.testing.cases import CASES, IMAGE, Case, f32, i64, one_operator, values
from d5suite.validate.checks import check_gradient_float64
from d5suite.validate.norms import relative_l2
from d5suite.validate.oracle import Oracle

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="module")
def _configured() -> None:
    BACKEND.load("runtime").configure(threads=2, seed=0, device="cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator_equals_onnx_in_float64(case: Case) -> None:
    operator, shape, inputs, attributes = case
    network = one_operator(operator, shape, inputs, **attributes)
    x = values(*shape, seed=7)
    expected, _ = Oracle(network, training=False).run(x)
    for mode in ("eager", "channels_last"):
        executor = BACKEND.executor(network, mode=mode, precision="fp64")
        answer = executor.fetch(executor.forward(executor.feed({"x": x})))["y"]
        assert relative_l2(answer, expected) < 1e-13, mode


def test_every_declared_operator_is_implemented_and_tried() -> None:
    implemented = set(BACKEND.load("operators").OPERATORS)
    assert implemented == BACKEND.operators
    assert implemented - {case[0] for case in CASES} == {"SoftmaxCrossEntropyLoss"}


@pytest.mark.parametrize("attributes", [{"reduction": "mean"}, {"reduction": "sum"}, {"ignore_index": 2}])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_equals_onnx(attributes: dict[str, Any], weighted: bool) -> None:
    scores, labels = values(6, 4), np.array([0, 1, 2, 3, 2, 1])
    weight = [values(4, seed=8) ** 2] if weighted else []
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "t", "w"][: 2 + weighted], ["y"], **attributes)
    arrays = dict(zip("xtw", [scores, labels, *weight], strict=False))
    doubles = {name: value if name == "t" else value.astype(np.float64) for name, value in arrays.items()}
    (expected,) = ReferenceEvaluator(node).run(None, doubles)
    graph = helper.make_graph(
        [node, helper.make_node("Identity", ["x"], ["z"])],
        "loss",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4]),
            helper.make_tensor_value_info("t", TensorProto.INT64, [6]),
        ],
        [
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [6, 4]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, []),
        ],
        [numpy_helper.from_array(w, "w") for w in weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    network = Network(model, input="x", output="z", label="t", loss="y")
    executor = BACKEND.executor(network, precision="fp64")
    answer = executor.fetch(executor.forward_backward(executor.feed({"x": scores, "t": labels})))["y"]
    assert abs(float(answer) - float(expected)) < 1e-13


def classifier(seed: int = 0) -> Network:
    """Convolutions, normalisations, a shortcut that must not be overwritten, and a pool that must not see it so."""
    b = Builder("classifier", seed=seed, image_size=10)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 6, 3, bias=True), "bn1", momentum=0.75))
    y = b.batch_norm(b.conv(x, "conv2", 6, 3, groups=2), "bn2", epsilon=1e-3)
    z = b.relu(b.add(y, x, "add"))
    p = b.add(b.max_pool(z, "pool", 2, stride=2), b.max_pool(b.relu(y), "pool2", 2, stride=2), "add2")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(p, "average"), "flatten"), "fc", 5))


def batch(seed: int = 0, size: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.standard_normal((size, 3, 10, 10)).astype(np.float32),
        "label": rng.integers(0, 5, size, dtype=np.int64),
    }


@pytest.mark.parametrize("mode", ["eager", "channels_last"])
def test_loss_statistics_and_gradients_are_proved(mode: str) -> None:
    executor = BACKEND.executor(classifier(), mode=mode, precision="fp64")
    arrays = batch()
    checks = check_gradient_float64(executor, arrays["image"], arrays["label"])
    assert len(checks) == 4
    assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("operator", ["Clip", "AveragePool", "MaxPool", "LRN", "Softmax", "Concat", "Pad", "Mul"])
def test_gradient_through_operator(operator: str) -> None:
    """Each operator on the way from a convolution to the loss; for LRN with as many channels as images, see above."""
    b = Builder("through", image_size=10)
    x = b.conv(b.image, "conv", 6, 3, bias=True)
    extra: dict[str, tuple[list[str], dict[str, Any]]] = {
        "Clip": ([b.parameter("low", f32(-0.4)), b.parameter("high", f32(0.4))], {}),
        "AveragePool": ([], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 2, 0]}),
        "MaxPool": ([], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 2, 0]}),
        "LRN": ([], {"size": 4, "alpha": 0.5}),
        "Softmax": ([], {"axis": 1}),
        "Concat": ([x], {"axis": 2}),
        "Mul": ([x], {}),
    }
    if operator == "Pad":
        b.constant("pads", i64(0, 0, 1, 2, 0, 0, 3, 0))
        extra["Pad"] = (["pads"], {})
    inputs, attributes = extra[operator]
    y = b.node(operator, "y", [x, *inputs], 6, **attributes)
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(y, "average"), "flatten"), "fc", 5))
    arrays = batch()
    checks = check_gradient_float64(BACKEND.executor(network, precision="fp64"), arrays["image"], arrays["label"])
    assert [check for check in checks if not check.passed] == []


def test_running_statistics_stay_biased_over_steps_and_batch_sizes() -> None:
    """Also where parameters are read, or inference runs, in between."""
    network = classifier()
    executor = BACKEND.executor(network, precision="fp64")
    statistics = {name: network.initializers[name].astype(np.float64) for name in network.statistics}
    oracle = Oracle(network, training=True)
    for step, size in enumerate((6, 6, 3, 3, 2)):
        arrays = batch(step, size)
        executor.forward_backward(executor.feed(arrays))
        _, statistics = oracle.run(arrays["image"], arrays["label"], statistics)
        if step == 3:
            executor.parameters()
    image = batch(9)["image"]
    answer = executor.fetch(executor.forward(executor.feed({"image": image})))[network.output]
    expected, _ = Oracle(network, training=False).run(image, None, statistics)
    assert relative_l2(answer, expected) < 1e-12
    found = executor.parameters()
    assert max(relative_l2(found[name], value) for name, value in statistics.items()) < 1e-12


def test_parameters_round_trip_and_are_copies() -> None:
    network = classifier()
    for mode in ("eager", "channels_last"):
        executor = BACKEND.executor(network, mode=mode)
        start = executor.parameters()
        assert set(start) == {*network.parameters, *network.statistics}
        for name, value in start.items():
            np.testing.assert_array_equal(value, network.initializers[name])
        executor.load_parameters({name: value + 1 for name, value in start.items()})
        for name, value in executor.parameters().items():
            np.testing.assert_array_equal(value, start[name] + 1)
        executor.load_parameters({"fc.bias": start["fc.bias"]})
        np.testing.assert_array_equal(executor.parameters()["fc.bias"], start["fc.bias"])


def test_loading_statistics_in_the_middle_of_training() -> None:
    network = classifier()
    executor, other = (BACKEND.executor(network, precision="fp64") for _ in range(2))
    for step in range(3):
        executor.forward_backward(executor.feed(batch(step)))
    other.load_parameters(executor.parameters())
    for each in (executor, other):
        each.forward_backward(each.feed(batch(5)))
    for name, value in executor.parameters().items():
        assert relative_l2(other.parameters()[name], value) < 1e-14, name


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.25),
        SGD(0.125, momentum=0.75),
        SGD(0.125, momentum=0.75, weight_decay=0.0625),
        SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125),
    ],
    ids=["plain", "momentum", "decay", "nesterov"],
)
def test_optimizer_follows_the_formulas(optimizer: SGD) -> None:
    """The neutral formulas written out here; one parameter has no part in the loss, and still decays."""
    network = classifier()
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(5, np.float32), "idle"))
    model.graph.node.append(helper.make_node("Add", [network.output, "idle"], ["shifted"], "shifted"))
    model.graph.output.append(helper.make_tensor_value_info("shifted", TensorProto.FLOAT, ["N", 5]))
    network = Network(model, input="image", output="shifted", label="label", loss="loss")
    executor, reference = (BACKEND.executor(network, precision="fp64") for _ in range(2))
    trainer = BACKEND.trainer(executor, optimizer)
    p = {name: value for name, value in reference.parameters().items() if name in network.parameters}
    v = {name: np.zeros_like(value) for name, value in p.items()}
    for step in range(4):
        arrays = batch(step)
        loss = executor.fetch(trainer.step(executor.feed(arrays)))["loss"]
        answer = reference.fetch(reference.forward_backward(reference.feed(arrays)))
        assert abs(float(loss) - float(answer["loss"])) < 1e-10
        for name in p:
            g = answer[name] + optimizer.weight_decay * p[name]
            v[name] = optimizer.momentum * v[name] + g
            update = g + optimizer.momentum * v[name] if optimizer.nesterov else v[name]
            p[name] = p[name] - optimizer.learning_rate * update
        reference.load_parameters(p)
    found = executor.parameters()
    assert "idle" in p
    assert max(relative_l2(found[name], value) for name, value in p.items()) < 1e-10


def test_bf16_rounds_weights_and_activations_and_nothing_else() -> None:
    """One convolution without bias and a batch normalisation: what the definition says, computed in NumPy's float64."""
    b = Builder("bf16", image_size=10)
    x = b.batch_norm(b.conv(b.image, "conv", 4, 1), "bn")
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))
    executor = BACKEND.executor(network, precision="bf16")
    arrays = batch()
    answer = executor.forward_backward(executor.feed(arrays))
    assert {value.dtype for value in answer.values()} == {torch.float32}
    assert executor.feed(arrays)["image"].dtype == torch.bfloat16

    def rounded(array: np.ndarray) -> np.ndarray:
        return torch.tensor(array).bfloat16().double().numpy()

    start = network.initializers
    image = rounded(arrays["image"])
    y = rounded(np.einsum("oi,nihw->nohw", rounded(start["conv.weight"][:, :, 0, 0]), image))
    statistics = executor.parameters()
    assert relative_l2(statistics["bn.running_mean"], 0.1 * y.mean((0, 2, 3))) < 1e-5  # float32, not bfloat16
    assert relative_l2(statistics["bn.running_var"], 0.9 + 0.1 * y.var((0, 2, 3))) < 1e-6
    exact = BACKEND.executor(network, precision="fp64")
    expected = exact.fetch(exact.forward_backward(exact.feed(arrays)))
    for name, value in executor.fetch(answer).items():
        assert 1e-6 < relative_l2(value, expected[name]) < 0.05, name

    trainer = BACKEND.trainer(executor, SGD(2.0**-14))
    before = executor.parameters()["conv.weight"]
    trainer.step(executor.feed(arrays))
    change = np.abs(executor.parameters()["conv.weight"] - before) / np.abs(before)
    assert 0 < np.median(change) < 2.0**-9  # a bfloat16 weight could not have moved so little


def test_bf16_inference_sees_new_weights() -> None:
    network = classifier()
    executor = BACKEND.executor(network, precision="bf16")
    feed = executor.feed({"image": batch()["image"]})
    first = executor.fetch(executor.forward(feed))[network.output]
    executor.load_parameters({"fc.bias": np.full(5, 10, np.float32)})
    second = executor.fetch(executor.forward(feed))[network.output]
    assert np.abs(second - first).min() > 5
    trainer = BACKEND.trainer(executor, SGD(0.5))
    trainer.step(executor.feed(batch()))
    assert relative_l2(executor.fetch(executor.forward(feed))[network.output], second) > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_channels_last_agrees_with_eager(precision: str) -> None:
    agree("channels_last", precision, classifier())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compile_agrees_with_eager() -> None:
    b = Builder("tiny", image_size=10)  # seconds of compilation per operator
    x = b.relu(b.batch_norm(b.conv(b.image, "conv", 4, 3), "bn"))
    agree("compile", "fp32", b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5)))


def agree(mode: str, precision: str, network: Network) -> None:
    tolerance = {"fp32": 1e-5, "bf16": 0.05, "fp64": 1e-12}[precision]
    found = []
    for each in ("eager", mode):
        executor = BACKEND.executor(network, mode=each, precision=precision)
        trainer = BACKEND.trainer(executor, SGD(0.125, momentum=0.75))
        feed = executor.feed(batch())
        losses = [executor.fetch(trainer.step(feed))["loss"] for _ in range(3)]
        output = executor.fetch(executor.forward(executor.feed({"image": batch()["image"]})))
        found.append({"losses": np.array(losses), **output, **executor.parameters()})
    for name, value in found[0].items():
        assert relative_l2(found[1][name], value, floor=0.1) < tolerance, name


def test_compile_without_a_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match=r"no-such-compiler.*\n.*g\+\+"):
        BACKEND.executor(classifier(), mode="compile")


@pytest.mark.parametrize(
    ("mode", "precision"), [("eager", "fp32"), ("channels_last", "fp32"), ("channels_last", "bf16"), ("eager", "fp64")]
)
def test_baseline_trains_like_the_adapter(mode: str, precision: str) -> None:
    network = build("resnet50", classes=5, image_size=32)
    optimizer = SGD(0.0078125, momentum=0.875, nesterov=True, weight_decay=2.0**-13)
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((4, 3, 32, 32)).astype(np.float32), np.array([0, 1, 2, 3])
    baseline = BACKEND.load("baseline").resnet50_training_step(
        network, optimizer, images, labels, mode=mode, device="cpu", precision=precision
    )
    executor = BACKEND.executor(network, mode=mode, precision=precision)
    trainer = BACKEND.trainer(executor, optimizer)
    feed = executor.feed({"image": images, "label": labels})
    tolerance = 1e-9 if precision == "fp64" else 1e-5
    for _ in range(3):
        loss = float(executor.fetch(trainer.step(feed))["loss"])
        baseline.step()
        baseline.synchronize()
        assert abs(baseline.loss() - loss) < tolerance * loss
    ours, theirs = executor.parameters(), baseline.parameters()
    assert set(theirs) == set(network.parameters)
    assert max(relative_l2(theirs[name], ours[name]) for name in theirs) < tolerance


def test_baseline_refuses_another_network() -> None:
    with pytest.raises(NetworkError, match="not a ResNet-50"):
        BACKEND.load("baseline").resnet50_training_step(
            classifier(), SGD(0.1), *batch().values(), mode="eager", device="cpu", precision="fp32"
        )


LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))


def test_there_are_nine_light_networks() -> None:
    assert len(LIGHT) == 9


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_light_network_gives_its_shipped_output(path: Path) -> None:
    network = Network.load(path)
    shape = tuple(n or 1 for n in network.shapes[network.input])
    x = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)  # as ONNX's own test runner
    expected = numpy_helper.to_array(onnx.load_tensor(path.with_name(f"{path.stem}_output_0.pb")))
    executor = BACKEND.executor(network)
    answer = executor.fetch(executor.forward(executor.feed({network.input: x})))[network.output]
    assert relative_l2(answer, expected) < 1e-6


def test_dropout_draws_in_training_only() -> None:
    b = Builder("dropout", image_size=10)
    ratio = b.parameter("ratio", f32(0.5))
    x = b.node("Dropout", "dropped", [b.conv(b.image, "conv", 4, 3), ratio], 4)
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))
    executor = BACKEND.executor(network)
    feed = executor.feed(batch())
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(executor.forward_backward(feed)["loss"]))
    assert losses[0] == losses[1] != losses[2]
    once, twice = (executor.fetch(executor.forward(feed))[network.output] for _ in range(2))
    np.testing.assert_array_equal(once, twice)


def test_unsupported_operators_are_all_listed() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Erf", ["x"], ["a"], "one"),
            helper.make_node("Sinh", ["a"], ["b"], "two"),
            helper.make_node("Erf", ["b"], ["c"], "three"),
        ],
        "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [1, 3, 4, 4])],
    )
    network = Network(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    with pytest.raises(UnsupportedOperatorError, match=r"'torch'.*2 operator.*Erf \(node one and 1 more\); Sinh"):
        BACKEND.executor(network)


def test_bad_input_is_named() -> None:
    network = classifier()
    executor = BACKEND.executor(network)
    with pytest.raises(NetworkError, match=r"'image' has shape \(2, 3, 9, 9\), not \(any, 3, 10, 10\)"):
        executor.feed({"image": np.zeros((2, 3, 9, 9), np.float32)})
    with pytest.raises(NetworkError, match="no input 'picture'"):
        executor.feed({"picture": np.zeros((2, 3, 10, 10), np.float32)})
    with pytest.raises(NetworkError, match=r"no parameter 'fc\.wait'"):
        executor.load_parameters({"fc.wait": np.zeros(5, np.float32)})
    with pytest.raises(NetworkError, match=r"'fc.bias' has shape \(4,\), not \(5\)"):
        executor.load_parameters({"fc.bias": np.zeros(4, np.float32)})
    relu = BACKEND.executor(one_operator("Relu", (1, 3, 4, 4)))
    with pytest.raises(NetworkError, match="loss"):
        relu.forward_backward(relu.feed({"x": values(1, 3, 4, 4)}))


def test_what_cannot_be_built_is_refused_before_anything_runs() -> None:
    with pytest.raises(NetworkError, match="reflect"):
        BACKEND.executor(one_operator("Pad", IMAGE, {"pads": i64(0, 0, 1, 1, 0, 0, 1, 1)}, mode="reflect"))
    graph = helper.make_graph(
        [
            helper.make_node("MaxPool", ["x"], ["y", "indices"], "pool", kernel_shape=[2, 2]),
            helper.make_node("Flatten", ["indices"], ["z"], "flat"),
        ],
        "indices",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("z", TensorProto.INT64, [1, 27])],
    )
    network = Network(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    with pytest.raises(NetworkError, match="'indices' is not a first output"):
        BACKEND.executor(network)


def test_one_value_per_channel_has_no_variance() -> None:
    b = Builder("narrow", image_size=10)
    x = b.batch_norm(b.global_average_pool(b.conv(b.image, "conv", 4, 3), "average"), "bn")
    network = b.classifier(b.linear(b.flatten(x, "flatten"), "fc", 5))
    executor = BACKEND.executor(network)
    with pytest.raises(NetworkError, match=r"bn: .*1 values per channel"):
        executor.forward_backward(executor.feed(batch(size=1)))
    executor.forward_backward(executor.feed(batch(size=2)))


def test_native_loader_gives_the_neutral_pixels_and_leaves_nothing(imagenet_tree: Path) -> None:
    import psutil

    from d5suite.data.decode import decode_image
    from d5suite.data.imagenet import ImageNet
    from d5suite.data.transforms import EvalTransform, TrainTransform

    dataset = ImageNet(imagenet_tree, "val")
    native_loader = BACKEND.load("loader").native_loader
    expected = sorted(float(EvalTransform(32)(decode_image(path)).sum()) for path in dataset.files)
    batches = native_loader(dataset, EvalTransform(32), batch_size=4, workers=0, seed=0)
    images, labels = zip(*(next(batches) for _ in range(len(dataset) // 4)), strict=True)
    batches.close()
    np.testing.assert_allclose(sorted(torch.cat(images).sum((1, 2, 3)).tolist()), expected, rtol=1e-4, atol=0.05)
    assert sorted(torch.cat(labels).tolist()) == sorted(dataset.labels.tolist())

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    batches = native_loader(dataset, TrainTransform(32), batch_size=3, workers=2, seed=0)
    for _ in range(8):  # further than one epoch
        image, label = next(batches)
        assert image.shape == (3, 3, 32, 32)
        assert image.dtype == torch.float32
        assert label.dtype == torch.int64
    batches.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_runtime_reports_this_machine() -> None:
    runtime = BACKEND.load("runtime")
    assert runtime.versions()["torch"] == BACKEND.version()
    assert runtime.device_problem("cpu") is None
    assert runtime.device_name("cpu")
    assert runtime.device_memory("cpu") is None
    if not torch.cuda.is_available():
        assert "CUDA" in runtime.device_problem("cuda")
