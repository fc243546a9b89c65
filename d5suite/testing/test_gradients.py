"""The loss and its gradients, against ONNX's reference evaluator and central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from d5suite.levels.description import PRECISIONS
from d5suite.levels.network import Executor
from d5suite.network import Network
from d5suite.network.zoo import build
from d5suite.testing.cases import model_of, one_operator, values
from d5suite.testing.fault import node_of_gradient
from d5suite.testing.networks import (
    GRAPHS,
    LARGER,
    THROUGH,
    classifier,
    dropping,
    every_operator,
    random_batch,
    regressor,
    sharing,
    through,
    today,
)
from d5suite.testing.subject import Subject, difference, output
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import check_gradient, check_gradient_float64, check_gradient_without_float64
from d5suite.validate.network.oracle import NetworkOracle

MEANING = "gradient.meaning"


def _prove(
    subject: Subject, network: Network, size: int = 6, precision: str = "", proved: Executor | None = None
) -> None:
    """Check gradients in a precision, by default the most precise one.

    They are compared with those of ``proved``, which is in float64, if given.
    """
    subject.require(network, gradient=True)
    precision = precision or subject.exact
    images, labels = random_batch(network, size)

    def checks(part: Network, images: np.ndarray, labels: np.ndarray) -> list[Check]:
        vouching = proved if proved is None or part is network else subject.executor(part, "fp64")
        executor, tolerance = subject.executor(part, precision), subject.backend.tolerances[precision]
        if vouching is not None:
            return check_gradient(executor, vouching, images, labels, tolerance)
        if precision == "fp64":
            return check_gradient_float64(executor, images, labels)
        return check_gradient_without_float64(executor, images, labels, tolerance)

    subject.prove(MEANING, checks(network, images, labels), lambda: node_of_gradient(network, images, checks))


@pytest.mark.parametrize("operator", THROUGH)
def test_gradient_through_operator(subject: Subject, operator: str) -> None:
    _prove(subject, through(operator))


NETWORKS = {
    "classifier": classifier(),
    "classifier, generic": classifier().at_generic_point(),
    "sharing, generic": sharing().at_generic_point(),
    "classifier, smoothed labels": classifier().with_label_smoothing(0.1).at_generic_point(),
    "classifier, several labels": classifier().with_multilabel_loss().at_generic_point(),
    "a map and its targets": regressor("map"),
    "two outputs and their targets": regressor("map", "features"),
    "every_operator": every_operator(),
    "every_operator, generic": every_operator().at_generic_point(),
    "today, generic": today().at_generic_point(),
    **{network.name: network for network in GRAPHS},
}
SLOW = ("classifier, generic", "two outputs and their targets", "every_operator", "today, generic")


@pytest.mark.parametrize(
    "network",
    [pytest.param(NETWORKS[name], id=name, marks=pytest.mark.slow if name in SLOW else ()) for name in NETWORKS],
)
def test_gradient_of_network(subject: Subject, network: Network) -> None:
    _prove(subject, network)


def test_gradient_of_a_larger_batch(subject: Subject) -> None:
    _prove(subject, classifier().at_generic_point(), LARGER)


@pytest.mark.slow
def test_gradient_of_resnet18(subject: Subject) -> None:
    _prove(subject, build("resnet18", classes=10, image_size=32).at_generic_point(), 4)


@pytest.fixture(scope="module")
def proved(subject: Subject) -> Executor | None:
    """Return a float64 executor, compiled once, whose gradients the other precisions must match."""
    return subject.executor(classifier().at_generic_point(), "fp64") if subject.exact == "fp64" else None


@pytest.mark.parametrize(
    "precision",
    [pytest.param(each, marks=() if each == "fp32" else pytest.mark.slow) for each in PRECISIONS],
)
def test_timed_precisions_are_within_their_tolerances(
    subject: Subject, precision: str, request: pytest.FixtureRequest
) -> None:
    """The short form checks 16 bits in `test_answers` only."""
    network = classifier().at_generic_point()
    subject.require(network, gradient=True, precision=precision)
    _prove(subject, network, precision=precision, proved=request.getfixturevalue("proved"))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("ignored", "weighted"),
    [
        pytest.param(None, False, id="plain"),
        pytest.param(None, True, id="weighted", marks=pytest.mark.slow),
        pytest.param(2, False, id="ignore_index", marks=pytest.mark.slow),
        pytest.param(2, True, id="ignore_index-weighted"),
    ],
)
def test_loss_means_what_onnx_says(subject: Subject, reduction: str, weighted: bool, ignored: int | None) -> None:
    scores, labels = values(6, 4), np.array([0, 1, 2, 3, 2, 1])
    weight = [values(4, seed=8) ** 2] if weighted else []
    attributes: dict[str, Any] = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
    names = ["x", "labels", "w"][: 2 + weighted]
    node = helper.make_node("SoftmaxCrossEntropyLoss", names, ["y"], **attributes)
    arrays = dict(zip(names, [scores, labels, *weight], strict=True))
    doubles = {name: value if name == "labels" else value.astype(np.float64) for name, value in arrays.items()}
    (expected,) = ReferenceEvaluator(node).run(None, doubles)
    same, weights = helper.make_node("Identity", ["x"], ["z"]), dict(zip("w", weight, strict=False))
    model = model_of([node, same], {"x": [6, 4], "labels": [6]}, {"z": [6, 4], "y": []}, weights)
    network = Network(model, input="x", output="z", label="labels", loss="y")
    subject.require(network, gradient=True)
    answer = difference(subject.executor(network), scores, labels)["y"]
    subject.close("operators.meaning", "the loss", answer, np.asarray(expected), subject.rounding)


def test_running_statistics_are_the_neutral_ones_over_batches_of_changing_size(subject: Subject) -> None:
    """Read the parameters in between."""
    network = classifier()
    subject.require(network, gradient=True)
    executor = subject.executor(network)
    statistics = {name: network.initializers[name].astype(np.float64) for name in network.statistics}
    oracle = NetworkOracle(network, training=True)
    for step, size in enumerate((6, 6, 2)):
        images, labels = random_batch(network, size, seed=step)
        difference(executor, images, labels)
        _, statistics = oracle.run(images, labels, statistics)
        if step == 1:
            executor.parameters()
    found = executor.parameters()
    for name, value in statistics.items():
        subject.close("executor.statistics", name, found[name], value, subject.rounding)


def test_dropout_drops_in_training_only(subject: Subject) -> None:
    network = dropping()
    subject.require(network, gradient=True)
    executor = subject.executor(network)
    images, labels = random_batch(network)
    one, two = (float(difference(executor, images, labels)["loss"]) for _ in range(2))
    drawn = subject.apart([one], [two], subject.exact)
    subject.hold("operators.meaning", drawn, f"Dropout does not drop in training: the loss stays {one:.6g}")
    expected, _ = NetworkOracle(network, training=False).run(images)
    answer = output(executor, images)
    subject.close("operators.meaning", "the output with a Dropout", answer, expected, subject.rounding)


def test_what_has_no_loss_cannot_be_differentiated(subject: Subject) -> None:
    network = one_operator("Relu", (1, 3, 4, 4), {})
    subject.require(network, gradient=True)
    executor = subject.executor(network)
    with subject.refuses("executor.forward_backward", "a network without a loss", "loss"):
        executor.forward_backward(executor.feed({"x": values(1, 3, 4, 4)}))
