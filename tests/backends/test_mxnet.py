"""Tests of what is specific to MXNet: NumPy's names, modes, optimizers, baseline, loader."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from d5suite.backends.mxnet import BACKEND
from d5suite.errors import BackendError, NetworkError
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from d5suite.testing.cases import f32
from d5suite.testing.networks import classifier, every_operator, random_batch, with_idle_parameter
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.norms import relative_l2
from d5suite.validate.training.trajectory import check_trajectory, train, train_by_formula

if BACKEND.problem():
    pytest.skip(str(BACKEND.problem()), allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def _configured() -> None:
    BACKEND.load("runtime").configure(threads=2, seed=0, device="cpu")


def arrays(network: Network, size: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    """A random batch by input names."""
    images, labels = random_batch(network, size, seed)
    return {network.input: images, network.require_loss()[0]: labels}


def test_importing_the_description_leaves_numpy_alone() -> None:
    """NumPy gets the names that MXNet needs only with MXNet; checked in a new process."""
    code = (
        "import sys, numpy\n"
        "from d5suite.backends.mxnet import BACKEND\n"
        "assert not hasattr(numpy, 'PZERO') and 'mxnet' not in sys.modules\n"
        "runtime = BACKEND.load('runtime')\n"
        "assert runtime.mx is sys.modules['mxnet'] and hasattr(numpy, 'PZERO')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_absent_is_refused_with_its_reason() -> None:
    with pytest.raises(BackendError, match="CUDA"):
        BACKEND.executor(classifier(), device="cuda")
    for precision, said in (("bf16", "bfloat16"), ("fp16", "FP16 gemm on cpu not implemented")):
        with pytest.raises(BackendError, match=said):
            BACKEND.executor(classifier(), precision=precision)


@pytest.mark.parametrize("precision", BACKEND.precisions)
def test_modes_agree(precision: str) -> None:
    network = every_operator()
    found = []
    for mode in BACKEND.modes:
        executor = BACKEND.executor(network, mode=mode, precision=precision)
        trainer = BACKEND.trainer(executor, SGD(0.0625, momentum=0.5))
        feed = executor.feed(arrays(network))
        losses = [executor.fetch(trainer.step(feed))["loss"] for _ in range(3)]
        found.append({"losses": np.array(losses), **executor.fetch(executor.forward(feed)), **executor.parameters()})
    for other in found[1:]:
        assert max(relative_l2(other[name], value) for name, value in found[0].items()) < 1e-6


def test_hybrid_keeps_its_graph_and_imperative_makes_none() -> None:
    network = classifier()
    for mode in BACKEND.modes:
        executor: Any = BACKEND.executor(network, mode=mode)
        feed = executor.feed(arrays(network))
        executor.forward_backward(feed)
        graph = executor._train._cached_op
        executor.forward_backward(feed)
        assert executor._train._cached_op is graph
        assert (graph is not None) == (mode != "imperative")
        if mode != "imperative":
            kept = dict.fromkeys(("static_alloc", "static_shape"), mode != "stock")
            assert kept.items() <= dict(executor._train._flags).items(), mode


def test_fused_inference_sees_new_weights() -> None:
    """MXNet's fused operators keep the weights of their first call (docs/findings.md)."""
    network = classifier()
    executor: Any = BACKEND.executor(network, mode="fused")
    feed = executor.feed(arrays(network))
    first = executor.fetch(executor.forward(feed))[network.output]
    assert any("sg_mkldnn_conv" in name for name in executor._infer._cached_graph[1].get_internals().list_outputs())
    graph = executor._infer._cached_op
    executor.forward(feed)
    assert executor._infer._cached_op is graph
    plain = BACKEND.executor(network, mode="hybrid")
    assert relative_l2(first, plain.fetch(plain.forward(plain.feed(arrays(network))))[network.output]) < 1e-6
    trainer = BACKEND.trainer(executor, SGD(0.5))
    trainer.step(feed)
    moved = executor.fetch(executor.forward(feed))[network.output]
    plain.load_parameters(executor.parameters())
    again = plain.fetch(plain.forward(plain.feed(arrays(network))))[network.output]
    assert relative_l2(moved, again) < 1e-6 < relative_l2(moved, first)


@pytest.mark.parametrize("mode", BACKEND.modes)
def test_running_statistics_are_biased_over_steps_and_batch_sizes(mode: str) -> None:
    network = classifier()
    executor = BACKEND.executor(network, mode=mode, precision="fp64")
    statistics = {name: network.initializers[name].astype(np.float64) for name in network.statistics}
    oracle = NetworkOracle(network, training=True)
    for step, size in enumerate((6, 6, 3, 2)):
        batch = arrays(network, size, step)
        executor.forward_backward(executor.feed(batch))
        _, statistics = oracle.run(batch["image"], batch["label"], statistics)
    found = executor.parameters()
    assert max(relative_l2(found[name], value) for name, value in statistics.items()) < 1e-14


@pytest.mark.parametrize("mode", BACKEND.modes)
def test_running_statistics_are_those_of_the_pass_just_made(mode: str) -> None:
    network = classifier()
    batch = arrays(network, 6, 0)
    found = []
    for waits in (True, *[False] * 20):
        executor = BACKEND.executor(network, mode=mode)
        feed = executor.feed(batch)
        executor.forward_backward(feed)
        if waits:
            executor.synchronize()
        found.append(executor.parameters())
    for other in found[1:]:
        for name in network.statistics:
            np.testing.assert_array_equal(other[name], found[0][name])


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.25),
        SGD(0.1, weight_decay=0.1),
        SGD(0.1, momentum=0.9, weight_decay=1e-4),
        SGD(0.1, momentum=0.9, nesterov=True),
        SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.3, clip_value=0.1, clip_norm=0.3),
        RMSProp(0.01, decay=0.8, epsilon=0.01, weight_decay=0.3),
        RMSProp(0.01, momentum=0.9, epsilon=0.1, weight_decay=0.3),
        Adagrad(0.1, epsilon=0.1, initial_square=0.1, weight_decay=0.3),
        Adam(0.01, epsilon=0.01, weight_decay=0.3),
        AdamW(0.01, epsilon=0.01, weight_decay=0.3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("mode", BACKEND.modes)
def test_optimizer_follows_the_formula(mode: str, optimizer: Optimizer) -> None:
    """Settings are not exact in float32; one parameter does not affect the loss."""
    network = with_idle_parameter()
    batches = [random_batch(network, seed=step) for step in range(10)]
    rates = [optimizer.learning_rate * factor for factor in (1, 0.3, 0.7)]
    for precision, tolerance in (("fp64", 1e-10), ("fp32", 1e-4)):
        executor = BACKEND.executor(network, mode=mode, precision=precision)
        state: dict[str, np.ndarray] = {}
        expected = train_by_formula(executor, optimizer, batches, rates=rates, accumulate=2, state=state)
        trainer = BACKEND.trainer(executor, optimizer)
        (found,) = train(trainer, batches, rates=rates, accumulate=2)
        # A bias ahead of BatchNormalization has a gradient of rounding only.
        for trajectory in (expected, found):
            trajectory.parameters.pop("conv1.bias")  # type: ignore[attr-defined]
        checks = check_trajectory(mode, found, expected, tolerance=tolerance, parameters=True)
        assert [check for check in checks if not check.passed] == []
        remembered = trainer.state()
        errors = {name: relative_l2(remembered[name], state[name]) for name in state if "conv1.bias" not in name}
        assert {name for name, error in errors.items() if not error < tolerance} == set()


def test_gradient_of_an_unused_parameter_stays_zero() -> None:
    network = with_idle_parameter()
    executor = BACKEND.executor(network)
    trainer = BACKEND.trainer(executor, SGD(0.125, momentum=0.5, nesterov=True, weight_decay=0.25))
    feed = executor.feed(arrays(network))
    trainer.step(feed)
    assert not executor.fetch(executor.forward_backward(feed))["idle"].any()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    """Neither by Python nor by oneDNN, which logs a message for average pooling in training."""
    b = Builder("average", image_size=10)
    x = b.node(
        "AveragePool",
        "pool",
        [b.conv(b.image, "conv", 4, 3)],
        4,
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
    )
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))
    for mode in BACKEND.modes:
        executor = BACKEND.executor(network, mode=mode)
        trainer = BACKEND.trainer(executor, SGD(0.125, momentum=0.5, nesterov=True, weight_decay=0.25))
        feed = executor.feed(arrays(network))
        executor.forward(feed)
        executor.forward_backward(feed)
        executor.fetch(trainer.step(feed))
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_dropout_draws_from_the_seed_in_training_only() -> None:
    b = Builder("dropout", image_size=10)
    ratio = b.parameter("ratio", f32(0.5))
    x = b.node("Dropout", "dropped", [b.conv(b.image, "conv", 4, 3), ratio], 4)
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))
    losses = []
    for seed in (1, 1, 2):
        BACKEND.load("runtime").configure(threads=2, seed=seed, device="cpu")
        executor = BACKEND.executor(network)
        feed = executor.feed(arrays(network))
        losses.append(float(executor.fetch(executor.forward_backward(feed))["loss"]))
    assert losses[0] == losses[1] != losses[2]
    once, twice = (executor.fetch(executor.forward(feed))[network.output] for _ in range(2))
    np.testing.assert_array_equal(once, twice)


def test_bad_arrays_are_named() -> None:
    executor = BACKEND.executor(classifier())
    with pytest.raises(NetworkError, match=r"'image' has shape \(2, 3, 9, 9\), not \(any, 3, 10, 10\)"):
        executor.feed({"image": np.zeros((2, 3, 9, 9), np.float32)})
    with pytest.raises(NetworkError, match="no input 'picture'"):
        executor.feed({"picture": np.zeros((2, 3, 10, 10), np.float32)})
    with pytest.raises(NetworkError, match=r"no parameter 'fc\.wait'"):
        executor.load_parameters({"fc.wait": np.zeros(5, np.float32)})
    with pytest.raises(NetworkError, match=r"'fc.bias' has shape \(4,\), not \(5\)"):
        executor.load_parameters({"fc.bias": np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    ("mode", "precision", "nesterov"),
    [
        ("hybrid", "fp64", True),
        pytest.param("hybrid", "fp32", True, marks=pytest.mark.slow),
        pytest.param("imperative", "fp32", False, marks=pytest.mark.slow),
        pytest.param("stock", "fp32", False, marks=pytest.mark.slow),
    ],
)
def test_baseline_trains_like_the_adapter(mode: str, precision: str, nesterov: bool) -> None:
    network = build("resnet50", classes=5, image_size=32)
    optimizer = SGD(0.0078125, momentum=0.875, nesterov=nesterov, weight_decay=2.0**-13)
    images, labels = random_batch(network, 4)
    where: dict[str, Any] = {"mode": mode, "device": "cpu", "precision": precision}
    baseline = BACKEND.load("baseline").resnet50_training_step(network, optimizer, images, labels, **where)
    executor = BACKEND.executor(network, **where)
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
    network = classifier()
    with pytest.raises(NetworkError, match="not a ResNet-50"):
        BACKEND.load("baseline").resnet50_training_step(
            network, SGD(0.1), *random_batch(network), mode="hybrid", device="cpu", precision="fp32"
        )


def test_native_loader_gives_alike_pixels_and_leaves_nothing(
    imagenet_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    from d5suite.data.decode import decode_image
    from d5suite.data.imagenet import ImageNet
    from d5suite.data.transforms import EvalTransform, TrainTransform

    dataset = ImageNet(imagenet_tree, "train")  # which has greyscale, CMYK and PNG files
    transform = EvalTransform(32)
    expected = np.stack([transform(decode_image(path)) for path in dataset.files])
    native_loader = BACKEND.load("loader").native_loader
    batches = native_loader(dataset, transform, batch_size=4, workers=0, seed=0)
    seen = set()
    for _ in range(len(dataset) // 4):
        for image, label in zip(*next(batches), strict=True):
            errors = np.sqrt(((expected - image) ** 2).mean((1, 2, 3)))
            assert errors.min() < 0.15  # area averaging is not the triangle filter; other images are 0.6 away
            assert dataset.labels[errors.argmin()] == label
            seen.add(int(errors.argmin()))
    batches.close()
    assert seen == set(range(len(dataset)))

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    found = []
    for workers in (0, 2):
        batches = native_loader(dataset, TrainTransform(32), batch_size=3, workers=workers, seed=0)
        found.append([next(batches) for _ in range(12)])  # further than one epoch
        batches.close()
    for inline, parallel in zip(*found, strict=True):
        assert parallel[0].shape == (3, 3, 32, 32)
        assert parallel[0].dtype == np.float32
        assert parallel[1].dtype == np.int64
        for one, other in zip(inline, parallel, strict=True):
            np.testing.assert_array_equal(one, other)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert [str(path) for path in tmp_path.iterdir()] == [get_temp_dir()]  # this process removes its own


def test_runtime_reports_this_machine() -> None:
    runtime = BACKEND.load("runtime")
    assert runtime.versions()["mxnet"] == BACKEND.version()
    assert runtime.device_problem("cpu") is None
    assert runtime.device_name("cpu")
    assert runtime.device_memory("cpu") is None
    assert "CUDA" in runtime.device_problem("cuda")


ONE_RANK = """
import signal
from d5suite.backends.mxnet import BACKEND, native
from d5suite.distributed.schemes import settings_from_dict
from d5suite.levels.native import Meeting

meeting = Meeting(0, 1, 0, ["here"], "cpu", 1, None, lambda value: [value])
native.DistSync.meet(meeting, settings_from_dict({"name": "dist_sync"}, BACKEND))
print("met", flush=True)
signal.pause()
"""


def test_a_rank_ends_with_its_server_and_the_scheduler_with_the_rank() -> None:
    import psutil

    rank = subprocess.Popen([sys.executable, "-c", ONE_RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    helpers: dict[str, psutil.Process] = {}
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "met\n"
        helpers = {each.cmdline()[-1]: each for each in psutil.Process(rank.pid).children()}
        assert set(helpers) == {"scheduler", "server"}
        helpers["server"].kill()
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 1
        assert f"error: MXNet's server {helpers['server'].pid} ended with status -9 during the job" in said
        assert not psutil.wait_procs(list(helpers.values()), timeout=300)[1]
    finally:
        rank.kill()
        rank.wait()
        for helper in helpers.values():
            if helper.is_running():
                helper.kill()


@pytest.mark.parametrize("channels", [16, 24, 40])
def test_some_channels_of_a_convolution_are_cut_out(channels: int) -> None:
    """At once with rows and backwards columns, and by themselves."""
    weights = np.random.default_rng(0).standard_normal((channels, 3, 3, 3)).astype(np.float32)
    bounds = {"low": [5], "high": [10], "one": [1], "lows": [3, 2, -1], "highs": [9, 6, -9], "steps": [1, 2, -1]}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["all"], pads=[1, 1, 1, 1]),
            helper.make_node("Slice", ["all", "low", "high", "one"], ["some"]),
            helper.make_node("Slice", ["all", "lows", "highs", "axes", "steps"], ["others"]),
        ],
        "cut",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("some", "others")],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array([1, 2, 3]), "axes")]
        + [numpy_helper.from_array(np.array(value), name) for name, value in bounds.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    executor = BACKEND.executor(Network(model))
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    found = executor.fetch(executor.forward(executor.feed({"x": x})))
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    for name, right in zip(("some", "others"), expected, strict=True):
        assert relative_l2(found[name], right) < 1e-5


@pytest.mark.parametrize("shapes", [((4, 3, 5), (1, 5, 2)), ((1, 3, 5), (4, 5, 2)), ((4, 3, 5), None)])
def test_a_product_repeats_batch_axes_whose_sizes_are_not_all_known(shapes: Any) -> None:
    """Heads that share a factor, on either side; and a factor that is a weight."""
    left, right = shapes
    factor = np.random.default_rng(0).standard_normal((1, 4, 5, 2)).astype(np.float32)
    inputs = {"x": left} | ({} if right is None else {"y": right})
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w" if right is None else "y"], ["z"]),
        ],
        "shared",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", *shape]) for n, shape in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("z",)],
        [numpy_helper.from_array(factor, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    executor = BACKEND.executor(Network(model))
    for batch in (2, 3):
        fed = {
            n: np.random.default_rng(1).standard_normal((batch, *shape)).astype(np.float32)
            for n, shape in inputs.items()
        }
        found = executor.fetch(executor.forward(executor.feed(fed)))
        (expected,) = ReferenceEvaluator(model).run(None, fed)
        assert relative_l2(found["z"], np.asarray(expected)) < 1e-5


def compare(network: Network, mode: str = "hybrid", feed: dict[str, np.ndarray] | None = None) -> float:
    """Return the largest error of a mode's gradients in float32, by those operator by operator."""
    found = []
    for where, precision in (("imperative", "fp64"), (mode, "fp32")):
        executor = BACKEND.executor(network, mode=where, precision=precision)
        fed = executor.feed(feed or arrays(network, 2))
        found.append(executor.fetch(executor.forward_backward(fed)))
    largest = max(float(np.abs(value).max()) for value in found[0].values())
    return max(
        float(np.abs(found[1][name] - value).max()) / max(float(np.abs(value).max()), 1e-2 * largest)
        for name, value in found[0].items()
    )


def reshaped(b: Builder, x: str, name: str, *sizes: int) -> str:
    return b.reshape(x, name, (-1, *sizes))


def finished(b: Builder, x: str) -> Network:
    """Append a convolution and a classifier."""
    x = b.conv(x, "last", 16, 1)
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


@pytest.mark.parametrize("mode", BACKEND.modes)
@pytest.mark.parametrize("operator", ["Add", "Sum", "ScatterElements"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_sum_with_an_input_has_the_right_gradient(mode: str, operator: str, turned: bool) -> None:
    """In a cached graph with static memory, MXNet's function for equal shapes does not."""
    generator, size = np.random.default_rng(0), (2, 6)
    terms = ["given", "product"] if turned else ["product", "given"]
    scatter = helper.make_node(operator, ["given", "places", "product"], ["sum"], axis=1, reduction="add")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            scatter if operator == "ScatterElements" else helper.make_node(operator, terms, ["sum"]),
            helper.make_node("Tanh", ["sum"], ["tanh"]),
            helper.make_node("MatMul", ["tanh", "v"], ["y"]),
        ],
        "sum",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name in ("x", "given")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, size)],
        [numpy_helper.from_array(generator.standard_normal((6, 6)).astype(np.float32), name) for name in "wv"]
        + [numpy_helper.from_array(np.tile(np.arange(6)[::-1], (2, 1)), "places")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    network = Network(model).with_classification_loss()
    feed = {name: generator.standard_normal(size).astype(np.float32) for name in ("x", "given")}
    assert compare(network, mode, {**feed, network.require_loss()[0]: np.array([1, 4])}) < 1e-4


@pytest.mark.parametrize("mode", ["hybrid", "stock"])
@pytest.mark.parametrize("channels", [16, 24, 40])
@pytest.mark.parametrize("ending", ["Reshape", "Unsqueeze", "BatchNormalization", "Add"])
def test_what_a_convolution_reads_may_be_transposed_and_reshaped(mode: str, channels: int, ending: str) -> None:
    """Its gradient is stored in blocks, which MXNet cannot transpose in another shape."""
    b = Builder("reshaped", image_size=8)
    x = reshaped(b, b.conv(b.image, "conv", channels, 3), "rows", 64, channels)
    x = b.transpose(x, "columns", (0, 2, 1), channels)
    if ending == "Unsqueeze":
        x = b.node("Unsqueeze", "line", [b.relu(x), b.constant("axis", np.array([2]))], channels)
    else:
        x = reshaped(b, x, "squares", channels, 8, 8)
    if ending == "BatchNormalization":
        x = b.relu(b.batch_norm(x, "norm"))
    if ending == "Add":
        x = b.add(x, b.conv(b.image, "other", channels, 3), "sum")
    assert compare(finished(b, x), mode) < 1e-3


@pytest.mark.parametrize("mode", ["hybrid", "imperative"])
@pytest.mark.parametrize(
    "widths", [(20, 12), (24, 40), (12, 20), (4, 28), (8, 8), (16, 16), (12, 8, 4), (20, 5)], ids=str
)
def test_channels_of_any_numbers_are_joined_in_front_of_a_convolution(mode: str, widths: tuple[int, ...]) -> None:
    """MXNet cannot divide a gradient that is stored in blocks, unless at a block's end."""
    b = Builder("joined", image_size=8)
    joined = b.concat([b.conv(b.image, f"conv{n}", width, 3) for n, width in enumerate(widths)], "joined")
    assert compare(finished(b, b.relu(joined)), mode) < 1e-3


@pytest.mark.parametrize("mode", BACKEND.modes)
@pytest.mark.parametrize("slopes", [(8, 1, 1), (1, 1, 1)], ids=str)
def test_slopes_have_the_right_gradient(mode: str, slopes: tuple[int, ...]) -> None:
    b = Builder("slopes", image_size=8)
    slope = b.parameter("slope", np.linspace(0.1, 0.5, slopes[0], dtype=np.float32).reshape(slopes))
    x = b.node("PRelu", "relu", [b.conv(b.image, "conv", 8, 3), slope], 8)
    x = b.node("ReduceMean", "mean", [x, b.constant("axes", np.array([2, 3]))], 8, keepdims=0)
    assert compare(b.classifier(b.linear(x, "fc", 5)), mode) < 1e-4


@pytest.mark.parametrize("mode", BACKEND.modes)
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_equal_extremes_share_their_gradient(operator: str, kept: int, mode: str) -> None:
    """Three pixels in each row, one of them, or all; an infinite one is left alone."""
    sign = 1 if operator == "ReduceMax" else -1
    b = Builder("extremes", image_size=4, channels=1)
    weight = b.parameter("weight", np.ones((1, 1, 4, 4), np.float32))
    x = b.node(operator, "most", [b.add(b.image, weight, "sum"), b.constant("axes", np.array([3]))], 1, keepdims=kept)
    network = b.classifier(b.linear(reshaped(b, x, "row", 4), "fc", 4))
    image = sign * np.array([[3, 3, 3, 1], [2, 1, 0, -1], [5, 5, 5, 5], [-np.inf, -1, -1, -2]], np.float32)
    executor = BACKEND.executor(network, mode=mode, precision="fp64")
    feed = {"image": image[None, None], "label": np.array([2])}
    found = executor.fetch(executor.forward_backward(executor.feed(feed)))
    assert np.isfinite(found["loss"]).all()
    gradient = found["weight"][0, 0]
    shares = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]])
    whole = gradient.sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, whole * shares / shares.sum(1, keepdims=True), rtol=1e-12, atol=1e-15)
    weights, row = executor.parameters(), (image + 1).max(1) if sign > 0 else (image + 1).min(1)
    scores = weights["fc.weight"] @ row + weights["fc.bias"]
    chances = np.exp(scores - scores.max())
    right = weights["fc.weight"].T @ (chances / chances.sum() - np.eye(4)[2])
    np.testing.assert_allclose(whole[:, 0], right, rtol=1e-9)
