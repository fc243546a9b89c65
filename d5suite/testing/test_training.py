"""Training: the optimizer's formula, and whole runs against the recorded ones that independent backends agreed on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from d5suite.errors import ConfigurationError
from d5suite.levels.network import Executor
from d5suite.levels.training import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, RuleTrainer, Trainer, UpdateRule
from d5suite.testing import reference
from d5suite.testing.networks import COURSES, classifier, random_batch, with_idle_parameter
from d5suite.testing.subject import Subject
from d5suite.validate import checks
from d5suite.validate.checks import FLOAT64, Validation
from d5suite.validate.norms import relative_l2


class Case(NamedTuple):
    """An optimizer, the learning rates of the first steps if they differ from its own, and the batches per step."""

    optimizer: Optimizer
    rates: tuple[float, ...] = ()
    accumulate: int = 1


# Epsilons are large: a bias ahead of BatchNormalization has a gradient of nothing but rounding, which a small one would
# blow up to a full step.
OPTIMIZERS = {
    "plain": Case(SGD(0.25)),
    "momentum": Case(SGD(0.125, momentum=0.75)),
    "decay": Case(SGD(0.125, momentum=0.75, weight_decay=0.0625)),
    "nesterov": Case(SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125)),
    "rmsprop": Case(RMSProp(0.01, decay=0.8, epsilon=0.001, weight_decay=0.05)),
    "rmsprop-momentum": Case(RMSProp(0.01, decay=0.9, momentum=0.7, epsilon=1.0)),
    "adagrad": Case(Adagrad(0.05, epsilon=0.01, weight_decay=0.05)),
    "adagrad-start": Case(Adagrad(0.05, initial_square=0.1)),
    "adam": Case(Adam(0.02, epsilon=0.001)),
    "adam-decay": Case(Adam(0.02, beta1=0.8, beta2=0.95, epsilon=0.001, weight_decay=0.05)),
    "adamw": Case(AdamW(0.02, epsilon=0.001, weight_decay=0.1)),
    "clip-norm": Case(SGD(0.125, momentum=0.75, weight_decay=0.0625, clip_norm=0.5)),
    "clip-norm-idle": Case(SGD(0.125, clip_norm=1000.0)),
    "clip-value": Case(Adam(0.02, epsilon=0.001, clip_value=0.01)),
    "clip-both": Case(AdamW(0.02, epsilon=0.001, clip_value=0.05, clip_norm=0.25)),
    "rates": Case(SGD(0.125, momentum=0.75, weight_decay=0.0625), (0.25, 0.25, 0.0625, 0.03, 0.2)),
    "rates-nesterov": Case(SGD(0.0625, momentum=0.5, nesterov=True), (0.0625, 0.25, 0.03)),
    "rates-rmsprop": Case(RMSProp(0.01, momentum=0.7, epsilon=0.1), (0.001, 0.02, 0.01, 0.01, 0.3)),
    "rates-adagrad": Case(Adagrad(0.05, epsilon=0.01), (0.1, 0.01)),
    "rates-adamw": Case(AdamW(0.02, epsilon=0.001), (0.001, 0.02, 0.003)),
    "accumulation": Case(SGD(0.125, momentum=0.75, weight_decay=0.0625), accumulate=2),
    "accumulation-clipped": Case(Adam(0.02, epsilon=0.001, clip_norm=0.5), accumulate=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_follows_its_formula(subject: Subject, name: str) -> None:
    network = with_idle_parameter()
    subject.require(network, gradient=True, level=2, precision="fp64")
    optimizer, rates, accumulate = OPTIMIZERS[name]
    batches = [random_batch(network, seed=step) for step in range(5 if accumulate == 1 else 3 * accumulate)]
    executor = subject.executor(network, "fp64")
    remembered: dict[str, np.ndarray] = {}
    expected = checks.train_by_formula(
        executor, optimizer, batches, rates=rates, accumulate=accumulate, state=remembered
    )
    trainer = subject.trainer(executor, optimizer)
    (found,) = checks.train(trainer, batches, rates=rates, accumulate=accumulate)
    Validation().require(
        checks.check_trajectory("training vs the formula", found, expected, tolerance=FLOAT64, parameters=True)
    )
    changed = [
        name for name, value in found.parameters.items() if not np.array_equal(value, network.initializers[name])
    ]
    assert set(network.parameters) - {"idle"} <= set(changed)
    state = trainer.state()
    assert set(state) == set(remembered)
    for key, value in remembered.items():
        assert state[key].shape == value.shape, key
        assert relative_l2(state[key], value, floor=1e-6) < FLOAT64, key


@pytest.mark.parametrize("name", ["momentum", "nesterov", "rmsprop-momentum", "adagrad", "adam", "adamw"])
def test_training_goes_on_from_a_saved_state_to_the_last_bit(subject: Subject, name: str) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2, precision="fp32")
    optimizer = OPTIMIZERS[name].optimizer
    batches = [random_batch(network, seed=step) for step in range(5)]

    def run(executor: Executor, trainer: Trainer, steps: range) -> None:
        for step in steps:
            trainer.set_learning_rate(optimizer.learning_rate / (1 + step))
            trainer.step(executor.feed({"image": batches[step][0], "label": batches[step][1]}))

    executor = subject.executor(network, "fp32")
    trainer = subject.trainer(executor, optimizer)
    run(executor, trainer, range(3))
    parameters, state = executor.parameters(), trainer.state()
    run(executor, trainer, range(3, 5))
    resumed = subject.executor(network, "fp32")
    resumed.load_parameters(parameters)
    other = subject.trainer(resumed, optimizer)
    other.load_state(state)
    assert other.learning_rate == float(state["learning_rate"])
    run(resumed, other, range(3, 5))
    after, expected = resumed.parameters(), executor.parameters()
    for key, value in expected.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    assert int(other.state()["steps"]) == 5


def test_a_state_of_another_optimizer_is_refused(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2)
    executor = subject.executor(network)
    state = subject.trainer(executor, SGD(0.5, momentum=0.5)).state()
    with pytest.raises(ConfigurationError, match="another optimizer or network"):
        subject.trainer(executor, Adam(0.5)).load_state(state)


def test_a_users_rule_trains_as_the_native_optimizer_does(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2, precision="fp64")
    batches = [random_batch(network, seed=step) for step in range(4)]
    optimizer = SGD(0.125, momentum=0.75)
    executor = subject.executor(network, "fp64")
    (expected,) = checks.train(subject.trainer(executor, optimizer), batches)
    trainer = RuleTrainer(executor, Momentum(0.125, 0.75))
    losses = []
    for images, labels in batches:
        losses.append(float(trainer.step(executor.feed({"image": images, "label": labels}))["loss"]))
    found = checks.Trajectory(np.array(losses), executor.parameters())
    Validation().require(
        checks.check_trajectory("a rule vs the native optimizer", found, expected, tolerance=FLOAT64, parameters=True)
    )


class Momentum(UpdateRule):
    """Momentum as a user would write it."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self.velocity: dict[str, np.ndarray] = {}

    def update_rule(self, gradient: np.ndarray, parameter: np.ndarray, name: str) -> np.ndarray:
        """One parameter's new value."""
        self.velocity[name] = self.momentum * self.velocity.get(name, np.zeros_like(gradient)) + gradient
        return parameter - self.rate * self.velocity[name]


def test_the_loss_is_the_one_before_the_update(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2)
    images, labels = random_batch(network)
    executor, other = (subject.executor(network) for _ in range(2))
    feed = {"image": images, "label": labels}
    before = other.fetch(other.forward_backward(other.feed(feed)))["loss"]
    trainer = subject.trainer(executor, SGD(0.5))
    first = executor.fetch(trainer.step(executor.feed(feed)))["loss"]
    second = executor.fetch(trainer.step(executor.feed(feed)))["loss"]
    assert first.shape == ()
    assert float(first) == pytest.approx(float(before), rel=1e-6)
    assert abs(float(second) - float(first)) > 1e-3


@pytest.mark.parametrize("course", COURSES)
def test_training_agrees_with_the_recorded_run(subject: Subject, course: str) -> None:
    network = COURSES[course].network()
    subject.require(network, gradient=True, level=2, precision="fp64")
    recorded = reference.load(course)
    found = reference.train(subject.backend, course, mode=subject.mode, device=subject.device, precision="fp64")
    Validation().require(recorded.compare(found, FLOAT64))


@pytest.mark.parametrize("course", COURSES)
def test_training_in_float32_is_within_tolerance(subject: Subject, course: str) -> None:
    network = COURSES[course].network()
    subject.require(network, gradient=True, level=2, precision="fp32")
    recorded = reference.load(course)
    found = reference.train(subject.backend, course, mode=subject.mode, device=subject.device, precision="fp32")
    Validation().require(recorded.compare(found, subject.backend.tolerances["fp32"].trajectory, parameters=False))
