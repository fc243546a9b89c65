"""Replace If nodes with a constant condition by the branch that is taken.

PyTorch's older exporter writes such nodes, to test ranks and sizes. May import ONNX, NumPy and
`d5suite.network.folding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import TensorProto, numpy_helper

from d5suite.network.graph_edits import (
    attributes_of,
    copy_of,
    is_operator,
    read_within,
    remove_items,
    replace_items,
    subgraphs,
)

Known = Callable[[onnx.ModelProto], Mapping[str, onnx.TensorProto]]
"""Folds a model without conditionals and returns its constants."""


def without_conditionals(model: onnx.ModelProto, known: Known) -> onnx.ModelProto:
    """Return the model without the conditionals whose condition is constant.

    Parameters
    ----------
    model : onnx.ModelProto
    known : callable
        Gets the part of the graph that computes the conditions, with the results of conditionals as
        inputs of any shape; returns the constants after folding.
    """
    if not any(is_operator(node, "If") for node in model.graph.node):
        return model
    whole = copy_of(model)
    graph = whole.graph
    while conditions := [node.input[0] for node in graph.node if is_operator(node, "If")]:
        constants = known(_up_to(whole, conditions))
        kept: list[onnx.NodeProto] = []
        for node in graph.node:
            value = constants.get(node.input[0]) if is_operator(node, "If") else None
            kept += [node] if value is None else _taken(node, bool(numpy_helper.to_array(value)), graph)
        replace_items(graph.node, kept)
        if not any(condition in constants for condition in conditions):
            break
    return whole


def _up_to(model: onnx.ModelProto, conditions: list[str]) -> onnx.ModelProto:
    """Return a copy of the model that computes only these conditions."""
    part = copy_of(model)
    graph = part.graph
    for node in graph.node:
        if is_operator(node, "If"):
            for name, kind in zip(node.output, _kinds(node), strict=True):
                graph.input.append(onnx.helper.make_tensor_value_info(name, kind, None))
    nodes, wanted = [], set(conditions)
    for node in reversed(graph.node):
        if wanted.intersection(node.output) and not is_operator(node, "If"):
            nodes.append(node)
            wanted.update(filter(None, read_within(node)))
    replace_items(graph.node, reversed(nodes))
    named = dict.fromkeys(conditions)
    replace_items(graph.output, (onnx.helper.make_tensor_value_info(name, TensorProto.BOOL, None) for name in named))
    for field in (graph.input, graph.initializer):
        remove_items(field, lambda each: each.name not in wanted)
    return part


def _branch(node: onnx.NodeProto, condition: bool) -> onnx.GraphProto:
    branch: onnx.GraphProto = attributes_of(node)["then_branch" if condition else "else_branch"]
    return branch


def _kinds(node: onnx.NodeProto) -> list[int]:
    """Return the element types of a conditional's outputs; 0 if no branch states one.

    If a branch returns the result of a nested conditional, that conditional may state the type.
    """
    found = [0] * len(node.output)
    for branch in (_branch(node, True), _branch(node, False)):
        writers = {name: inner for inner in branch.node for name in inner.output}
        nested: dict[tuple[str, ...], list[int]] = {}  # a search per output would take exponential time
        for place, value in enumerate(branch.output):
            kind, writer = value.type.tensor_type.elem_type, writers.get(value.name)
            if not kind and writer is not None and is_operator(writer, "If"):
                outputs = tuple(writer.output)
                if outputs not in nested:
                    nested[outputs] = _kinds(writer)
                kind = nested[outputs][outputs.index(value.name)]
            found[place] = found[place] or kind
    return found


def _taken(node: onnx.NodeProto, condition: bool, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes of the branch taken, under unique names; add initializers to the graph."""
    branch, prefix = _branch(node, condition), f"{node.output[0]}.d5suite."
    names = {name: prefix + name for inner in branch.node for name in inner.output if name}
    names |= {tensor.name: prefix + tensor.name for tensor in branch.initializer}
    for tensor in branch.initializer:
        graph.initializer.append(tensor)
        graph.initializer[-1].name = names[tensor.name]
    nodes = []
    for inner in branch.node:
        copied = copy_of(inner)
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
    for graph in subgraphs(node):
        own = {name for inner in graph.node for name in inner.output} | {t.name for t in graph.initializer}
        rest = {name: new for name, new in names.items() if name not in own}
        for inner in graph.node:
            _rename(inner, rest)
        for value in graph.output:
            value.name = rest.get(value.name, value.name)
