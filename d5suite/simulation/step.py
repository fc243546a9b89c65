"""The computing of a training step, node by node: from a network and a machine, or as measured.

Imports `d5suite.network`, `d5suite.models` and `d5suite.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import Roof
from d5suite.models.node_groups import node_groups
from d5suite.models.roofline import level_of

if TYPE_CHECKING:
    from d5suite.network.layers import LayerFacts
    from d5suite.network.model import Network

ITEMSIZE = 4
"""Bytes of a gradient's element: float32."""

BACKWARD = 2.0
"""A node's backward pass, in forward passes, where it is not counted."""

UPDATED, HELD = 5, 3
"""Times the parameters: what an update moves (weights and momentum, both ways, and gradients), and
what it holds."""


@dataclass(frozen=True)
class ComputeTask:
    """A piece of computing.

    Attributes
    ----------
    label : str
        A node's name, with its direction; or several nodes'.
    kind : str
        The ONNX operator.
    seconds : float
    parameters : tuple of str
        Whose gradients are known once it has ended.
    flops, bytes : float
        Counted operations, and compulsory traffic; 0 if nothing is counted.
    """

    label: str
    kind: str
    seconds: float
    parameters: tuple[str, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class ComputeStep:
    """The computing of a step on one rank.

    Attributes
    ----------
    title : str
    forward, backward : tuple of ComputeTask
        In the order in which they run.
    update_s : float
        Seconds of the optimizer and of what belongs to no node.
    parameters : mapping of str to tuple of int
        Shapes, in the network's order.
    source : str
        Where the seconds come from.
    network : Network, optional
        Network for which orders of transfers are made.
    """

    title: str
    forward: tuple[ComputeTask, ...]
    backward: tuple[ComputeTask, ...]
    update_s: float
    parameters: Mapping[str, tuple[int, ...]]
    source: str
    network: Network | None = field(default=None, repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """Seconds of all computing."""
        return sum(each.seconds for each in (*self.forward, *self.backward)) + self.update_s

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return ITEMSIZE * sum(map(math.prod, self.parameters.values()))

    def scaled(self, factor: float, kind: str | None = None) -> ComputeStep:
        """Return the step with all computing, or one kind of operator, scaled by a factor."""

        def of(tasks: Sequence[ComputeTask]) -> tuple[ComputeTask, ...]:
            return tuple(
                replace(each, seconds=each.seconds * factor) if kind in (None, each.kind) else each for each in tasks
            )

        update = self.update_s * factor if kind is None else self.update_s
        return replace(self, forward=of(self.forward), backward=of(self.backward), update_s=update)

    def beside(self, alone: Roof, part: Roof) -> ComputeStep:
        """Return a measured step as it runs while other ranks of the same machine compute, too.

        Each task takes longer by as much as its time at the roof does. What keeps it below the
        roof, such as calls of Python, takes as long as before.

        Parameters
        ----------
        alone, part : Roof
            What the rank reaches alone, and its part of what all ranks reach together.
        """

        def at(roof: Roof, flops: float, moved: float, held: float) -> float:
            return max(flops / roof.flops_per_s, moved / level_of(held, roof).bytes_per_s)

        def longer(flops: float, moved: float, held: float) -> float:
            return max(0.0, at(part, flops, moved, held) - at(alone, flops, moved, held))

        def of(tasks: Sequence[ComputeTask]) -> tuple[ComputeTask, ...]:
            return tuple(
                replace(each, seconds=each.seconds + longer(each.flops, each.bytes, each.bytes)) for each in tasks
            )

        update_s = self.update_s + longer(0.0, UPDATED * self.nbytes, HELD * self.nbytes)
        return replace(self, forward=of(self.forward), backward=of(self.backward), update_s=update_s)

    @property
    def kinds(self) -> list[str]:
        """Kinds of operators, without repetition."""
        return list(dict.fromkeys(each.kind for each in (*self.forward, *self.backward)))


def _owners(network: Network) -> dict[str, tuple[str, ...]]:
    """Return the parameters of each node; a shared one belongs to the first node of the network.

    The backward pass reaches that node last: only then is the gradient complete.
    """
    found: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for node in network.nodes:
        own = tuple(name for name in dict.fromkeys(node.inputs) if name in network.parameters and name not in seen)
        seen.update(own)
        found[node.name] = own
    return found


def _shapes(network: Network) -> dict[str, tuple[int, ...]]:
    return {name: tuple(network.initializers[name].shape) for name in network.parameters}


def from_network(network: Network, roof: Roof, *, batch: int, share: float, source: str) -> ComputeStep:
    """Return the step of a network by the roofline: counted work at a share of the ceilings.

    A node takes max(FLOP / peak, bytes / bandwidth) / share. The update moves weights, gradients
    and momentum: five times the parameters.

    Parameters
    ----------
    network : Network
        With a loss.
    roof : Roof
    batch : int
        Images of a rank.
    share : float
        Share of the roof that a node reaches, above 0 and at most 1.
    source : str
        Where the ceilings come from.
    """
    from d5suite.network.layers import layer_facts

    network.require_loss()
    memory = roof.levels[-1].bytes_per_s

    def seconds(flops: float, moved: float) -> float:
        return max(flops / roof.flops_per_s, moved / memory) / share

    def task(name: str, direction: str, each: LayerFacts) -> ComputeTask:
        flops, moved = _counted(vars(each), direction)
        owned = owners[name] if direction == "backward" else ()
        return ComputeTask(f"{name} {direction}", each.op_type, seconds(flops, moved), owned, flops, moved)

    facts, owners = layer_facts(network, batch_size=batch), _owners(network)
    forward = tuple(task(name, "forward", each) for name, each in facts.items())
    backward = tuple(task(name, "backward", each) for name, each in reversed(facts.items()))
    shapes = _shapes(network)
    step = ComputeStep(f"{network.name}, batch {batch} a rank", forward, backward, 0.0, shapes, source, network)
    return replace(step, update_s=UPDATED * step.nbytes / memory / share)


def from_record(record: Mapping[str, Any], network: Network, roof: Roof, *, title: str, source: str) -> ComputeStep:
    """Return the step of a result: of its layers pass, or else its median, divided by counted work.

    Parameters
    ----------
    record : mapping
        Record of one rank.
    network : Network
    roof : Roof
    title : str
    source : str
        Where the ceilings come from.

    Raises
    ------
    ConfigurationError
        If the network is not the one of the result.
    """
    part = record.get("layers", {})
    if "times" in part:
        return from_layers(part, network, title=title)
    step = from_network(network, roof, batch=record["batch_size"], share=1.0, source=source)
    measured = step.scaled(record["median_s"] / step.seconds)
    return replace(measured, title=title, source="the measured median, divided by counted work")


def _counted(facts: Mapping[str, Any], direction: str) -> tuple[float, float]:
    """Return operations and bytes of a node; `BACKWARD` forward passes if backward has no count."""
    forward, backward = ([facts.get(f"{prefix}{what}") for what in ("flops", "bytes")] for prefix in ("", "backward_"))
    if direction == "forward" or backward == [None, None]:
        passes = 1.0 if direction == "forward" else BACKWARD
        return passes * (forward[0] or 0), passes * (forward[1] or 0)
    return float(backward[0] or 0), float(backward[1] or 0)


def from_layers(part: Mapping[str, Any], network: Network, *, title: str) -> ComputeStep:
    """Return the step that a layers pass has measured; its times are those of a plain step.

    The profiler's slowdown is divided out. Nodes that ran as one are one task; what belongs to no
    node is part of the update.

    Raises
    ------
    ConfigurationError
        If the network is not the one of the result.
    """
    graph, owners = part["graph"], _owners(network)
    if unknown := sorted(name for name in owners if owners[name] and name not in graph):
        raise ConfigurationError(f"the result's network has no node {unknown[0]!r}", where=title)
    slow = part["slowdown"]
    tasks: dict[str, list[ComputeTask]] = {"forward": [], "backward": []}
    order = {name: place for place, name in enumerate(graph)}
    given: set[str] = set()
    groups = node_groups(part["times"])
    for direction, found in tasks.items():
        own = [each for each in groups if each.direction == direction]
        own.sort(key=lambda each: min(order.get(name, 0) for name in each.nodes), reverse=direction == "backward")
        for each in own:
            parameters = [name for node in each.nodes for name in owners.get(node, ())] * (direction == "backward")
            given.update(parameters)
            label = f"{each.nodes[0]} {direction}" + (f" +{len(each.nodes) - 1}" if len(each.nodes) > 1 else "")
            facts = [graph.get(name) or {} for name in each.nodes]
            kind = max(facts, key=lambda known: known.get("flops") or 0).get("op_type", "?")
            flops, moved = (sum(of) for of in zip(*(_counted(known, direction) for known in facts), strict=True))
            found.append(ComputeTask(label, kind, each.seconds / slow, tuple(parameters), flops, moved))
    rest = tuple(name for name in network.parameters if name not in given)
    if rest:  # nodes without a time, such as views: their gradients come last
        tasks["backward"].append(ComputeTask("others backward", "?", 0.0, rest))
    left = max(0.0, part["plain_step_s"] - sum(each.seconds for own in tasks.values() for each in own))
    forward, backward = map(tuple, tasks.values())
    return ComputeStep(title, forward, backward, left, _shapes(network), "measured by the layers pass", network)
