"""Layer times in TensorFlow: its own profiler, whose events have the scopes of nodes.

Imports TensorFlow, `d5suite.errors`, `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop
from tensorflow.python.eager import context as eager
from tensorflow.python.framework import op_callbacks
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from d5suite.backends.tensorflow.network import Executor
from d5suite.errors import BackendError
from d5suite.levels.attribution import Interval, Owner, divided, innermost, labelled
from d5suite.levels.profile import OPTIMIZER, OTHER_OPERATORS, Profile
from d5suite.levels.training import Trainer
from d5suite.levels.xplane import (
    UNNAMED,
    HloGraph,
    Line,
    Program,
    dropped,
    instructions,
    is_backward,
    kernels,
    lines,
    program,
    program_owners,
)

_FUNCTION = re.compile(r"^(?:EagerLocalExecute: )?(__\w+?_\d+)(?::\w+)?$")
"""The event of a traced function."""


def profile(
    executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None = None
) -> Profile:
    """Return where the time of some steps went; see `d5suite.levels.profile`."""
    if executor.device != "cpu":
        raise BackendError("layer times of TensorFlow are taken on the CPU only")
    options = tf.profiler.experimental.ProfilerOptions(2, python_tracer_level=0, device_tracer_level=0)
    with _annotated(executor) as forget:
        step()
        forget()
        tf.profiler.experimental.start(str(folder), options)
        try:
            begin = perf_counter()
            for _ in range(steps):
                step()
                forget()
            seconds = (perf_counter() - begin) / steps
        finally:
            tf.profiler.experimental.stop()
    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    found = lines(space)
    if executor.mode == "eager":
        intervals, owners = _annotations(found)
    else:
        intervals, owners = kernels(found, _graph(found))
        compiled, modules = instructions(found)
        intervals, owners = [*intervals, *compiled], owners | program_owners(_programs(space), modules)
    layers, other = divided(executor.network, intervals, owners, steps)
    method = _METHODS.get(executor.mode, _METHODS["graph"])
    notes = (*space.errors, *space.warnings, *((UNNAMED,) if executor.mode == "xla" else ()))
    return Profile(layers, other, seconds, method, dropped(space), notes)


@contextmanager
def _annotated(executor: Executor) -> Iterator[Callable[[], None]]:
    """In mode ``eager``, mark the calls of each node, forward and backward, for the profiler.

    Yields a function to call after each step, which frees the tensors of the step.
    """
    if executor.mode != "eager":
        yield lambda: None
        return
    marks = _Marks()
    before, executor.scope = executor.scope, marks.scope
    op_callbacks.add_op_callback(marks.remember)
    pywrap_tfe.TFE_Py_RegisterGradientFunction(marks.gradient)
    try:
        yield marks.forget
    finally:
        pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)
        op_callbacks.remove_op_callback(marks.remember)
        executor.scope = before


class _Marks:
    """Annotations around nodes and their gradient functions, which TensorFlow's tape does not name.

    A gradient function is given the operator's tensors, which tell the node.
    """

    def __init__(self) -> None:
        self._current = ""
        self._tensors: dict[tuple[str, int], tuple[str, Any]] = {}  # a tensor's id is its own while it is held

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Mark what runs in a node or the update."""
        self._current = name
        with tf.profiler.experimental.Trace(name):
            yield
        self._current = ""

    def forget(self) -> None:
        """Free the tensors of a step."""
        self._tensors.clear()

    def remember(self, op_type: str, inputs: Any, attrs: Any, outputs: Any, *_: Any, **__: Any) -> None:
        """Note whose tensors these are; TensorFlow calls it for each operator."""
        if self._current:
            held = self._current
            self._tensors.update({(op_type, id(tensor)): (held, tensor) for tensor in (*inputs, *outputs)})

    def gradient(self, op_name: str, attributes: Any, count: int, inputs: Any, outputs: Any, *more: Any) -> Any:
        """Run an operator's gradient function, marked as its node's."""
        keys = ((op_name, id(tensor)) for tensor in (*(outputs or ()), *(inputs or ())))
        name = next((self._tensors[key][0] for key in keys if key in self._tensors), "")
        with tf.profiler.experimental.Trace(f"gradient_tape/{name}"):
            return backprop._gradient_function(op_name, attributes, count, inputs, outputs, *more)


_METHODS = {
    "graph": "TensorFlow's profiler: wall time of each kernel; where two threads run kernels, each counts half",
    "xla": "TensorFlow's profiler: wall time of each instruction of XLA's program, until its threads have finished; "
    "where several run, each counts its part",
    "eager": "TensorFlow's profiler: wall time of each node's Python calls and of its gradient functions",
}


def _graph(found: Iterable[Line]) -> HloGraph:
    """Return the operations of the functions that ran, before TensorFlow fused them."""
    graph: dict[str, tuple[str, list[str]]] = {}
    waiting = [match.group(1) for line in found for each, _ in line if (match := _FUNCTION.match(each.what))]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen or not eager.context().has_function(name):
            continue
        seen.add(name)
        for node in eager.context().get_function_def(name).node_def:
            graph[node.name] = node.op, [each.partition(":")[0] for each in node.input if not each.startswith("^")]
            waiting += [value.func.name for value in node.attr.values() if value.func.name]
    return graph


def _programs(space: Any) -> Iterator[tuple[str, Program]]:
    """Yield the compiled programs that a profile contains."""
    for plane in space.planes:
        for metadata in plane.event_metadata.values():
            for stat in metadata.stats:
                if plane.stat_metadata[stat.metadata_id].name == "Hlo Proto":
                    proto = hlo_pb2.HloProto.FromString(stat.bytes_value)
                    yield proto.hlo_module.name, program(proto.hlo_module)


def _annotations(found: Iterable[Line]) -> tuple[list[Interval], dict[str, Owner]]:
    """Return the annotations of nodes and the operators outside of them, and their owners."""
    intervals: list[Interval] = []
    owners: dict[str, Owner] = {}
    for line in found:
        marked = [each for each, _ in line if labelled(each.what) or each.what == OPTIMIZER]
        operators = [each for each, _ in line if each.what.startswith("EagerLocalExecute: ")]
        inside = {id(part) for part in operators if any(m.start <= part.start and part.end <= m.end for m in marked)}
        intervals += innermost([*marked, *(each for each in operators if id(each) not in inside)])
    for what in {each.what for each in intervals}:
        other = OPTIMIZER if what == OPTIMIZER else OTHER_OPERATORS
        owners[what] = Owner(tuple(sorted(set(labelled(what)))), is_backward(what), other)
    return intervals, owners
