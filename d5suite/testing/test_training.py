"""Training: the optimizer's formula, and whole runs against the recorded ones that independent backends agreed on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from d5suite.errors import ConfigurationError, NetworkError
from d5suite.levels.contract import ContractError
from d5suite.levels.network import Executor, Native
from d5suite.levels.training import (
    LOSS_SCALE,
    LOSS_SCALING,
    SGD,
    STEPS,
    UNSCALED_STEPS,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
    RMSProp,
    RuleTrainer,
    Trainer,
    UpdateRule,
)
from d5suite.testing import reference
from d5suite.testing.networks import (
    COURSES,
    Batch,
    classifier,
    random_batch,
    with_dropout,
    with_idle_parameter,
    with_small_gradients,
)
from d5suite.testing.subject import Subject, difference
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

FLOAT16_UPDATES = 0.1
"""Accepted relative error of an update in float16; a wrong scale is off by a factor, and what vanishes by 1."""


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


@pytest.mark.parametrize("course", ["lenet5_digits", "every_operator"])  # float16 is slow on many processors
def test_training_in_float16_is_within_tolerance(subject: Subject, course: str) -> None:
    network = COURSES[course].network()
    subject.require(network, gradient=True, level=2, precision="fp16")
    recorded = reference.load(course)
    found = reference.train(subject.backend, course, mode=subject.mode, device=subject.device, precision="fp16")
    Validation().require(recorded.compare(found, subject.backend.tolerances["fp16"].trajectory, parameters=False))


def _fed(executor: Executor, batch: Batch) -> Native:
    images, labels = batch
    return executor.feed({"image": images, "label": labels})


def test_training_with_dropout_goes_on_to_the_last_bit(subject: Subject) -> None:
    network = with_dropout()
    subject.require(network, gradient=True, level=2, precision="fp32")
    batches = [random_batch(network, seed=step) for step in range(5)]

    def run(trainer: Trainer, steps: range) -> list[float]:
        executor = trainer.executor
        return [float(executor.fetch(trainer.step(_fed(executor, batches[step])))["loss"]) for step in steps]

    executor = subject.executor(network, "fp32")
    trainer = subject.trainer(executor, SGD(0.125, momentum=0.75))
    run(trainer, range(3))
    parameters, state, random = executor.parameters(), trainer.state(), executor.random_state()
    losses, expected = run(trainer, range(3, 5)), executor.parameters()

    def resumed(random: dict[str, np.ndarray] | None) -> tuple[list[float], dict[str, np.ndarray]]:
        executor = subject.executor(network, "fp32")
        trainer = subject.trainer(executor, SGD(0.125, momentum=0.75))
        executor.load_parameters(parameters)
        trainer.load_state(state)
        if random is not None:
            executor.load_random_state(random)
        return run(trainer, range(3, 5)), executor.parameters()

    again, found = resumed(random)
    assert again == losses, ContractError(subject.backend.name, "executor.random", f"losses {again}, not {losses}")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    anew, _ = resumed(None)
    assert anew != losses  # or the random state would hold nothing that matters


def test_gradients_with_dropout_are_drawn_again_from_a_random_state(subject: Subject) -> None:
    network = with_dropout()
    subject.require(network, gradient=True)
    batch = random_batch(network)

    def losses(executor: Executor) -> list[float]:
        return [float(executor.fetch(executor.forward_backward(_fed(executor, batch)))["loss"]) for _ in range(3)]

    executor = subject.executor(network)
    losses(executor)
    parameters, random = executor.parameters(), executor.random_state()
    expected = losses(executor)
    assert len(set(expected)) == len(expected)
    for other in (executor, subject.executor(network)):
        other.load_parameters(parameters)
        other.load_random_state(random)
        assert losses(other) == expected


def test_a_random_state_of_something_else_is_refused(subject: Subject) -> None:
    plain, network = classifier(), with_dropout()
    subject.require(plain)
    executor = subject.executor(plain)
    assert executor.random_state() == {}
    executor.load_random_state({})
    with pytest.raises(NetworkError, match="random state"):
        executor.load_random_state({"no such generator": np.zeros(2, np.uint32)})
    subject.require(network, gradient=True)
    with pytest.raises(NetworkError, match="random state"):
        subject.executor(network).load_random_state({"no such generator": np.zeros(2, np.uint32)})


HUGE = 2.0**60
"""A scale of the loss with which no gradient stays finite in float16."""


def _scaled(state: dict[str, np.ndarray], scale: float, steps: int) -> dict[str, np.ndarray]:
    return {**state, LOSS_SCALE: np.array(scale), UNSCALED_STEPS: np.array(steps)}


def test_loss_scaling_follows_its_definition(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2, precision="fp16")
    executor = subject.executor(network, "fp16")
    optimizer = AdamW(0.02, epsilon=0.001, weight_decay=0.1, clip_norm=0.5)
    trainer = subject.trainer(executor, optimizer)
    feed = _fed(executor, random_batch(network))
    start = trainer.state()
    assert (float(start[LOSS_SCALE]), int(start[UNSCALED_STEPS])) == (LOSS_SCALING.initial, 0)

    def step(scale: float, steps: int, *feeds: Native) -> tuple[list[float], float, bool]:
        """From this scale, so long in force: steps, scale and steps at it; the loss; whether anything was updated."""
        trainer.load_state(_scaled(trainer.state(), scale, steps))
        before, held = executor.parameters(), trainer.state()
        loss = float(executor.fetch(trainer.step(*feeds))["loss"])
        after, holds = executor.parameters(), trainer.state()
        made = int(holds[STEPS]) - int(held[STEPS])
        counted = [float(made), float(holds[LOSS_SCALE]), float(holds[UNSCALED_STEPS])]
        slots = [key for key in held if "/" in key]
        changed = [not np.array_equal(after[name], before[name]) for name in network.parameters]
        changed += [not np.array_equal(holds[key], held[key]) for key in slots]
        moved = [not np.array_equal(after[name], before[name]) for name in network.statistics]
        assert all(moved)
        assert any(changed) == bool(made)
        return counted, loss, any(changed)

    def holds(found: list[float], *expected: float) -> None:
        assert found == list(expected), ContractError(
            subject.backend.name, "trainer.scaling", f"(updates, scale, steps at it) are {found}, not {list(expected)}"
        )

    last = LOSS_SCALING.interval - 1
    skipped, loss, changed = step(HUGE, 5, feed)
    assert not changed
    holds(skipped, 0, HUGE / LOSS_SCALING.factor, 0)
    updated, same, changed = step(64.0, 5, feed)
    assert changed
    assert same == loss  # nothing was updated in between, and the loss that a step gives is not scaled
    holds(updated, 1, 64.0, 6)
    holds(step(64.0, last, feed)[0], 1, 64.0 * LOSS_SCALING.factor, 0)
    holds(step(HUGE, last, feed)[0], 0, HUGE / LOSS_SCALING.factor, 0)
    holds(step(HUGE, 3, feed, feed)[0], 0, HUGE / LOSS_SCALING.factor, 0)
    holds(step(64.0, 3, feed, feed)[0], 1, 64.0, 4)

    given = _scaled(trainer.state(), 2.0**11, 17)
    trainer.load_state(given)
    found = trainer.state()
    assert set(found) == set(given)
    for key, value in given.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize("name", ["momentum", "clip-norm", "clip-both", "accumulation-clipped"])
def test_the_scale_of_the_loss_does_not_enter_the_update(subject: Subject, name: str) -> None:
    network = with_idle_parameter()
    subject.require(network, gradient=True, level=2, precision="fp16")
    optimizer, _, accumulate = OPTIMIZERS[name]
    batches = [random_batch(network, seed=step) for step in range(2 * accumulate)]
    executor = subject.executor(network, "fp16")
    expected = checks.train_by_formula(executor, optimizer, batches, accumulate=accumulate)
    (found,) = checks.train(subject.trainer(executor, optimizer), batches, accumulate=accumulate)
    whole = np.sqrt(sum(float((value**2).sum()) for value in network.initializers.values()))
    for key in network.parameters:
        change, right = (run.parameters[key] - network.initializers[key] for run in (found, expected))
        assert relative_l2(change, right, floor=1e-3 * whole) < FLOAT16_UPDATES, key


def test_gradients_too_small_for_float16_arrive(subject: Subject) -> None:
    network = with_small_gradients()
    subject.require(network, gradient=True, level=2, precision="fp16")
    batch = random_batch(network, 32)
    exact, executor = subject.executor(network), subject.executor(network, "fp16")
    expected = difference(exact, *batch)
    found = difference(executor, *batch)
    rate = 2.0**16
    start = executor.parameters()
    subject.trainer(executor, SGD(rate)).step(_fed(executor, batch))
    end = executor.parameters()
    for name in network.parameters:
        assert relative_l2(found[name], expected[name]) < FLOAT16_UPDATES, name
        assert relative_l2((start[name] - end[name]) / rate, expected[name]) < FLOAT16_UPDATES, name
