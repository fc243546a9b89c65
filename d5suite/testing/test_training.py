"""Training: the optimizer's formula, and whole runs against the recorded ones that independent backends agreed on."""

from __future__ import annotations

import numpy as np
import pytest

from d5suite.levels.training import SGD
from d5suite.testing import reference
from d5suite.testing.networks import COURSES, classifier, random_batch, with_idle_parameter
from d5suite.testing.subject import Subject
from d5suite.validate import checks
from d5suite.validate.checks import FLOAT64, Validation

OPTIMIZERS = {
    "plain": SGD(0.25),
    "momentum": SGD(0.125, momentum=0.75),
    "decay": SGD(0.125, momentum=0.75, weight_decay=0.0625),
    "nesterov": SGD(0.0625, momentum=0.5, nesterov=True, weight_decay=0.125),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_follows_its_formula(subject: Subject, name: str) -> None:
    network = with_idle_parameter()
    subject.require(network, gradient=True, level=2, precision="fp64")
    batches = [random_batch(network, seed=step) for step in range(5)]
    executor = subject.executor(network, "fp64")
    expected = checks.train_by_formula(executor, OPTIMIZERS[name], batches)
    (found,) = checks.train(subject.trainer(executor, OPTIMIZERS[name]), batches)
    Validation().require(
        checks.check_trajectory("training vs the formula", found, expected, tolerance=FLOAT64, parameters=True)
    )
    changed = [
        name for name, value in found.parameters.items() if not np.array_equal(value, network.initializers[name])
    ]
    assert set(network.parameters) - {"idle"} <= set(changed)


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
