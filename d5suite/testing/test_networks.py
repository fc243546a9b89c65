"""Whole networks forwards: published ones, ours, and what an executor owes its caller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from d5suite.network import Network
from d5suite.testing.networks import LIGHT, classifier, every_operator, random_batch
from d5suite.testing.subject import Subject, difference, output
from d5suite.validate.checks import Check
from d5suite.validate.norms import relative_l2
from d5suite.validate.oracle import Oracle


@pytest.mark.parametrize("path", LIGHT, ids=lambda path: path.stem)
def test_light_network_gives_its_shipped_output(subject: Subject, path: Path) -> None:
    network = Network.load(path)
    subject.require(network)
    precision = "fp32" if "fp32" in subject.backend.precisions else subject.exact
    shape = tuple(n or 1 for n in network.shapes[network.input])
    x = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)  # as ONNX's own test runner
    expected = numpy_helper.to_array(onnx.load_tensor(path.with_name(f"{path.stem}_output_0.pb")))
    answer = output(subject.executor(network, precision), x)
    tolerance = subject.backend.tolerances[precision].outputs
    subject.close("executor.forward", f"the output of {path.stem}", answer, expected, tolerance)


@pytest.mark.parametrize("network", [classifier(), every_operator()], ids=lambda network: network.name)
def test_output_equals_the_reference_at_any_batch_size(subject: Subject, network: Network) -> None:
    subject.require(network)
    network = network.at_generic_point()
    executor = subject.executor(network)
    for size in (4, 3, 1):
        images, _ = random_batch(network, size)
        expected, _ = Oracle(network, training=False).run(images)
        what = f"the output for {size} images"
        subject.close("executor.forward", what, output(executor, images), expected, max(subject.rounding, 1e-8))


def test_every_precision_is_within_its_tolerance(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network)
    images, _ = random_batch(network)
    expected, _ = Oracle(network, training=False).run(images)
    for precision in subject.backend.precisions:
        answer = output(subject.executor(network, precision), images)
        tolerance = subject.backend.tolerances[precision].outputs
        subject.close("executor.forward", f"the output in {precision}", answer, expected, tolerance)


def test_parameters_come_back_as_they_were_given(subject: Subject) -> None:
    network = classifier()
    subject.require(network)
    executor = subject.executor(network)
    start = executor.parameters()
    initial = {name: network.initializers[name] for name in (*network.parameters, *network.statistics)}
    subject.same("executor.parameters", "at the start", start, initial)
    given = {
        name: (value + np.arange(value.size).reshape(value.shape) / 8).astype(np.float32)
        for name, value in start.items()
    }
    executor.load_parameters(given)
    found = executor.parameters()
    subject.same("executor.parameters", "after load_parameters", found, given)
    for value in found.values():
        value += 1
    subject.same("executor.parameters", "after a change of the arrays given", executor.parameters(), given)
    executor.load_parameters({"fc.bias": start["fc.bias"]})
    found = executor.parameters()
    subject.same("executor.parameters", "after one was loaded", found, {**given, "fc.bias": start["fc.bias"]})


def test_new_parameters_are_used(subject: Subject) -> None:
    network = classifier()
    subject.require(network)
    other = network.at_generic_point()
    images, _ = random_batch(network)
    executor = subject.executor(network)
    output(executor, images)
    executor.load_parameters({name: other.initializers[name] for name in (*network.parameters, *network.statistics)})
    expected, _ = Oracle(other, training=False).run(images)
    answer = output(executor, images)
    subject.close("executor.parameters", "the output after load_parameters", answer, expected, subject.rounding)


def test_inference_changes_nothing(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network)
    executor = subject.executor(network)
    images, _ = random_batch(network)
    before = executor.parameters()
    first, second = output(executor, images), output(executor, images)
    subject.same("executor.inference", "after two forward passes", executor.parameters(), before)
    subject.same("executor.forward", "the second forward pass", {"output": second}, {"output": first})


def test_two_executors_do_not_share_anything(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network)
    images, _ = random_batch(network)
    one, two = subject.executor(network), subject.executor(network)
    before = output(one, images)
    two.load_parameters({name: value * 2 for name, value in two.parameters().items()})
    after = output(one, images)
    subject.same("executor.parameters", "after another's load_parameters", {"output": after}, {"output": before})


def test_the_same_seed_gives_the_same_answer(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network)
    images, labels = random_batch(network)
    one, two = (subject.executor(network) for _ in range(2))
    first, second = ({"output": output(executor, images)} for executor in (one, two))
    subject.same("executor.forward", "another executor of the network", second, first)
    if "gradient" not in subject.backend.absent:
        first, second = difference(one, images, labels), difference(two, images, labels)
        for name, value in first.items():
            error = relative_l2(second[name], value, floor=1e-12)
            tolerance = 1e-12 if subject.exact == "fp64" else 1e-5
            subject.prove(
                "executor.forward_backward", [Check(f"{name} of another executor of the network", error, tolerance)]
            )


def test_bad_input_is_refused(subject: Subject) -> None:
    network = classifier()
    subject.require(network)
    executor = subject.executor(network)
    feeds: list[tuple[str, dict[str, np.ndarray]]] = [
        ("a wrong image size", {"image": np.zeros((2, 3, 9, 9), np.float32)}),
        ("too few axes", {"image": np.zeros((3, 10, 10), np.float32)}),
        ("an unknown input", {"picture": np.zeros((2, 3, 10, 10), np.float32)}),
        ("no image", {"label": np.zeros(2, np.int64)}),
    ]
    for what, feed in feeds:
        with subject.refuses("executor.feed", what):
            executor.feed(feed)
    for what, values in [
        ("an unknown parameter", {"fc.wait": np.zeros(5, np.float32)}),
        ("a parameter of the wrong shape", {"fc.bias": np.zeros(4, np.float32)}),
    ]:
        before = executor.parameters()
        with subject.refuses("executor.parameters", what):
            executor.load_parameters(values)
        subject.same("executor.parameters", f"after {what} was refused", executor.parameters(), before)
