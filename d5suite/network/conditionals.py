"""Replace each conditional whose condition is known before anything runs by the branch taken.

PyTorch's older exporter asks for ranks and sizes in the graph. May import ONNX, NumPy and
`d5suite.network.folding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
from onnx import TensorProto, numpy_helper

Known = Callable[[onnx.ModelProto], Mapping[str, onnx.TensorProto]]
"""Folds a model without conditionals; returns its constants."""


def without_conditionals(model: onnx.ModelProto, known: Known) -> onnx.ModelProto:
    """Return the model without the conditionals that can be decided; itself if there are none.

    Parameters
    ----------
    model : onnx.ModelProto
    known : callable
        Gets the graph up to the conditions, in which the results of conditionals are inputs of any
        shape, and returns the constants that are left.
    """
    if not any(map(_is_conditional, model.graph.node)):
        return model
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    graph = whole.graph
    while conditions := [node.input[0] for node in graph.node if _is_conditional(node)]:
        constants = known(_up_to(whole, conditions))
        nodes = list(graph.node)
        graph.ClearField("node")
        for node in nodes:
            value = constants.get(node.input[0]) if _is_conditional(node) else None
            graph.node.extend([node] if value is None else _taken(node, bool(numpy_helper.to_array(value)), graph))
        if not any(condition in constants for condition in conditions):
            break
    return whole


def _is_conditional(node: onnx.NodeProto) -> bool:
    return node.op_type == "If" and not node.domain


def _up_to(model: onnx.ModelProto, conditions: list[str]) -> onnx.ModelProto:
    """Return a copy that ends at these conditions."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    graph = part.graph
    types = {value.name: value.type.tensor_type.elem_type for value in _inferred(model)}
    for name in (output for node in graph.node if _is_conditional(node) for output in node.output if output):
        graph.input.append(onnx.helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None))
    nodes, wanted = [], set(conditions)
    for node in reversed(graph.node):
        if wanted.intersection(node.output) and not _is_conditional(node):
            nodes.append(node)
            wanted.update(_read(node))
    graph.ClearField("node")
    graph.node.extend(reversed(nodes))
    graph.ClearField("output")
    graph.output.extend(
        onnx.helper.make_tensor_value_info(name, TensorProto.BOOL, None) for name in dict.fromkeys(conditions)
    )
    for field in (graph.input, graph.initializer):
        for index in reversed(range(len(field))):
            if field[index].name not in wanted:
                del field[index]
    return part


def _inferred(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    yield from model.graph.value_info
    yield from model.graph.output
    for node in model.graph.node:
        if _is_conditional(node):
            for output, value in zip(node.output, _branch(node, True).output, strict=True):
                yield onnx.helper.make_tensor_value_info(output, value.type.tensor_type.elem_type, None)


def _branch(node: onnx.NodeProto, condition: bool) -> onnx.GraphProto:
    name = "then_branch" if condition else "else_branch"
    return next(attribute.g for attribute in node.attribute if attribute.name == name)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Return what a node reads, inside of its graphs, too."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _read(inner)


def _taken(node: onnx.NodeProto, condition: bool, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return a branch's nodes under names of their own; add its initializers to the graph."""
    branch, prefix = _branch(node, condition), f"{node.output[0]}.d5suite."
    names = {name: prefix + name for inner in branch.node for name in inner.output if name}
    names |= {tensor.name: prefix + tensor.name for tensor in branch.initializer}
    for tensor in branch.initializer:
        graph.initializer.append(tensor)
        graph.initializer[-1].name = names[tensor.name]
    nodes = []
    for inner in branch.node:
        copied = onnx.NodeProto()
        copied.CopyFrom(inner)
        copied.name = prefix + inner.name if inner.name else ""
        _rename(copied, names)
        nodes.append(copied)
    for output, value in zip(node.output, branch.output, strict=True):
        if output:
            source = names.get(value.name, value.name)
            nodes.append(onnx.helper.make_node("Identity", [source], [output], f"{output}.d5suite.taken"))
    return nodes


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {name for inner in graph.node for name in inner.output} | {t.name for t in graph.initializer}
            rest = {name: new for name, new in names.items() if name not in own}
            for inner in graph.node:
                _rename(inner, rest)
            for value in graph.output:
                value.name = rest.get(value.name, value.name)
