"""The time of every node of a network within a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from d5suite.errors import D5Error
from d5suite.instruments.clock import now
from d5suite.levels.contract import ContractError
from d5suite.levels.profile import DIRECTIONS, SLACK, Kernel, Kernels, LayerTime, Profile, check_profile
from d5suite.measurements import schemas as s
from d5suite.measurements.tables import Column
from d5suite.passes.base import Pass, PassError, PreparedStep

BUDGET_S = 2.0
"""Approximate time of all profiled steps together, in seconds."""

FEWEST, MOST = 3, 20
"""Fewest and most profiled steps, before rounding up to whole steps per profile."""

PROFILES = 3
"""Number of profiles that share the steps. A node's time is the median over the profiles; the range
shows which nodes, or backends, cannot be told apart."""

_SECONDS, _COUNT = s.number(minimum=0), s.or_null(s.integer(minimum=0))

_KERNEL = s.mapping(
    {
        "primitive": s.text(),
        "implementation": s.text(),
        "layouts": s.text(),
        "seconds": _SECONDS,
        "calls": _SECONDS,
        "reorder": s.boolean(),
    },
    optional=["layouts", "reorder"],
)

_TIME = s.mapping(
    {
        "nodes": s.array(s.text(), "names of the neutral graph; several were fused, and ran as one", minItems=1),
        "direction": s.choice(*DIRECTIONS),
        "seconds": s.number("the median of the profiles", minimum=0),
        "range": s.pair("the smallest and the largest of the profiles", minimum=0),
        "calls": _SECONDS,
        "kernels": s.array(_KERNEL, "a library's kernels, such as oneDNN's, from a step of their own"),
        "reorders": s.number("changes of layout per step", minimum=0),
        "reorder_s": _SECONDS,
    },
    optional=["range", "kernels", "reorders", "reorder_s"],
)

_WORK = ("flops", "backward_flops", "bytes", "backward_bytes")

_NODE = s.mapping(
    {"op_type": s.text(), "stage": s.text(), "shape": s.array(s.integer()), **dict.fromkeys(_WORK, _COUNT)},
    optional=["shape", *_WORK],
)

SCHEMA = s.record(
    {
        "times": s.array(
            _TIME,
            "of each node, or of nodes that ran as one, per step and direction: seconds, calls, and seconds of "
            "changing layouts (reorder_s)",
        ),
        "graph": s.by_name(_NODE, "each node of the network, with its work by d5suite.network.work"),
        "other": s.by_name(_SECONDS, "seconds of what belongs to no node, by name"),
        "kernels_apart": s.array(
            _KERNEL, "the library's kernels that could not be joined to a node, or belong to none"
        ),
        "steps": s.integer("profiled ones", minimum=1),
        "step_s": s.number("of a profiled step", exclusiveMinimum=0),
        "plain_step_s": s.number("of the same step just before and after, without a profiler", exclusiveMinimum=0),
        "slowdown": s.number("step_s / plain_step_s", exclusiveMinimum=0),
        "coverage": s.number("the part of step_s that belongs to nodes", minimum=0),
        "left_over_s": s.number("of step_s: what no event covers"),
        "dropped": s.integer("events that the profiler lost", minimum=0),
        "method": s.text(),
        "notes": s.array(s.text()),
    },
    optional=["kernels_apart", "steps", "dropped", "notes"],
)


class Layers(Pass):
    """Layer times, forward and backward, from the framework's own profiler.

    Steps without the profiler run before and after every profile, so that the record shows the
    slowdown by the profiler.
    """

    name = "layers"
    needs = ("profile",)
    schema: ClassVar[Mapping[str, Any]] = SCHEMA | {
        "description": "where the time of a step goes, in a pass of its own under the framework's profiler; per "
        "step, in wall time"
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
            folders = [Path(folder) / str(number) for number in range(PROFILES + 1)]
            try:
                module = backend.load("profile")
                for own in folders[1:]:
                    own.mkdir()
                    took.clear()
                    profiles.append(module.profile(executor, once, each, own, trainer))
                    check_profile(backend.name, profiles[-1], executor.network)
                    check_step(backend.name, profiles[-1], took)
                    several(1)
                    plain += several(each)
            except D5Error as error:
                raise PassError(str(error).partition("\n")[0]) from error
            kernels = _kernels_of(module, executor, once, step.feed, profiles, folders[0])  # type: ignore[attr-defined]
        facts = workload.layer_facts  # type: ignore[attr-defined]
        graph = {name: asdict(each) for name, each in facts.items()}
        return part_of(profiles, PROFILES * each, statistics.median(plain), graph, kernels)


def check_step(backend: str, found: Profile, took: Sequence[float]) -> None:
    """Raise `ContractError` if a profile's step time does not fit the steps that ran."""
    shortest, longest = min(took, default=0.0), max(took, default=0.0)
    if not (1 - SLACK) * shortest <= found.step_seconds <= (1 + SLACK) * longest:
        raise ContractError(
            backend,
            "profile.times",
            f"the profiled step is said to have taken {found.step_seconds * 1e3:.4g} ms, and the {len(took)} steps "
            f"that ran took {shortest * 1e3:.4g} to {longest * 1e3:.4g} ms",
        )


def _kernels_of(
    module: Any, executor: Any, once: Callable[[], None], feed: Any, profiles: Sequence[Profile], folder: Path
) -> Kernels:
    """Return the kernels of a library in one further step, if the adapter reports kernels."""
    take = getattr(module, "kernels", None)
    if take is None:
        return Kernels()
    backward = any(layer.direction == DIRECTIONS[1] for found in profiles for layer in found.layers)
    folder.mkdir()
    try:
        found: Kernels = take(executor, once, feed, backward, folder)
    except D5Error as error:
        return Kernels(notes=(str(error).partition("\n")[0],))
    return found


def part_of(
    profiles: Sequence[Profile],
    steps: int,
    plain_s: float,
    graph: Mapping[str, Any],
    kernels: Kernels = Kernels(),  # noqa: B008  immutable
) -> dict[str, Any]:
    """Return profiles of one step as the record holds them: median and range of every time.

    If a profile lacks a time, it counts as 0. Kernels of nodes that have no time are listed apart.
    """
    layers: dict[tuple[tuple[str, ...], str], list[LayerTime]] = {}
    for each in (layer for found in profiles for layer in found.layers):
        layers.setdefault((each.nodes, each.direction), []).append(each)
    names = dict.fromkeys(name for found in profiles for name in found.other)
    other = {name: statistics.median(found.other.get(name, 0.0) for found in profiles) for name in names}
    step_s = statistics.median(found.step_seconds for found in profiles)
    times = [_time(own, len(profiles), kernels.of.get(key, ())) for key, own in layers.items()]
    apart = [*kernels.apart, *(kernel for key, own in kernels.of.items() if key not in layers for kernel in own)]
    node_s = sum(each["seconds"] for each in times)
    dropped = sum(found.dropped for found in profiles)
    lost = [f"the profiler lost {dropped:,} events: times of some nodes are too short"] if dropped else []
    return {
        "times": times,
        "graph": graph,
        "other": {name: seconds for name, seconds in other.items() if seconds},
        **({"kernels_apart": [asdict(each) for each in apart]} if apart else {}),
        "steps": steps,
        "step_s": step_s,
        "plain_step_s": plain_s,
        "slowdown": step_s / plain_s,
        "coverage": node_s / step_s,
        "left_over_s": step_s - node_s - sum(other.values()),
        "dropped": dropped,
        "method": profiles[-1].method,
        "notes": [*profiles[-1].notes, *kernels.notes, *lost],
    }


def _time(found: Sequence[LayerTime], profiles: int, kernels: Sequence[Kernel]) -> dict[str, Any]:
    layer = found[-1]
    seconds = [each.seconds for each in found] + [0.0] * (profiles - len(found))
    reorders = [each for each in kernels if each.reorder]
    made: dict[str, Any] = {
        "nodes": list(layer.nodes),
        "direction": layer.direction,
        "seconds": statistics.median(seconds),
        "range": [min(seconds), max(seconds)],
        "calls": layer.calls,
    }
    if len(kernels) > len(reorders):
        made["kernels"] = [_told(each) for each in kernels if not each.reorder]
    if reorders:
        made["reorders"] = sum(each.calls for each in reorders)
        made["reorder_s"] = sum(each.seconds for each in reorders)
    return made


def _told(kernel: Kernel) -> dict[str, Any]:
    return {key: value for key, value in asdict(kernel).items() if key != "reorder"}
