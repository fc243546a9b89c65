"""Facts about each node of a network: its stage, and its counted work and traffic.

May import `d5suite.network` and NumPy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.analysis import differentiated, shapes_of_batch
from d5suite.network.graph import Node
from d5suite.network.model import Network
from d5suite.network.operation import Operation, is_floating
from d5suite.network.work import work


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a node before it runs.

    Attributes
    ----------
    op_type : str
    stage : str
        The part of the network that the node's name states; see `stages`.
    shape : tuple of int
        Shape of the node's first output.
    flops, backward_flops, bytes, backward_bytes : int or None
        As `d5suite.network.work.Work` counts them; None if not counted.
    """

    op_type: str
    stage: str
    shape: tuple[int, ...]
    flops: int | None
    backward_flops: int | None
    bytes: int | None
    backward_bytes: int | None


@dataclass(frozen=True)
class _Placed:
    """A node of a network, with the attributes of an `Operation` that `work` reads."""

    node: Node
    shapes: Mapping[str, tuple[int, ...]]
    itemsize: Mapping[str, int]
    constants: Mapping[str, np.ndarray]
    differentiable: tuple[int, ...]
    differentiated: tuple[int, ...] = (0,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.node.outputs if name in self.shapes)[:1]

    def nbytes(self, names: Sequence[str]) -> int:
        return sum(int(np.prod(self.shapes[name], dtype=np.int64)) * self.itemsize[name] for name in names)


def layer_facts(network: Network, *, batch_size: int = 1, bytes_per_value: int = 4) -> dict[str, LayerFacts]:
    """Return the facts of each node by name.

    Parameters
    ----------
    network : Network
    batch_size : int
        Images in the batch; ignored if the network fixes its batch size.
    bytes_per_value : int
        Size of a floating-point value: 4 for float32.
    """
    known = {name: shape for name, shape in shapes_of_batch(network, batch_size).items() if None not in shape}
    shapes = cast(Mapping[str, tuple[int, ...]], known)
    itemsize = {
        name: bytes_per_value if is_floating(network.dtypes[name]) else network.dtypes[name].itemsize
        for name in shapes
        if name in network.dtypes
    }
    stage = stages([node.name for node in network.nodes])
    moved = differentiated(network)
    found = {}
    for node in network.nodes:
        differentiable = tuple(index for index, name in enumerate(node.inputs) if name in moved)
        first = next(name for name in node.outputs if name)
        counted: tuple[int | None, ...] = (None,) * 4
        if all(name in itemsize for name in (*node.inputs, first) if name):
            placed = _Placed(node, shapes, itemsize, network.initializers, differentiable)
            try:
                cost = work(cast(Operation, placed))
                backward = (cost.backward_flops, cost.backward_bytes) if differentiable else (0, 0)
                counted = cost.flops, backward[0], cost.bytes, backward[1]
            except (NetworkError, KeyError, IndexError, TypeError):
                pass  # no work is defined for this operator
        found[node.name] = LayerFacts(node.op_type, stage[node.name], shapes.get(first, ()), *counted)
    return found


def stages(names: Sequence[str]) -> dict[str, str]:
    """Return the stage of each node: the first part of its name.

    Parts are separated by dots or slashes. A stage with more than half of all nodes is divided by
    the next part, so that ``encoder.layers.encoder_layer_3.mlp`` is in
    ``encoder.layers.encoder_layer_3``, not in ``encoder``.
    """
    parts = {name: [part for part in re.split(r"[./]", name) if part] or [name] for name in names}
    depth = dict.fromkeys(names, 1)
    while True:
        found = {name: ".".join(parts[name][: depth[name]]) for name in names}
        count = Counter(found.values())
        large = {stage for stage, number in count.items() if 2 * number > len(names)}
        deeper = [name for name in names if found[name] in large and depth[name] < len(parts[name])]
        if not deeper:
            return found
        for name in deeper:
            depth[name] += 1
