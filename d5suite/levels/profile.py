"""Layer times: how long each node of a network takes within a step.

An adapter's module ``profile`` has one function:

``profile(executor, step, steps, folder, trainer)``
    Run ``step()`` some times unrecorded if the profiler needs it, then ``steps`` times under the
    framework's own profiler, and return a `Profile`. ``step()`` makes one step of a measurement
    (forward, forward and backward, or a training step) and synchronizes. ``trainer`` is the
    `Trainer` that a training step uses, else None. The function may write into ``folder``, which is
    deleted afterwards. When it returns, the executor is as it was: nothing slows later steps down.

Where the framework computes with a library that reports its kernels, such as oneDNN, the module has
another function:

``kernels(executor, step, feed, backward, folder)``
    Return the library's `Kernels` of one more step. ``feed`` is the native feed that ``step()``
    takes, and ``backward`` says whether it differentiates. A kernel whose node is not known is
    listed apart, never assigned by guess.

None of this may cost time while no profile is taken. Times are wall time: they add up to the
step's time or less. Where several threads run nodes at the same time, `shared_seconds` divides each
moment among the nodes that run in it.

Imports `d5suite.errors` (through `contract`) and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from d5suite.levels.contract import ContractError

if TYPE_CHECKING:
    from d5suite.network import Network

DIRECTIONS = ("forward", "backward")

OPTIMIZER = "optimizer"
"""Key in `Profile.other`: the update of the parameters."""

REORDERS = "reorders"
"""Key in `Profile.other`: changes of layout that belong to no node."""

OTHER_OPERATORS = "other operators"
"""Key in `Profile.other`: operators that the framework ran and that belong to no node."""

ADDED = "gradients added up"
"""Key in `Profile.other`: sums of the gradients of tensors that several nodes read."""

SLACK = 0.05
"""Fraction of the profiled step by which the times may exceed it: events have inexact edges."""


@dataclass(frozen=True)
class Kernel:
    """A library's kernel that computed a node or a part of it.

    Attributes
    ----------
    primitive : str
        What it computes in the library's terms, such as ``convolution``.
    implementation : str
        The library's name of the code that ran, such as ``brgconv:avx512_core``.
    layouts : str
        Layouts of its tensors, such as ``src:aBcd16b wei:Acdb16a dst:aBcd16b``; empty if unknown.
    seconds : float
        Time per step.
    calls : float
        Number of calls per step.
    reorder : bool
        Whether it only changes a layout or a type.
    """

    primitive: str
    implementation: str
    layouts: str = ""
    seconds: float = 0.0
    calls: float = 1.0
    reorder: bool = False


@dataclass(frozen=True)
class Kernels:
    """The kernels of a library that ran in one step.

    Attributes
    ----------
    of : dict of (tuple of str, str) to tuple of Kernel
        Kernels by the nodes and the direction of a `LayerTime`.
    apart : tuple of Kernel
        Kernels that belong to no node, or whose node is not known.
    notes : tuple of str
        Remarks for a reader.
    """

    of: dict[tuple[tuple[str, ...], str], tuple[Kernel, ...]] = field(default_factory=dict)
    apart: tuple[Kernel, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerTime:
    """The time of one node, or of several that a compiler fused, in one direction.

    Attributes
    ----------
    nodes : tuple of str
        Names of the neutral graph's nodes, in its order. The time of several nodes is never split
        by guess.
    direction : str
        One of `DIRECTIONS`.
    seconds : float
        Mean wall time per step.
    calls : float
        How often it ran per step.
    """

    nodes: tuple[str, ...]
    direction: str
    seconds: float
    calls: float = 1.0


@dataclass(frozen=True)
class Profile:
    """Where the time of a step went.

    Attributes
    ----------
    layers : tuple of LayerTime
        Each set of nodes at most once per direction.
    other : dict of str to float
        Seconds per step of what belongs to no node, by name: `OPTIMIZER`, `REORDERS`,
        `OTHER_OPERATORS`. What no event covers is left out.
    step_seconds : float
        Mean wall time of the profiled steps.
    method : str
        One sentence that names the profiler and says what it counts.
    dropped : int
        Events that the profiler lost.
    notes : tuple of str
        Remarks for a reader of the times.
    """

    layers: tuple[LayerTime, ...]
    other: dict[str, float]
    step_seconds: float
    method: str
    dropped: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def node_seconds(self) -> float:
        """Seconds per step that belong to nodes."""
        return sum(each.seconds for each in self.layers)

    @property
    def coverage(self) -> float:
        """Fraction of the profiled step's time that belongs to nodes."""
        return self.node_seconds / self.step_seconds


def seconds_per_step(step: Callable[[], object], steps: int) -> float:
    """Make some steps, one after the other, and return the mean of their wall times."""
    begin = perf_counter()
    for _ in range(steps):
        step()
    return (perf_counter() - begin) / steps


def check_profile(backend: str, found: object, network: Network) -> None:
    """Raise `ContractError` unless a profile's nodes exist and its times are possible.

    Parameters
    ----------
    backend : str
        The adapter's name.
    found : object
        What ``profile`` returned.
    network : Network
        The network that was profiled.
    """
    if not isinstance(found, Profile):
        raise ContractError(backend, "profile.nodes", f"profile returned a {type(found).__name__}, not a Profile")
    known = {node.name for node in network.nodes}
    seen: set[tuple[tuple[str, ...], str]] = set()
    for layer in found.layers:
        unknown = [name for name in layer.nodes if name not in known]
        if unknown or not layer.nodes:
            what = f"the network has no node {unknown[0]!r}" if unknown else "a time belongs to no node"
            raise ContractError(backend, "profile.nodes", what)
        if layer.direction not in DIRECTIONS:
            raise ContractError(backend, "profile.nodes", f"{layer.direction!r} is no direction")
        key = layer.nodes, layer.direction
        if key in seen:
            raise ContractError(
                backend, "profile.nodes", f"{', '.join(layer.nodes)} has two times in the {layer.direction} direction"
            )
        seen.add(key)
    if not 0 < found.step_seconds < math.inf:
        raise ContractError(backend, "profile.times", f"the profiled step took {found.step_seconds!r} s")
    times = [(f"node {', '.join(each.nodes)}, {each.direction},", each.seconds) for each in found.layers]
    for what, seconds in [*times, *found.other.items()]:
        if not 0 <= seconds < math.inf:
            raise ContractError(backend, "profile.times", f"{what} took {seconds!r} s")
    total = found.node_seconds + sum(found.other.values())
    if total > (1 + SLACK) * found.step_seconds:
        raise ContractError(
            backend,
            "profile.times",
            f"the times add up to {total * 1e3:.4g} ms, and the profiled step took {found.step_seconds * 1e3:.4g} ms",
        )


def shared_seconds(events: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Divide wall time among events of several threads; return the seconds of each owner.

    A moment in which events of k owners run counts 1/k for each, so that the sum is the time in
    which anything ran. Events of one owner may overlap, as nested ones do.

    Parameters
    ----------
    events : iterable of (float, float, str)
        Start and end, in seconds, and the owner.
    """
    edges: list[tuple[float, int, str]] = []
    for start, end, owner in events:
        if end > start:
            edges += [(start, 1, owner), (end, -1, owner)]
    edges.sort(key=lambda each: (each[0], each[1]))
    found: dict[str, float] = {}
    running: dict[str, int] = {}
    last = 0.0
    for moment, change, owner in edges:
        if running and moment > last:
            part = (moment - last) / len(running)
            for each in running:
                found[each] = found.get(each, 0.0) + part
        last = moment
        count = running.get(owner, 0) + change
        if count:
            running[owner] = count
        else:
            running.pop(owner, None)
    return found
