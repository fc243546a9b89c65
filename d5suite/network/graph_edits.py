"""Small edits of ONNX graphs, in place. May import ONNX and NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import numpy_helper

IN_FLOAT32 = ".in_float32"
"""Marks casts to float32 that stay, because the precision of activations may be narrower: a loss is
computed in float32."""

Message = TypeVar("Message", onnx.ModelProto, onnx.NodeProto)


def replace_items(field: Any, items: Iterable[Any]) -> None:
    """Replace what a repeated field holds, such as a graph's nodes."""
    kept = list(items)
    del field[:]
    field.extend(kept)


def remove_items(field: Any, unwanted: Callable[[Any], bool]) -> None:
    """Remove items of a repeated field, without copying the others."""
    for place in reversed(range(len(field))):
        if unwanted(field[place]):
            del field[place]


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and the nodes of their subgraphs."""
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            yield node
            waiting += [graph.node for graph in subgraphs(node)]


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs that a node's attributes hold."""
    return [graph for each in node.attribute for graph in (each.g, *each.graphs) if graph.node or graph.output]


def read_within(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node and its subgraphs read."""
    for inner in nodes_within([node]):
        yield from inner.input
        yield from (output.name for graph in subgraphs(inner) for output in graph.output)


def rename_inputs(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename tensors in the inputs of nodes; ``names`` maps old names to new ones."""
    for node in nodes:
        for place, name in enumerate(node.input):
            if name in names:
                node.input[place] = names[name]


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes that a node states."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def set_attributes(node: onnx.NodeProto, **attributes: Any) -> None:
    """Set some attributes of a node."""
    remove_items(node.attribute, lambda attribute: attribute.name in attributes)
    node.attribute.extend(onnx.helper.make_attribute(*pair) for pair in attributes.items())


def tensor_of(array: np.ndarray, name: str) -> onnx.TensorProto:
    """Return an array as an initializer."""
    return numpy_helper.from_array(np.asarray(array, order="C"), name)


class NodeWriter:
    """Adds nodes and constants to a graph, under names that begin with a prefix."""

    def __init__(self, graph: onnx.GraphProto, prefix: str) -> None:
        self._graph, self._prefix, self._count = graph, prefix, 0

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{self._prefix}.d5suite.{kind}{self._count}"

    def constant(self, value: Any) -> str:
        """Add an initializer; return its name."""
        name = self._name("constant")
        self._graph.initializer.append(tensor_of(np.asarray(value), name))
        return name

    def node(self, operator: str, *inputs: str, output: str = "", name: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        output = output or self._name(operator)
        name = name or f"{output}.d5suite"
        self._graph.node.append(onnx.helper.make_node(operator, inputs, [output], name, **attributes))
        return output

    def cut(self, x: str, axis: int, start: int, stop: int, *, squeeze: bool = False, output: str = "") -> str:
        """Cut an axis from ``start`` to ``stop``; ``squeeze`` drops an axis of length one."""
        bounds = [self.constant(np.array([value])) for value in (start, stop, axis)]
        if not squeeze:
            return self.node("Slice", x, *bounds, output=output)
        return self.node("Squeeze", self.node("Slice", x, *bounds), bounds[2], output=output)

    def row(self, x: str, index: int, axis: int) -> str:
        """Take one row of an axis, and drop the axis."""
        return self.cut(x, axis, index, index + 1, squeeze=True)

    def stack(self, tensors: list[str], axis: int, output: str = "") -> str:
        """Join tensors along a new axis."""
        place = self.constant(np.array([axis]))
        return self.node("Concat", *(self.node("Unsqueeze", x, place) for x in tensors), output=output, axis=axis)


def rewrite_nodes(graph: onnx.GraphProto, rewrite: Callable[[onnx.NodeProto, NodeWriter], bool]) -> bool:
    """Replace nodes of a graph.

    Parameters
    ----------
    graph : onnx.GraphProto
    rewrite : callable
        Gets a node and a `NodeWriter`. It writes what replaces the node and returns True, or
        returns False to keep the node.

    Returns
    -------
    bool
        Whether any node was replaced.
    """
    nodes, changed = list(graph.node), False
    del graph.node[:]
    for node in nodes:
        if rewrite(node, NodeWriter(graph, next(filter(None, node.output), ""))):
            changed = True
        else:
            graph.node.append(node)
    return changed


def state_defaults(node: onnx.NodeProto, defaults: Iterable[onnx.AttributeProto]) -> None:
    """Add to a node the default values of attributes that it omits."""
    stated = {attribute.name for attribute in node.attribute}
    node.attribute.extend(default for default in defaults if default.name not in ("", *stated))


def copy_of(message: Message) -> Message:
    """Return a copy of a model or a node."""
    other = type(message)()
    other.CopyFrom(message)
    return other


def is_operator(node: onnx.NodeProto, *operators: str) -> bool:
    """Return whether a node is one of ONNX's own operators."""
    return not node.domain and node.op_type in operators
