"""Nodes of a step that ran as one: the disjoint sets of nodes that have a time of their own.

A backend that fuses nodes may still have a time of one of them alone, such as of a copy of its
weights. Both times belong to one set then, whose work counts once. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class NodeGroup(NamedTuple):
    """Nodes that ran as one in one direction.

    Attributes
    ----------
    nodes : tuple of str
        In the order of the times that name them.
    direction : str
    seconds, calls : float
        Per step.
    places : tuple of int
        Places of the times that are added up here.
    """

    nodes: tuple[str, ...]
    direction: str
    seconds: float
    calls: float
    places: tuple[int, ...]


def node_groups(times: Sequence[Mapping[str, Any]]) -> list[NodeGroup]:
    """Return the groups of a record's ``layers.times``, in the order of their first times."""
    found: dict[tuple[str, tuple[str, ...]], NodeGroup] = {}
    groups = {
        direction: {node: group for group in joined(_nodes(times, direction)) for node in group}
        for direction in dict.fromkeys(each["direction"] for each in times)
    }
    for place, each in enumerate(times):
        nodes, direction = groups[each["direction"]][each["nodes"][0]], each["direction"]
        known = found.get((direction, nodes), NodeGroup(nodes, direction, 0.0, 0.0, ()))
        found[direction, nodes] = known._replace(
            seconds=known.seconds + each["seconds"], calls=known.calls + each["calls"], places=(*known.places, place)
        )
    return list(found.values())


def _nodes(times: Sequence[Mapping[str, Any]], direction: str) -> list[Sequence[str]]:
    return [each["nodes"] for each in times if each["direction"] == direction]


def joined(sets: Iterable[Sequence[str]]) -> set[tuple[str, ...]]:
    """Return the smallest disjoint sets that hold every given set as a whole."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for first, *others in sets:
        for other in others:
            parent[root(other)] = root(first)
        root(first)
    groups: dict[str, list[str]] = {}
    for name in list(parent):
        groups.setdefault(root(name), []).append(name)
    return {tuple(group) for group in groups.values()}
