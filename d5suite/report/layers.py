"""Layer times of several backends side by side: rows that all of them can be compared in.

A backend that fused nodes has one time for them. A row therefore holds the smallest set of nodes
that no backend fused with others: where one fused a convolution with what follows, the row covers
all of these nodes, and the other backends' times are added up. Imports `d5suite.report.reading` and
its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from d5suite.models.node_groups import node_groups
from d5suite.report.compare import failures, is_reduced, setting
from d5suite.report.reading import ResultKey

DIRECTIONS = ("forward", "backward")

SORTS: Mapping[str, Callable[[LayerRow], float]] = {
    "time": lambda row: -max(row.seconds.values(), default=0.0),
    "difference": lambda row: -row.difference,
    "ratio": lambda row: -row.ratio,
}
"""Orders of rows, besides ``network``: the order of the graph."""


@dataclass(frozen=True)
class LayerRow:
    """Nodes that no backend fused with other nodes, with the time of each backend.

    Attributes
    ----------
    nodes : tuple of str
    direction : str
    label : str
        What tables call it.
    op_type, stage : str
        Operator and stage of the node with the most work.
    seconds : dict of str to float
        Per step, by backend; a backend without any time for it is left out.
    ranges : dict of str to (float, float)
        The smallest and the largest seconds of several profiles; both equal ``seconds`` in files
        without ranges. A sum of rows has the sums of their ranges.
    flops, bytes : int or None
        Counted work and compulsory traffic; None if not counted.
    kernels : dict of str to str
        By backend: the library's implementations, if known.
    """

    nodes: tuple[str, ...]
    direction: str
    label: str
    op_type: str
    stage: str
    seconds: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    flops: int | None
    bytes: int | None
    kernels: dict[str, str]

    @property
    def slowest(self) -> str:
        """The backend that takes longest."""
        return max(self.seconds, key=self.seconds.__getitem__, default="")

    @property
    def tells_backends_apart(self) -> bool:
        """Whether each profile of the slowest backend took longer than any of the fastest one."""
        if not self.seconds:
            return False
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        return self.ranges[self.slowest][0] > self.ranges[fastest][1]

    def may_be_longer_than(self, other: LayerRow) -> bool:
        """Whether another run may find that this row takes longer than another one."""
        return bool(self.seconds and other.seconds) and (self.ranges[self.slowest][1] >= other.ranges[other.slowest][0])

    @property
    def fastest(self) -> float:
        """Seconds of the fastest backend."""
        return min(self.seconds.values(), default=0.0)

    @property
    def difference(self) -> float:
        """Seconds between the slowest and the fastest backend."""
        return max(self.seconds.values(), default=0.0) - self.fastest

    @property
    def ratio(self) -> float:
        """The slowest backend's time divided by the fastest one's; 1 if there is only one."""
        return max(self.seconds.values()) / self.fastest if self.fastest else 1.0


@dataclass(frozen=True)
class Comparison:
    """The layer times of one measurement under one set of conditions.

    Attributes
    ----------
    title : str
        Case and measurement.
    setting : str
        What a reader needs to know of the conditions.
    conditions : dict of str to str
    parts : dict of str to dict
        The part ``layers`` of each backend's record.
    missing : dict of str to str
        Why a backend has no layer times.
    rows : list of LayerRow
        In the order of the graph, forward rows first.
    ceiling : dict of str to float
        Operations and bytes per second that the machine reaches, under the names ``flops`` and
        ``bytes`` of `LayerRow`; empty if the result has none.
    """

    title: str
    setting: str
    conditions: dict[str, str]
    parts: dict[str, dict[str, Any]]
    missing: dict[str, str]
    rows: list[LayerRow]
    ceiling: dict[str, float]

    @property
    def backends(self) -> list[str]:
        """Backends with layer times, the fastest step first."""
        return sorted(self.parts, key=lambda name: self.parts[name]["plain_step_s"])

    def aggregate(self, key: str) -> list[LayerRow]:
        """Return the sums of rows with equal ``op_type`` or ``stage``, by direction.

        Parameters
        ----------
        key : {"op_type", "stage"}
        """
        groups: dict[tuple[str, str], list[LayerRow]] = {}
        for row in self.rows:
            groups.setdefault((getattr(row, key), row.direction), []).append(row)
        return [_sum(label, direction, group) for (label, direction), group in groups.items()]

    def part_of_ceiling(self, row: LayerRow, seconds: float) -> float | None:
        """Return the larger part of a ceiling, of arithmetic or memory, that a time reaches."""
        parts = [
            work / seconds / self.ceiling[name]
            for name, work in (("flops", row.flops), ("bytes", row.bytes))
            if work and seconds > 0 and name in self.ceiling
        ]
        return max(parts, default=None)


def not_told_apart(rows: Sequence[LayerRow]) -> list[list[LayerRow]]:
    """Return groups of neighbours, of rows sorted by time, that another run may reorder."""
    groups: list[list[LayerRow]] = []
    for before, row in itertools.pairwise(rows):
        if row.may_be_longer_than(before):
            if groups and groups[-1][-1] is before:
                groups[-1].append(row)
            else:
                groups.append([before, row])
    return groups


def comparisons(records: Mapping[ResultKey, Mapping[str, Any]]) -> list[Comparison]:
    """Return the layer times in a result file, one comparison for each measurement.

    Parameters
    ----------
    records : mapping
        From `d5suite.report.reading.load_results`.
    """
    groups: dict[Any, dict[str, Mapping[str, Any]]] = {}
    for (title, conditions, backend), record in records.items():
        if "layers" in record:
            groups.setdefault((title, conditions, is_reduced(record)), {})[backend] = record
    ceiling = _ceiling(records.values())
    found = []
    for (title, conditions, _), members in groups.items():
        missing = {name: _problem(record) for name, record in members.items()}
        parts = {name: dict(record["layers"]) for name, record in members.items() if not missing[name]}
        rows = list(_rows(parts)) if parts else []
        absent = {name: why for name, why in missing.items() if why}
        said = setting(next(iter(members.values())))
        found.append(Comparison(title, said, dict(conditions), parts, absent, rows, ceiling))
    return found


def _problem(record: Mapping[str, Any]) -> str:
    if failures(record):
        return "its answer is wrong"
    return str(record["layers"].get("missing", ""))


def _ceiling(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the highest ceilings that a result file has measured, by `LayerRow`'s names."""
    found: dict[str, float] = {}
    for record in records:
        for key, each in (record.get("ceiling") or {}).items():
            name = key.removesuffix("_per_s")
            found[name] = max(found.get(name, 0.0), each["value"])
    return found


def _rows(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[LayerRow]:
    graph: dict[str, Mapping[str, Any]] = {}
    for part in parts.values():
        graph.update(part["graph"])
    order = {name: number for number, name in enumerate(graph)}

    def place(node: str) -> int:
        return order.get(node, len(order))

    times = [(backend, each) for backend, part in parts.items() for each in part["times"]]
    groups = node_groups([each for _, each in times])
    for group in sorted(groups, key=lambda each: (DIRECTIONS.index(each.direction), min(map(place, each.nodes)))):
        yield _row(
            tuple(sorted(group.nodes, key=place)), group.direction, graph, [times[number] for number in group.places]
        )


def _row(
    nodes: tuple[str, ...],
    direction: str,
    graph: Mapping[str, Mapping[str, Any]],
    times: Sequence[tuple[str, Mapping[str, Any]]],
) -> LayerRow:
    """Return the row of nodes; ``times`` are the backends' records of them."""
    prefix = "" if direction == "forward" else "backward_"
    facts = [graph.get(node, {}) for node in nodes]
    main = max(facts, key=lambda each: (each.get("flops") or 0, each.get("bytes") or 0))
    label = nodes[facts.index(main)] + (f" +{len(nodes) - 1}" if len(nodes) > 1 else "")
    seconds, ranges = _added(
        (backend, each["seconds"], each.get("range", (each["seconds"],) * 2)) for backend, each in times
    )
    kernels = {backend: _kernels([each for name, each in times if name == backend]) for backend in seconds}
    flops, traffic = (_total([each.get(f"{prefix}{what}") for each in facts]) for what in ("flops", "bytes"))
    said = {backend: text for backend, text in kernels.items() if text}
    op_type, stage = main.get("op_type", ""), main.get("stage", "")
    return LayerRow(nodes, direction, label, op_type, stage, seconds, ranges, flops, traffic, said)


def _total(values: Sequence[int | None]) -> int | None:
    counted = [each for each in values if each is not None]
    return sum(counted) if counted else None


def _kernels(times: Sequence[Mapping[str, Any]]) -> str:
    """Return the implementations' times: ``brgconv:avx512_core 1.2 ms, 3 reorders 0.4 ms``."""
    took: dict[str, float] = {}
    for each in (kernel for time in times for kernel in time.get("kernels", [])):
        took[each["implementation"]] = took.get(each["implementation"], 0.0) + each["seconds"]
    said = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in sorted(took.items(), key=lambda each: -each[1])]
    reorders = sum(time.get("reorders", 0) for time in times)
    if reorders:
        seconds = sum(time.get("reorder_s", 0.0) for time in times)
        said.append(f"{reorders:.0f} reorder{'s' * (reorders != 1)} {1e3 * seconds:.3g} ms")
    return ", ".join(said)


def _added(
    times: Iterable[tuple[str, float, tuple[float, float]]],
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return the sums of seconds, and of their ranges, by backend."""
    seconds: dict[str, float] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for backend, took, (low, high) in times:
        seconds[backend] = seconds.get(backend, 0.0) + took
        least, most = ranges.get(backend, (0.0, 0.0))
        ranges[backend] = least + low, most + high
    return seconds, ranges


def _sum(label: str, direction: str, rows: Sequence[LayerRow]) -> LayerRow:
    seconds, ranges = _added((name, took, row.ranges[name]) for row in rows for name, took in row.seconds.items())
    nodes = tuple(node for row in rows for node in row.nodes)
    flops, traffic = _total([row.flops for row in rows]), _total([row.bytes for row in rows])
    return LayerRow(nodes, direction, label, rows[0].op_type, rows[0].stage, seconds, ranges, flops, traffic, {})


def reorders(part: Mapping[str, Any]) -> tuple[float, float]:
    """Return how often oneDNN changed a layout per step, and for how many seconds."""
    found = [(each.get("reorders", 0), each.get("reorder_s", 0.0)) for each in part["times"]]
    found += [(each["calls"], each["seconds"]) for each in part.get("kernels_apart", []) if each.get("reorder")]
    return sum(count for count, _ in found), sum(seconds for _, seconds in found)


def not_joined(part: Mapping[str, Any]) -> str:
    """Return the library's kernels that have no node: ``3 reorder 0.1 ms, 1 eltwise 0.02 ms``."""
    found: dict[str, list[float]] = {}
    for each in part.get("kernels_apart", []):
        own = found.setdefault(each["primitive"], [0, 0.0])
        own[:] = own[0] + each["calls"], own[1] + each["seconds"]
    ordered = sorted(found.items(), key=lambda each: -each[1][1])
    return ", ".join(f"{calls:.0f} {name} {1e3 * seconds:.3g} ms" for name, (calls, seconds) in ordered)
