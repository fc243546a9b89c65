"""The time of every node of a network within a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from d5suite.errors import D5Error
from d5suite.instruments.clock import now
from d5suite.levels.contract import ContractError
from d5suite.levels.profile import SLACK, Kernel, LayerTime, Profile, check_profile
from d5suite.measurements.tables import Column
from d5suite.passes.base import Pass, PassError, PreparedStep

BUDGET_S = 2.0
"""About how long the profiled steps take together."""

FEWEST, MOST = 3, 20
"""Profiled steps."""

PROFILES = 3
"""Profiles that the steps are divided among. A node's time is the median of theirs; their range
says which of two nodes, or of two backends, cannot be told apart."""

_SECONDS = {"type": "number", "minimum": 0}
_COUNT = {"type": ["integer", "null"], "minimum": 0}


class Layers(Pass):
    """Layer times, forward and backward, from the framework's own profiler.

    The steps run unprofiled before and after each profile, so that the record says how much the
    profiler slows them down.
    """

    name = "layers"
    needs = ("profile",)
    schema: ClassVar[Mapping[str, Any]] = {
        "description": "where the time of a step goes, in a pass of its own under the framework's profiler; per "
        "step, in wall time",
        "required": [
            "times",
            "graph",
            "other",
            "step_s",
            "plain_step_s",
            "slowdown",
            "coverage",
            "left_over_s",
            "method",
        ],
        "properties": {
            "times": {
                "type": "array",
                "description": "of each node, or of nodes that ran as one, per step and direction: seconds, calls, "
                "and seconds of changing layouts (reorder_s)",
                "items": {
                    "type": "object",
                    "required": ["nodes", "direction", "seconds", "calls"],
                    "properties": {
                        "nodes": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "string"},
                            "description": "names of the neutral graph; several were fused, and ran as one",
                        },
                        "direction": {"enum": ["forward", "backward"]},
                        "seconds": {**_SECONDS, "description": "the median of the profiles"},
                        "range": {
                            "type": "array",
                            "description": "the smallest and the largest of the profiles",
                            "items": _SECONDS,
                            "minItems": 2,
                            "maxItems": 2,
                        },
                        "calls": _SECONDS,
                        "kernels": {
                            "type": "array",
                            "description": "a library's kernels, such as oneDNN's, from a step of their own",
                            "items": {
                                "type": "object",
                                "required": ["primitive", "implementation", "seconds", "calls"],
                                "properties": {
                                    "primitive": {"type": "string"},
                                    "implementation": {"type": "string"},
                                    "layouts": {"type": "string"},
                                    "seconds": _SECONDS,
                                    "calls": _SECONDS,
                                },
                            },
                        },
                        "reorders": {**_SECONDS, "description": "changes of layout per step"},
                        "reorder_s": _SECONDS,
                    },
                },
            },
            "graph": {
                "type": "object",
                "description": "each node of the network, with its work by d5suite.network.work",
                "additionalProperties": {
                    "type": "object",
                    "required": ["op_type", "stage"],
                    "properties": {
                        "op_type": {"type": "string"},
                        "stage": {"type": "string"},
                        "shape": {"type": "array", "items": {"type": "integer"}},
                        "flops": _COUNT,
                        "backward_flops": _COUNT,
                        "bytes": _COUNT,
                        "backward_bytes": _COUNT,
                    },
                },
            },
            "other": {
                "type": "object",
                "additionalProperties": _SECONDS,
                "description": "seconds of what belongs to no node, by name",
            },
            "steps": {"type": "integer", "minimum": 1, "description": "profiled ones"},
            "step_s": {"type": "number", "exclusiveMinimum": 0, "description": "of a profiled step"},
            "plain_step_s": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "of the same step just before and after, without a profiler",
            },
            "slowdown": {"type": "number", "exclusiveMinimum": 0, "description": "step_s / plain_step_s"},
            "coverage": {"type": "number", "minimum": 0, "description": "the part of step_s that belongs to nodes"},
            "left_over_s": {"type": "number", "description": "of step_s: what no event covers"},
            "dropped": {"type": "integer", "minimum": 0, "description": "events that the profiler lost"},
            "method": {"type": "string"},
            "notes": {"type": "array", "items": {"type": "string"}},
        },
    }
    columns: ClassVar[Sequence[Column]] = (Column("in nodes", "coverage", "percent"),)

    def problem(self, prepared: PreparedStep) -> str:
        """See `Pass.problem`."""
        if not prepared.measurement.takes_layers:
            return "not taken for this measurement"
        if prepared.workload.job.ranks > 1:
            return "not taken of several ranks"
        return super().problem(prepared)

    def take(self, prepared: PreparedStep) -> dict[str, Any]:
        """See `Pass.take`."""
        workload, step = prepared.workload, prepared.step
        executor = workload.executor  # type: ignore[attr-defined]
        trainer = workload.trainer if prepared.measurement.level == 2 else None  # type: ignore[attr-defined]
        took: list[float] = []

        def once() -> None:
            start = now()
            step.run()
            step.synchronize()
            took.append(now() - start)

        def several(count: int) -> list[float]:
            for _ in range(count):
                once()
            return took[-count:]

        backend = workload.backend
        with step, TemporaryDirectory(prefix="d5suite-layers-") as folder:
            several(2)
            steps = min(MOST, max(FEWEST, round(BUDGET_S / took[-1])))
            each = -(-steps // PROFILES)
            plain, profiles = several(each), []
            try:
                profile = backend.load("profile").profile
                for _ in range(PROFILES):
                    took.clear()
                    profiles.append(profile(executor, once, each, Path(folder), trainer))
                    check_profile(backend.name, profiles[-1], executor.network)
                    check_step(backend.name, profiles[-1], took)
                    several(1)
                    plain += several(each)
            except D5Error as error:
                raise PassError(str(error).partition("\n")[0]) from error
        facts = workload.layer_facts  # type: ignore[attr-defined]
        graph = {name: asdict(each) for name, each in facts.items()}
        return part_of(profiles, PROFILES * each, statistics.median(plain), graph)


def check_step(backend: str, found: Profile, took: Sequence[float]) -> None:
    """Raise `ContractError` unless the profiled step took about as long as the steps that ran."""
    shortest, longest = min(took, default=0.0), max(took, default=0.0)
    if not (1 - SLACK) * shortest <= found.step_seconds <= (1 + SLACK) * longest:
        raise ContractError(
            backend,
            "profile.times",
            f"the profiled step is said to have taken {found.step_seconds * 1e3:.4g} ms, and the {len(took)} steps "
            f"that ran took {shortest * 1e3:.4g} to {longest * 1e3:.4g} ms",
        )


def part_of(profiles: Sequence[Profile], steps: int, plain_s: float, graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return profiles of one step as the record holds them: the median of each time, and its range.

    A time that a profile lacks is 0 in it.
    """
    layers: dict[tuple[tuple[str, ...], str], list[LayerTime]] = {}
    for each in (layer for found in profiles for layer in found.layers):
        layers.setdefault((each.nodes, each.direction), []).append(each)
    names = dict.fromkeys(name for found in profiles for name in found.other)
    other = {name: statistics.median(found.other.get(name, 0.0) for found in profiles) for name in names}
    step_s = statistics.median(found.step_seconds for found in profiles)
    times = [_time(own, len(profiles)) for own in layers.values()]
    node_s = sum(each["seconds"] for each in times)
    return {
        "times": times,
        "graph": graph,
        "other": {name: seconds for name, seconds in other.items() if seconds},
        "steps": steps,
        "step_s": step_s,
        "plain_step_s": plain_s,
        "slowdown": step_s / plain_s,
        "coverage": node_s / step_s,
        "left_over_s": step_s - node_s - sum(other.values()),
        "dropped": sum(found.dropped for found in profiles),
        "method": profiles[-1].method,
        "notes": list(profiles[-1].notes),
    }


def _time(found: Sequence[LayerTime], profiles: int) -> dict[str, Any]:
    layer = found[-1]
    seconds = [each.seconds for each in found] + [0.0] * (profiles - len(found))
    reorders = [each for each in layer.kernels if each.reorder]
    made: dict[str, Any] = {
        "nodes": list(layer.nodes),
        "direction": layer.direction,
        "seconds": statistics.median(seconds),
        "range": [min(seconds), max(seconds)],
        "calls": layer.calls,
    }
    kernels = _kernels(each for each in layer.kernels if not each.reorder)
    if kernels:
        made["kernels"] = kernels
    if reorders:
        made["reorders"] = sum(each.calls for each in reorders)
        made["reorder_s"] = sum(each.seconds for each in reorders)
    return made


def _kernels(kernels: Iterable[Kernel]) -> list[dict[str, Any]]:
    return [{key: value for key, value in asdict(each).items() if key != "reorder"} for each in kernels]
