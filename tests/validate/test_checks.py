"""Validation catches wrong answers: each planted error is found, named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from d5suite.errors import ConfigurationError, JobError, ValidationError
from d5suite.levels import network as level1
from d5suite.levels import training as level2
from d5suite.levels.contract import ContractError
from d5suite.levels.description import MOST_ROUNDINGS, USUAL, WIDER, Tolerance, capped
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.optimizers.settings import SGD, Optimizer, optimizer_from_dict
from d5suite.testing.networks import classifier, random_batch
from d5suite.validate.check import Validation
from d5suite.validate.network.gradient import check_gradient, check_gradient_float64
from d5suite.validate.network.gradient_references import GradientReference, sampled
from d5suite.validate.network.inference import check_inference, outputs_tolerance
from d5suite.validate.network.oracle import NetworkOracle, inference, inferences
from d5suite.validate.network.sensitivity import Sensitivity, check_each_gradient, differentiate, gradient_errors
from d5suite.validate.norms import UNIT_ROUNDOFF, relative_l2
from d5suite.validate.training.formulas import update
from d5suite.validate.training.trajectory import check_trajectory, load_runs, save_runs, train, train_by_formula
from d5suite.validate.training.updates import check_update
from tests.conftest import small_network


def linear_network() -> Network:
    """Mean over the image, then one fully connected layer: small enough to differentiate by
    hand."""
    b = Builder("linear", image_size=4)
    return b.classifier(b.linear(b.flatten(b.global_average_pool(b.image, "pool"), "flatten"), "fc", 5))


SINGLE = Tolerance(outputs=1e-6, gradients=10, trajectory=1e-5, reason="float32 rounding")

Fault = Callable[[dict[str, np.ndarray]], None]


class HandExecutor(level1.Executor):
    """`linear_network` in NumPy; ``fault`` may spoil an answer before it is handed out."""

    def __init__(self, *, fault: Fault | None = None, precision: str = "fp64") -> None:
        super().__init__(linear_network(), mode="numpy", device="cpu", precision=precision)
        self.dtype = np.float64 if precision == "fp64" else np.float32
        self.fault = fault
        self.values = {name: value.astype(self.dtype) for name, value in self.network.initializers.items()}

    def feed(self, arrays: level1.Arrays) -> level1.Native:
        return {k: v.astype(self.dtype) if v.dtype.kind == "f" else v for k, v in arrays.items()}

    def _spoilt(self, answer: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.fault is not None:
            self.fault(answer)
        return answer

    def forward(self, feed: level1.Native) -> level1.Native:
        features = feed["image"].mean(axis=(2, 3))
        return self._spoilt({"fc": features @ self.values["fc.weight"].T + self.values["fc.bias"]})

    def forward_backward(self, feed: level1.Native) -> level1.Native:
        features, labels = feed["image"].mean(axis=(2, 3)), feed["label"]
        logits = features @ self.values["fc.weight"].T + self.values["fc.bias"]
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(probabilities[rows, labels]).mean()
        slope = probabilities.copy()
        slope[rows, labels] -= 1
        slope /= len(labels)
        return self._spoilt({"loss": np.array(loss), "fc.weight": slope.T @ features, "fc.bias": slope.sum(axis=0)})

    def fetch(self, values: level1.Native) -> dict[str, np.ndarray]:
        return {name: np.array(value) for name, value in values.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in self.values.items()}

    def load_parameters(self, values: level1.Arrays) -> None:
        self.values.update({name: np.array(value, self.dtype) for name, value in values.items()})

    def synchronize(self) -> None:
        pass


class HandTrainer(level2.Trainer):
    """The update formula, with an optional dampening that the neutral definition does not have."""

    dampening = 0.0

    def __init__(self, executor: level1.Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self.held: dict[str, np.ndarray] = {}

    def step(self, feed: level1.Native, *more: level1.Native) -> level1.Native:
        executor = self.executor
        assert isinstance(executor, HandExecutor) and not more
        answer = dict(executor.forward_backward(feed))
        gradients = {k: (1 - self.dampening) * v for k, v in answer.items()}
        update(self.optimizer, executor.values, gradients, self.held)
        return {"loss": answer["loss"]}

    def _change_rate(self, rate: float) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        return dict(self.held)

    def load_state(self, values: level1.Arrays) -> None:
        self.held = dict(values)


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.standard_normal((4, 3, 4, 4)).astype(np.float32), generator.integers(0, 5, 4)


def test_a_right_executor_passes(batch: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = batch
    validation = Validation()
    executor = HandExecutor()
    validation.require(check_inference(executor, images, tolerance=1e-5, threads=1))
    validation.require(check_gradient_float64(executor, images, labels))
    single = HandExecutor(precision="fp32")
    validation.require(check_gradient(single, executor, images, labels, SINGLE))
    found = validation.to_dict()
    assert found["passed"]
    assert len(found["checks"]) == 6
    assert all(0 <= c["error"] <= c["tolerance"] for c in found["checks"])
    assert sum(c["error"] > 0 for c in found["checks"]) >= 3  # they compare different computations


def _scale(name: str, factor: float) -> Fault:
    def fault(answer: dict[str, np.ndarray]) -> None:
        if name in answer:
            answer[name] = answer[name] * factor

    return fault


def _drop_one(name: str) -> Fault:
    def fault(answer: dict[str, np.ndarray]) -> None:
        if name in answer:
            answer[name] = answer[name].copy()
            answer[name].flat[0] = 0

    return fault


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_scale("fc.weight", 1.01), "first tensor that disagrees: fc.weight"),
        (_scale("fc.bias", 4.0), "first tensor that disagrees: fc.bias"),  # summed instead of averaged
        (_scale("fc.bias", 0.0), "first tensor that disagrees: fc.bias"),
        (_drop_one("fc.weight"), "first tensor that disagrees: fc.weight"),
        (_scale("loss", 4.0), "loss"),
    ],
)
def test_a_wrong_gradient_is_named(fault: Fault, message: str, batch: tuple[np.ndarray, np.ndarray]) -> None:
    validation = Validation()
    with pytest.raises(ValidationError, match=message):
        validation.require(check_gradient_float64(HandExecutor(fault=fault), *batch))
    assert not validation.to_dict()["passed"]


def test_a_loss_whose_roundings_drown_small_steps_is_proved_with_larger_ones(
    tmp_path: Path, batch: tuple[np.ndarray, np.ndarray]
) -> None:
    images, labels = batch[0] * 1000, batch[1]
    right = check_gradient_float64(HandExecutor(), images, labels, recorded=tmp_path / "answers.h5")
    assert all(check.passed for check in right)
    assert any("step" in check.detail for check in right), "the smallest step would do, too"
    again = check_gradient_float64(HandExecutor(), images, labels, recorded=tmp_path / "answers.h5")
    assert [check.to_dict() for check in again] == [check.to_dict() for check in right]
    for factor in (1.001, 0.999):
        wrong = HandExecutor(fault=_scale("fc.weight", factor))
        with pytest.raises(ValidationError, match=r"first tensor that disagrees: fc\.weight"):
            Validation().require(check_gradient_float64(wrong, images, labels))


def test_a_loss_is_held_to_the_networks_sensitivity(batch: tuple[np.ndarray, np.ndarray]) -> None:
    images, labels = batch[0] + np.float32(10), batch[1]  # logits cancel, so that roundings weigh more
    strict = Tolerance(outputs=1e-8, gradients=10, trajectory=1e-5, reason="less than a rounding")
    loss, *_ = check_gradient(HandExecutor(precision="fp32"), HandExecutor(), images, labels, strict)
    assert strict.outputs < loss.error < loss.tolerance < 1e-4
    wrong = HandExecutor(fault=_scale("loss", 1.001), precision="fp32")
    with pytest.raises(ValidationError, match=r"loss .* relative error 0\.001"):
        Validation().require(check_gradient(wrong, HandExecutor(), images, labels, strict))


def test_momentum_that_dwarfs_the_gradient_may_round_it_away_and_nothing_else(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    executor, proved = HandExecutor(precision="fp32"), HandExecutor()
    images, labels = batch
    optimizer = SGD(learning_rate=0.1, momentum=0.9)
    start = executor.parameters()
    answer = GradientReference.of(
        proved.forward_backward({"image": images.astype(np.float64), "label": labels}), "loss"
    )
    for fault, passes in ((None, True), (_scale("fc.bias", 0.5), False)):
        executor.fault = fault
        executor.load_parameters(start)
        trainer = HandTrainer(executor, optimizer)
        trainer.load_state({"steps": np.array(3.0), "velocity/fc.weight": np.full((5, 3), 1e6, np.float32),
                            "velocity/fc.bias": np.zeros(5, np.float32)})  # fmt: skip
        state = {name: value if "/" not in name else sampled({name: value})[name]
                 for name, value in trainer.state().items()}  # fmt: skip
        trainer.step({"image": images, "label": labels})
        (check,) = check_update(
            "step", trainer, sampled(start), state, sampled(executor.parameters()), answer, limit=1e-3
        )
        assert check.passed is passes, check


def test_a_wrong_tensor_is_named_in_the_timed_precision(batch: tuple[np.ndarray, np.ndarray]) -> None:
    wrong = HandExecutor(fault=_scale("fc.bias", 1.001), precision="fp32")
    with pytest.raises(ValidationError, match=r"first tensor that disagrees: fc\.bias \(0\.001\)"):
        Validation().require(check_gradient(wrong, HandExecutor(), *batch, SINGLE))


@pytest.mark.parametrize(
    ("wrong_at", "passes"),
    [("these weights", True), ("all weights", False), ("one call", False), ("two calls", False)],
)
def test_a_flip_at_these_weights_is_no_wrong_gradient(
    wrong_at: str, passes: bool, batch: tuple[np.ndarray, np.ndarray]
) -> None:
    executor = HandExecutor(precision="fp32")
    start, calls = executor.parameters(), []

    def fault(answer: dict[str, np.ndarray]) -> None:
        calls.append(1)
        here = np.array_equal(start["fc.weight"], executor.values["fc.weight"])
        wrong = {"these weights": here, "one call": len(calls) <= 1, "two calls": len(calls) <= 2}
        if wrong.get(wrong_at, True):
            answer["fc.bias"] = answer["fc.bias"] * 1.05

    executor.fault = fault
    checks = check_gradient(executor, HandExecutor(), *batch, SINGLE)
    gradient = next(check for check in checks if check.name.startswith("gradient"))
    assert gradient.passed is passes, gradient
    assert gradient.error < 1e-5 if passes else gradient.error == pytest.approx(0.05, rel=0.01)
    assert ("least error at 2 weights" in gradient.detail) is passes
    assert all(np.array_equal(start[name], value) for name, value in executor.parameters().items())


@pytest.mark.parametrize(("factor", "roundings", "passes"), [(1.001, 1, False), (1.001, 1e4, True), (1.5, 1e4, False)])
def test_larger_roundings_count_only_where_they_are_declared(
    factor: float, roundings: float, passes: bool, batch: tuple[np.ndarray, np.ndarray]
) -> None:
    executor, proved = HandExecutor(fault=_scale("fc.bias", factor), precision="fp32"), HandExecutor()
    fed = {"image": batch[0], "label": batch[1]}
    exact = differentiate(proved, proved.feed(fed))
    usual = Sensitivity.measure(proved, fed, exact, "fp32")
    answers = differentiate(executor, fed), exact
    found = check_each_gradient("each", executor, proved, (fed, fed), answers, usual, roundings)
    assert found.passed is passes and ("roundings 10000 times" in found.name) is (roundings > 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: a.update(fc=a["fc"] * 1.001), "relative error 0.001"),
        (lambda a: a.update(fc=a["fc"][:, :-1]), r"shape \(4, 4\), not \(4, 5\)"),
        (lambda a: a["fc"].__setitem__((0, 0), np.nan), "non-finite"),
        (lambda a: a.pop("fc"), "missing"),
    ],
)
def test_a_wrong_output_is_refused(spoil: Fault, message: str, batch: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises((ValidationError, ContractError), match=message):
        Validation().require(check_inference(HandExecutor(fault=spoil), batch[0], tolerance=1e-5, threads=1))


def _off_by(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Let onnxruntime's outputs be wrong by this part of themselves."""

    def inexact(*arguments: Any, **settings: Any) -> Any:
        outputs, _ = inferences(*arguments, **settings)
        wrong = [{name: value * np.float32(1 + error) for name, value in each.items()} for each in outputs]
        return wrong, "onnxruntime"

    monkeypatch.setattr("d5suite.validate.network.inference.inferences", inexact)


def _images(count: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((count, 3, 4, 4)).astype(np.float32)


def test_float64_decides_where_onnxruntime_is_the_less_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _off_by(monkeypatch, 2e-4)
    (check,) = check_inference(HandExecutor(precision="fp32"), _images(9), tolerance=1e-5, threads=1)
    assert check.passed and check.name == "output (numpy fp32) vs onnx.reference"
    assert check.detail == "fc; onnxruntime itself is off by 0.0002" and check.error < 1e-6


@pytest.mark.parametrize("sample", [slice(None), 4], ids=["all", "one"])
def test_float64_does_not_excuse_a_wrong_output(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of nine samples, too: float64 takes four of them."""
    _off_by(monkeypatch, 2e-4)

    def spoil(answer: dict[str, np.ndarray]) -> None:
        answer["fc"][sample] *= 1.001

    (check,) = check_inference(HandExecutor(fault=spoil, precision="fp32"), _images(9), tolerance=1e-5, threads=1)
    assert not check.passed and check.name == "output (numpy fp32) vs onnxruntime"


def test_float64_is_not_asked_where_onnxruntime_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d5suite.validate.network.inference.NetworkOracle", None)
    (check,) = check_inference(HandExecutor(precision="fp32"), _images(9), tolerance=1e-5, threads=1)
    assert check.passed and check.name == "output (numpy fp32) vs onnxruntime"


def test_a_missing_gradient_is_named(batch: tuple[np.ndarray, np.ndarray]) -> None:
    def forget(answer: dict[str, np.ndarray]) -> None:
        del answer["fc.bias"]

    executor = HandExecutor(fault=forget)
    with pytest.raises(ContractError, match=r"'fc\.bias' is missing"):
        Validation().require(check_gradient_float64(executor, *batch))


def test_momentum_with_dampening_is_caught(batch: tuple[np.ndarray, np.ndarray]) -> None:
    optimizer = SGD(learning_rate=0.5, momentum=0.5)
    executor = HandExecutor()
    steps = [batch] * 10
    expected = train_by_formula(executor, optimizer, steps)
    early, right = train(HandTrainer(executor, optimizer), steps, early=[3])
    assert np.array_equal(early.losses, right.losses[:3])
    assert not np.array_equal(early.parameters["fc.bias"], right.parameters["fc.bias"])
    Validation().require(check_trajectory("a vs b", right, expected, tolerance=1e-8, parameters=True))
    assert right.losses[-1] < right.losses[0]
    trainer = HandTrainer(executor, optimizer)
    trainer.dampening = 0.5
    (wrong,) = train(trainer, steps)
    with pytest.raises(ValidationError, match="first disagrees at step 2"):
        Validation().require(check_trajectory("a vs b", wrong, expected, tolerance=1e-8, parameters=True))


def test_training_puts_the_weights_back(batch: tuple[np.ndarray, np.ndarray]) -> None:
    executor = HandExecutor()
    before = executor.parameters()
    train(HandTrainer(executor, SGD(0.5)), [batch] * 2)
    after = executor.parameters()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_training_runs_survive_the_disk(tmp_path: Path, batch: tuple[np.ndarray, np.ndarray]) -> None:
    executor = HandExecutor()
    early, found = train(HandTrainer(executor, SGD(0.5)), [batch] * 3, early=[2])
    save_runs(tmp_path / "t.h5", "hand", [early, found])
    runs, name = load_runs(tmp_path / "t.h5")
    assert name == "hand" and sorted(runs) == [2, 3]
    again = runs[3]
    assert np.array_equal(again.losses, found.losses)
    assert list(again.parameters) == list(found.parameters)
    assert all(np.array_equal(again.parameters[k], found.parameters[k]) for k in found.parameters)
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5"]


def test_parameters_of_a_saved_run_are_read_when_they_are_needed(
    tmp_path: Path, batch: tuple[np.ndarray, np.ndarray]
) -> None:
    path = tmp_path / "t.h5"
    save_runs(path, "hand", train(HandTrainer(HandExecutor(), SGD(0.5)), [batch] * 2))
    (run,) = load_runs(path)[0].values()
    path.unlink()
    assert len(run.losses) == 2
    with pytest.raises(JobError, match=r"t\.h5: cannot read the training run"):
        run.parameters["fc.bias"]


def test_the_oracle_agrees_with_onnxruntime_and_with_itself() -> None:
    network = small_network()
    generator = np.random.default_rng(0)
    images = generator.standard_normal((4, 3, 32, 32)).astype(np.float32)
    labels = generator.integers(0, 4, 4)
    output, evaluator = inference(network, images, threads=1)
    assert evaluator == "onnxruntime"
    assert relative_l2(output, NetworkOracle(network, training=False).run(images)[0]) < 1e-6
    oracle = NetworkOracle(network, training=True)
    loss, statistics = oracle.run(images, labels)
    assert loss.shape == ()
    assert set(statistics) == set(network.statistics)
    # A convolution ahead of BatchNormalization: scaling its weights changes nothing but through
    # epsilon.
    scaling = {"conv2.weight": oracle.weights["conv2.weight"]}
    assert abs(oracle.derivative(images, labels, scaling, 1e-6)) < 1e-3
    bias = {"fc.bias": np.ones(4)}  # adding a constant to all logits changes no probability
    assert abs(oracle.derivative(images, labels, bias, 1e-4)) < 1e-9


class Pooled(HandExecutor):
    """The largest of three pixels, among zeros around the image."""

    def __init__(self) -> None:
        graph = helper.make_graph(
            [helper.make_node("Pad", ["x", "pads"], ["padded"]),
             helper.make_node("MaxPool", ["padded"], ["y"], kernel_shape=[3, 1], strides=[2, 1])],
            "pooled",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 4, 1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1, 2, 1])],
            [numpy_helper.from_array(np.array([0, 0, 1, 0, 0, 0, 1, 0]), "pads")],
        )  # fmt: skip
        network = Network(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
        level1.Executor.__init__(self, network, mode="numpy", device="cpu", precision="fp32")
        self.dtype = np.float32

    def forward(self, feed: level1.Native) -> level1.Native:
        padded = np.pad(feed["x"], [(0, 0), (0, 0), (1, 1), (0, 0)])
        return {"y": np.stack([padded[:, :, start : start + 3].max(2) for start in (0, 2)], 2)}


def test_a_right_answer_is_proved_where_onnxruntime_loses_the_zeros_around_an_image() -> None:
    images = -np.arange(1, 9, dtype=np.float32).reshape(2, 1, 4, 1)
    (check,) = check_inference(Pooled(), images, tolerance=SINGLE.outputs, threads=1)
    assert "vs onnxruntime" in check.name and check.passed, check


@pytest.mark.parametrize(("size", "channels"), [(5, 8), (3, 2), (1, 3)])
def test_the_oracle_normalises_over_channels_as_onnxruntime_does(size: int, channels: int) -> None:
    graph = helper.make_graph(
        [helper.make_node("LRN", ["x"], ["n"], alpha=0.5, beta=0.75, bias=2.0, size=size),
         helper.make_node("Flatten", ["n"], ["y"])],
        "lrn",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", channels, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", channels * 16])],
    )  # fmt: skip
    network = Network(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    images = np.random.default_rng(0).standard_normal((2, channels, 4, 4)).astype(np.float32)
    output, _ = inference(network, images, threads=1)
    assert relative_l2(NetworkOracle(network, training=False).run(images)[0], output) < 1e-6


finite = st.floats(-1e3, 1e3)


@given(st.lists(finite, min_size=1, max_size=20), st.floats(0.01, 100))
def test_relative_error_is_scale_free_and_zero_for_equals(values: list[float], scale: float) -> None:
    a = np.array(values)
    assert relative_l2(a, a) == 0
    if np.linalg.norm(a) > 1e-6:
        assert relative_l2(1.5 * scale * a, scale * a) == pytest.approx(0.5, rel=1e-6)
    assert relative_l2(a, a[:-1]) == np.inf
    assert relative_l2(np.append(a, np.nan), np.append(a, 0)) == np.inf


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 0.0}, {"learning_rate": 1.0, "momentum": 1.0}, {"learning_rate": 1.0, "nesterov": True},
     {"learning_rate": float("nan")}, {"learning_rate": 1.0, "weight_decay": -1.0}],
)  # fmt: skip
def test_bad_optimizer_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        optimizer_from_dict({"name": "sgd", **settings})


def test_unknown_optimizers_and_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown optimizer 'adamax'"):
        optimizer_from_dict({"name": "adamax"})
    with pytest.raises(ConfigurationError, match="dampening"):
        optimizer_from_dict({"name": "sgd", "learning_rate": 1.0, "dampening": 0.5})
    optimizer = SGD(0.1, 0.9, True, weight_decay=1e-4)
    assert optimizer_from_dict(optimizer.to_dict()) == optimizer


@pytest.mark.parametrize(("precision", "roundoffs"), [("fp64", 3.3), ("fp32", 3.3), ("bf16", 1.9), ("fp16", 1.9)])
def test_roundings_of_cancelled_terms_are_forgiven_and_a_wrong_small_gradient_is_not(
    precision: str, roundoffs: float
) -> None:
    """A bias before BatchNormalization has no gradient but what is left of terms that cancel."""
    unit = UNIT_ROUNDOFF[precision]
    expected = {"weight": np.ones(1), "bias": np.zeros(1)}
    for times, right in ((roundoffs, True), (1.3 * roundoffs, False)):
        found = {**expected, "bias": np.full(1, times * unit)}
        assert (gradient_errors(found, expected, unit)["bias"] == 0) is right


@pytest.mark.parametrize(
    ("precision", "dtype", "bits", "passes"),
    [
        ("bf16", "bf16", None, True),
        ("bf16", "bf16", 3, False),
        ("fp16", "fp16", None, True),
        ("fp16", "bf16", None, False),
    ],
)
def test_the_tolerance_of_16_bits_is_that_of_their_roundings(
    precision: str, dtype: str, bits: int | None, passes: bool
) -> None:
    """An executor rounds weights and input; a liar has fewer bits than it says."""
    network = classifier().at_generic_point()
    images, _ = random_batch(network, 8)

    def rounded(value: np.ndarray) -> np.ndarray:
        if bits is not None:
            mantissa, exponent = np.frexp(value)
            return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent).astype(np.float32)
        found: np.ndarray = value.astype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16).astype(np.float32)
        return found

    weights = {name: network.initializers[name] for name in network.statistics}
    weights |= {name: rounded(network.initializers[name]) for name in network.parameters}
    (found,), _ = inferences(network.with_weights(weights), [rounded(images)], threads=1)
    (expected,), _ = inferences(network, [images], threads=1)
    tolerance = outputs_tolerance(network, images, expected, precision, USUAL[precision][0], threads=1)
    error = relative_l2(found[network.output], expected[network.output])
    assert (error <= tolerance) is passes
    assert error < USUAL[precision][0]  # which alone would accept it


def test_a_wide_tolerance_is_cut_and_told() -> None:
    kept, told = capped(Tolerance(0.9, 2, 0.1, "it is fast"), "bf16")
    assert (kept.outputs, kept.gradients) == (WIDER * 0.2, 2)
    assert told == "its tolerances in bf16 are wider than other backends': outputs 0.8 where others are held to 0.2"
    assert capped(Tolerance(0.2, 2, 0.1, "as others"), "bf16")[1] == ""
    assert capped(Tolerance(5e-5, 4, 1e-2, "sums", roundings=99), "fp32")[0].roundings == MOST_ROUNDINGS
    assert capped(Tolerance(5e-5, 9, 9, "it does not train"), "fp32", trains=False)[1] == ""
