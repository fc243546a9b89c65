"""The execution of a network: the nodes that an output needs, and the weights to round.

Imports `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from d5suite.errors import NetworkError
from d5suite.network import Network, Node

_FLOAT32_INPUTS = {"BatchNormalization": (1, 2, 3, 4), "SoftmaxCrossEntropyLoss": (2,)}
"""Weights that stay float32 in a 16-bit precision, by operator and input number."""

SEVERAL_OUTPUTS = frozenset({"Attention", "GRU", "LSTM", "LayerNormalization", "MaxPool", "TopK"})
"""Operators whose further outputs networks need; others compute only their first output."""


@dataclass(frozen=True)
class ScheduledNode:
    """A node to run.

    Attributes
    ----------
    node : Node
        With the first output, and the needed outputs of `SEVERAL_OUTPUTS`; others are ``""``.
    dead : tuple of str
        Inputs other than initializers that no later node reads; they can be freed.
    """

    node: Node
    dead: tuple[str, ...]


def schedule(network: Network, wanted: str | Sequence[str], *, training: bool) -> list[ScheduledNode]:
    """Return the nodes that the wanted tensors need, in order.

    Parameters
    ----------
    network : Network
    wanted : str or sequence of str
        The outputs, or the loss.
    training : bool
        Whether the label is fed.

    Raises
    ------
    NetworkError
        If an output other than a node's first is needed, and its operator is not in
        `SEVERAL_OUTPUTS`.
    """
    wanted = [wanted] if isinstance(wanted, str) else wanted
    nodes = network.nodes_for(wanted)
    known = {"", *network.inputs, *network.initializers, *([network.label] if training else [])}
    kept = {"", *wanted, *network.initializers}
    read = {*wanted, *(name for node in nodes for name in node.inputs)}
    last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
    steps = []
    for index, node in enumerate(nodes):
        for name in node.inputs:
            if name not in known:
                maker = next((f" of {each.op_type}" for each in nodes if name in each.outputs), "")
                raise NetworkError(
                    f"tensor {name!r} is not a first output{maker}, and only those are computed", where=node.name
                )
        outputs = node.outputs if node.op_type in SEVERAL_OUTPUTS else node.outputs[:1]
        outputs = tuple(name if i == 0 or name in read else "" for i, name in enumerate(outputs))
        while not outputs[-1]:
            outputs = outputs[:-1]
        known.update(outputs)
        dead = [name for name in dict.fromkeys(node.inputs) if name not in kept and last_use[name] == index]
        steps.append(ScheduledNode(replace(node, outputs=outputs), tuple(dead)))
    for name in wanted:
        if name not in known:
            raise NetworkError(f"no node computes {name!r} as its first output", where=network.name)
    return steps


def by_name(node: Node, result: Any) -> dict[str, Any]:
    """Return the results of a node's callable by output name."""
    results = result if len(node.outputs) > 1 else (result,)
    return {name: value for name, value in zip(node.outputs, results, strict=True) if name}


def is_rounded(network: Network, node: Node, index: int) -> bool:
    """Return whether a 16-bit precision rounds this parameter; others stay float32."""
    return node.inputs[index] in network.parameters and index not in _FLOAT32_INPUTS.get(node.op_type, ())


def check_statistics(network: Network) -> None:
    """Raise `NetworkError` if running statistics are computed."""
    computed = [name for name in network.statistics if name not in network.initializers]
    if computed:
        raise NetworkError(f"running statistics must be initializers: {', '.join(computed)}", where=network.name)
