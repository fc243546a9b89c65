"""Turn a profiler's intervals into times of nodes; shared by adapters' ``profile`` modules.

Executors trace each node in a scope called `label`, profilers report intervals with the scopes of
what ran, and `divided` computes layer times from them. Imports the standard library and
`d5suite.levels.profile`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from d5suite.levels.profile import OTHER_OPERATORS, LayerTime, shared_seconds

if TYPE_CHECKING:
    from d5suite.network import Network

_LABEL = re.compile(r"d5node(\d+)(?![0-9])")

_NANOSECONDS = 1e-9

_NO_SCOPE: AbstractContextManager[None] = nullcontext()


def label(index: int) -> str:
    """Return the scope of a node by its index in `Network.nodes`, valid in every framework."""
    return f"d5node{index}"


def labels(network: Network) -> dict[str, str]:
    """Return the scope of every node by its name."""
    return {node.name: label(index) for index, node in enumerate(network.nodes)}


def no_scope(name: str) -> AbstractContextManager[None]:
    """Return a scope that does nothing: a real one would cost time in every step."""
    return _NO_SCOPE


def labelled(text: str) -> list[int]:
    """Return the indices of the nodes whose scopes a name contains, outermost first."""
    return [int(found) for found in _LABEL.findall(text)]


class Owner(NamedTuple):
    """The nodes, or else the key in `Profile.other`, that an interval's time belongs to.

    Attributes
    ----------
    nodes : tuple of int
        Indices of nodes in order; empty if no node owns it.
    backward : bool
        Whether any part belongs to the backward pass.
    other : str
        Key in `Profile.other`, if no node owns it.
    """

    nodes: tuple[int, ...] = ()
    backward: bool = False
    other: str = OTHER_OPERATORS


class Interval(NamedTuple):
    """One run of ``what`` on one thread, from start to end in nanoseconds."""

    start: float
    end: float
    what: str


def innermost(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the parts of one thread's nested intervals in which no inner interval runs.

    Parameters
    ----------
    intervals : iterable of Interval
        Intervals of one thread: any two either nest or do not overlap.
    """
    parts: list[Interval] = []
    stack: list[Interval] = []
    now = 0.0

    def until(end: float) -> None:
        nonlocal now
        if stack and end > now:
            parts.append(Interval(now, end, stack[-1].what))
        now = max(now, end)

    for each in sorted(intervals, key=lambda one: (one.start, -one.end)):
        while stack and stack[-1].end <= each.start:
            until(stack[-1].end)
            stack.pop()
        until(each.start)
        stack.append(each)
    while stack:
        until(stack[-1].end)
        stack.pop()
    return parts


def divided(
    network: Network, intervals: Sequence[Interval], owners: Mapping[str, Owner], steps: int
) -> tuple[tuple[LayerTime, ...], dict[str, float]]:
    """Return `Profile.layers` and `Profile.other` of the intervals of some steps.

    Parameters
    ----------
    network : Network
    intervals : sequence of Interval
        Intervals of all threads, where nested intervals were split by `innermost`.
    owners : mapping of str to Owner
        By `Interval.what`; an interval without owner is left out.
    steps : int
        The number of steps.
    """
    kept = [each for each in intervals if each.what in owners]
    keys = {what: f"{owner.nodes}{owner.backward}" if owner.nodes else owner.other for what, owner in owners.items()}
    names = {keys[what]: owner for what, owner in owners.items()}
    seconds = shared_seconds((one.start * _NANOSECONDS, one.end * _NANOSECONDS, keys[one.what]) for one in kept)
    calls: dict[str, int] = defaultdict(int)
    for each in kept:
        calls[keys[each.what]] += 1
    layers, other = [], {}
    for key in sorted(seconds, key=lambda key: (names[key].backward, names[key])):
        owner = names[key]
        if owner.nodes:
            layers.append(
                LayerTime(
                    tuple(network.nodes[index].name for index in owner.nodes),
                    "backward" if owner.backward else "forward",
                    seconds[key] / steps,
                    calls[key] / steps,
                )
            )
        else:
            other[owner.other] = seconds[key] / steps
    return tuple(layers), other
