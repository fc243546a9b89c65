"""Layer times on ONNX Runtime: its own profiler, on a session like the timed one.

The session writes the graph that it runs after its optimizations. One of that graph's nodes stands
for all neutral nodes between its inputs and its output. Imports onnxruntime, ONNX, `d5suite.levels`
and this adapter's `network`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

from d5suite.backends.onnxruntime.network import Executor
from d5suite.levels.profile import OTHER_OPERATORS, REORDERS, LayerTime, Profile, seconds_per_step
from d5suite.levels.training import Trainer
from d5suite.network import Network, Node

_METHOD = "onnxruntime's profiler: wall time of each kernel of its optimized graph, which it runs one after another"

_BLOCKED = "_nchwc"
"""Suffix that onnxruntime gives to names of nodes whose channels it lays out in blocks."""

_KERNEL = "_kernel_time"

_REORDERS = ("ReorderInput", "ReorderOutput")


def profile(executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    optimized = folder / "optimized.onnx"
    with executor.profiled(folder / "profile", optimized) as session:
        step()
        step_seconds = seconds_per_step(step, steps)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    groups = _groups(executor.network, onnx.load(optimized, load_external_data=False).graph)
    begin = sorted(event["ts"] for event in events if event["name"] == "model_run")[-steps]
    found: dict[tuple[str, ...], tuple[float, int]] = {}
    other: dict[str, float] = {}
    for event in events:
        name = event["name"]
        if event["cat"] != "Node" or not name.endswith(_KERNEL) or event["ts"] < begin:
            continue
        nodes, seconds = groups.get(name.removesuffix(_KERNEL), ()), event["dur"] * 1e-6
        if nodes:
            before, calls = found.get(nodes, (0.0, 0))
            found[nodes] = before + seconds, calls + 1
        else:
            kind = REORDERS if event["args"].get("op_name") in _REORDERS else OTHER_OPERATORS
            other[kind] = other.get(kind, 0.0) + seconds / steps
    layers = tuple(
        LayerTime(nodes, "forward", seconds / steps, calls / steps) for nodes, (seconds, calls) in found.items()
    )
    return Profile(layers, other, step_seconds, _METHOD)


def _groups(network: Network, optimized: Any) -> dict[str, tuple[str, ...]]:
    """Return the neutral nodes that each optimized node stands for, by its name."""
    makers = {output: node for node in network.nodes for output in node.outputs if output}
    names = {node.name: node for node in network.nodes}
    same: dict[str, str] = {}  # the neutral tensor that a new one holds in another layout
    for node in optimized.node:
        if node.op_type == "ReorderInput":
            same[node.output[0]] = same.get(node.input[0], node.input[0])
        elif node.output[0] not in makers:
            origin = names.get(node.name.removesuffix(_BLOCKED))
            if origin is not None:
                same[node.output[0]] = _last(network, origin, node).outputs[0]
    made = {same.get(name, name) for node in optimized.node for name in node.output if name}
    order = {node.name: number for number, node in enumerate(network.nodes)}
    found = {}
    for node in optimized.node:
        if node.op_type in _REORDERS:
            continue
        read = {same.get(name, name) for name in node.input}
        group = _between(makers, read | made, [same.get(name, name) for name in node.output if name])
        found[node.name] = tuple(sorted(group, key=order.__getitem__))
    return found


def _last(network: Network, origin: Node, optimized: Any) -> Node:
    """Return the last of the nodes that a convolution with blocked channels stands for.

    It keeps its name when an addition, its fourth input, and an activation are fused into it.
    """
    activation = next((each.s.decode() for each in optimized.attribute if each.name == "activation"), "")
    for wanted in (("Add", "Sum") if len(optimized.input) > 3 else (), (activation,) if activation else ()):
        if wanted and origin.op_type not in wanted:
            readers = [each for each in network.nodes if origin.outputs[0] in each.inputs and each.op_type in wanted]
            origin = readers[0] if len(readers) == 1 else origin
    return origin


def _between(makers: Mapping[str, Any], known: set[str], outputs: list[str]) -> set[str]:
    """Return the nodes that compute the outputs, back to tensors that are known."""
    found: set[str] = set()
    waiting = [name for name in outputs if name in makers]
    while waiting:
        node = makers[waiting.pop()]
        if node.name not in found:
            found.add(node.name)
            waiting += [name for name in node.inputs if name in makers and name not in known]
    return found
