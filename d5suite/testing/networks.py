"""The networks of the conformance kit. Imports NumPy, ONNX, `d5suite.network` and `d5suite.data`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.testing.cases import f32, i64, values

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))
"""The networks that ONNX ships, their weights all equal."""

Batch = tuple[np.ndarray, np.ndarray]


def classifier() -> Network:
    """Convolutions, normalisations, a shortcut whose input is read twice, and pooling; 3×10×10 pixels, 5 classes."""
    b = Builder("classifier", image_size=10)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 6, 3, bias=True), "bn1", momentum=0.75))
    y = b.batch_norm(b.conv(x, "conv2", 6, 3, groups=2), "bn2", epsilon=1e-3)
    z = b.relu(b.add(y, x, "add"))
    p = b.add(b.max_pool(z, "pool", 2, stride=2), b.max_pool(b.relu(y), "pool2", 2, stride=2), "add2")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(p, "average"), "flatten"), "fc", 5))


def layers() -> Network:
    """Two layers and nothing between: no kink to cross, and no sum to cancel; 3×4×4 pixels, 5 classes."""
    b = Builder("layers", image_size=4)
    x = b.linear(b.flatten(b.image, "flatten", size=4), "fc1", 8)
    return b.classifier(b.linear(x, "fc2", 5))


def with_idle_parameter(network: Network | None = None) -> Network:
    """A network, by default `classifier`, and a parameter that its loss does not depend on, which decay moves."""
    network = network or classifier()
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(5, np.float32), "idle"))
    model.graph.node.append(helper.make_node("Add", [network.output, "idle"], ["shifted"], "shifted"))
    model.graph.output.append(helper.make_tensor_value_info("shifted", TensorProto.FLOAT, ["N", 5]))
    return Network(model, input="image", output="shifted", label="label", loss="loss")


def every_operator() -> Network:
    """Every operator that the zoo and ONNX's light networks use, on one way to a loss; 3×16×16 pixels, 5 classes."""
    b = Builder("every_operator", image_size=16)
    six = b.parameter("offset", values(6, 1, 1, seed=21) * f32(0.1))
    scale = b.parameter("divisor", np.full((6, 1, 1), 1.5))
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 6, 3), "bn1"))
    x = b.node("LRN", "lrn", [x], 6, size=3, alpha=0.1, beta=0.75, bias=1.0)
    average = b.node("AveragePool", "average", [x], 6, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])
    largest = b.node("MaxPool", "largest", [x], 6, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])
    x = b.node("LeakyRelu", "leaky", [b.node("Concat", "both", [average, largest], 12, axis=1)], 12, alpha=0.1)
    gate = b.node("Sigmoid", "gate", [b.conv(x, "conv2", 6, 1, bias=True)], 6)
    y = b.tanh(b.conv(x, "conv3", 6, 3, groups=2))
    x = b.node("Sub", "centred", [b.node("Mul", "gated", [gate, y], 6), six], 6)
    x = b.node("Div", "scaled", [x, scale], 6)
    low, high = b.constant("low", f32(-0.45)), b.constant("high", f32(0.45))
    x = b.node("Clip", "clipped", [x, low, high], 6)
    pads = b.constant("pads", i64(0, 0, 2, 1, 0, 0, 0, 1))
    x = b.conv(b.node("Pad", "padded", [x, pads, b.constant("filling", f32(0.1))], 6), "conv4", 6, 3, padding=0)
    x = b.node("Sum", "summed", [b.add(x, y, "added"), gate, x], 6)
    x = b.node("Dropout", "dropped", [x, b.constant("ratio", f32(0.0))], 6)
    x = b.node("Transpose", "last", [b.node("Identity", "same", [x], 6)], 8, perm=[0, 2, 3, 1])
    x = b.node("MatMul", "mixed", [x, b.parameter("mixer", values(6, 6, seed=22) * f32(0.4))], 8)
    x = b.node("Transpose", "first", [x], 6, perm=[0, 3, 1, 2])
    x = b.node(
        "Concat", "pooled", [b.global_average_pool(x, "mean"), b.node("GlobalMaxPool", "max", [x], 6)], 12, axis=1
    )
    x = b.node("Squeeze", "squeezed", [x, b.constant("image_axes", i64(2, 3))], 12)
    x = b.node("Unsqueeze", "unsqueezed", [x, b.constant("new_axes", i64(1))], 1)
    x = b.node(
        "Flatten", "flat", [b.node("Reshape", "reshaped", [x, b.constant("shape", i64(0, -1, 2))], 6)], 12, axis=1
    )
    x = b.node(
        "Sum", "features", [b.node("Softmax", "soft", [x], 12, axis=-1), b.node("LogSoftmax", "log", [x], 12)], 12
    )
    return b.classifier(b.linear(x, "fc", 5))


def through(operator: str) -> Network:
    """A convolution, one further operator, and a loss; 3×10×10 pixels, 5 classes.

    For LRN with as many channels as `random_batch` has images, because ONNX's evaluator (1.23) confuses the two.
    """
    b = Builder(f"through_{operator}", image_size=10)
    x = b.conv(b.image, "conv", 6, 3, bias=True)
    extra: dict[str, tuple[list[str], dict[str, Any]]] = {
        "AveragePool": ([], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 2, 0]}),
        "Clip": ([b.constant("low", f32(-0.4)), b.constant("high", f32(0.4))], {}),
        "Concat": ([x], {"axis": 2}),
        "LRN": ([], {"size": 4, "alpha": 0.5}),
        "MaxPool": ([], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 2, 0]}),
        "Mul": ([x], {}),
        "Pad": ([b.constant("pads", i64(0, 0, 1, 2, 0, 0, 3, 0))], {}),
        "Softmax": ([], {"axis": 1}),
    }
    inputs, attributes = extra[operator]
    y = b.node(operator, "y", [x, *inputs], 6, **attributes)
    return b.classifier(b.linear(b.flatten(b.global_average_pool(y, "average"), "flatten"), "fc", 5))


THROUGH = ("AveragePool", "Clip", "Concat", "LRN", "MaxPool", "Mul", "Pad", "Softmax")
"""What `through` can be asked for: operators whose gradients are easily wrong."""


def with_dropout() -> Network:
    """A Dropout on either side of a BatchNormalization; 3×10×10 pixels, 5 classes."""
    b = Builder("with_dropout", image_size=10)
    x = b.dropout(b.conv(b.image, "conv1", 8, 3, bias=True), "drop1", ratio=0.25)
    x = b.dropout(b.relu(b.batch_norm(x, "bn1", momentum=0.75)), "drop2")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


def dropping() -> Network:
    """A Dropout and as little else as makes a classifier; 3×10×10 pixels, 5 classes."""
    b = Builder("dropping", image_size=10)
    x = b.dropout(b.conv(b.image, "conv", 32, 3), "dropped")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


def with_small_gradients() -> Network:
    """One layer whose outputs are divided by 2^20, so that in float16 their gradients for 32 images are all 0.

    3×4×4 pixels, 5 classes.
    """
    b = Builder("with_small_gradients", image_size=4)
    x, part = b.linear(b.flatten(b.image, "flatten", size=4), "fc", 5), b.constant("part", f32(2.0**-10))
    return b.classifier(b.node("Mul", "smaller", [b.node("Mul", "small", [x, part], 5), part], 5))


def heavy() -> Network:
    """A network that keeps a processor busy for tens of milliseconds a batch; 3×64×64 pixels, 5 classes."""
    b = Builder("heavy", image_size=64)
    x = b.image
    for index in range(6):
        x = b.relu(b.conv(x, f"conv{index}", 48, 3, bias=True))
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


def random_batch(network: Network, size: int = 6, seed: int = 0) -> Batch:
    """Standard normal images, float32 (size, C, H, W), and random labels, int64 (size,) or, of -1, 0, 1, (size, K)."""
    generator = np.random.default_rng(seed)
    shape = tuple(n or 1 for n in network.shapes[network.input][1:])
    classes = network.shapes[network.output][-1] or 1
    images = generator.standard_normal((size, *shape)).astype(np.float32)
    if network.label is not None and len(network.shapes[network.label]) == 2:
        return images, generator.integers(-1, 2, (size, classes))
    return images, generator.integers(0, classes, size)


class Course(NamedTuple):
    """A training run that all backends must agree on.

    Attributes
    ----------
    network : callable
        Builds the network.
    batches : callable
        ``(network, steps)`` to one pair of images and labels per step.
    learning_rate : float
        Exact in float32, because some frameworks hold it so.
    """

    network: Callable[[], Network]
    batches: Callable[[Network, int], list[Batch]]
    learning_rate: float


def _random_batches(network: Network, steps: int) -> list[Batch]:
    return [random_batch(network, seed=step) for step in range(steps)]


def _digit_batches(network: Network, steps: int, size: int = 16) -> list[Batch]:
    from d5suite.data.digits import digits

    images, labels = digits()
    order = np.random.default_rng(0).permutation(len(images))[: steps * size].reshape(steps, size)
    return [(images[some], labels[some]) for some in order]


COURSES = {
    "lenet5_digits": Course(lambda: build("lenet5", classes=10, image_size=32), _digit_batches, 2.0**-5),
    "every_operator": Course(every_operator, _random_batches, 2.0**-5),
    "resnet18": Course(lambda: build("resnet18", classes=10, image_size=32), _random_batches, 2.0**-9),
}
"""By name."""
