"""The cost of a network, per node and in total: parameters, multiply-accumulates, activation bytes.

May import `d5suite.network` and `d5suite.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import onnx

from d5suite.errors import NetworkError
from d5suite.network.folding import Shape, shapes_of
from d5suite.network.graph import Node
from d5suite.network.model import Network
from d5suite.network.normalise import forget_shapes, infer, without_weights
from d5suite.network.operation import is_floating
from d5suite.network.work import node_macs

IN_PLACE = frozenset(
    {
        "Clip", "Dropout", "Flatten", "Identity", "Relu", "Reshape", "Softmax", "SoftmaxCrossEntropyLoss", "Squeeze",
        "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose output needs no memory of its own.

The rule is convnet-burden's (github.com/albanie/convnet-burden, core/burden.m): every layer's
output counts, including concatenations, but ReLUs work in place; Dropout is the identity in
inference, and reshapes are views.
"""


@dataclass(frozen=True)
class NodeCost:
    """One node's cost.

    Attributes
    ----------
    name, op_type : str
    output_shape : tuple of int
        Shape of the node's first output.
    parameters : int
        Trainable values; a shared weight is counted at its first use.
    macs : int
        Multiply-accumulates of convolutions and matrix products; 1 MAC is 2 floating-point
        operations.
    activation_bytes : int
        Size of the node's first output; 0 if the operator works in place.

    Notes
    -----
    A node that only the loss needs, such as in an auxiliary classifier, has parameters but neither
    MACs nor bytes.
    """

    name: str
    op_type: str
    output_shape: tuple[int, ...]
    parameters: int
    macs: int
    activation_bytes: int


@dataclass(frozen=True)
class NetworkCost:
    """The costs of all nodes and their sums."""

    nodes: tuple[NodeCost, ...]

    @property
    def parameters(self) -> int:
        """Trainable values, BatchNormalization's running statistics excluded."""
        return sum(node.parameters for node in self.nodes)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one inference pass."""
        return sum(node.macs for node in self.nodes)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all activations of one inference pass, without reuse."""
        return sum(node.activation_bytes for node in self.nodes)


def analyse(network: Network, *, batch_size: int = 1, bytes_per_value: int = 4) -> NetworkCost:
    """Count a network's cost for one batch.

    Parameters
    ----------
    network : Network
    batch_size : int
        Images in the batch; ignored if the network fixes its batch size.
    bytes_per_value : int
        4 for float32, 2 for bfloat16, 8 for float64.

    Raises
    ------
    NetworkError
        If the graph does not determine a tensor's size.
    """
    inferred = {node.name for node in network.nodes_for(network.outputs)}
    stated = shapes_of_batch(network, batch_size)
    seen: set[str] = set()
    costs = []
    for node in network.nodes:
        shapes = partial(_shape, stated, network, node)
        shape = shapes(next(name for name in node.outputs if name))
        fresh = [i for i in node.inputs if i in network.parameters and i not in seen]
        seen.update(fresh)
        stored = node.name in inferred and node.op_type not in IN_PLACE
        costs.append(
            NodeCost(
                node.name,
                node.op_type,
                shape,
                sum(network.initializers[i].size for i in fresh),
                node_macs(node, shapes) if node.name in inferred else 0,
                math.prod(shape) * bytes_per_value if stored else 0,
            )
        )
    return NetworkCost(tuple(costs))


def _shape(stated: Mapping[str, Shape], network: Network, node: Node, tensor: str) -> tuple[int, ...]:
    shape = stated.get(tensor)
    if shape is None or None in shape:
        raise NetworkError(f"the size of tensor {tensor!r} is not known", where=f"{network.name}, node {node.name}")
    return tuple(n or 0 for n in shape)


def differentiated(network: Network) -> set[str]:
    """Return the parameters and what depends on them: the tensors through which a gradient flows.

    A tensor of unknown type counts as floating-point.
    """
    moved = set(network.parameters)
    for node in network.nodes:
        if not moved.isdisjoint(node.inputs):
            kinds = {name: network.dtypes.get(name) for name in node.outputs if name}
            moved.update(name for name, kind in kinds.items() if kind is None or is_floating(kind))
    return moved


def shapes_of_batch(network: Network, batch_size: int) -> Mapping[str, Shape]:
    """Infer all shapes for one batch size; the batch may be any axis, or a factor of an axis."""
    if not network.batched or network.batch_size is not None:
        return network.shapes
    light = without_weights(network.model)
    for value in light.graph.input:
        for size in value.type.tensor_type.shape.dim:
            if not size.HasField("dim_value"):
                size.dim_value = batch_size
    forget_shapes(light)
    try:
        inferred = infer(light)
    except onnx.shape_inference.InferenceError:
        raise NetworkError(
            f"its shapes do not fit a batch of {batch_size}", where=network.name, hint="Give another: --batch-size N."
        ) from None
    found = {name: shape for name, shape in shapes_of(inferred).items() if None not in shape}
    stated = {
        name: (batch_size, *shape[1:]) if shape[:1] == (None,) else shape for name, shape in network.shapes.items()
    }
    return stated | found
