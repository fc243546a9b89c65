"""Rewrites of a network's graph: losses, label smoothing, Dropout, weights at a generic point.

Each function takes a `Graph` and returns a new ONNX model. May import ONNX, NumPy and
`d5suite.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.helper import make_node, make_tensor_value_info

from d5suite.errors import NetworkError
from d5suite.network.graph import Graph
from d5suite.network.graph_edits import (
    IN_FLOAT32,
    NodeWriter,
    attributes_of,
    copy_of,
    rename_inputs,
    replace_items,
    rewrite_nodes,
)

_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def with_classification_loss(network: Graph, axis: int | None = None) -> onnx.ModelProto:
    """Add a label input and the loss; see `Network.with_classification_loss`."""
    model = copy_of(network.model)
    label, loss = _free_names(model)
    logits, labels, cells = _logits(network), label, network.shapes[network.output]
    if axis is not None and network.shapes[logits] != cells:
        logits = network.output
    rank, label_shape = len(network.shapes[logits]), [network.batch_size or "N"]
    if axis is not None:
        label_shape += [n or "?" for place, n in enumerate(cells) if place not in (0, axis)]
    write = NodeWriter(model.graph, loss)
    if rank > 2 and axis != 1:
        logits = write.node("Flatten", logits, axis=axis or 1)
    if rank > 2 and axis is not None and axis != 1:
        labels = write.node("Reshape", label, write.constant(np.array([-1])))
    write.node("SoftmaxCrossEntropyLoss", logits, labels, output=loss, reduction="mean")
    return _with_label_and_loss(model, label, label_shape, loss)


def with_squared_error(network: Graph, outputs: Sequence[str]) -> onnx.ModelProto:
    """Add a label input and the loss; see `Network.with_squared_error`."""
    model = copy_of(network.model)
    label, loss = _free_names(model)
    write = NodeWriter(model.graph, loss)

    def wide(name: str, place: int) -> str:
        kept = f"{loss}{IN_FLOAT32}.{place}"
        return write.node("Cast", name, output=kept, name=kept, to=TensorProto.FLOAT)

    found = [wide(name, place) for place, name in enumerate(outputs)]
    shapes = [network.shapes[name] for name in outputs]
    shape = [network.batch_size or "N", *(n or 1 for n in shapes[0][1:])]
    if not network.batched:  # the whole output is one sample
        row = write.constant(np.array([1, -1]))
        found = [write.node("Reshape", name, row) for name in found]
        shape = [1, sum(math.prod(n or 1 for n in each) for each in shapes)]
    elif len(outputs) > 1:
        found = [write.node("Flatten", name, axis=1) for name in found]
        shape[1:] = [sum(math.prod(n or 1 for n in each[1:]) for each in shapes)]
    values = found[0] if len(found) == 1 else write.node("Concat", *found, axis=1)
    apart = write.node("Sub", values, wide(label, len(outputs)))
    write.node("ReduceMean", write.node("Mul", apart, apart), output=loss, keepdims=0)
    return _with_label_and_loss(model, label, shape, loss, TensorProto.FLOAT)


def with_multilabel_loss(network: Graph) -> onnx.ModelProto:
    """Replace the loss by sigmoid cross-entropy; see `Network.with_multilabel_loss`.

    It is written as the softmax cross-entropy of the pair (0, logit), because
    ``softmax((0, x))[1] = sigmoid(x)``.
    """
    logits = _logits(network)
    shape = network.shapes[logits]
    if len(shape) != 2 or shape[1] is None:
        raise NetworkError(f"a multi-label loss needs an output of shape (N, classes), not {shape}", where=network.name)
    model = _without_loss(network)
    label, loss = _free_names(model)
    write = NodeWriter(model.graph, loss)
    present = write.node("Unsqueeze", logits, write.constant(np.array([1])))
    pair = write.node("Pad", present, write.constant(np.array([0, 1, 0, 0, 0, 0])))
    write.node("SoftmaxCrossEntropyLoss", pair, label, output=loss, reduction="mean", ignore_index=-1)
    return _with_label_and_loss(model, label, [network.batch_size or "N", shape[1]], loss)


def with_label_smoothing(network: Graph, smoothing: float) -> onnx.ModelProto:
    """Smooth the labels of every cross-entropy; see `Network.with_label_smoothing`."""
    label, _ = network.require_loss()
    model = copy_of(network.model)

    def rewrite(node: onnx.NodeProto, write: NodeWriter) -> bool:
        if node.op_type != "SoftmaxCrossEntropyLoss":
            return False
        settings = attributes_of(node)
        if settings.get("reduction", b"mean") != b"mean" or len(node.input) > 2 or len(network.shapes[label]) != 1:
            raise NetworkError("labels can be smoothed only in a mean over one label per image", where=network.name)
        hard = write.node(node.op_type, *node.input, name=node.name, **settings)
        mean = write.node("ReduceMean", write.node("LogSoftmax", node.input[0], axis=1), keepdims=0)
        own = write.node("Mul", hard, write.constant(np.float32(1 - smoothing)))
        others = write.node("Mul", mean, write.constant(np.float32(-smoothing)))
        write.node("Add", own, others, output=node.output[0])
        return True

    if not rewrite_nodes(model.graph, rewrite):
        raise NetworkError(
            "the network has no softmax cross-entropy whose labels could be smoothed", where=network.name
        )
    return model


def without_dropout(network: Graph) -> onnx.ModelProto:
    """Remove every Dropout; see `Network.without_dropout`."""
    model = copy_of(network.model)
    graph = model.graph
    same: dict[str, str] = {}
    wanted = {value.name for value in graph.output}
    nodes = []
    for node in graph.node:
        rename_inputs([node], same)
        if node.op_type == "Dropout":
            same[node.output[0]] = node.input[0]
            for mask in wanted.intersection(node.output[1:]):
                sizes, value = f"{mask}.sizes", onnx.helper.make_tensor("", onnx.TensorProto.BOOL, [1], [True])
                nodes.append(make_node("Shape", [node.input[0]], [sizes], sizes))
                nodes.append(make_node("ConstantOfShape", [sizes], [mask], mask, value=value))
        else:
            nodes.append(node)
    nodes += [
        make_node("Identity", [same[value.name]], [value.name], f"{value.name}.kept")
        for value in graph.output
        if value.name in same
    ]
    replace_items(graph.node, nodes)
    return model


def generic_weights(network: Graph) -> dict[str, np.ndarray]:
    """Return the initializers with noise on all weights; see `Network.at_generic_point`."""
    generator = np.random.default_rng(0xD5)
    variances = {node.inputs[4] for node in network.nodes if node.op_type == "BatchNormalization"}
    initializers = dict(network.initializers)
    for name in (*network.parameters, *network.statistics):
        value = network.initializers[name].astype(np.float64)
        noise = generator.standard_normal(value.shape)
        if name in variances:
            value = value * np.exp(0.1 * noise)
        else:
            value = value + 0.1 * (float(np.sqrt(np.mean(value**2))) or 1.0) * noise
        initializers[name] = value.astype(network.initializers[name].dtype)
    return initializers


def with_initializers(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a copy of a model with these initializers."""
    other = copy_of(model)
    replace_items(other.graph.initializer, (numpy_helper.from_array(value, name) for name, value in values.items()))
    return other


def _free_names(model: onnx.ModelProto) -> tuple[str, str]:
    """Return names of the label and the loss that no tensor of the model has."""
    graph = model.graph
    taken = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    taken.update(name for node in graph.node for name in (*node.input, *node.output))
    label, loss = (name if name not in taken else f"d5suite.{name}" for name in ("label", "loss"))
    return label, loss


def _with_label_and_loss(
    model: onnx.ModelProto, label: str, label_shape: list[int | str], loss: str, kind: int = TensorProto.INT64
) -> onnx.ModelProto:
    """Declare the label as the last input and the loss as the last output."""
    model.graph.input.append(make_tensor_value_info(label, kind, label_shape))
    model.graph.output.append(make_tensor_value_info(loss, TensorProto.FLOAT, []))
    return model


def _without_loss(network: Graph) -> onnx.ModelProto:
    """Return the model with only what the outputs need."""
    model = copy_of(network.model)
    graph = model.graph
    needed = {name for node in network.nodes_for(network.outputs) for name in (*node.inputs, *node.outputs)}
    for field_name, kept in (
        ("node", [node for node in graph.node if node.output[0] in needed]),
        ("initializer", [tensor for tensor in graph.initializer if tensor.name in needed]),
        ("input", [value for value in graph.input if value.name in network.inputs]),
        ("output", [value for value in graph.output if value.name in network.outputs]),
    ):
        replace_items(getattr(graph, field_name), kept)
    return model


def _logits(network: Graph) -> str:
    """Return the input of a final Softmax, which only reshapes may follow; else the output."""
    tensor = network.output
    for node in reversed(network.nodes):
        if tensor in node.outputs and node.op_type == "Softmax":
            return node.inputs[0]
        if tensor in node.outputs and node.op_type in _VIEWS:
            tensor = node.inputs[0]
    return network.output
