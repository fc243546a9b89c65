"""Layer times on MXNet: its engine's profiler, while a cached graph runs operator by operator.

MXNet's profiler knows only an operator's type, and a cached graph runs as a few events of many
operators each. So the graph is built again for the profile, with memory as before but without
bulks: then MXNet calls back after each operator, with its name, and the callback waits for it.
Imports MXNet, `d5suite.levels` and the adapter's `network` and `runtime`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.backends.mxnet.network import Executor
from d5suite.backends.mxnet.runtime import configure, mx
from d5suite.levels.attribution import Interval, Owner, divided, labelled
from d5suite.levels.network import Native
from d5suite.levels.onednn import Repeated, kernels_by_owner, kernels_of, mark, step_begins
from d5suite.levels.profile import OPTIMIZER, OTHER_OPERATORS, Kernels, Profile, seconds_per_step
from d5suite.levels.training import Trainer

_METHOD = (
    "MXNet's engine profiler: wall time of each operator of the cached graph, in the memory of the mode, one by one "
    "and without bulks"
)
_OPERATOR_BY_OPERATOR = (
    "MXNet's engine profiler: wall time of each operator of the same block as a cached graph that runs operator by "
    "operator, because MXNet names no operators outside of graphs"
)

_NO_OPERATORS = ("DeleteVariable", "SetValueOp", "CopyCPU2CPU", "ResourceParallelRandomSetSeed")
"""The engine's own events."""

_BETWEEN = "waiting between operators"
"""Key in `Profile.other`: time between operators, while MXNet calls back, waits, and starts the
next one. Only profiled steps have it."""

_BACKWARD = "_backward_"
"""Part of the names of operators of the backward pass."""


class _Call(NamedTuple):
    """An operator that has finished: its name, its type and when, in microseconds since 1970."""

    name: str
    op_type: str
    until: float


def profile(
    executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None = None
) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    path = folder / "profile.json"
    mx.profiler.set_config(
        profile_symbolic=True,
        profile_imperative=True,
        profile_memory=False,
        profile_api=False,
        continuous_dump=False,  # by a thread, which MXNet starts once
        filename=str(path),
    )
    with _operator_by_operator(executor) as calls:
        step()
        calls.clear()
        mx.profiler.set_state("run")
        seconds = seconds_per_step(step, steps)
        mx.profiler.set_state("stop")
        parts = _all_fused(executor)
    mx.profiler.dump(finished=True)
    intervals, owners, lost = _joined(_events(path), calls, parts, trained=trainer is not None)
    layers, other = divided(executor.network, intervals, owners, steps)
    method = _OPERATOR_BY_OPERATOR if executor.mode == "imperative" else _METHOD
    return Profile(layers, other, seconds, method, lost)


def kernels(executor: Executor, step: Callable[[], None], feed: Native, backward: bool, folder: Path) -> Kernels:
    """Return oneDNN's kernels in a step; see `d5suite.levels.profile`.

    MXNet has no switch for oneDNN's verbose output, so the step runs in a process of its own,
    operator by operator. Each writes a mark when it has finished.
    """
    arrays = {name: array.astype(executor.network.dtypes[name]) for name, array in executor.fetch(feed).items()}
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    asked = Repeated(executor.network, executor.mode, executor.precision, threads, backward, arrays)
    found = kernels_by_owner(asked.lines(__name__, folder), marks_follow=True)
    parts = json.loads((folder / _PARTS).read_text(encoding="utf-8"))
    owners = {name: Owner(_nodes(name, parts), _BACKWARD in name) for name in found}
    return kernels_of(executor.network, found, owners)


def _repeat(folder: Path) -> None:
    """Make a step for `kernels`, and write which operators each fused operator contains."""
    asked = Repeated.given()
    configure(threads=asked.threads, seed=0, device="cpu")
    executor = Executor(asked.network, mode=asked.mode, device="cpu", precision=asked.precision)
    call = executor.forward_backward if asked.backward else executor.forward
    feed = executor.feed(asked.arrays)
    with _operator_by_operator(executor, mark):
        for _ in range(2):
            executor.synchronize()
            step_begins()
            call(feed)
            executor.synchronize()
        (folder / _PARTS).write_text(json.dumps(_all_fused(executor)), encoding="utf-8")


_PARTS = "parts.json"


@contextmanager
def _operator_by_operator(
    executor: Executor, told: Callable[[str], object] = lambda name: None
) -> Iterator[list[_Call]]:
    """Run the executor's graphs without bulks; yield the list of operators that have finished.

    ``told`` is called with the name of each.
    """
    calls: list[_Call] = []

    def finished(name: bytes, op_type: bytes, _: Any) -> None:
        mx.nd.waitall()
        calls.append(_Call(name.decode(), op_type.decode(), time.time() * 1e6))
        told(name.decode())

    blocks = executor.blocks
    before = [(block._active, block._flags, block._backend) for block in blocks]
    for block, (_, flags, backend) in zip(blocks, before, strict=True):
        static = dict(flags).get("static_alloc", False)
        block.hybridize(backend=backend, static_alloc=static, forward_bulk_size=0, backward_bulk_size=0)
        block.register_op_hook(finished)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hooks miss parts of graphs with static shapes; this one has none
            yield calls
    finally:
        for block, (active, flags, backend) in zip(blocks, before, strict=True):
            block._callback = None
            block._active, block._flags, block._backend = active, flags, backend
            block._clear_cached_op()


def _events(path: Path) -> list[Interval]:
    """Return the engine's runs of operators, in microseconds since 1970, in order."""
    begun: dict[tuple[Any, str], list[float]] = {}
    found = []
    text = path.read_text(encoding="utf-8")
    for event in json.loads(re.sub(r"\[\s*,", "[", text, count=1))["traceEvents"]:  # every file but the first begins so
        if event.get("cat") != "operator" or event["name"] in _NO_OPERATORS:
            continue
        key = event["tid"], event["name"]
        if event["ph"] == "B":
            begun.setdefault(key, []).append(event["ts"])
        elif begun.get(key):
            found.append(Interval(begun[key].pop(), event["ts"], event["name"]))
    return sorted(found)


def _fused(block: Any) -> dict[str, str]:
    """Return, for each fused oneDNN operator of a block, the names of the operators inside."""
    if not block._cached_graph:
        return {}
    nodes = json.loads(block._cached_graph[1].tojson())["nodes"]
    return {
        node["name"]: " ".join(inner["name"] for part in node["subgraphs"] for inner in part["nodes"])
        for node in nodes
        if node.get("subgraphs")
    }


def _all_fused(executor: Executor) -> dict[str, str]:
    return {name: inner for block in executor.blocks for name, inner in _fused(block).items()}


def _nodes(name: str, parts: Mapping[str, str]) -> tuple[int, ...]:
    """Return the nodes that an operator computes, given the parts of fused operators."""
    return tuple(sorted(set(labelled(parts.get(name.rpartition("_")[0], name)))))


def _joined(
    events: list[Interval], calls: list[_Call], parts: Mapping[str, str], *, trained: bool
) -> tuple[list[Interval], dict[str, Owner], int]:
    """Give each event the name of the operator that finished after it.

    Returns
    -------
    intervals : list of Interval
        In nanoseconds.
    owners : dict of str to Owner
    lost : int
        Operators without an event.
    """
    intervals, owners, lost = [], {}, 0
    waiting = iter(events)
    event = next(waiting, None)
    last = first = ""
    ended: float | None = None  # of the graph that runs
    for call in calls:
        if call.name == first or (_BACKWARD in call.name) != (_BACKWARD in first):
            first, ended = call.name, None  # another graph begins, or the same one again
        own = False
        while event is not None and event.end <= call.until:
            own = own or event.what == call.op_type
            if ended is not None and event.start > ended:
                intervals.append(Interval(ended, event.start, _BETWEEN))
            ended = max(event.end, ended or 0.0)
            intervals.append(event._replace(what=call.name if event.what == call.op_type else f" {event.what}"))
            event = next(waiting, None)
        lost += not own and call.name.rpartition("_")[0] != last  # several outputs of one operator
        last = call.name.rpartition("_")[0]
    while event is not None:
        intervals.append(event._replace(what=f" {event.what}"))
        event = next(waiting, None)
    for each in intervals:
        nodes = _nodes(each.what, parts)
        update = trained and not each.what.startswith(" _backward")
        other = _BETWEEN if each.what == _BETWEEN else OPTIMIZER if update else OTHER_OPERATORS
        owners[each.what] = Owner(nodes, _BACKWARD in each.what, other)
    return [Interval(each.start * 1e3, each.end * 1e3, each.what) for each in intervals], owners, lost


if __name__ == "__main__":
    _repeat(Path(sys.argv[1]))
