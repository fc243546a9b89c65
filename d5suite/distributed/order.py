"""The order of transfers: pure functions on the tasks of a step.

TIC and TAC are the heuristics of Hashemi, Abdu Jyothi and Campbell, "TicTac: accelerating
distributed deep learning with communication scheduling" (MLSys 2019), sections 4 and 5; E and S are
their ordering efficiency and speed-up potential, section 3.2.

Imports NumPy and `d5suite.errors`.
"""

from __future__ import annotations

import graphlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from d5suite.errors import ConfigurationError


@dataclass(frozen=True)
class Task:
    """Something that takes time on one resource.

    Attributes
    ----------
    name : str
        Unique within its graph.
    kind : {"compute", "transfer"}
    seconds : float
        How long the task takes alone.
    bytes : int
        Bytes that a transfer moves.
    resource : str
        What the task occupies, such as ``compute`` or ``link``; by default its kind.
    depends_on : tuple of str
        Names of tasks that must end before this one begins.
    """

    name: str
    kind: Literal["compute", "transfer"]
    seconds: float = 0.0
    bytes: int = 0
    resource: str = ""
    depends_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("compute", "transfer"):
            raise ConfigurationError(f"a task is compute or transfer, not {self.kind!r}", where=f"task {self.name}")
        if not (0 <= self.seconds < math.inf and self.bytes >= 0):
            raise ConfigurationError("seconds and bytes are finite and not negative", where=f"task {self.name}")
        object.__setattr__(self, "resource", self.resource or self.kind)
        object.__setattr__(self, "depends_on", tuple(self.depends_on))


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of a step, with their dependencies.

    Attributes
    ----------
    tasks : tuple of Task
        In any order; of two transfers with equal priority, the first one here goes first.

    Raises
    ------
    ConfigurationError
        If two tasks share a name, a dependency is unknown, or tasks wait for each other.
    """

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        twice = [name for name, count in Counter(each.name for each in self.tasks).items() if count > 1]
        if twice:
            raise ConfigurationError(f"two tasks have the name {twice[0]!r}", where="task graph")
        for each in self.tasks:
            for name in each.depends_on:
                if name not in self.by_name:
                    raise ConfigurationError(f"it depends on {name!r}, which is no task", where=f"task {each.name}")
        assert self.sorted is not None

    @cached_property
    def by_name(self) -> Mapping[str, Task]:
        """Return the tasks by name."""
        return {each.name: each for each in self.tasks}

    @cached_property
    def sorted(self) -> tuple[Task, ...]:
        """Return the tasks, each after all that it depends on."""
        sorter = graphlib.TopologicalSorter({each.name: each.depends_on for each in self.tasks})
        try:
            return tuple(self.by_name[name] for name in sorter.static_order())
        except graphlib.CycleError as error:
            raise ConfigurationError(
                f"tasks wait for each other: {', '.join(error.args[1])}", where="task graph"
            ) from None

    @cached_property
    def transfers(self) -> tuple[Task, ...]:
        """Return the transfers, in the order of `tasks`."""
        return tuple(each for each in self.tasks if each.kind == "transfer")

    @cached_property
    def needs(self) -> Mapping[str, int]:
        """Return which transfers each task needs, as bits by their place in `transfers`.

        A transfer needs itself alone: dep(op) of the paper.
        """
        bit = {each.name: 1 << place for place, each in enumerate(self.transfers)}
        found: dict[str, int] = {}
        for each in self.sorted:
            found[each.name] = bit.get(each.name, 0)
            if each.kind == "compute":
                for name in each.depends_on:
                    found[each.name] |= found[name]
        return found

    @property
    def busy(self) -> dict[str, float]:
        """Return the seconds of all tasks of each resource."""
        found: dict[str, float] = {}
        for each in self.tasks:
            found[each.resource] = found.get(each.resource, 0.0) + each.seconds
        return found


@dataclass(frozen=True)
class Properties:
    """What TIC and TAC know of an outstanding transfer r.

    Attributes
    ----------
    seconds : float
        M: seconds of the transfer itself.
    unlocked : float
        P: seconds of the computations that need r and no other outstanding transfer.
    joint : float
        M+: the least total seconds of the outstanding transfers of any computation that needs r and
        others; infinite if there is none.
    """

    seconds: float
    unlocked: float
    joint: float


class _Needs:
    """Computations grouped by the set of transfers that they need, one row for each set."""

    def __init__(self, graph: TaskGraph, computing: Mapping[str, float]) -> None:
        seconds: dict[int, float] = {}
        for each in graph.tasks:
            if each.kind == "compute" and (bits := graph.needs[each.name]):
                seconds[bits] = seconds.get(bits, 0.0) + computing[each.name]
        count = len(graph.transfers)
        self.rows = np.array([[bits >> place & 1 for place in range(count)] for bits in seconds], bool)
        self.rows = self.rows.reshape(len(seconds), count)
        self.seconds = np.array(list(seconds.values()), np.float64)

    def properties(self, times: np.ndarray, outstanding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return P and M+ of each transfer; they are meaningless for those not outstanding."""
        needed = self.rows & outstanding
        counts = needed.sum(axis=1)
        single, several = needed[counts == 1], needed[counts > 1]
        unlocked = (single * self.seconds[counts == 1][:, None]).sum(axis=0)
        together = (several * times).sum(axis=1)
        joint = np.where(several, together[:, None], np.inf).min(axis=0, initial=np.inf)
        return unlocked, joint


def properties(graph: TaskGraph, outstanding: Iterable[str] | None = None) -> dict[str, Properties]:
    """Return the properties of the outstanding transfers by name (algorithm 1 of the paper).

    Parameters
    ----------
    graph : TaskGraph
    outstanding : iterable of str, optional
        Transfers that have not arrived; by default all.
    """
    names = [each.name for each in graph.transfers]
    wanted = set(names if outstanding is None else outstanding)
    times = np.array([each.seconds for each in graph.transfers])
    needs = _Needs(graph, {each.name: each.seconds for each in graph.tasks})
    unlocked, joint = needs.properties(times, np.array([name in wanted for name in names], bool))
    found = zip(names, times.tolist(), unlocked.tolist(), joint.tolist(), strict=True)
    return {name: Properties(*values) for name, *values in found if name in wanted}


def goes_first(one: Properties, other: Properties) -> bool:
    """Return whether TAC sends ``one`` before ``other``, if only these two are left to order.

    The transfer that goes second overlaps what the first unlocks: the order with the shorter step
    wins. A tie goes to the smaller M+ (the paper's comparator).
    """
    first, second = min(other.unlocked, one.seconds), min(one.unlocked, other.seconds)
    return first < second if first != second else one.joint < other.joint


def tic(graph: TaskGraph) -> dict[str, int]:
    """Return priorities of transfers by timing-independent communication scheduling, least first.

    Every transfer takes 1 and every computation 0: M+ is the fewest transfers of any computation
    that needs this one and others. Transfers with equal M+ share a priority: the number of
    transfers before them. A transfer that no computation needs together with others comes last.
    """
    names = [each.name for each in graph.transfers]
    needs = _Needs(graph, dict.fromkeys(graph.by_name, 0.0))
    joint = needs.properties(np.ones(len(names)), np.ones(len(names), bool))[1].tolist()
    before = {value: sum(other < value for other in joint) for value in set(joint)}
    return {name: before[value] for name, value in zip(names, joint, strict=True)}


def tac(graph: TaskGraph) -> dict[str, int]:
    """Return priorities of transfers by timing-aware communication scheduling, least first.

    Repeatedly compute the properties, and take the transfer that `goes_first`. Each comparison
    finds the best order of two transfers, but the order of all need not be optimal.
    """
    names = [each.name for each in graph.transfers]
    times = np.array([each.seconds for each in graph.transfers])
    needs = _Needs(graph, {each.name: each.seconds for each in graph.tasks})
    outstanding, found = np.ones(len(names), bool), dict[str, int]()
    while len(found) < len(names):
        unlocked, joint = needs.properties(times, outstanding)
        left = [Properties(*values) for values in zip(times.tolist(), unlocked.tolist(), joint.tolist(), strict=True)]
        best, *others = np.flatnonzero(outstanding).tolist()
        for place in others:
            if goes_first(left[place], left[best]):
                best = place
        found[names[best]], outstanding[best] = len(found), False
    return found


def sequence(priorities: Mapping[str, int]) -> tuple[str, ...]:
    """Return names by priority, the least first; names with equal priority keep their order."""
    return tuple(sorted(priorities, key=lambda name: priorities[name]))


def efficiency(makespan_s: float, busy_s: Iterable[float]) -> float | None:
    """Return E, the ordering efficiency: 1 if everything overlaps that can, 0 if nothing does.

    E = (cost_max − U) / (cost_max − cost_min), where U is the makespan, cost_max the sum of all
    resources' busy seconds and cost_min the largest. It lies outside 0 to 1 if resources are idle
    together, or if the busy seconds are those of another step.

    Parameters
    ----------
    makespan_s : float
        Seconds of the step.
    busy_s : iterable of float
        Seconds in which each resource was busy, such as `TaskGraph.busy`'s values.

    Returns
    -------
    float or None
        None if fewer than two resources were busy: then there is nothing to overlap.
    """
    longest, least = _costs(busy_s)
    return (longest - makespan_s) / (longest - least) if longest > least else None


def potential(busy_s: Iterable[float]) -> float:
    """Return S, the speed-up potential: (cost_max − cost_min) / cost_min.

    The best order is at most 1 + S times as fast as the worst: 2 times on two resources, if both
    are busy equally long. 0 if nothing is busy.
    """
    longest, least = _costs(busy_s)
    return (longest - least) / least if least else 0.0


def _costs(busy_s: Iterable[float]) -> tuple[float, float]:
    values = list(busy_s)
    return math.fsum(values), max(values, default=0.0)


def divided(nbytes: int, slice_bytes: int, itemsize: int = 1) -> list[slice]:
    """Divide an array into slices of at most `slice_bytes`, but at least one element (P3).

    Jayarajan et al., "Priority-based parameter propagation for distributed DNN training" (MLSys
    2019), section 4.1.

    Parameters
    ----------
    nbytes : int
        Size of the array.
    slice_bytes : int
        Most bytes of a slice; 0: the array is not divided.
    itemsize : int
        Bytes of an element.

    Returns
    -------
    list of slice
        Slices of elements; together they cover the array, each element once.
    """
    length = nbytes // itemsize
    each = max(slice_bytes // itemsize, 1) if slice_bytes else max(length, 1)
    return [slice(start, min(start + each, length)) for start in range(0, length, each)]


def overtaken(choices: Sequence[tuple[bool, tuple[str, ...]]], asked: Sequence[str]) -> int:
    """Count the transfers of a step that were chosen while a ready one should have gone first.

    Transfers that were chosen before they were ready, or never chosen, count, too.

    Parameters
    ----------
    choices : sequence of (bool, tuple of str)
        In time order: what became ready (True), and what was chosen (False), by the names of a
        transfer's parameters. A transfer that is sent in slices is chosen once for each slice.
    asked : sequence of str
        All parameters in the requested order.
    """
    place = {name: number for number, name in enumerate(asked)}
    last = {names: turn for turn, (became_ready, names) in enumerate(choices) if not became_ready}
    ready: dict[tuple[str, ...], int] = {}
    wrong = 0
    for turn, (became_ready, names) in enumerate(choices):
        if became_ready:
            ready[names] = min(place.get(name, len(place)) for name in names)
            continue
        wrong += names not in ready or ready[names] > min(ready.values())
        if turn == last[names]:
            ready.pop(names, None)
    return wrong + len(ready)


def planned(ready_s: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Return the order of transfers on a link that always takes the ready one that comes first.

    Parameters
    ----------
    ready_s : sequence of float
        When each transfer is ready, in the requested order.
    seconds : sequence of float
        How long each transfer takes.
    """
    coming = sorted(range(len(ready_s)), key=lambda number: ready_s[number])
    ready: list[int] = []
    found: list[int] = []
    now, next_one = 0.0, 0
    while len(found) < len(coming):
        if not ready:
            now = max(now, ready_s[coming[next_one]])
        while next_one < len(coming) and ready_s[coming[next_one]] <= now:
            heapq.heappush(ready, coming[next_one])
            next_one += 1
        found.append(heapq.heappop(ready))
        now += seconds[found[-1]]
    return found


def in_turn(names: Iterable[str], update: Callable[[Sequence[str], bool], None]) -> Callable[[Iterable[str]], None]:
    """Return a function that updates the parameters of a call, each only once in all calls.

    Parameters
    ----------
    names : iterable of str
        All parameters.
    update : callable
        Takes names, and whether these are the last parameters.
    """
    left = dict.fromkeys(names)

    def updated(wanted: Iterable[str]) -> None:
        due = [name for name in dict.fromkeys(wanted) if name in left]
        for name in due:
            del left[name]
        if due:
            update(due, not left)

    return updated
