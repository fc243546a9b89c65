"""PyTorch's adapter against ONNX and NumPy: operators, statistics, optimizers, precisions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from d5suite.backends.torch import BACKEND
from d5suite.errors import BackendError, NetworkError, UnsupportedOperatorError
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.operation import Operation
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from d5suite.testing.cases import CASES, OperatorCase, one_operator, values
from d5suite.validate.network.gradient import check_gradient_float64
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.norms import relative_l2

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="module")
def _configured() -> None:
    BACKEND.load("runtime").configure(threads=2, seed=0, device="cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator_equals_onnx_in_channels_last(case: OperatorCase) -> None:
    """The kit proves the default mode."""
    operator, shape, inputs, attributes = case
    network = one_operator(operator, shape, inputs, **attributes)
    x = values(*shape, seed=7)
    expected, _ = NetworkOracle(network, training=False).run(x)
    executor = BACKEND.executor(network, mode="channels_last", precision="fp64")
    answer = executor.fetch(executor.forward(executor.feed({"x": x})))["y"]
    assert relative_l2(answer, expected) < 1e-13


def classifier(seed: int = 0) -> Network:
    """Return a network whose shortcut must not be overwritten before a pool reads it."""
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


def test_parameters_round_trip_in_channels_last() -> None:
    """The kit proves the default mode."""
    network = classifier()
    executor = BACKEND.executor(network, mode="channels_last")
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


@pytest.mark.parametrize(("precision", "narrow"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bits_round_weights_and_activations_and_nothing_else(precision: str, narrow: Any) -> None:
    """Compare a convolution and a batch normalization with their definition in float64."""
    b = Builder("rounded", image_size=10)
    x = b.batch_norm(b.conv(b.image, "conv", 4, 1), "bn")
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))
    executor = BACKEND.executor(network, precision=precision)
    arrays = batch()
    answer = executor.forward_backward(executor.feed(arrays))
    assert {value.dtype for value in answer.values()} == {torch.float32}
    assert executor.feed(arrays)["image"].dtype == narrow

    def rounded(array: np.ndarray) -> np.ndarray:
        return torch.tensor(array).to(narrow).double().numpy()

    start = network.initializers
    image = rounded(arrays["image"])
    y = rounded(np.einsum("oi,nihw->nohw", rounded(start["conv.weight"][:, :, 0, 0]), image))
    statistics = executor.parameters()
    assert relative_l2(statistics["bn.running_mean"], 0.1 * y.mean((0, 2, 3))) < 1e-5  # float32, not 16 bits
    assert relative_l2(statistics["bn.running_var"], 0.9 + 0.1 * y.var((0, 2, 3))) < 1e-6
    exact = BACKEND.executor(network, precision="fp64")
    expected = exact.fetch(exact.forward_backward(exact.feed(arrays)))
    for name, value in executor.fetch(answer).items():
        assert 1e-6 < relative_l2(value, expected[name]) < 0.05, name

    trainer = BACKEND.trainer(executor, SGD(2.0**-17))
    before = executor.parameters()["conv.weight"]
    trainer.step(executor.feed(arrays))
    change = np.abs(executor.parameters()["conv.weight"] - before) / np.abs(before)
    assert 0 < np.median(change) < 2.0**-12  # less than 16 bits can resolve


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_inference_sees_new_weights(precision: str) -> None:
    network = classifier()
    executor = BACKEND.executor(network, precision=precision)
    feed = executor.feed({"image": batch()["image"]})
    first = executor.fetch(executor.forward(feed))[network.output]
    executor.load_parameters({"fc.bias": np.full(5, 10, np.float32)})
    second = executor.fetch(executor.forward(feed))[network.output]
    assert np.abs(second - first).min() > 5
    trainer = BACKEND.trainer(executor, SGD(0.5))
    trainer.step(executor.feed(batch()))
    assert relative_l2(executor.fetch(executor.forward(feed))[network.output], second) > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_channels_last_agrees_with_eager(precision: str) -> None:
    agree("channels_last", precision, classifier())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compile_agrees_with_eager() -> None:
    b = Builder("tiny", image_size=10)  # each operator takes seconds to compile
    x = b.relu(b.batch_norm(b.conv(b.image, "conv", 4, 3), "bn"))
    agree("compile", "fp32", b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5)))


OPTIMIZERS = [
    SGD(0.125, momentum=0.75, nesterov=True, weight_decay=0.25),
    RMSProp(2.0**-6, momentum=0.5, weight_decay=0.25),
    Adagrad(0.125, weight_decay=0.25),
    Adam(0.125, weight_decay=0.25),
    AdamW(0.125, weight_decay=0.25),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
def test_one_kernel_for_all_parameters_updates_as_stock_does(optimizer: Optimizer) -> None:
    """Give both the same gradients, in ONNX's order of the axes; continue from a saved state."""
    trainers = [
        BACKEND.trainer(BACKEND.executor(classifier(), mode=mode, precision="fp64"), optimizer)
        for mode in ("stock", "eager", "channels_last")
    ]
    for step in range(4):
        if step == 2:
            saved = trainers[0].state()
        _, *gradients = trainers[0].gradients(trainers[0].executor.feed(batch(step))).items()
        for trainer in reversed(trainers):  # a gradient may be overwritten
            if step == 2:
                trainer.load_state(saved)
            trainer.apply({name: value.contiguous().clone() for name, value in gradients})
    stock, *others = (trainer.executor.parameters() for trainer in trainers)
    for found in others:
        for name in trainers[0].executor.network.parameters:
            assert relative_l2(found[name], stock[name]) < 1e-12, name


def test_stock_sets_no_option() -> None:
    for mode, fused in (("stock", None), ("eager", True), ("channels_last", True)):
        trainer: Any = BACKEND.trainer(BACKEND.executor(classifier(), mode=mode), SGD(0.125))
        assert [group["fused"] for group in trainer._optimizer.param_groups] == [fused], mode


def agree(mode: str, precision: str, network: Network) -> None:
    tolerance = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01, "fp64": 1e-12}[precision]
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_any_number_of_operators_of_a_kind_is_compiled() -> None:
    """They share a factory's code, of which PyTorch compiles eight forms by default."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for alpha in (0.25, 0.5):
            operation = Operation("LeakyRelu", {"X": (2, 3)}, {"alpha": alpha}, name="bent")
            operator = BACKEND.operator(operation, mode="compile")
            (x,) = operation.draw(0)
            assert x is not None
            (y,) = operator.fetch(operator.forward(*operator.feed([x])))
            np.testing.assert_allclose(y, np.where(x > 0, x, x * alpha), rtol=1e-6)


def test_compile_without_a_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match=r"no-such-compiler.*\n.*g\+\+"):
        BACKEND.executor(classifier(), mode="compile")


@pytest.mark.parametrize(
    ("mode", "precision"),
    [
        ("eager", "fp64"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("channels_last", "fp32"),
                ("eager", "fp32"),
                ("stock", "fp32"),
                ("channels_last", "bf16"),
                ("eager", "fp16"),
            ]
        ),
    ],
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
    for _ in range(2):  # of which the second has momentum
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


def test_what_cannot_be_built_is_refused_before_anything_runs() -> None:
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
    for _ in range(8):  # more than one epoch
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
    assert runtime.event_timer("cpu") is None
    assert runtime.l2_flush("cpu") is None
    if not torch.cuda.is_available():
        assert "CUDA" in runtime.device_problem("cuda")


def test_events_are_recorded_in_order_and_read_when_the_second_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against made-up events: no GPU is needed, and none has seen it."""
    told: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.name = f"event {len(told)}"
            told.append(self.name)

        def record(self) -> None:
            told.append(f"{self.name} recorded")

        def synchronize(self) -> None:
            told.append(f"{self.name} reached")

        def elapsed_time(self, later: Event) -> float:
            assert told[-1] == f"{later.name} reached"
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = BACKEND.load("runtime").event_timer("cuda")
    assert timer is not None
    timer.start()
    timer.stop()
    assert timer.milliseconds() == 2.5
    assert told == ["event 0", "event 1", "event 0 recorded", "event 1 recorded", "event 1 reached"]


def test_a_buffer_larger_than_the_cache_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a made-up GPU."""
    made: list[Any] = []

    class Properties:
        L2_cache_size = 1 << 10

    def empty(count: int, *, dtype: Any, device: str) -> Any:
        assert device == "cuda"
        made.append(torch.ones(count, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch, "empty", empty)
    flush = BACKEND.load("runtime").l2_flush("cuda")
    (buffer,) = made
    assert buffer.numel() * buffer.element_size() == flush.buffer_bytes == 2 * flush.cache_bytes == 2 << 10
    flush()
    assert not buffer.any()
    assert len(made) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")
def test_events_measure_a_real_gpu() -> None:
    timer = BACKEND.load("runtime").event_timer("cuda")
    assert timer is not None
    x = torch.ones(4096, 4096, device="cuda")
    for _ in range(3):
        timer.start()
        y = x @ x
        timer.stop()
        assert 0.01 < timer.milliseconds() < 10_000
    del y


def test_amds_sensors_are_read_in_amds_units(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = BACKEND.load("runtime")
    assert runtime.sensors("cpu") is None and runtime.sensors("cuda") is None  # NVIDIA's answer through NVML

    def refused() -> int:
        raise ModuleNotFoundError("amdsmi does not seem to be installed")

    monkeypatch.setattr(torch.version, "hip", "6.4")
    answers = {"get_device_name": "Instinct", "power_draw": 350, "clock_rate": 0, "mem_get_info": (3 * 2**30, 2**32)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "temperature", refused)
    sensors = runtime.sensors("cuda")
    assert sensors.name == "Instinct" and sensors.power_w() == 350.0 and sensors.used_bytes() == 2**30
    assert sensors.clock_mhz() is None and sensors.temperature_c() is None
