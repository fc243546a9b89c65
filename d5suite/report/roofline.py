"""Results under a machine's roofs: nodes from the layer pass, steps, and their trajectories.

Bytes are counted: compulsory traffic, by shapes. Imports `d5suite.models` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from d5suite.models.ceilings import Ceilings, Roof, other_machine
from d5suite.models.node_groups import NodeGroup, node_groups
from d5suite.models.roofline import Placed, RooflineStep, Segment, TimedWork, explained, place, place_all, trajectories
from d5suite.report.compare import failures, setting
from d5suite.report.layers import DIRECTIONS
from d5suite.report.reading import ResultKey

COUNTED = "counted"
"""Label of bytes: compulsory traffic from shapes, not read from a counter."""

DISTURBED = "disturbed: "
"""Begins the mark of a disturbed result."""

TURNED = ("threads", "batch", "image size")
"""Conditions that are knobs of a trajectory."""

SLOWED = 1.2
"""Slow-down by a profiler from which on its nodes' places are doubted."""


@dataclass(frozen=True)
class Spot:
    """A node or a step under its roof.

    Attributes
    ----------
    name : str
        Name of the node; empty for a step.
    op_type, direction : str
    nodes : int
        Number of nodes that ran as one.
    placed : Placed
    finding : str
        Why it lies above its roof, if it does.
    """

    name: str
    op_type: str
    direction: str
    nodes: int
    placed: Placed
    finding: str = ""


@dataclass(frozen=True)
class Roofline:
    """One result under its roof.

    Attributes
    ----------
    title, backend, setting : str
        Case and measurement; backend; conditions in words.
    conditions : dict of str to str
    threads, batch, image : int
    roof : Roof
    step : Spot
    nodes : list of Spot
        The slowest first.
    marks : list of str
        What makes the result doubtful.
    machine : str
        Name in the machine file, with a mark if it is another machine's.
    """

    title: str
    backend: str
    setting: str
    conditions: dict[str, str]
    threads: int
    batch: int
    roof: Roof
    step: Spot
    nodes: list[Spot] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    machine: str = ""
    image: int = 0

    @property
    def disturbed(self) -> bool:
        """Whether something disturbed the machine while it was measured."""
        return any(mark.startswith(DISTURBED) for mark in self.marks)


def rooflines(
    records: Mapping[ResultKey, Mapping[str, Any]], ceilings: Ceilings, *, elsewhere: bool = False
) -> tuple[list[Roofline], dict[str, str]]:
    """Return results under their roofs, and why others have none, by name.

    Parameters
    ----------
    records : mapping
        From `d5suite.report.reading.load_results`.
    ceilings : Ceilings
    elsewhere : bool
        Whether results of another machine are placed, too, and marked.
    """
    found: list[Roofline] = []
    missing: dict[str, str] = {}
    for (title, conditions, backend), record in records.items():
        name = f"{title}, {backend}, {setting(record)}"
        made = _roofline(title, dict(conditions), backend, record, ceilings, elsewhere)
        if isinstance(made, str):
            missing[name] = made
        else:
            found.append(made)
    return found, missing


def _roofline(
    title: str, conditions: dict[str, str], backend: str, record: Mapping[str, Any], ceilings: Ceilings, elsewhere: bool
) -> Roofline | str:
    """Return a result under its roof, or why it has none."""
    if failures(record):
        return "its answer is wrong"
    part = record.get("layers")
    if part is None:
        return "it has no layer times, which hold the counted bytes: measure with --passes layers"
    if part.get("missing"):
        return str(part["missing"])
    marks = [f"{DISTURBED}{reason}" for reason in record["machine"]["reasons"]]
    device, name = record["device"], str(record.get("device_name", ""))
    if differs := other_machine(ceilings.host, record["environment"], device, name):
        if not elsewhere:
            return differs
        marks.append(f"another machine's roof: {differs}")
    roof = ceilings.roof(device=device, precision=record["precision"], threads=record["threads"])
    if isinstance(roof, str):
        return roof
    if part["slowdown"] > SLOWED:
        marks.append(f"the profiler slowed steps down {part['slowdown']:.2f} times, so nodes look slower than they are")
    whole = [each for _, _, each in counted(part, record["measurement"])]
    if not whole:
        return "no node of the network has counted work"
    step = _spot("", "", "", len(whole), place_all(whole, record["median_s"], roof))
    nodes = [
        _spot(
            " ".join(each.group.nodes),
            each.op_type,
            each.group.direction,
            len(each.group.nodes),
            place(each.work, roof),
        )
        for each in timed_nodes(part)
        if each.work.bytes or each.work.flops
    ]
    nodes.sort(key=lambda spot: -spot.placed.work.seconds)
    said = ceilings.name + (" (another machine)" if any(mark.startswith("another") for mark in marks) else "")
    return Roofline(
        title, backend, setting(record), conditions, record["threads"], record.get("batch_size", 1), roof, step, nodes,
        marks, said, record.get("image_size") or 0,
    )  # fmt: skip


def _spot(name: str, op_type: str, direction: str, nodes: int, placed: Placed) -> Spot:
    finding = ""
    if placed.above:
        if name and nodes > 1:
            why = "the traffic between fused nodes is counted and not moved"
        elif placed.bound == "arithmetic":
            why = "the ceiling of arithmetic is too low, or fewer operations are made than counted (such as Winograd's)"
        else:
            why = f"the ceiling of {placed.level} is too low, or a smaller cache still holds what is read"
        finding = f"{placed.share:.2f} times its roof: {why}"
    return Spot(name, op_type, direction, nodes, placed, finding)


def work_of(facts: Mapping[str, Any], direction: str, seconds: float) -> TimedWork:
    """Return the counted work of a node of the graph in one direction."""
    prefix = "" if direction == "forward" else "backward_"
    return TimedWork(facts.get(f"{prefix}flops") or 0, facts.get(f"{prefix}bytes") or 0, seconds)


class TimedGroup(NamedTuple):
    """Nodes that ran alone or as one, with their work and time.

    Attributes
    ----------
    group : NodeGroup
    op_type : str
        Operator of the node with the most operations.
    work : TimedWork
    """

    group: NodeGroup
    op_type: str
    work: TimedWork


def timed_nodes(part: Mapping[str, Any]) -> Iterator[TimedGroup]:
    """Yield the nodes that ran, each once."""
    for group in node_groups(part["times"]):
        if group.seconds > 0:
            facts = [part["graph"].get(name, {}) for name in group.nodes]
            works = [work_of(one, group.direction, 0.0) for one in facts]
            main = max(facts, key=lambda one: (one.get("flops") or 0, one.get("bytes") or 0))
            total = TimedWork(sum(one.flops for one in works), sum(one.bytes for one in works), group.seconds)
            yield TimedGroup(group, str(main.get("op_type", "")), total)


def counted(part: Mapping[str, Any], measurement: str) -> Iterator[tuple[str, str, TimedWork]]:
    """Yield name, direction and work of the nodes of a step that have counted work.

    If the profiler reports nodes, those that did not run, such as views, are left out.
    """
    ran = {(name, each["direction"]) for each in part["times"] for name in each["nodes"]}
    directions = DIRECTIONS[:1] if measurement == "inference" else DIRECTIONS
    for name, facts in part["graph"].items():
        for direction in directions:
            work = work_of(facts, direction, 0.0)
            if (work.flops or work.bytes) and (not ran or (name, direction) in ran):
                yield name, direction, work


def paths(found: Sequence[Roofline]) -> dict[tuple[str, str, str], list[list[Segment]]]:
    """Return trajectories by title, backend, and conditions besides the knobs."""
    groups: dict[tuple[str, str, str], list[RooflineStep]] = {}
    for each in found:
        if not (each.step.placed.work.flops and each.step.placed.work.bytes):
            continue
        fixed = ", ".join(f"{key} {value}" for key, value in each.conditions.items() if key not in TURNED)
        groups.setdefault((each.title, each.backend, fixed), []).append(
            RooflineStep(each.threads, each.batch, each.step.placed.work, each.disturbed, each.image)
        )
    return {key: lines for key, steps in groups.items() if (lines := trajectories(steps))}


NAMED = {"strong": "strong scaling", "weak": "weak scaling", "size": "batch size", "image": "image size"}
"""Kinds of trajectories in words."""


def path_lines(found: Sequence[Roofline]) -> list[str]:
    """Return the trajectories in words, strong and weak scaling apart."""
    lines: list[str] = []
    for (title, backend, _), own in paths(found).items():
        for line in own:
            lines.append(f"{title}, {backend}, {NAMED[line[0].kind]}:")
            lines += [f"  {explained(segment)}" for segment in line]
    return lines


def to_dict(found: Sequence[Roofline], missing: Mapping[str, str]) -> dict[str, Any]:
    """Return all places and trajectories as JSON values, in operations, bytes and seconds."""
    import math

    return {
        "bytes": COUNTED,
        "rooflines": [
            {
                "measurement": each.title,
                "backend": each.backend,
                "conditions": each.conditions,
                "machine": each.machine,
                "marks": each.marks,
                "roof": {
                    "flops_per_s": each.roof.flops_per_s,
                    "levels": [vars(level) for level in each.roof.levels],
                    "in_doubt": list(each.roof.notes),
                },
                "step": _values(each.step),
                "nodes": [_values(spot) for spot in each.nodes],
            }
            for each in found
        ],
        "trajectories": [
            {
                "measurement": title,
                "backend": backend,
                "conditions": fixed,
                "kind": line[0].kind,
                "segments": [
                    {
                        "threads": [each.first.threads, each.second.threads],
                        "batch": [each.first.batch, each.second.batch],
                        "image": [each.first.image, each.second.image],
                        "log2_rate": math.log2(each.rate),
                        "log2_intensity": math.log2(each.intensity),
                        "log2_bandwidth": math.log2(each.bandwidth),
                        "serial_part": each.serial_part,
                    }
                    for each in line
                ],
            }
            for (title, backend, fixed), lines in paths(found).items()
            for line in lines
        ],
        "missing": dict(missing),
    }


def _values(spot: Spot) -> dict[str, Any]:
    work = spot.placed.work
    return {
        "name": spot.name,
        "operator": spot.op_type,
        "direction": spot.direction,
        "flops": work.flops,
        "bytes": work.bytes,
        "seconds": work.seconds,
        "level": spot.placed.level,
        "bound": spot.placed.bound,
        "share": spot.placed.share,
        "finding": spot.finding or None,
    }
