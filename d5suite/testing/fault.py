"""Find the node at fault when a whole network disagrees with its reference.

The network is cut after one node and another, and each part is proved like the whole. Imports
NumPy, ONNX, `d5suite.network` and `d5suite.validate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto, helper

from d5suite.network import Network, Node
from d5suite.network.graph_edits import copy_of, replace_items
from d5suite.validate.check import Check
from d5suite.validate.network.oracle import NetworkOracle, inference
from d5suite.validate.norms import relative_l2

LARGEST = 64
"""Pixels per side up to which ONNX's reference evaluator is used. It takes minutes for larger
images, for which onnxruntime is used."""


def node_of_output(
    network: Network, images: np.ndarray, answer: Callable[[Network, np.ndarray], np.ndarray], tolerance: float
) -> str:
    """Name the first node whose output disagrees while its inputs agree.

    Parameters
    ----------
    network : Network
        A network whose output is wrong for these images.
    images : numpy.ndarray
    answer : callable
        Computes the output of a part of the network on the backend.
    tolerance : float
    """

    def error(node: Node) -> float:
        part = upto(network, node)
        small = max(images.shape[2:], default=1) <= LARGEST
        expected, _ = NetworkOracle(part, training=False).run(images) if small else inference(part, images, threads=1)
        found = relative_l2(answer(part, images), expected)
        return 0.0 if found <= tolerance else found

    return _first(network, network.output, "of its output", error)


def node_of_gradient(
    network: Network, images: np.ndarray, check: Callable[[Network, np.ndarray, np.ndarray], Sequence[Check]]
) -> str:
    """Name the first node through which the gradients are wrong.

    Parameters
    ----------
    network : Network
        A network whose gradients are wrong for these images.
    images : numpy.ndarray
    check : callable
        Proves the gradients of a part of the network that ends with a loss, for a batch.
    """

    def error(node: Node) -> float:
        part = upto(network, node, loss=True)
        if not part.parameters:
            return 0.0
        classes = math.prod(n or 1 for n in network.shapes[node.outputs[0]][1:])
        labels = np.random.default_rng(0).integers(0, classes, len(images))
        return max((each.error for each in check(part, images, labels) if not each.passed), default=0.0)

    return _first(network, network.require_loss()[1], "of the gradient through it", error)


def upto(network: Network, node: Node, *, loss: bool = False) -> Network:
    """Return the part of a network that computes a node's output, with that output.

    With ``loss``, the elements of the output for one image are the classes of a loss.

    Raises
    ------
    NetworkError
        If the part is not a valid network.
    """
    wanted = node.outputs[0]
    needed = {each.outputs[0] for each in network.nodes_for([wanted])}
    model = copy_of(network.model)
    graph = model.graph
    nodes = [each for each in graph.node if each.output[0] in needed]
    read = {name for each in nodes for name in each.input}
    shape = [f"size {axis}" if axis and n is None else n or "N" for axis, n in enumerate(network.shapes[wanted])]
    outputs = [helper.make_tensor_value_info(wanted, TensorProto.FLOAT, shape)]
    inputs = [value for value in graph.input if value.name == network.input]
    if loss:
        batch = [network.batch_size or "N"]
        nodes.append(helper.make_node("Flatten", [wanted], ["part.flat"], "part.flatten", axis=1))
        nodes.append(helper.make_node("SoftmaxCrossEntropyLoss", ["part.flat", "label"], ["loss"], "part.loss"))
        inputs.append(helper.make_tensor_value_info("label", TensorProto.INT64, batch))
        outputs.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    for field, kept in (("node", nodes), ("output", outputs), ("input", inputs), ("initializer", weights)):
        replace_items(getattr(graph, field), kept)
    label, target = ("label", "loss") if loss else (None, None)
    name = f"{network.name} up to {node.name}"
    return Network(model, name=name, input=network.input, output=wanted, label=label, loss=target)


def _first(network: Network, wanted: str, where: str, error: Callable[[Node], float]) -> str:
    """Find the wrong node among those that compute a wrong tensor, by bisection."""
    suspects = list(network.nodes_for([wanted]))
    found = math.nan
    while len(suspects) > 1:
        middle = suspects[(len(suspects) - 1) // 2]
        before = {each.name for each in network.nodes_for([middle.outputs[0]])}
        try:
            wrong = error(middle)
        except Exception:  # not a valid network, or one that the adapter cannot run: try the next part
            wrong, before = 0.0, {middle.name}
        if wrong:
            found, suspects = wrong, [each for each in suspects if each.name in before]
        else:
            suspects = [each for each in suspects if each.name not in before]
    node = suspects[0]
    figure = "" if math.isnan(found) else f", relative error {found:.3g} {where}"
    return f"the first node that disagrees is {node.op_type} {node.name!r}{figure}"
