"""Layer times on deep500: a clock around each node's operator, forward and backward.

Imports deep500 (through `repairs`), `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from time import perf_counter
from typing import Any

from d5suite.backends.deep500.network import Executor
from d5suite.backends.deep500.repairs import deep500
from d5suite.levels.profile import OPTIMIZER, LayerTime, Profile, seconds_per_step
from d5suite.levels.training import Trainer

_METHOD = "a clock around each node's Python operator: wall time, BLAS threads included"

_GRAPH = "deep500's graph"
"""Key in `Profile.other`: a pass's time between operators, when the graph looks up tensors, and
adds up and stores gradients."""

_Times = dict[tuple[str, str], list[float]]
"""Durations by node and direction."""


class _Timed(deep500.CustomPythonOp):
    """An operator whose calls are timed."""

    def __init__(self, operator: Any, name: str, times: _Times) -> None:
        self.__dict__.update(operator.__dict__)
        self._operator, self._name, self._times = operator, name, times

    def forward(self, *inputs: Any) -> Any:
        """Run the operator forward."""
        return self._clocked("forward", self._operator.forward, *inputs)

    def backward(self, *arguments: Any) -> Any:
        """Run the operator backward."""
        return self._clocked("backward", self._operator.backward, *arguments)

    def _clocked(self, direction: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter()
        result = call(*arguments)
        self._times.setdefault((self._name, direction), []).append(perf_counter() - start)
        return result


def profile(executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    times: _Times = {}
    passes: list[float] = []
    with contextlib.ExitStack() as changed:
        graphs = {"inference": executor.inference, "inference_and_backprop": executor.training}
        for call, graph in graphs.items():
            if graph is not None:
                changed.enter_context(_operators_timed(graph.network, times))
                changed.enter_context(_passes_timed(graph, call, passes))
        step_seconds = seconds_per_step(step, steps)
    layers = tuple(
        LayerTime((name,), direction, sum(each) / steps, len(each) / steps) for (name, direction), each in times.items()
    )
    inside = sum(passes) / steps
    other = {_GRAPH: max(0.0, inside - sum(each.seconds for each in layers))}
    if trainer is not None:
        other[OPTIMIZER] = step_seconds - inside
    return Profile(layers, other, step_seconds, _METHOD)


@contextlib.contextmanager
def _operators_timed(network: Any, times: _Times) -> Iterator[None]:
    """Time every operator of a reference network, its losses included."""
    nodes: dict[str, MutableMapping[str, Any]] = {name: network.graph.nodes[name] for name in network.graph.nodes}
    own = {name: node["custom_op"] for name, node in nodes.items()}
    losses = dict(network.losses)
    for name, node in nodes.items():
        node["custom_op"] = _Timed(own[name], name, times)
    for output, (operator, record, name) in losses.items():
        network.losses[output] = (_Timed(operator, name, times), record, name)
    try:
        yield
    finally:
        for name, node in nodes.items():
            node["custom_op"] = own[name]
        network.losses.update(losses)


@contextlib.contextmanager
def _passes_timed(graph: Any, call: str, passes: list[float]) -> Iterator[None]:
    """Time a graph's passes; the rest of a training step belongs to the optimizer."""
    own = getattr(graph, call)

    def timed(*arguments: Any) -> Any:
        start = perf_counter()
        result = own(*arguments)
        passes.append(perf_counter() - start)
        return result

    setattr(graph, call, timed)
    try:
        yield
    finally:
        delattr(graph, call)
