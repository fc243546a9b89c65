"""Keras's adapter: modes, layers, precisions, optimizer, baseline and loader.

The kit proves the operators. A process runs one mode: the default one here, the others in
subprocesses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.backends.keras import BACKEND
from d5suite.errors import BackendError, NetworkError
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.user_network import load_user_network
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import classifier
from d5suite.validate.norms import relative_l2
from d5suite.validate.training.formulas import update
from tests.conftest import require_installed

require_installed("keras", "tensorflow")


NESTEROV = SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125)


@pytest.fixture(scope="module", autouse=True)
def _configured() -> None:
    runtime = BACKEND.load("runtime")
    import keras

    keras.utils.set_random_seed(0)
    assert runtime.versions()["keras"] == BACKEND.version()


def executor_of(network: Network, precision: str) -> Any:
    return BACKEND.executor(network, precision=precision)


def batch(seed: int = 0, size: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.standard_normal((size, 3, 10, 10)).astype(np.float32),
        "label": rng.integers(0, 5, size, dtype=np.int64),
    }


def test_a_process_runs_one_mode() -> None:
    with pytest.raises(BackendError, match="mode 'tensorflow', which excludes mode 'jax'"):
        BACKEND.executor(classifier(), mode="jax")
    with pytest.raises(BackendError, match="runs Keras on tensorflow, not on torch"):
        BACKEND.load("network").Executor(classifier(), mode="torch", device="cpu", precision="fp32")


MODE_SCRIPT = """
import json, sys
import numpy as np
from d5suite.backends.keras import BACKEND
from d5suite.optimizers.settings import SGD, Adagrad, AdamW, RMSProp
from d5suite.testing.networks import classifier
from d5suite.validate.training.trajectory import train, train_by_formula
from d5suite.validate.norms import relative_l2

mode = sys.argv[1]
runtime = BACKEND.load("runtime", mode)
runtime.configure(threads=1, seed=0, device="cpu")
optional = [name for name in ("jax", "matplotlib", "sklearn") if name in sys.modules and name != mode]
LossModel = BACKEND.load("network", mode).LossModel
rng = np.random.default_rng(0)
batches = [(rng.standard_normal((6, 3, 10, 10)).astype(np.float32), rng.integers(0, 5, 6)) for _ in range(4)]
optimizer = SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125)
exact, rounded = (BACKEND.executor(classifier(), mode=mode, precision=p) for p in ("fp64", "fp32"))
trainer = BACKEND.trainer(exact, optimizer)
found = train(trainer, batches)[0]
expected = train_by_formula(exact, optimizer, batches)
trained = train(BACKEND.trainer(rounded, optimizer), batches)[0]
traces, compute = [], LossModel.compute_metrics
LossModel.compute_metrics = lambda *given, **more: traces.append(1) or compute(*given, **more)
others = {}
for optimizer, accumulate in (
    (RMSProp(0.01, momentum=0.7, epsilon=0.1), 1),
    (AdamW(0.02, epsilon=0.001, clip_norm=0.1), 1),
    (Adagrad(0.05, epsilon=0.01, clip_value=0.01, clip_norm=0.02, weight_decay=0.05), 2),
):
    course = {"rates": (0.01, 0.3, 0.1), "accumulate": accumulate}
    formula = train_by_formula(exact, optimizer, batches, **course)
    native = train(BACKEND.trainer(exact, optimizer), batches, **course)[0]
    others[optimizer.name] = max(relative_l2(native.parameters[k], v, floor=0.1) for k, v in formula.parameters.items())
start = exact.parameters()
feed = exact.feed({"image": batches[0][0], "label": batches[0][1]})
trainer.step(feed)
between = exact.parameters()
output = exact.fetch(exact.forward(feed))["fc"]
trainer.step(feed)
exact.synchronize()
print(json.dumps({
    "formula": max(relative_l2(found.parameters[k], v, floor=0.1) for k, v in expected.parameters.items()),
    "losses": relative_l2(found.losses, expected.losses),
    "others": others,
    "traces": len(traces),
    "optional": optional,
    "float32": max(relative_l2(trained.parameters[k], v, floor=0.1) for k, v in expected.parameters.items()),
    "moved": float(np.abs(between["fc.weight"] - start["fc.weight"]).max()),
    "moved_again": float(np.abs(exact.parameters()["fc.weight"] - between["fc.weight"]).max()),
    "dtype": str(output.dtype),
    "versions": runtime.versions(),
    "floatx": __import__("keras").config.floatx(),
}))
"""


SLOW = dict.fromkeys((BACKEND.default_mode, "jax"), pytest.mark.slow)
"""The kit proves the default in full."""


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SLOW.get(mode, ())) for mode in BACKEND.modes])
def test_every_mode_follows_the_formulas(mode: str) -> None:
    """In float64, too, where Keras on PyTorch and JAX uses float32; one trace serves all rates."""
    problem = BACKEND.problem(mode)
    if problem:
        pytest.skip(problem)
    process = subprocess.run([sys.executable, "-c", MODE_SCRIPT, mode], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["optional"] == []
    assert found["formula"] < 1e-12
    assert found["losses"] < 1e-12
    assert max(found["others"].values()) < 1e-12
    assert mode == "torch" or found["traces"] == 2  # RMSProp's and AdamW's: Adagrad ran no step of one batch
    assert 1e-10 < found["float32"] < 1e-4
    assert found["moved"] > 0
    assert found["moved_again"] > 0
    assert found["dtype"] == "float64"
    assert mode in found["versions"]
    assert found["floatx"] == "float32"


def test_the_network_is_a_model_of_keras_layers() -> None:
    from keras import layers

    executor = executor_of(classifier(), "fp32")
    found = {layer.name: type(layer) for layer in executor.loss_model().layers}
    assert found["conv1"] is found["conv2"] is layers.Conv2D
    assert found["bn1"] is layers.BatchNormalization
    assert found["add"] is layers.Add
    assert found["fc"] is layers.Dense
    assert executor.variables["conv1.weight"].shape == (3, 3, 3, 6)
    assert tuple(executor.feed(batch())["image"].shape) == (6, 10, 10, 3)


def test_a_weight_that_no_slope_leads_to_has_a_gradient_of_zero() -> None:
    """It is used, but behind a comparison, as in vector quantisation."""
    b = Builder("quantised", image_size=4)
    y = b.linear(b.flatten(b.image, "flatten", size=4), "fc", 5)
    codes, half = b.parameter("codes", np.linspace(-1, 1, 5, dtype=np.float32)), b.scalar("half", 0.5)
    above = b.node("Greater", "above", [y, codes], 5)
    executor = executor_of(b.classifier(b.node("Where", "chosen", [above, y, half], 5)), "fp64")
    inputs = {"image": batch()["image"][..., :4, :4], "label": np.arange(6) % 5}
    gradients = executor.fetch(executor.forward_backward(executor.feed(inputs)))
    np.testing.assert_array_equal(gradients["codes"], np.zeros(5))
    assert np.abs(gradients["fc.weight"]).max() > 0


def test_float64_leaves_the_process_as_it_was() -> None:
    import keras
    from keras.src.backend.common import dtypes

    before = dict(dtypes.BIT64_TO_BIT32_DTYPE)
    executor = executor_of(classifier(), "fp64")
    with executor.scope():
        assert keras.config.floatx() == "float64"
    executor.forward_backward(executor.feed(batch()))
    assert keras.config.floatx() == "float32"
    assert before == dtypes.BIT64_TO_BIT32_DTYPE


def test_trainers_of_one_executor_have_their_own_state() -> None:
    executor, reference = (BACKEND.executor(classifier(), precision="fp64") for _ in range(2))
    trainers = BACKEND.trainer(executor, NESTEROV), BACKEND.trainer(executor, SGD(0.125, momentum=0.75))
    parameters = {name: executor.parameters()[name] for name in executor.network.parameters}
    states: tuple[dict[str, np.ndarray], ...] = ({}, {})
    for step in range(4):
        trainers[step % 2].step(executor.feed(batch(step)))
        reference.load_parameters(parameters)
        gradients = reference.fetch(reference.forward_backward(reference.feed(batch(step))))
        update(trainers[step % 2].optimizer, parameters, gradients, states[step % 2])
    found = executor.parameters()
    assert max(relative_l2(found[name], value) for name, value in parameters.items()) < 1e-12


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_precisions_round_weights_and_activations_only(precision: str, dtype: str) -> None:
    """Compare a convolution and a batch normalization with their definition in float64."""
    import ml_dtypes

    b = Builder("short", image_size=10)
    x = b.batch_norm(b.conv(b.image, "conv", 4, 1), "bn")
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))
    executor = executor_of(network, precision)
    assert {variable.value.dtype.name for variable in executor.variables.values()} == {"float32"}
    feed = executor.feed(batch())
    assert feed["image"].dtype.name == dtype
    answer = executor.forward_backward(feed)
    assert {value.dtype.name for value in answer.values()} == {"float32"}

    def rounded(array: np.ndarray) -> Any:
        return array.astype(ml_dtypes.bfloat16 if precision == "bf16" else np.float16).astype(np.float64)

    weight = rounded(network.initializers["conv.weight"][:, :, 0, 0])
    y = rounded(np.einsum("oi,nihw->nohw", weight, rounded(batch()["image"])))
    statistics = executor.parameters()
    assert relative_l2(statistics["bn.running_mean"], 0.1 * y.mean((0, 2, 3))) < 1e-5  # float32, not 16 bits
    assert relative_l2(statistics["bn.running_var"], 0.9 + 0.1 * y.var((0, 2, 3))) < 1e-6
    before = executor.parameters()["conv.weight"]
    BACKEND.trainer(executor, SGD(2.0**-14)).step(feed)
    change = np.abs(executor.parameters()["conv.weight"] - before) / np.abs(before)
    assert 0 < np.median(change) < 2.0**-9  # a bfloat16 weight could not have moved so little


@pytest.mark.slow
def test_baseline_is_the_same_computation() -> None:
    precision, tolerance = "fp64", 1e-9  # in float32 test_cost_of_neutrality proves it before it measures
    network = build("resnet50", classes=4, image_size=32)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((4, 3, 32, 32)).astype(np.float32)
    labels = rng.integers(0, 4, 4, dtype=np.int64)
    optimizer = SGD(0.0078125, momentum=0.875, nesterov=True, weight_decay=2.0**-13)
    where = {"mode": "tensorflow", "device": "cpu", "precision": precision}
    baseline = BACKEND.load("baseline").resnet50_training_step(network, optimizer, images, labels, **where)
    executor = BACKEND.executor(network, **where)
    trainer = BACKEND.trainer(executor, optimizer)
    feed = executor.feed({network.input: images, network.require_loss()[0]: labels})
    for _ in range(2):
        baseline.step()
        baseline.synchronize()
        assert executor.fetch(trainer.step(feed))["loss"] == pytest.approx(baseline.loss(), rel=tolerance)
    ours, theirs = executor.parameters(), baseline.parameters()
    assert theirs.keys() == set(network.parameters)
    assert max(relative_l2(theirs[name], ours[name]) for name in theirs) < 10 * tolerance


def test_baseline_refuses_another_network() -> None:
    arrays = batch()
    with pytest.raises(NetworkError, match="not a ResNet-50"):
        BACKEND.load("baseline").resnet50_training_step(
            classifier(), NESTEROV, arrays["image"], arrays["label"], mode="tensorflow", device="cpu", precision="fp32"
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_native_loader_gives_the_neutral_pixels_and_leaves_nothing(imagenet_tree: Path, workers: int) -> None:
    import threading

    from d5suite.data.decode import decode_image
    from d5suite.data.imagenet import ImageNet
    from d5suite.data.transforms import EvalTransform, TrainTransform

    native_loader = BACKEND.load("loader").native_loader
    dataset = ImageNet(imagenet_tree, "val")
    expected = np.stack([EvalTransform(32)(decode_image(path)).transpose(1, 2, 0) for path in dataset.files])
    batches = native_loader(dataset, EvalTransform(32), batch_size=4, workers=workers, seed=0)
    seen = []
    for _ in range(len(dataset) // 4):
        images, labels = next(batches)
        for image, label in zip(np.asarray(images), np.asarray(labels), strict=True):
            errors = np.abs(expected - image).max((1, 2, 3))
            assert errors.min() < 1e-5
            assert dataset.labels[errors.argmin()] == label
            seen.append(int(errors.argmin()))
    assert sorted(seen) == list(range(len(dataset)))
    batches.close()
    runs = []
    for _ in range(2):
        batches = native_loader(dataset, TrainTransform(32), batch_size=3, workers=workers, seed=0)
        runs.append([np.asarray(next(batches)[0]) for _ in range(8)])  # more than one epoch
        batches.close()
    np.testing.assert_array_equal(runs[0], runs[1])
    assert runs[0][0].shape == (3, 32, 32, 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Worker_") and thread.is_alive()]


def test_a_weight_is_added_to_a_column_of_as_many_samples(tmp_path: Path) -> None:
    """Keras's sum takes the column for a bias of the weight's channels."""
    token = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    graph = helper.make_graph(
        [
            helper.make_node("Expand", ["token", "sizes"], ["tokens"], "tokens"),
            helper.make_node("Concat", ["tokens", "image"], ["y"], "joined", axis=1),
        ],
        "spread",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [4, 5, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 6, 4])],
        [numpy_helper.from_array(token, "token"), numpy_helper.from_array(np.array([4, 1, 4]), "sizes")],
    )
    path = tmp_path / "spread.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    network = load_user_network(path, shapes={}, batch_size=4).network
    images = np.random.default_rng(0).standard_normal((4, 5, 4)).astype(np.float32)
    executor = executor_of(network, "fp32")
    found = executor.fetch(executor.forward(executor.feed({"image": images})))["y"]
    np.testing.assert_array_equal(found, np.concatenate([np.repeat(token, 4, 0), images], 1))


def test_runtime_reports_this_machine() -> None:
    import tensorflow as tf

    runtime = BACKEND.load("runtime")
    assert {"keras", "tensorflow"} <= runtime.versions().keys()
    assert runtime.device_problem("cpu") is None
    assert runtime.device_name("cpu")
    assert runtime.device_memory("cpu") is None
    if not tf.config.list_physical_devices("GPU"):
        assert "CUDA" in runtime.device_problem("cuda")
