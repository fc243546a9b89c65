"""`NodeContext`: what an adapter's factories know about the network around a node.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Network, Node
from d5suite.network.graph import Shape
from d5suite.network.operation import PRECISIONS, STATIC_INPUTS, Operation, is_floating

C = TypeVar("C", bound="NodeContext")


class Packing(NamedTuple):
    """NumPy functions that convert a weight to a framework's own form and back."""

    pack: Callable[[np.ndarray], np.ndarray]
    unpack: Callable[[np.ndarray], np.ndarray]


@dataclass(kw_only=True)
class NodeContext:
    """The context of a factory; every adapter adds its own fields.

    Attributes
    ----------
    shapes : mapping of str to tuple
        ONNX shape of every tensor whose rank is known.
    constants : mapping of str to numpy.ndarray
        Values of constant inputs, such as shapes, axes and bounds.
    training : bool
        Whether BatchNormalization and Dropout are in training mode.
    single : bool
        Whether this is level 0: one node instead of a network.
    dtypes : mapping of str to numpy.dtype
        Type of every tensor. In a network, floating-point tensors have the type of activations, but
        those of a loss with targets at least float32.
    non_negative : frozenset of str
        Tensors known to be non-negative: used as indices they never count from the end.
    readers : mapping of str to set of str
        By tensor of a network that is read: the operators that read it; "" stands for an output.
    packing : dict of str to Packing
        Weights that a factory stores in a form other than a permutation of axes; level 0 only.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    training: bool = False
    single: bool = False
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    non_negative: frozenset[str] = frozenset()
    readers: Mapping[str, set[str]] = field(default_factory=dict)
    packing: dict[str, Packing] = field(default_factory=dict)

    @classmethod
    def of_operation(cls: type[C], operation: Operation, **more: Any) -> C:
        """Return the context of an operation's node; ``more`` sets the adapter's fields."""
        return cls(
            shapes=operation.shapes, constants=operation.constants, training=operation.training, single=True,
            dtypes=operation.dtypes, non_negative=operation.non_negative, **more,
        )  # fmt: skip

    @classmethod
    def of_network(cls: type[C], network: Network, *, training: bool, activations: str = "fp32", **more: Any) -> C:
        """Return the context of a network's nodes; ``more`` sets the adapter's fields.

        ``activations`` is the precision of activations.
        """
        constants = {name: network.initializers[name] for name in network.constants}
        narrow, wide = PRECISIONS[activations], PRECISIONS["fp64" if activations == "fp64" else "fp32"]
        loss = _loss_of_numbers(network)
        dtypes = {
            name: (wide if name in loss else narrow) if is_floating(dtype) else dtype
            for name, dtype in network.dtypes.items()
        }
        return cls(
            shapes=network.shapes, constants=constants, training=training, dtypes=dtypes,
            non_negative=_non_negative(network),
            readers=_readers(network), **more,
        )  # fmt: skip

    def shape(self, name: str) -> Shape:
        """Return the ONNX shape of a tensor.

        Raises
        ------
        NetworkError
            If its rank is unknown.
        """
        if name not in self.shapes:
            raise NetworkError("the rank of this tensor is not known", where=name)
        return self.shapes[name]

    def rank(self, name: str) -> int:
        """Return the number of axes of a tensor."""
        return len(self.shape(name))

    def constant(self, node: Node, index: int) -> np.ndarray | None:
        """Return the value of a constant input; None if it is omitted.

        Raises
        ------
        NetworkError
            If the network computes it.
        """
        if not has_input(node, index):
            return None
        if node.inputs[index] not in self.constants:
            raise NetworkError(
                f"input {index} of {node.op_type} must be a constant", where=node.name, hint="Export with fixed shapes."
            )
        return self.constants[node.inputs[index]]

    def is_integer(self, name: str) -> bool:
        """Return whether a tensor is not floating point."""
        return name in self.dtypes and not is_floating(self.dtypes[name])

    def wanted(self, node: Node) -> tuple[bool, ...]:
        """Return whether each output is wanted, that is, has a name."""
        return tuple(map(bool, node.outputs))


def _loss_of_numbers(network: Network) -> frozenset[str]:
    """Return the tensors that only a loss with floating-point targets computes; none otherwise."""
    if network.loss is None or not network.has_targets:
        return frozenset()
    found = {name for node in network.nodes_for([network.loss]) for name in node.outputs}
    return frozenset(found - {name for node in network.nodes_for(network.outputs) for name in node.outputs})


_STAYS_NON_NEGATIVE = frozenset({
    "Add", "Cast", "Concat", "CumSum", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Mul",
    "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose output is non-negative if all inputs are."""


def _non_negative(network: Network) -> frozenset[str]:
    """Return the integer tensors of a network that are never negative.

    The network's integer inputs count as such: token numbers, positions, labels.
    """
    computed = {name for node in network.nodes for name in node.outputs}
    whole = {name for name, dtype in network.dtypes.items() if not is_floating(dtype)} - computed
    found = {name for name in whole if (network.initializers.get(name, np.zeros(1)) >= 0).all()}
    for node in network.nodes:
        static = STATIC_INPUTS.get(node.op_type, ())
        read = {name for index, name in enumerate(node.inputs) if name and index not in static}
        if node.op_type in ("ArgMax", "ArgMin", "Shape") or (node.op_type in _STAYS_NON_NEGATIVE and read <= found):
            found.add(node.outputs[0])
        if node.op_type in ("MaxPool", "TopK"):
            found.update(node.outputs[1:])
    return frozenset(found)


def _readers(network: Network) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: {""} for name in network.outputs}
    for node in network.nodes:
        for name in filter(None, node.inputs):
            found.setdefault(name, set()).add(node.op_type)
    return found


def has_input(node: Node, index: int) -> bool:
    """Return whether an optional input is given."""
    return index < len(node.inputs) and bool(node.inputs[index])


def select(results: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """Return the first result if only that is wanted, else a tuple with None for the unwanted."""
    if not any(wanted[1:]):
        return results[0]
    return tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=False))
