"""Small edits of ONNX graphs, in place. May import ONNX only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import onnx

Message = TypeVar("Message", onnx.ModelProto, onnx.NodeProto)


def replace_items(field: Any, items: Iterable[Any]) -> None:
    """Replace what a repeated field holds, such as a graph's nodes."""
    kept = list(items)
    del field[:]
    field.extend(kept)


def remove_items(field: Any, unwanted: Callable[[Any], bool]) -> None:
    """Remove items of a repeated field; the others stay where they are, uncopied."""
    for place in reversed(range(len(field))):
        if unwanted(field[place]):
            del field[place]


def rename_inputs(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Let nodes read other tensors: the new name by the old one."""
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


def copy_of(message: Message) -> Message:
    """Return a copy of a model or a node."""
    other = type(message)()
    other.CopyFrom(message)
    return other


def is_operator(node: onnx.NodeProto, *operators: str) -> bool:
    """Return whether a node is one of ONNX's own operators."""
    return not node.domain and node.op_type in operators
