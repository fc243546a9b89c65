"""Forward passes of ONNX's light networks and the kit's own, and the executor's interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from d5suite.levels.profile import check_profile
from d5suite.network import Network
from d5suite.testing.cases import model_of, values
from d5suite.testing.fault import node_of_output
from d5suite.testing.networks import GRAPHS, LARGER, LIGHT, classifier, every_operator, random_batch, sharing, today
from d5suite.testing.subject import Subject, copied, difference, output, overwrite
from d5suite.validate.network.oracle import NetworkOracle, inference

LIGHTEST = ("light_shufflenet", "light_squeezenet")
"""The short form runs these; the others have up to 61 million weights."""

UNDECIDED = {
    "light_squeezenet": "its scores are all about 1e10 and equal, so that roundings decide the Softmax behind them"
}
"""Networks whose shipped output float32 arithmetic cannot reproduce. Their scores before the
Softmax are compared with onnxruntime's."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=() if p.stem in LIGHTEST else pytest.mark.slow) for p in LIGHT],
)
def test_light_network_gives_its_shipped_output(subject: Subject, path: Path, tmp_path: Path) -> None:
    decided = path.stem not in UNDECIDED
    network = Network.load(path if decided else _before_softmax(path, tmp_path))
    subject.require(network)
    precision = subject.timed
    shape = tuple(n or 1 for n in network.shapes[network.input])
    x = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)  # as ONNX's own test runner
    if decided:
        expected = numpy_helper.to_array(onnx.load_tensor(path.with_name(f"{path.stem}_output_0.pb")))
    else:
        expected, _ = inference(network, x, threads=1)
    answer = output(subject.executor(network, precision), x)
    tolerance = subject.backend.tolerances[precision].outputs
    fault = _fault(subject, network, x, precision, tolerance)
    subject.close("executor.forward", f"the output of {path.stem}", answer, expected, tolerance, fault)


def _fault(
    subject: Subject, network: Network, images: np.ndarray, precision: str, tolerance: float
) -> Callable[[], str]:
    """Return a function that names the node at fault."""

    def answer(part: Network, images: np.ndarray) -> np.ndarray:
        return output(subject.executor(part, precision), images)

    return lambda: node_of_output(network, images, answer, tolerance)


def _before_softmax(path: Path, folder: Path) -> Path:
    """Write the network without its last node, a Softmax, and return the file."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    last = model.graph.node.pop()
    assert last.op_type == "Softmax"
    (scores,) = (value for value in model.graph.value_info if value.name == last.input[0])
    model.graph.output[0].CopyFrom(scores)
    onnx.save(model, folder / path.name)
    return folder / path.name


@pytest.mark.parametrize(
    "network",
    [classifier(), sharing(), every_operator(), today(), *GRAPHS],
    ids=lambda network: network.name,
)
def test_output_equals_the_reference_at_any_batch_size(subject: Subject, network: Network) -> None:
    subject.require(network)
    network = network.at_generic_point()
    executor = subject.executor(network)
    for size in (4, 3, 1):
        images, _ = random_batch(network, size)
        expected, _ = NetworkOracle(network, training=False).run(images)
        what, tolerance = f"the output for {size} images", max(subject.rounding, 1e-8)
        fault = _fault(subject, network, images, subject.exact, tolerance)
        subject.close("executor.forward", what, output(executor, images), expected, tolerance, fault)


@pytest.mark.parametrize("size", [LARGER, pytest.param(2 * LARGER - 1, marks=pytest.mark.slow)])
def test_every_image_of_a_larger_batch_is_answered(subject: Subject, size: int) -> None:
    """Compare image by image: one wrong image of many is a small part of the whole."""
    network = classifier().at_generic_point()
    subject.require(network)
    images, _ = random_batch(network, size)
    expected, _ = NetworkOracle(network, training=False).run(images)
    for precision in dict.fromkeys((subject.exact, "fp32")):
        if precision in subject.backend.precisions:
            answer = output(subject.executor(network, precision), images)
            tolerance = max(subject.backend.tolerances[precision].outputs, 1e-8)
            for number, (one, wanted) in enumerate(zip(answer, expected, strict=True), start=1):
                what = f"the output for image {number} of {size} in {precision}"
                subject.close("executor.forward", what, one, wanted, tolerance)


def test_an_output_may_be_constant(subject: Subject) -> None:
    """Detectors return constant anchors beside computed outputs."""
    fixed = {"anchors": values(3, 2, seed=1), "scale": np.array(0.25, np.float32)}
    tensors = {"y": ["N", 4], **{name: list(value.shape) for name, value in fixed.items()}}
    relu = onnx.helper.make_node("Relu", ["x"], ["y"], "relu")
    network = Network(model_of([relu], {"x": ["N", 4]}, tensors, fixed), name="constant")
    subject.require(network)
    executor = subject.executor(network)
    x = values(2, 4, seed=2)
    answer = executor.fetch(executor.forward(executor.feed({"x": x})))
    expected = {"y": np.maximum(x, 0), **fixed}
    subject.named("executor.forward", "outputs", answer, expected)
    for name, value in expected.items():
        subject.close("executor.forward", f"output {name}", answer[name], value.astype(float), subject.rounding)


def test_every_precision_is_within_its_tolerance(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network)
    images, _ = random_batch(network)
    expected, _ = NetworkOracle(network, training=False).run(images)
    negated = {name: -network.initializers[name] for name in network.parameters}
    expected_then, _ = NetworkOracle(network.with_weights(negated), training=False).run(images)
    for precision in subject.backend.precisions:
        executor = subject.executor(network, precision)
        tolerance = subject.backend.tolerances[precision].outputs
        fault = _fault(subject, network, images, precision, tolerance)
        answer = output(executor, images)
        subject.close("executor.forward", f"the output in {precision}", answer, expected, tolerance, fault)
        executor.load_parameters(negated)
        what = f"the output in {precision} after load_parameters"
        subject.close("executor.parameters", what, output(executor, images), expected_then, tolerance)


def test_parameters_come_back_as_they_were_given(subject: Subject) -> None:
    """Give arrays of the parameters' type, which could be kept without a copy."""
    network, clause = classifier(), "executor.parameters"
    subject.require(network)
    initial = {name: network.initializers[name] for name in (*network.parameters, *network.statistics)}
    for precision in subject.backend.precisions:
        executor = subject.executor(network, precision)
        start = executor.parameters()
        subject.same(clause, "at the start", start, initial)
        dtype = np.float64 if precision == "fp64" else np.float32
        wanted = {
            name: (value + np.arange(value.size).reshape(value.shape) / 8).astype(np.float32).astype(dtype)
            for name, value in start.items()
        }
        given = copied(wanted)
        executor.load_parameters(given)
        found = executor.parameters()
        subject.same(clause, "after load_parameters", found, wanted)
        overwrite(given)
        subject.same(clause, "after a change of the arrays given", executor.parameters(), wanted)
        overwrite(found)
        subject.same(clause, "after a change of the arrays returned", executor.parameters(), wanted)
        executor.load_parameters({"fc.bias": start["fc.bias"]})
        found = executor.parameters()
        subject.same(clause, "after one was loaded", found, {**wanted, "fc.bias": start["fc.bias"]})


def test_new_parameters_are_used(subject: Subject) -> None:
    network = classifier()
    subject.require(network)
    other = network.at_generic_point()
    images, _ = random_batch(network)
    executor = subject.executor(network)
    output(executor, images)
    executor.load_parameters({name: other.initializers[name] for name in (*network.parameters, *network.statistics)})
    expected, _ = NetworkOracle(other, training=False).run(images)
    answer = output(executor, images)
    subject.close("executor.parameters", "the output after load_parameters", answer, expected, subject.rounding)


def test_inference_changes_nothing(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network)
    images, _ = random_batch(network)
    for precision in subject.backend.precisions:
        executor = subject.executor(network, precision)
        before = executor.parameters()
        first, second = ({"output": output(executor, images)} for _ in range(2))
        subject.same("executor.inference", "after two forward passes", executor.parameters(), before)
        subject.repeated("executor.forward", f"the second forward pass in {precision}", second, first, precision)


def test_two_executors_do_not_share_anything(subject: Subject) -> None:
    network = classifier().at_generic_point()
    subject.require(network)
    images, _ = random_batch(network)
    for precision in subject.backend.precisions:
        one, two = (subject.executor(network, precision) for _ in range(2))
        before = {"output": output(one, images)}
        two.load_parameters({name: value * 2 for name, value in two.parameters().items()})
        after = {"output": output(one, images)}
        what = f"after another's load_parameters in {precision}"
        subject.repeated("executor.parameters", what, after, before, precision)


def test_the_same_seed_gives_the_same_answer(subject: Subject) -> None:
    """Gradients take long to compile: the short form repeats them in one precision."""
    network = classifier().at_generic_point()
    subject.require(network)
    images, labels = random_batch(network)
    for precision in subject.backend.precisions:
        one, two = (subject.executor(network, precision) for _ in range(2))
        what = f"another executor of the network in {precision}"
        first, second = ({"output": output(executor, images)} for executor in (one, two))
        subject.repeated("executor.forward", what, second, first, precision)
        if "gradient" not in subject.backend.absent and (not subject.short or precision == subject.exact):
            first, second = (difference(executor, images, labels) for executor in (one, two))
            least = 1e-12 if precision == "fp64" else 1e-5
            subject.repeated("executor.forward_backward", what, second, first, precision, least)


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
    for what, given in [
        ("an unknown parameter", {"fc.wait": np.zeros(5, np.float32)}),
        ("a parameter of the wrong shape", {"fc.bias": np.zeros(4, np.float32)}),
    ]:
        before = executor.parameters()
        with subject.refuses("executor.parameters", what):
            executor.load_parameters(given)
        subject.same("executor.parameters", f"after {what} was refused", executor.parameters(), before)


def test_layer_times_are_of_nodes_and_can_be_true(subject: Subject, tmp_path: Path) -> None:
    backend = subject.backend
    if "profile" in backend.absent:
        pytest.skip(f"no profile: {backend.absent['profile']}")
    network = classifier()
    subject.require(network)
    executor = subject.executor(network, subject.timed)
    feed = executor.feed(network.arrays(random_batch(network, 4)[0]))

    def step() -> None:
        executor.forward(feed)
        executor.synchronize()

    step()
    found = backend.load("profile", subject.mode).profile(executor, step, 2, tmp_path, None)
    check_profile(backend.name, found, network)
    directions = {layer.direction for layer in found.layers}
    subject.hold("profile.nodes", directions <= {"forward"}, "a forward pass has times of the backward direction")
    subject.hold("profile.nodes", bool(found.method), "the profile does not say how it was made")
