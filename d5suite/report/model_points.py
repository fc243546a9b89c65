"""Measured points that models are fitted to: steps by their nodes, and peaks of memory.

Imports `d5suite.models` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from d5suite.models.ceilings import Ceilings, other_machine
from d5suite.models.node_groups import node_groups
from d5suite.models.node_time import MeasuredStep, TimedNodes, node_work
from d5suite.models.peak import MeasuredPeak
from d5suite.report.compare import failures, setting
from d5suite.report.reading import ResultKey
from d5suite.report.roofline import counted

MEASUREMENTS = ("inference", "training_step")
"""Measurements that have models."""

WIDTHS = {"bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a value by precision; 4 of all others."""

LEAST_COVERAGE = 0.3
"""Part of a step that its nodes must explain: with less, their times do not stand for the rest."""

LEAST_LEFT = 0.2
"""Part of a node's time that is left at least when the profiler's overhead is subtracted."""


class PointKind(NamedTuple):
    """What the points of one model have in common."""

    backend: str
    measurement: str
    device: str
    precision: str
    threads: int

    def __str__(self) -> str:
        return f"{self.backend}, {self.measurement}, {self.precision}, {self.threads} thread{'s' * (self.threads != 1)}"


class Points(NamedTuple):
    """Points for models by kind, and why other results give none.

    Attributes
    ----------
    steps : dict of PointKind to list of MeasuredStep
    peaks : dict of PointKind to list of MeasuredPeak
    slots : dict of PointKind to float
        Values of the optimizer's state per parameter.
    missing : dict of str to str
    """

    steps: dict[PointKind, list[MeasuredStep]]
    peaks: dict[PointKind, list[MeasuredPeak]]
    slots: dict[PointKind, float]
    missing: dict[str, str]


def points_of(records: Mapping[ResultKey, Mapping[str, Any]], ceilings: Ceilings, *, disturbed: bool = False) -> Points:
    """Return the points in results.

    Parameters
    ----------
    records : mapping
        From `d5suite.report.reading.load_results`.
    ceilings : Ceilings
    disturbed : bool
        Whether times of a disturbed machine count, too.
    """
    found = Points({}, {}, {}, {})
    for (title, _, backend), record in records.items():
        if record["measurement"] not in MEASUREMENTS:
            continue
        name = f"{title}, {backend}, {setting(record)}"
        if why := _problem(record, ceilings):
            found.missing[name] = why
            continue
        kind = PointKind(
            backend.partition("@")[0], record["measurement"], record["device"], record["precision"], record["threads"]
        )
        network, part, memory = title.partition("/")[0], record["layers"], record.get("memory") or {}
        roof = ceilings.roof(device=kind.device, precision=kind.precision, threads=kind.threads)
        if isinstance(roof, str):
            found.missing[name] = roof
            continue
        parameters, gradients, state = (
            memory.get(f"{what}_bytes", 0) for what in ("parameters", "gradients", "optimizer_state")
        )
        trains, width = kind.measurement == "training_step", WIDTHS.get(kind.precision, 4)
        if record["machine"]["reasons"] and not disturbed:  # its memory still counts
            found.missing[name] = f"disturbed: {record['machine']['reasons'][0]}"
        elif part["coverage"] >= LEAST_COVERAGE:
            updated = float(2 * parameters + gradients + 2 * state) if trains else 0.0
            nodes = [
                node_work(part["graph"][node], direction, width)
                for node, direction, _ in counted(part, kind.measurement)
            ]
            point = MeasuredStep(network, nodes, list(_timed(part, width)), updated, record["median_s"], roof)
            found.steps.setdefault(kind, []).append(point)
        else:
            found.missing[name] = f"the profiler tells the nodes of {part['coverage']:.0%} of its step only"
        if "alive_bytes" in memory:
            own = parameters + (gradients + state if trains else 0)
            peak = MeasuredPeak(network, own, memory["alive_bytes"], len(part["graph"]), memory["peak_bytes"])
            found.peaks.setdefault(kind, []).append(peak)
            found.slots[kind] = state / max(1, parameters)
    return found


def _problem(record: Mapping[str, Any], ceilings: Ceilings) -> str | None:
    """Return why a result is no point of a model."""
    if failures(record):
        return "its answer is wrong"
    part = record.get("layers")
    if part is None or part.get("missing"):
        return part["missing"] if part else "it has no layer times: measure with --passes layers,memory"
    device, name = record["device"], str(record.get("device_name", ""))
    return other_machine(ceilings.host, record["environment"], device, name)


def _timed(part: Mapping[str, Any], width: int) -> Iterator[TimedNodes]:
    """Yield nodes with their times, less what the profiler adds to each call."""
    calls = sum(each["calls"] for each in part["times"])
    added = max(0.0, part["step_s"] - part["plain_step_s"]) * part["coverage"] / max(1.0, calls)
    for group in node_groups(part["times"]):
        if group.seconds > 0:
            nodes = [node_work(part["graph"].get(name, {}), group.direction, width) for name in group.nodes]
            yield TimedNodes(nodes, max(LEAST_LEFT * group.seconds, group.seconds - added * group.calls))
