"""The loss and its gradients: against ONNX's reference evaluator and central differences in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.testing.cases import values
from d5suite.testing.networks import THROUGH, classifier, every_operator, random_batch, through
from d5suite.testing.subject import Subject, difference
from d5suite.validate.checks import Validation, check_gradient, check_gradient_float64
from d5suite.validate.norms import relative_l2
from d5suite.validate.oracle import Oracle


def _prove(subject: Subject, network: Network, size: int = 6) -> None:
    subject.require(network, gradient=True, precision="fp64")
    images, labels = random_batch(network, size)
    Validation().require(check_gradient_float64(subject.executor(network, "fp64"), images, labels))


@pytest.mark.parametrize("operator", THROUGH)
def test_gradient_through_operator(subject: Subject, operator: str) -> None:
    _prove(subject, through(operator))


@pytest.mark.parametrize(
    "network",
    [
        classifier(),
        classifier().at_generic_point(),
        classifier().with_label_smoothing(0.1).at_generic_point(),
        classifier().with_multilabel_loss().at_generic_point(),
        every_operator(),
        every_operator().at_generic_point(),
    ],
    ids=[
        "classifier",
        "classifier, generic",
        "classifier, smoothed labels",
        "classifier, several labels",
        "every_operator",
        "every_operator, generic",
    ],
)
def test_gradient_of_network(subject: Subject, network: Network) -> None:
    _prove(subject, network)


def test_gradient_of_resnet18(subject: Subject) -> None:
    _prove(subject, build("resnet18", classes=10, image_size=32).at_generic_point(), 4)


def test_timed_precisions_are_within_their_tolerances(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network, gradient=True, precision="fp64")
    images, labels = random_batch(network)
    proved = subject.executor(network, "fp64")
    for precision in subject.backend.precisions:
        executor = subject.executor(network, precision)
        tolerance = subject.backend.tolerances[precision]
        Validation().require(check_gradient(executor, proved, images, labels, tolerance))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("ignored", [None, 2], ids=["", "ignore_index"])
def test_loss_means_what_onnx_says(subject: Subject, reduction: str, weighted: bool, ignored: int | None) -> None:
    scores, labels = values(6, 4), np.array([0, 1, 2, 3, 2, 1])
    weight = [values(4, seed=8) ** 2] if weighted else []
    attributes: dict[str, Any] = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "t", "w"][: 2 + weighted], ["y"], **attributes)
    arrays = dict(zip("xtw", [scores, labels, *weight], strict=False))
    doubles = {name: value if name == "t" else value.astype(np.float64) for name, value in arrays.items()}
    (expected,) = ReferenceEvaluator(node).run(None, doubles)
    number = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node, helper.make_node("Identity", ["x"], ["z"])],
        "loss",
        [number("x", TensorProto.FLOAT, [6, 4]), number("t", TensorProto.INT64, [6])],
        [number("z", TensorProto.FLOAT, [6, 4]), number("y", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(w, "w") for w in weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    network = Network(model, input="x", output="z", label="t", loss="y")
    subject.require(network, gradient=True)
    answer = difference(subject.executor(network), scores, labels)["y"]
    assert relative_l2(answer, np.asarray(expected)) < subject.rounding


def test_running_statistics_are_the_neutral_ones_over_batches_of_changing_size(subject: Subject) -> None:
    """Also where parameters are read in between."""
    network = classifier()
    subject.require(network, gradient=True, precision="fp64")
    executor = subject.executor(network, "fp64")
    statistics = {name: network.initializers[name].astype(np.float64) for name in network.statistics}
    oracle = Oracle(network, training=True)
    for step, size in enumerate((6, 6, 3, 2)):
        images, labels = random_batch(network, size, seed=step)
        difference(executor, images, labels)
        _, statistics = oracle.run(images, labels, statistics)
        if step == 2:
            executor.parameters()
    found = executor.parameters()
    assert max(relative_l2(found[name], value) for name, value in statistics.items()) < 1e-12


def test_dropout_drops_in_training_only(subject: Subject) -> None:
    b = Builder("dropout", image_size=10)
    ratio = b.constant("ratio", np.array(0.5, np.float32))
    x = b.node("Dropout", "dropped", [b.conv(b.image, "conv", 32, 3), ratio], 32)
    network = b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))
    subject.require(network, gradient=True)
    executor = subject.executor(network)
    images, labels = random_batch(network)
    one, two = (float(difference(executor, images, labels)["loss"]) for _ in range(2))
    assert one != two
    expected, _ = Oracle(network, training=False).run(images)
    answer = executor.fetch(executor.forward(executor.feed({network.input: images})))[network.output]
    assert relative_l2(answer, expected) < max(subject.rounding, 1e-12)


def test_what_has_no_loss_cannot_be_differentiated(subject: Subject) -> None:
    from d5suite.errors import NetworkError
    from d5suite.testing.cases import one_operator

    network = one_operator("Relu", (1, 3, 4, 4), {})
    subject.require(network, gradient=True)
    executor = subject.executor(network)
    with pytest.raises(NetworkError, match="loss"):
        executor.forward_backward(executor.feed({"x": values(1, 3, 4, 4)}))
