"""Training: the optimizers' formulas, recorded runs, and saved states."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from d5suite.errors import ConfigurationError
from d5suite.levels.description import PRECISIONS
from d5suite.levels.network import Executor, Native
from d5suite.levels.training import LEARNING_RATE, LOSS_SCALE, STEPS, UNSCALED_STEPS, Trainer
from d5suite.optimizers.settings import LOSS_SCALING, SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from d5suite.testing import reference
from d5suite.testing.networks import (
    TASKS,
    classifier,
    fed,
    layers,
    loss_of,
    random_batch,
    steady,
    with_dropout,
    with_idle_parameter,
    with_small_gradients,
)
from d5suite.testing.subject import Subject, copied, difference, overwrite, tensor_errors
from d5suite.training.rules import RuleTrainer, UpdateRule
from d5suite.validate.norms import FLOAT64
from d5suite.validate.training.trajectory import Trajectory, check_trajectory, train, train_by_formula


class OptimizerCase(NamedTuple):
    """An optimizer, the learning rate of each step if not its own, and batches per step."""

    optimizer: Optimizer
    rates: tuple[float, ...] = ()
    accumulate: int = 1


# Epsilons are large: the gradient of a bias before BatchNormalization is only rounding, which a
# small epsilon would amplify to a full step.
OPTIMIZERS = {
    "plain": OptimizerCase(SGD(0.25)),
    "momentum": OptimizerCase(SGD(0.125, momentum=0.75)),
    "decay": OptimizerCase(SGD(0.125, momentum=0.75, weight_decay=0.0625)),
    "nesterov": OptimizerCase(SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125)),
    "rmsprop": OptimizerCase(RMSProp(0.01, decay=0.8, epsilon=0.001, weight_decay=0.05)),
    "rmsprop-momentum": OptimizerCase(RMSProp(0.01, decay=0.9, momentum=0.7, epsilon=1.0)),
    "adagrad": OptimizerCase(Adagrad(0.05, epsilon=0.01, weight_decay=0.05)),
    "adagrad-start": OptimizerCase(Adagrad(0.05, initial_square=0.1)),
    "adam": OptimizerCase(Adam(0.02, epsilon=0.001)),
    "adam-decay": OptimizerCase(Adam(0.02, beta1=0.8, beta2=0.95, epsilon=0.001, weight_decay=0.05)),
    "adamw": OptimizerCase(AdamW(0.02, epsilon=0.001, weight_decay=0.1)),
    "clip-norm": OptimizerCase(SGD(0.125, momentum=0.75, weight_decay=0.0625, clip_norm=0.5)),
    "clip-norm-idle": OptimizerCase(SGD(0.125, clip_norm=1000.0)),
    "clip-value": OptimizerCase(Adam(0.02, epsilon=0.001, clip_value=0.01)),
    "clip-both": OptimizerCase(AdamW(0.02, epsilon=0.001, clip_value=0.05, clip_norm=0.25)),
    "rates": OptimizerCase(SGD(0.125, momentum=0.75, weight_decay=0.0625), (0.25, 0.25, 0.0625, 0.03, 0.2)),
    "rates-nesterov": OptimizerCase(SGD(0.0625, momentum=0.5, nesterov=True), (0.0625, 0.25, 0.03)),
    "rates-rmsprop": OptimizerCase(RMSProp(0.01, momentum=0.7, epsilon=0.1), (0.001, 0.02, 0.01, 0.01, 0.3)),
    "rates-adagrad": OptimizerCase(Adagrad(0.05, epsilon=0.01), (0.1, 0.01)),
    "rates-adamw": OptimizerCase(AdamW(0.02, epsilon=0.001), (0.001, 0.02, 0.003)),
    "accumulation": OptimizerCase(SGD(0.125, momentum=0.75, weight_decay=0.0625), accumulate=2),
    "accumulation-clipped": OptimizerCase(Adam(0.02, epsilon=0.001, clip_norm=0.5), accumulate=3),
}

UPDATES = {"fp64": FLOAT64, "fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}
"""Accepted relative error of a parameter's change and of the optimizer's state, by precision.

Except in ``fp64``, parameters and optimizers are float32, so these are roundings of gradients. A
wrong scale is off by a factor, and a vanished gradient by 1."""


@pytest.fixture(scope="module")
def differentiated(subject: Subject) -> Callable[[str], Executor]:
    """Return executors by precision, compiled once, whose gradients the formula uses."""
    return cache(lambda precision: subject.executor(with_idle_parameter(steady(precision)), precision))


IN_16_BITS = ("momentum", "rmsprop-momentum", "adagrad", "adam", "adamw", "clip-norm", "clip-both", "rates",
              "accumulation-clipped")  # fmt: skip
"""One of each kind: optimizers are float32 as in ``fp32``; only their gradients differ."""


QUICK = {
    "fp64": ("momentum", "nesterov", "rmsprop-momentum", "adagrad", "adam-decay", "clip-both", "rates"),
    "fp32": ("adam",),
    "bf16": ("adamw",),
    "fp16": ("accumulation-clipped",),
}
"""Cases of the short form: every rule in float64, and one optimizer in each other precision."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name, precision, id=f"{name}-{precision}", marks=() if name in QUICK[precision] else pytest.mark.slow
        )
        for precision in PRECISIONS
        for name in (OPTIMIZERS if precision in ("fp32", "fp64") else IN_16_BITS)
    ],
)
def test_optimizer_follows_its_formula(
    subject: Subject, differentiated: Callable[[str], Executor], name: str, precision: str
) -> None:
    network = with_idle_parameter(steady(precision))
    subject.require(network, gradient=True, level=2, precision=precision)
    optimizer, rates, accumulate = OPTIMIZERS[name]
    batches = [random_batch(network, seed=step) for step in range(5 if accumulate == 1 else 3 * accumulate)]
    remembered: dict[str, np.ndarray] = {}
    expected = train_by_formula(
        differentiated(precision), optimizer, batches, rates=rates, accumulate=accumulate, state=remembered
    )
    trainer = subject.trainer(subject.executor(network, precision), optimizer)
    (found,) = train(trainer, batches, rates=rates, accumulate=accumulate)
    tolerance, what = UPDATES[precision], f"{len(batches) // accumulate} steps in {precision} vs the formula"
    subject.prove(
        "trainer.meaning",
        check_trajectory(what, found, expected, tolerance=tolerance, parameters=precision == "fp64"),
    )
    start = {key: network.initializers[key].astype(np.float64) for key in network.parameters}
    changes, wanted = ({key: run.parameters[key] - value for key, value in start.items()} for run in (found, expected))
    subject.prove("trainer.meaning", tensor_errors(f"{what}: the change", changes, wanted, tolerance))
    still = [key for key, value in changes.items() if key != "idle" and not value.any()]
    subject.hold("trainer.meaning", not still, f"{', '.join(still)} does not change")
    state = {key: value for key, value in trainer.state().items() if key not in (LOSS_SCALE, UNSCALED_STEPS)}
    subject.hold("trainer.state", set(state) == set(remembered), f"it holds {sorted(state)}, not {sorted(remembered)}")
    for key, value in remembered.items():
        subject.hold("trainer.state", state[key].shape == value.shape, f"{key!r} has shape {state[key].shape}")
    for slot in (STEPS, LEARNING_RATE, *optimizer.slots):
        those = {key: value for key, value in remembered.items() if key.split("/")[0] == slot}
        subject.prove("trainer.state", tensor_errors(f"{what}: the state", state, those, tolerance))


LONG = 200
"""Steps of the long run: mistakes that come late, or every few dozen steps, show."""

LONG_RUN = 5e-4
"""Accepted relative error of its losses and of each tensor in float32, where no ReLU flips: MXNet
is off by 8e-5, the other adapters by 2e-6."""


def test_two_hundred_steps_follow_the_formula(subject: Subject) -> None:
    """Steps are made back to back, on four batches in turn, in the precision that is timed."""
    network = layers()
    precision = subject.timed
    subject.require(network, gradient=True, level=2)
    optimizer = SGD(2.0**-6, momentum=0.875, weight_decay=0.0625)
    batches = [random_batch(network, seed=step % 4) for step in range(LONG)]
    expected = train_by_formula(subject.executor(network), optimizer, batches)
    trainer = subject.trainer(subject.executor(network, precision), optimizer)
    (found,) = train(trainer, batches, back_to_back=True)
    tolerance = LONG_RUN if precision in ("fp32", "fp64") else subject.backend.tolerances[precision].trajectory
    what = f"{LONG} steps in {precision} vs the formula"
    subject.prove("trainer.meaning", check_trajectory(what, found, expected, tolerance=tolerance, parameters=True))


@pytest.mark.parametrize(
    "name",
    [
        "adam",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("momentum", "nesterov", "rmsprop-momentum", "adagrad", "adamw")
        ),
    ],
)
def test_training_goes_on_from_a_saved_state_to_the_last_bit(subject: Subject, name: str) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2, precision="fp32")
    optimizer = OPTIMIZERS[name].optimizer
    batches = [random_batch(network, seed=step) for step in range(5)]

    def run(executor: Executor, trainer: Trainer, steps: range) -> None:
        for step in steps:
            trainer.set_learning_rate(optimizer.learning_rate / (1 + step))
            trainer.step(fed(executor, batches[step]))

    executor = subject.executor(network, "fp32")
    trainer = subject.trainer(executor, optimizer)
    run(executor, trainer, range(3))
    parameters, state = executor.parameters(), trainer.state()
    run(executor, trainer, range(3, 5))
    resumed = subject.executor(network, "fp32")
    resumed.load_parameters(parameters)
    other = subject.trainer(resumed, optimizer)
    given = copied(state)
    other.load_state(given)
    overwrite(given)
    subject.same("trainer.state", "the state loaded, after a change of the arrays given", other.state(), state)
    rate, wanted = other.learning_rate, float(state[LEARNING_RATE])
    subject.hold("trainer.state", rate == wanted, f"the learning rate is {rate}, not {wanted}, after load_state")
    run(resumed, other, range(3, 5))
    found, expected = resumed.parameters(), executor.parameters()
    subject.repeated("trainer.state", "training from a saved state", found, expected, "fp32")
    steps = int(other.state()[STEPS])
    subject.hold("trainer.state", steps == 5, f"{steps} steps are counted, not 5")


def test_a_state_of_another_optimizer_is_refused(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2)
    executor = subject.executor(network)
    state = subject.trainer(executor, SGD(0.5, momentum=0.5)).state()
    what = "the state of another optimizer"
    with subject.refuses("trainer.state", what, "another optimizer or network", error=ConfigurationError):
        subject.trainer(executor, Adam(0.5)).load_state(state)


def test_a_users_rule_trains_as_the_native_optimizer_does(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2)
    batches = [random_batch(network, seed=step) for step in range(4)]
    optimizer = SGD(0.125, momentum=0.75)
    executor = subject.executor(network)
    (expected,) = train(subject.trainer(executor, optimizer), batches)
    trainer = RuleTrainer(executor, Momentum(0.125, 0.75))
    losses = [float(trainer.step(fed(executor, batch))["loss"]) for batch in batches]
    found = Trajectory(np.array(losses), executor.parameters())
    tolerance = UPDATES[subject.exact]
    subject.prove(
        "trainer.meaning",
        check_trajectory("a rule vs the native optimizer", found, expected, tolerance=tolerance, parameters=True),
    )


class Momentum(UpdateRule):
    """Momentum as a user writes it."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self.velocity: dict[str, np.ndarray] = {}

    def update_rule(self, gradient: np.ndarray, parameter: np.ndarray, name: str) -> np.ndarray:
        """Return a parameter's new value."""
        self.velocity[name] = self.momentum * self.velocity.get(name, np.zeros_like(gradient)) + gradient
        return parameter - self.rate * self.velocity[name]


def test_the_loss_is_the_one_before_the_update(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2)
    batch = random_batch(network)
    executor, other = (subject.executor(network) for _ in range(2))
    before = loss_of(other, other.forward_backward(fed(other, batch)))
    trainer = subject.trainer(executor, SGD(0.5))
    first, second = (loss_of(executor, trainer.step(fed(executor, batch))) for _ in range(2))
    what, tolerance = "the loss of the first step", max(subject.rounding, 1e-6)
    subject.close("trainer.loss", what, np.array(first), np.array(before), tolerance)
    subject.hold("trainer.loss", abs(second - first) > 1e-3, f"it stays {second:.6g}")


UNSTEADY = {"resnet18": ("bf16", "fp16"), "every_operator": ("bf16",)}
"""Precisions in which a task is skipped."""


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        pytest.param(task, precision, id=f"{task}-{precision}", marks=() if quick else pytest.mark.slow)
        for task in TASKS
        for precision in PRECISIONS
        for quick in (
            (task, precision) in (("lenet5_digits", "fp32"), ("every_operator", "fp64"), ("transformer", "fp64")),
        )
    ],
)
def test_training_agrees_with_the_recorded_run(subject: Subject, task: str, precision: str) -> None:
    """Errors are at most 1e-8 in float64, and the tolerance of losses in lower precisions.

    In float32 it also holds for each tensor's change. In 16 bits only losses are compared, and not
    in tasks that take minutes or amplify roundings.
    """
    network = TASKS[task].network()
    subject.require(network, gradient=True, level=2, precision=precision)
    if precision in UNSTEADY.get(task, ()):
        pytest.skip(f"in {precision} the steps of {task} are slow, or amplify roundings to tens of percent")
    tolerance = FLOAT64 if precision == "fp64" else subject.backend.tolerances[precision].trajectory
    found = reference.train(subject.backend, task, mode=subject.mode, device=subject.device, precision=precision)
    losses, tensors = reference.load(task).compare(found, tolerance, precision)
    subject.prove("trainer.meaning", [losses, tensors] if precision in ("fp64", "fp32") else [losses])


def test_training_with_dropout_goes_on_to_the_last_bit(subject: Subject) -> None:
    network = with_dropout()
    subject.require(network, gradient=True, level=2, precision="fp32")
    batches = [random_batch(network, seed=step) for step in range(5)]

    def run(trainer: Trainer, steps: range) -> list[float]:
        executor = trainer.executor
        return [loss_of(executor, trainer.step(fed(executor, batches[step]))) for step in steps]

    executor = subject.executor(network, "fp32")
    trainer = subject.trainer(executor, SGD(0.125, momentum=0.75))
    run(trainer, range(3))
    parameters, state, random = executor.parameters(), trainer.state(), executor.random_state()
    losses, expected = run(trainer, range(3, 5)), executor.parameters()
    later = executor.random_state()

    def resumed(random: dict[str, np.ndarray] | None) -> tuple[list[float], dict[str, np.ndarray]]:
        executor = subject.executor(network, "fp32")
        trainer = subject.trainer(executor, SGD(0.125, momentum=0.75))
        executor.load_parameters(parameters)
        trainer.load_state(state)
        if random is not None:
            given = copied(random)
            executor.load_random_state(given)
            overwrite(given, later)
        return run(trainer, range(3, 5)), executor.parameters()

    again, found = resumed(random)
    subject.hold("executor.random", not subject.apart(again, losses, "fp32"), f"losses {again}, not {losses}")
    subject.repeated("executor.random", "training from a random state", found, expected, "fp32")
    anew, _ = resumed(None)
    subject.hold("executor.random", subject.apart(anew, losses, "fp32"), "the random state makes no difference")


def test_gradients_with_dropout_are_drawn_again_from_a_random_state(subject: Subject) -> None:
    network = with_dropout()
    subject.require(network, gradient=True)
    batch = random_batch(network)

    def losses(executor: Executor) -> list[float]:
        return [loss_of(executor, executor.forward_backward(fed(executor, batch))) for _ in range(3)]

    executor = subject.executor(network)
    losses(executor)
    parameters, random = executor.parameters(), executor.random_state()
    expected = losses(executor)
    later = executor.random_state()
    anew = len(set(expected)) == len(expected) and subject.apart(expected[1:], expected[:-1], subject.exact)
    subject.hold("executor.random", anew, f"losses {expected} over one batch")
    for other in (executor, subject.executor(network)):
        other.load_parameters(parameters)
        given = copied(random)
        other.load_random_state(given)
        overwrite(given, later)
        again = losses(other)
        right = not subject.apart(again, expected, subject.exact)
        subject.hold("executor.random", right, f"losses {again}, not {expected}")


def test_a_random_state_of_something_else_is_refused(subject: Subject) -> None:
    plain, network = classifier(), with_dropout()
    subject.require(plain)
    executor = subject.executor(plain)
    held = executor.random_state()
    subject.hold("executor.random", held == {}, f"a network that draws nothing has the random state {sorted(held)}")
    executor.load_random_state({})
    what = "a random state of something else"
    with subject.refuses("executor.random", what, "random state"):
        executor.load_random_state({"no such generator": np.zeros(2, np.uint32)})
    subject.require(network, gradient=True)
    with subject.refuses("executor.random", what, "random state"):
        subject.executor(network).load_random_state({"no such generator": np.zeros(2, np.uint32)})


HUGE = 2.0**60
"""A loss scale that makes every gradient overflow in float16."""


def _scaled(state: dict[str, np.ndarray], scale: float, steps: int) -> dict[str, np.ndarray]:
    return {**state, LOSS_SCALE: np.array(scale), UNSCALED_STEPS: np.array(steps)}


def test_loss_scaling_follows_its_definition(subject: Subject) -> None:
    network = classifier()
    subject.require(network, gradient=True, level=2, precision="fp16")
    executor = subject.executor(network, "fp16")
    optimizer = AdamW(0.02, epsilon=0.001, weight_decay=0.1, clip_norm=0.5)
    trainer = subject.trainer(executor, optimizer)
    feed = fed(executor, random_batch(network))

    def holds(found: list[float], *expected: float) -> None:
        what = f"(updates, scale, steps at it) are {found}, not {list(expected)}"
        subject.hold("trainer.scaling", found == list(expected), what)

    start = trainer.state()
    holds([0.0, float(start[LOSS_SCALE]), float(start[UNSCALED_STEPS])], 0, LOSS_SCALING.initial, 0)

    def step(scale: float, steps: int, *feeds: Native) -> tuple[list[float], float, bool]:
        """Step from a scale and its age; return (updates, scale, age), loss, and any change."""
        trainer.load_state(_scaled(trainer.state(), scale, steps))
        before, held = executor.parameters(), trainer.state()
        loss = loss_of(executor, trainer.step(*feeds))
        after, holds = executor.parameters(), trainer.state()
        made = int(holds[STEPS]) - int(held[STEPS])
        counted = [float(made), float(holds[LOSS_SCALE]), float(holds[UNSCALED_STEPS])]
        slots = [key for key in held if "/" in key]
        changed = [not np.array_equal(after[name], before[name]) for name in network.parameters]
        changed += [not np.array_equal(holds[key], held[key]) for key in slots]
        moved = [not np.array_equal(after[name], before[name]) for name in network.statistics]
        subject.hold("trainer.scaling", all(moved), "a step leaves running statistics as they were")
        subject.hold("trainer.scaling", any(changed) == bool(made), f"{made} updates are counted of {sum(changed)}")
        return counted, loss, any(changed)

    last = LOSS_SCALING.interval - 1
    skipped, loss, changed = step(HUGE, 5, feed)
    subject.hold("trainer.scaling", not changed, "a gradient that is not finite updates something")
    holds(skipped, 0, HUGE / LOSS_SCALING.factor, 0)
    updated, same, changed = step(64.0, 5, feed)
    subject.hold("trainer.scaling", changed, "a finite gradient updates nothing")
    # Nothing was updated in between, and the loss that a step gives is not scaled.
    changed = subject.apart([same], [loss], "fp16")
    subject.hold("trainer.scaling", not changed, f"the loss depends on its scale: {same:.6g}, not {loss:.6g}")
    holds(updated, 1, 64.0, 6)
    holds(step(64.0, last, feed)[0], 1, 64.0 * LOSS_SCALING.factor, 0)
    holds(step(HUGE, last, feed)[0], 0, HUGE / LOSS_SCALING.factor, 0)
    holds(step(HUGE, 3, feed, feed)[0], 0, HUGE / LOSS_SCALING.factor, 0)
    holds(step(64.0, 3, feed, feed)[0], 1, 64.0, 4)

    given = _scaled(trainer.state(), 2.0**11, 17)
    loaded = copied(given)
    trainer.load_state(loaded)
    overwrite(loaded)
    subject.same("trainer.state", "after load_state", trainer.state(), given)


def test_gradients_too_small_for_float16_arrive(subject: Subject) -> None:
    network = with_small_gradients()
    subject.require(network, gradient=True, level=2, precision="fp16")
    batch = random_batch(network, 32)
    exact, executor = subject.executor(network), subject.executor(network, "fp16")
    expected = difference(exact, *batch)
    found = difference(executor, *batch)
    rate = 2.0**16
    start = executor.parameters()
    subject.trainer(executor, SGD(rate)).step(fed(executor, batch))
    end = executor.parameters()
    for name in network.parameters:
        tolerance, update = UPDATES["fp16"], (start[name] - end[name]) / rate
        subject.close("gradient.meaning", f"the small gradient of {name}", found[name], expected[name], tolerance)
        subject.close("trainer.scaling", f"the update by that of {name}", update, expected[name], tolerance)
