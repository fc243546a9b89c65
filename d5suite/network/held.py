"""Count the bytes that a network's step holds, from the lifetimes of its tensors.

No framework runs. A tensor lives from the node that writes it to the last one that reads it.
`IN_PLACE` operators write over an input that nothing else reads; reshapes are views. A backward
pass reads what the gradients' formulas need (`d5suite.network.work.BACKWARD_READS`).
Recomputation keeps the tensors that cross from one segment of nodes to another, and recomputes
those inside a segment (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174).

May import `d5suite.network` and `d5suite.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from d5suite.errors import NetworkError
from d5suite.network.analysis import IN_PLACE, differentiated, shapes_of_batch
from d5suite.network.graph import Node
from d5suite.network.model import Network
from d5suite.network.operation import is_floating
from d5suite.network.work import backward_reads

FROM_INPUT = frozenset({"MaxPool"})
"""Operators whose input frameworks keep for the backward pass, although the positions of the maxima
would suffice: the forward pass saves it, or the backward kernel reads it
(tests/network/test_held.py)."""

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose output is a view of their input."""

Use = tuple[frozenset[str], frozenset[str]]
"""The tensors that a node reads, and those that it writes."""


@dataclass(frozen=True)
class Held:
    """Bytes held for one batch: inputs included, parameters and their gradients excluded.

    Attributes
    ----------
    parameters : int
        Trainable values.
    nodes : int
        Number of nodes that compute the loss.
    forward : int
        Most bytes alive at once in inference.
    kept : int
        Activations that the backward pass reads.
    step : int
        Most bytes of activations and their gradients alive at once in a training step.
    recomputed : int
        As ``step``, if all segments but the last are recomputed.
    segments : int
        Number of segments behind ``recomputed``: the one that needs the fewest bytes.
    """

    parameters: int
    nodes: int
    forward: int
    kept: int
    step: int
    recomputed: int
    segments: int


def alive_bytes(network: Network, *, batch_size: int = 1, bytes_per_value: int = 4, training: bool = False) -> int:
    """Return the most bytes alive at once in inference or a training step: see `Held`.

    Raises
    ------
    NetworkError
        If the graph does not determine a tensor's size.
    """
    lives = _Lives(network, batch_size, bytes_per_value)
    if training:
        return lives.most(lives.step(network.nodes_for([network.require_loss()[1]]), 1))
    return lives.most([lives.forward(node) for node in network.nodes_for(network.outputs)], network.outputs)


def held(network: Network, *, batch_size: int = 1, bytes_per_value: int = 4) -> Held:
    """Count what a network's steps hold.

    Parameters
    ----------
    network : Network
        With a loss.
    batch_size : int
        Ignored if the network fixes its batch size.
    bytes_per_value : int
        Bytes of one floating-point activation value.

    Raises
    ------
    NetworkError
        If the graph does not determine a tensor's size, or the network has no loss.
    """
    lives = _Lives(network, batch_size, bytes_per_value)
    inferred, trained = network.nodes_for(network.outputs), network.nodes_for([network.require_loss()[1]])
    kept = {name for node in trained for name in lives.kept(node)}
    found = {count: lives.most(lives.step(trained, count)) for count in _divisions(len(trained))}
    best = min(found, key=lambda count: (found[count], count))
    return Held(
        parameters=sum(network.initializers[name].size for name in network.parameters),
        nodes=len(trained),
        forward=lives.most([lives.forward(node) for node in inferred], network.outputs),
        kept=lives.size(kept),
        step=found[1],
        recomputed=found[best],
        segments=best,
    )


class Passed(NamedTuple):
    """What a node of a training step holds, and what crosses from it to the next nodes.

    Attributes
    ----------
    parameters : int
        Trainable values that no earlier node reads.
    kept : int
        Bytes that the node's backward pass reads, and no earlier node's does.
    crossing : int
        Bytes that this node or an earlier one has written, and a later one reads.
    """

    parameters: int
    kept: int
    crossing: int


def passed(network: Network, *, batch_size: int = 1, bytes_per_value: int = 4) -> dict[str, Passed]:
    """Return what each node that computes the loss holds and passes on, by name, in order.

    The parameters are those of `held`.

    Raises
    ------
    NetworkError
        If the graph does not determine a tensor's size, or the network has no loss.
    """
    lives = _Lives(network, batch_size, bytes_per_value)
    nodes = network.nodes_for([network.require_loss()[1]])
    uses = [lives.forward(node) for node in nodes]
    last = {name: number for number, (reads, _) in enumerate(uses) for name in reads}
    known: set[str] = set()
    kept: set[str] = set()
    alive: set[str] = set()
    found = {}
    for number, (node, (_, writes)) in enumerate(zip(nodes, uses, strict=True)):
        parameters = (set(node.inputs) & set(network.parameters)) - known
        new = lives.kept(node) - kept
        known, kept = known | parameters, kept | new
        alive = {name for name in alive | writes if last.get(name, -1) > number}
        size = sum(network.initializers[name].size for name in parameters)
        found[node.name] = Passed(size, lives.size(new), lives.size(alive))
    return found


def _divisions(nodes: int) -> list[int]:
    """Return numbers of segments to try: powers of two up to twice the root of the node count."""
    return [2**power for power in range(max(1, 2 * math.isqrt(nodes)).bit_length())]


class _Lives:
    """The storage of each tensor, and the storages that a node reads and writes."""

    def __init__(self, network: Network, batch_size: int, bytes_per_value: int) -> None:
        self.network = network
        self._shapes = shapes_of_batch(network, batch_size)
        self._width = bytes_per_value
        self.inputs = frozenset(name for name in (*network.inputs, network.label) if name)
        self._moved = differentiated(network)
        self._place: dict[str, str] = {}
        self._read = set(network.outputs)
        readers: dict[str, int] = {}
        for node in network.nodes:
            for name in set(node.inputs):
                readers[name] = readers.get(name, 0) + 1
        self._read.update(readers)
        for node in network.nodes:
            first = node.inputs[0] if node.inputs else ""
            alone = readers.get(first) == 1 and first not in self.inputs and first not in network.outputs
            if first and (node.op_type in VIEWS or (node.op_type in IN_PLACE and alone)):
                same = self._shape(first) and self._bytes(first) == self._bytes(node.outputs[0])
                if same and first not in network.initializers:
                    self._place[node.outputs[0]] = self.place(first)

    def place(self, name: str) -> str:
        """Return the tensor whose storage this one uses; itself if it has its own."""
        return self._place.get(name, name)

    def _floats(self, name: str) -> bool:
        return name not in self.network.dtypes or is_floating(self.network.dtypes[name])

    def _shape(self, name: str) -> tuple[int | None, ...] | None:
        return self._shapes.get(name)

    def _bytes(self, name: str) -> int:
        shape = self._shape(name)
        if shape is None or None in shape:
            raise NetworkError(f"the size of tensor {name!r} is not known", where=self.network.name)
        width = self._width if self._floats(name) else self.network.dtypes[name].itemsize
        return math.prod(size or 0 for size in shape) * width

    def _storages(self, names: Sequence[str]) -> set[str]:
        return {self.place(name) for name in names if name and name not in self.network.initializers}

    def size(self, names: set[str]) -> int:
        """Return the bytes of these storages."""
        return sum(self._bytes(name.lstrip(_MARKS)) for name in names)

    def forward(self, node: Node) -> Use:
        """Return what a forward pass reads and writes."""
        return frozenset(self._storages(node.inputs)), frozenset(self._storages(self._written(node)))

    def _written(self, node: Node) -> list[str]:
        return [name for place, name in enumerate(node.outputs) if name and (place == 0 or name in self._read)]

    def kept(self, node: Node) -> set[str]:
        """Return the activations that a node's gradients are computed from."""
        moved = [index for index, name in enumerate(node.inputs) if name in self._moved]
        if moved and node.op_type in FROM_INPUT:
            return self._storages(node.inputs[:1])
        return self._storages(backward_reads(node, moved))

    def _backward(self, node: Node, again: frozenset[str]) -> Use:
        """Return what a backward pass reads and writes; ``again`` holds the recomputed tensors."""
        grown = self._storages([name for name in node.inputs if name in self._moved])
        given = self._storages([name for name in self._written(node) if name in self._moved])
        read = {_AGAIN + name if name in again else name for name in self.kept(node)}
        return frozenset(read | {_SLOPE + name for name in given}), frozenset(_SLOPE + name for name in grown)

    def step(self, nodes: Sequence[Node], segments: int) -> list[Use]:
        """Return the uses of a training step, in order; segments but the last are recomputed."""
        length = -(-len(nodes) // segments)
        parts = [nodes[start : start + length] for start in range(0, len(nodes), length)]
        uses = [self.forward(node) for node in nodes]
        for number, part in reversed(list(enumerate(parts))):
            again: frozenset[str] = frozenset()
            if number < len(parts) - 1:
                again = frozenset().union(*(self.forward(node)[1] for node in part))
                for reads, writes in map(self.forward, part):
                    uses.append((_renamed(reads, again), _renamed(writes, again)))
            uses += [self._backward(node, again) for node in reversed(part)]
        return uses

    def most(self, uses: Sequence[Use], outputs: Sequence[str] = ()) -> int:
        """Return the most bytes alive at once; inputs and outputs live to the end."""
        last = {name: number for number, (reads, writes) in enumerate(uses) for name in reads | writes}
        alive = set(self.inputs & last.keys())
        forever = alive | self._storages(outputs)
        now = most = self.size(alive)
        for number, (reads, writes) in enumerate(uses):
            fresh = writes - alive
            alive |= fresh
            now += self.size(set(fresh))
            most = max(most, now)
            ended = {name for name in reads | writes if last[name] == number and name not in forever} & alive
            alive -= ended
            now -= self.size(ended)
        return most


_AGAIN, _SLOPE = "\x01", "\x02"
_MARKS = _AGAIN + _SLOPE
"""Prefixes of a recomputed tensor and of a gradient; no tensor name in a file contains them."""


def _renamed(names: frozenset[str], again: frozenset[str]) -> frozenset[str]:
    return frozenset(_AGAIN + name if name in again else name for name in names)
