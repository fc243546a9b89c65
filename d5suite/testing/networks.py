"""The networks of the conformance kit.

Imports NumPy, ONNX, the contract, `d5suite.network` and `d5suite.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from d5suite.levels.network import Executor, Native
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.graph_edits import copy_of, rename_inputs
from d5suite.network.user_network import input_ranges
from d5suite.network.zoo import build, convnext, efficientnet, shufflenet, vit
from d5suite.testing.cases import f32, i64, model_of, values

REPEATING = ("light_vgg19", "light_zfnet512")
"""Networks with the operators of light_bvlc_alexnet and more than twice its weights."""

LIGHT = [
    path
    for path in sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))
    if path.stem not in REPEATING
]
"""Networks shipped with ONNX; all weights of each are equal."""

Batch = tuple[np.ndarray, np.ndarray]

LARGER = 17
"""Images of a batch that fills no vector, tile or thread evenly, and is larger than the others."""


def classifier() -> Network:
    """Build a small residual network that uses a shortcut twice; 3×10×10 pixels, 5 classes."""
    b = Builder("classifier", image_size=10)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 6, 3, bias=True), "bn1", momentum=0.75))
    y = b.batch_norm(b.conv(x, "conv2", 6, 3, groups=2), "bn2", epsilon=1e-3)
    z = b.relu(b.add(y, x, "add"))
    p = b.add(b.max_pool(z, "pool", 2, stride=2), b.max_pool(b.relu(y), "pool2", 2, stride=2), "add2")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(p, "average"), "flatten"), "fc", 5))


def sharing() -> Network:
    """Build a network whose layers share weights, as exporters write; 3×8×8 pixels, 5 classes."""
    b = Builder("sharing", image_size=8)
    x = b.conv(b.image, "stem", 6, 3)
    for part in ("first", "second"):
        x = b.relu(b.batch_norm(b.conv(x, f"{part}.conv", 6, 3, bias=True), f"{part}.bn"))
    x = b.flatten(b.global_average_pool(x, "average"), "flatten")
    x = b.linear(b.linear(x, "first.fc", 6), "second.fc", 6)
    network = b.classifier(b.linear(x, "fc", 5))
    model = copy_of(network.model)
    same = {name: name.replace("second.", "first.") for name in network.parameters}
    same["first.conv.bias"] = same["second.conv.bias"] = "first.bn.bias"
    rename_inputs(model.graph.node, same)
    return Network(model, input=network.input, output=network.output, label=network.label, loss=network.loss)


def layers() -> Network:
    """Build two linear layers, without kinks or cancelling sums; 3×4×4 pixels, 5 classes."""
    b = Builder("layers", image_size=4)
    x = b.linear(b.flatten(b.image, "flatten", size=4), "fc1", 8)
    return b.classifier(b.linear(x, "fc2", 5))


def steady(precision: str) -> Network:
    """Return `classifier` in float64, else `layers`, which does not amplify small errors."""
    return classifier() if precision == "fp64" else layers()


def with_idle_parameter(network: Network | None = None) -> Network:
    """Add to a network (default `classifier`) a parameter that only weight decay changes."""
    network = network or classifier()
    model = copy_of(network.model)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(5, np.float32), "idle"))
    model.graph.node.append(helper.make_node("Add", [network.output, "idle"], ["shifted"], "shifted"))
    model.graph.output.append(helper.make_tensor_value_info("shifted", TensorProto.FLOAT, ["N", 5]))
    return Network(model, input="image", output="shifted", label="label", loss="loss")


def every_operator() -> Network:
    """Chain every operator of the zoo and of ONNX's light networks; 3×16×16 pixels, 5 classes."""
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
    """Build a convolution, the given operator and a loss; 3×10×10 pixels, 5 classes.

    There are as many channels as images in `random_batch`, because ONNX's evaluator (1.23) confuses
    the two in LRN.
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
"""Operators that `through` accepts, whose gradients are easy to get wrong."""


def with_dropout() -> Network:
    """Build a Dropout on either side of a BatchNormalization; 3×10×10 pixels, 5 classes."""
    b = Builder("with_dropout", image_size=10)
    x = b.dropout(b.conv(b.image, "conv1", 8, 3, bias=True), "drop1", ratio=0.25)
    x = b.dropout(b.relu(b.batch_norm(x, "bn1", momentum=0.75)), "drop2")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


def dropping() -> Network:
    """Build the smallest classifier with a Dropout; 3×10×10 pixels, 5 classes."""
    b = Builder("dropping", image_size=10)
    x = b.dropout(b.conv(b.image, "conv", 32, 3), "dropped")
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


def with_small_gradients() -> Network:
    """Build one layer whose gradients underflow in float16; 3×4×4 pixels, 5 classes.

    The layer's outputs are divided by 2^20, so that the gradients of 32 images are all 0.
    """
    b = Builder("with_small_gradients", image_size=4)
    x, part = b.linear(b.flatten(b.image, "flatten", size=4), "fc", 5), b.constant("part", f32(2.0**-10))
    return b.classifier(b.node("Mul", "smaller", [b.node("Mul", "small", [x, part], 5), part], 5))


def heavy() -> Network:
    """Build a network that takes tens of milliseconds per batch; 3×64×64 pixels, 5 classes."""
    b = Builder("heavy", image_size=64)
    x = b.image
    for index in range(6):
        x = b.relu(b.conv(x, f"conv{index}", 48, 3, bias=True))
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


def roomy() -> Network:
    """Build a network of large images and little work: 29 MB for six of 3×224×224, 5 classes."""
    b = Builder("roomy", image_size=224)
    x = b.image
    for index in range(3):
        x = b.relu(b.conv(x, f"conv{index}", 8, 3, bias=True))
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "average"), "flatten"), "fc", 5))


def random_batch(network: Network, size: int = 6, seed: int = 0) -> Batch:
    """Draw float32 images or int64 words, and labels: -1, 0 or 1 if an image has several.

    Targets of a squared error are float32.
    """
    generator = np.random.default_rng(seed)
    shape = tuple(n or 1 for n in network.shapes[network.input][1:])
    classes = network.shapes[network.output][-1] or 1
    if network.dtypes[network.input].kind == "i":
        images = generator.integers(*input_ranges(network)[network.input], (size, *shape))
    else:
        images = generator.standard_normal((size, *shape)).astype(np.float32)
    cells = network.shapes[network.label] if network.label is not None else (None,)
    size_of_labels = (size, *(n or 1 for n in cells[1:]))
    if network.has_targets:
        return images, generator.standard_normal(size_of_labels).astype(np.float32)
    least, most = (-1, 2) if cells == network.shapes[network.output] else (0, classes)
    return images, generator.integers(least, most, size_of_labels)


def fed(executor: Executor, batch: Batch) -> Native:
    """Feed inputs and labels."""
    network = executor.network
    return executor.feed({network.input: batch[0], network.require_loss()[0]: batch[1]})


def loss_of(executor: Executor, answer: Native) -> float:
    """Fetch the loss of an answer."""
    return float(executor.fetch(answer)[executor.network.require_loss()[1]])


class TrainingTask(NamedTuple):
    """A training run on which all backends must agree.

    Attributes
    ----------
    network : callable
        Builds the network.
    batches : callable
        ``(network, steps)`` to one pair of images and labels per step.
    learning_rate : float
        Exact in float32, because some frameworks store it so.
    steps : int
        Fewer for a network whose float64 steps take seconds on some backends.
    """

    network: Callable[[], Network]
    batches: Callable[[Network, int], list[Batch]]
    learning_rate: float
    steps: int = 20


def today() -> Network:
    """Chain one block of each modern network of the zoo; 3×8×8 pixels, 5 classes."""
    b = Builder("today", image_size=8)
    x = b.hard_swish(b.batch_norm(b.conv(b.image, "conv", 6, 3), "bn"))
    x = efficientnet.block(b, x, "excited", inputs=6, hidden=8, kernel=3, stride=2, outputs=6)
    x = b.multiply(x, b.hard_sigmoid(b.global_average_pool(x, "average")), "gated")
    halves = [b.part(x, "right", 3, 6), b.part(x, "left", 0, 3)]
    x = shufflenet.shuffled(b, b.concat(halves, "exchanged"), "shuffle", 6, 4)
    x = vit.embedded(b, convnext.block(b, x, "next", 6, 4), pixels=16, width=6)
    x = vit.layer(b, x, "layer", tokens=17, width=6, heads=2, hidden=8)
    return b.classifier(b.linear(vit.representation(b, x, 6), "fc", 5))


def _scored(
    name: str,
    given: list[Any],
    nodes: list[onnx.NodeProto],
    weights: Mapping[str, np.ndarray],
    shape: Sequence[Any] = ("N", 5),
    opset: int = 21,
) -> Network:
    """Build a classifier from the name and shape of its input, its nodes and its weights.

    ``shape`` is the shape of the output, ``scores``.
    """
    model = model_of(nodes, {given[0]: ["N", *given[1:]]}, {"scores": shape}, weights, opset=opset)
    return Network(model, name=name).with_classification_loss(axis=2 if len(shape) == 3 else None)


def _drawn(shapes: Mapping[str, tuple[int, ...]], scale: float = 1.0) -> dict[str, np.ndarray]:
    return {name: values(*shape, seed=index) * f32(scale) for index, (name, shape) in enumerate(shapes.items())}


node = helper.make_node


def transformer() -> Network:
    """Build a causal transformer of one layer; 6 token numbers below 11, 5 classes."""
    shapes = {
        "words": (11, 8), "positions": (6, 8), "norm.scale": (8,), "norm.bias": (8,), "query": (8, 8), "key": (8, 4),
        "value": (8, 4), "out": (8, 8), "rms.scale": (8,), "up": (8, 16), "up.bias": (16,), "down": (16, 8),
        "fc": (8, 5),
    }  # fmt: skip
    parameters = _drawn(shapes, 0.5)
    nodes = [
        node("Gather", ["words", "tokens"], ["embedded"], "embedded"),
        node("Add", ["embedded", "positions"], ["placed"], "placed"),
        node("LayerNormalization", ["placed", "norm.scale", "norm.bias"], ["normal"], "normal", axis=-1),
        *(node("MatMul", ["normal", part], [f"{part}s"], f"{part}s") for part in ("query", "key", "value")),
        node("Attention", ["querys", "keys", "values"], ["attended"], "attended", is_causal=1, q_num_heads=4,
             kv_num_heads=2),
        node("MatMul", ["attended", "out"], ["projected"], "projected"),
        node("Add", ["placed", "projected"], ["summed"], "summed"),
        node("RMSNormalization", ["summed", "rms.scale"], ["scaled"], "scaled", axis=-1),
        node("MatMul", ["scaled", "up"], ["wide"], "wide"),
        node("Add", ["wide", "up.bias"], ["shifted"], "shifted"),
        node("Gelu", ["shifted"], ["active"], "active"),
        node("MatMul", ["active", "down"], ["narrow"], "narrow"),
        node("Add", ["summed", "narrow"], ["encoded"], "encoded"),
        node("Gather", ["encoded", "last"], ["representation"], "representation", axis=1),
        node("MatMul", ["representation", "fc"], ["scores"], "scores"),
    ]  # fmt: skip
    return _scored("transformer", ["tokens", 6], nodes, {**parameters, "last": np.array(-1)}, opset=23)


def spectral() -> Network:
    """Score 5 classes by spectra, norms, determinants and indices of 3×8×8 pixels."""
    shapes = {"kernel": (4, 3, 3, 3), "bias": (4,), "window": (16,), "spread": (64, 9), "fc": (94, 5)}
    parameters = _drawn(shapes, 0.3)
    constants = {
        "planes": i64(-1, 4, 64), "signals": i64(-1, 256, 1), "flat": i64(0, -1), "pooled": i64(-1, 4, 16),
        "two": i64(2), "three": i64(3), "last": i64(2, 3), "length": np.array(24), "along": np.array(2),
        "step": np.array(48), "image": i64(4, 4), "block": i64(2, 2), "inside": i64(63), "lengths": i64(8, 3, 0, 5),
    }  # fmt: skip
    half: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        node("Conv", ["x", "kernel", "bias"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("Reshape", ["c", "planes"], ["plane"], "plane"),
        node("Unsqueeze", ["plane", "three"], ["real"], "real"),
        node("DFT", ["real", "length", "along"], ["spectrum"], "spectrum", onesided=1),
        node("Relu", ["spectrum"], ["positive"], "positive"),
        node("DFT", ["positive", "", "along"], ["back"], "back", inverse=1, onesided=1),
        node("ReduceSumSquare", ["back", "last"], ["powers"], "powers", keepdims=0),
        node("Reshape", ["c", "signals"], ["signal"], "signal"),
        node("STFT", ["signal", "step", "window"], ["frames"], "frames", onesided=1),
        node("ReduceL2", ["frames", "three"], ["loud"], "loud", keepdims=0),
        node("Reshape", ["loud", "flat"], ["loudness"], "loudness"),
        node("LpPool", ["c"], ["norms"], "norms", **half),
        node("Det", ["norms"], ["volumes"], "volumes"),
        node("GlobalLpPool", ["c"], ["whole"], "whole", p=3),
        node("Reshape", ["whole", "flat"], ["size"], "size"),
        node("MatMul", ["plane", "spread"], ["columns"], "columns"),
        node("Col2Im", ["columns", "image", "block"], ["tiles"], "tiles"),
        node("Reshape", ["tiles", "flat"], ["tiled"], "tiled"),
        node("Hardmax", ["plane"], ["highest"], "highest"),
        node("Mul", ["highest", "plane"], ["alone"], "alone"),
        node("ReduceSum", ["alone", "two"], ["peaks"], "peaks", keepdims=0),
        node("MaxPool", ["c"], ["largest", "cells"], "largest", **half),
        node("BitwiseAnd", ["cells", "inside"], ["within"], "within"),
        node("Reshape", ["within", "pooled"], ["rows"], "rows"),
        node("GatherElements", ["plane", "rows"], ["found"], "found", axis=2),
        node("ReduceMean", ["found", "two"], ["places"], "places", keepdims=0),
        node("Transpose", ["c"], ["channels"], "channels", perm=[1, 2, 0, 3]),
        node("ReverseSequence", ["channels", "lengths"], ["reversed"], "reversed", batch_axis=0, time_axis=1),
        node("Transpose", ["reversed"], ["turned"], "turned", perm=[2, 0, 1, 3]),
        node("Mul", ["turned", "c"], ["matched"], "matched"),
        node("ReduceMean", ["matched", "last"], ["matches"], "matches", keepdims=0),
        node("Concat", ["powers", "loudness", "volumes", "size", "tiled", "peaks", "places", "matches"], ["all"], "all",
             axis=1),
        node("MatMul", ["all", "fc"], ["scores"], "scores"),
    ]  # fmt: skip
    return _scored("spectral", ["x", 3, 8, 8], nodes, {**parameters, **constants}, opset=23)


def tagger() -> Network:
    """Score 5 classes for each of 6 tokens below 11, by recurrences and the largest of 8 gates."""
    shapes = {
        "words": (11, 8), "w": (2, 16, 8), "r": (2, 16, 4), "b": (2, 32), "gru.w": (1, 24, 8), "gru.r": (1, 24, 8),
        "gru.b": (1, 48), "experts": (8, 3), "fc": (3, 5), "states.fc": (8, 5),
    }  # fmt: skip
    parameters = _drawn(shapes, 0.5)
    constants = {"rows": i64(6, -1, 8), "state": i64(-1, 1, 8), "one": i64(1), "four": i64(4)}
    nodes = [
        node("Gather", ["words", "tokens"], ["embedded"], "embedded"),
        node("Transpose", ["embedded"], ["steps"], "steps", perm=[1, 0, 2]),
        node("LSTM", ["steps", "w", "r", "b"], ["both", "", "cells"], "lstm", hidden_size=4, direction="bidirectional"),
        node("Transpose", ["both"], ["turned"], "turned", perm=[0, 2, 1, 3]),
        node("Reshape", ["turned", "rows"], ["joined"], "joined"),
        node("GRU", ["joined", "gru.w", "gru.r", "gru.b"], ["backwards", "last"], "gru", hidden_size=8,
             direction="reverse", linear_before_reset=1),
        node("Add", ["backwards", "last"], ["states"], "states"),
        node("Squeeze", ["states", "one"], ["squeezed"], "squeezed"),
        node("Transpose", ["squeezed"], ["tokenwise"], "tokenwise", perm=[1, 0, 2]),
        node("TopK", ["tokenwise", "four"], ["largest", "places"], "largest", axis=-1),
        node("Softmax", ["largest"], ["gates"], "gates", axis=-1),
        node("Gather", ["experts", "places"], ["chosen"], "chosen"),
        node("Einsum", ["gates", "chosen"], ["mixed"], "mixed", equation="ntk,ntkc->ntc"),
        node("MatMul", ["mixed", "fc"], ["plain"], "plain"),
        node("Transpose", ["cells"], ["ends"], "ends", perm=[1, 0, 2]),
        node("Reshape", ["ends", "state"], ["end"], "end"),
        node("MatMul", ["end", "states.fc"], ["shift"], "shift"),
        node("Add", ["plain", "shift"], ["scores"], "scores"),
    ]  # fmt: skip
    return _scored("tagger", ["tokens", 6], nodes, {**parameters, **constants}, ["N", 6, 5])


def reader() -> Network:
    """Score 5 classes for 6 tokens below 11, by rare variants of recurrences."""
    shapes = {
        "words": (11, 8), "gru.w": (2, 12, 8), "gru.r": (2, 12, 4), "gru.b": (2, 24), "w": (2, 16, 8), "r": (2, 16, 4),
        "b": (2, 32), "p": (2, 12), "back.w": (1, 16, 8), "back.r": (1, 16, 4), "fc": (4, 5),
    }  # fmt: skip
    parameters = _drawn(shapes, 0.5)
    nodes = [
        node("Gather", ["words", "tokens"], ["embedded"], "embedded"),
        node("Transpose", ["embedded"], ["steps"], "steps", perm=[1, 0, 2]),
        node("GRU", ["steps", "gru.w", "gru.r", "gru.b"], ["", "start"], "reset first", hidden_size=4,
             direction="bidirectional"),
        node("LSTM", ["steps", "w", "r", "b", "", "start", "", "p"], ["peeping"], "peepholes", hidden_size=4,
             direction="bidirectional"),
        node("LSTM", ["embedded", "back.w", "back.r"], ["all", "last"], "batch first", hidden_size=4,
             direction="reverse", layout=1),
        node("ReduceMean", ["peeping", "first two"], ["seen"], "seen", keepdims=0),
        node("ReduceMean", ["all", "middle two"], ["heard"], "heard", keepdims=0),
        node("Squeeze", ["last", "one"], ["ended"], "ended"),
        node("Sum", ["seen", "heard", "ended"], ["known"], "known"),
        node("MatMul", ["known", "fc"], ["scores"], "scores"),
    ]  # fmt: skip
    constants = {"first two": i64(0, 1), "middle two": i64(1, 2), "one": i64(1)}
    return _scored("reader", ["tokens", 6], nodes, {**parameters, **constants})


def normalised() -> Network:
    """Score 4 classes of images by convolutions whose kernels are computed from parameters.

    The kernels are ``g v / norm(v)``: weight normalisation (Salimans and Kingma, NeurIPS 2016).
    """
    shapes = {"v": (6, 3, 3, 3), "g": (6, 1, 1, 1), "up.v": (6, 4, 2, 2), "up.g": (6, 1, 1, 1), "fc": (4, 4)}
    parameters = _drawn(shapes)
    nodes = []
    for prefix in ("", "up."):
        nodes += [
            node("ReduceL2", [f"{prefix}v", "axes"], [f"{prefix}norm"], f"{prefix}norm"),
            node("Mul", [f"{prefix}v", f"{prefix}g"], [f"{prefix}scaled"], f"{prefix}scaled"),
            node("Div", [f"{prefix}scaled", f"{prefix}norm"], [f"{prefix}kernel"], f"{prefix}kernel"),
        ]
    nodes += [
        node("Conv", ["image", "kernel"], ["filtered"], "filtered"),
        node("Relu", ["filtered"], ["bent"], "bent"),
        node("ConvTranspose", ["bent", "up.kernel"], ["larger"], "larger", strides=[2, 2]),
        node("Tanh", ["larger"], ["bounded"], "bounded"),
        node("GlobalAveragePool", ["bounded"], ["pooled"], "pooled"),
        node("Flatten", ["pooled"], ["flat"], "flat"),
        node("MatMul", ["flat", "fc"], ["scores"], "scores"),
    ]
    return _scored("normalised", ["image", 3, 6, 7], nodes, {**parameters, "axes": i64(1, 2, 3)}, ["N", 4])


def regressor(*outputs: str) -> Network:
    """Compare a map of 3×8×8 pixels, their features, or both, with targets: a squared error."""
    parameters = _drawn({"kernel": (6, 3, 3, 3), "bias": (6,), "fc": (6, 5)}, 0.5)
    nodes = [
        node("Conv", ["image", "kernel", "bias"], ["filtered"], "filtered", pads=[1, 1, 1, 1]),
        node("LeakyRelu", ["filtered"], ["map"], "bent"),
        node("GlobalAveragePool", ["map"], ["pooled"], "pooled"),
        node("Flatten", ["pooled"], ["flat"], "flat"),
        node("MatMul", ["flat", "fc"], ["features"], "features"),
    ]
    made = {"map": ["N", 6, 8, 8], "features": ["N", 5]}
    model = model_of(nodes, {"image": ["N", 3, 8, 8]}, made, parameters)
    return Network(model, name="regressor").with_squared_error(outputs)


GRAPHS = (transformer(), tagger(), reader(), spectral(), normalised())
"""Networks with operators that the zoo lacks."""


def _random_batches(network: Network, steps: int) -> list[Batch]:
    return [random_batch(network, seed=step) for step in range(steps)]


def _digit_batches(network: Network, steps: int, size: int = 16) -> list[Batch]:
    from d5suite.data.digits import digits

    images, labels = digits()
    order = np.random.default_rng(0).permutation(len(images))[: steps * size].reshape(steps, size)
    return [(images[some], labels[some]) for some in order]


TASKS = {
    "lenet5_digits": TrainingTask(lambda: build("lenet5", classes=10, image_size=32), _digit_batches, 2.0**-5),
    "every_operator": TrainingTask(every_operator, _random_batches, 2.0**-5),
    "resnet18": TrainingTask(lambda: build("resnet18", classes=10, image_size=32), _random_batches, 2.0**-9, steps=6),
    "transformer": TrainingTask(transformer, _random_batches, 2.0**-9),
}
"""Training tasks by name."""
