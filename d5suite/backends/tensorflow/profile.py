"""Layer times in TensorFlow: its own profiler, whose events have the scopes of nodes.

Imports TensorFlow, `d5suite.errors`, `d5suite.levels` and this adapter's `network` and `runtime`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop
from tensorflow.python.eager import context as eager
from tensorflow.python.framework import op_callbacks
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from d5suite.backends.tensorflow.network import Executor
from d5suite.backends.tensorflow.runtime import configure
from d5suite.errors import BackendError
from d5suite.levels import xplane
from d5suite.levels.attribution import Interval, Owner, divided, innermost, labelled
from d5suite.levels.network import Native
from d5suite.levels.onednn import Repeated, kernels_by_time, kernels_of, step_begins
from d5suite.levels.profile import OPTIMIZER, OTHER_OPERATORS, Kernels, Profile
from d5suite.levels.training import Trainer


def profile(
    executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None = None
) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    if executor.device != "cpu":
        raise BackendError("layer times of TensorFlow are taken on the CPU only")
    found = _recorded(executor, step, steps, folder)
    layers, other = divided(executor.network, found.intervals, found.owners, steps)
    method = _METHODS.get(executor.mode, _METHODS["graph"])
    warnings = (*found.space.errors, *found.space.warnings)
    notes = (*warnings, *((xplane.UNNAMED,) if executor.mode == "xla" else ()))
    return Profile(layers, other, found.seconds, method, xplane.dropped(warnings), notes)


class _Recorded(NamedTuple):
    """Some profiled steps.

    Intervals are in nanoseconds on the profiler's clock, on which ``begin_ns`` is the start of
    1970.
    """

    intervals: list[Interval]
    owners: dict[str, Owner]
    seconds: float
    space: Any
    begin_ns: float


def _recorded(executor: Executor, step: Callable[[], None], steps: int, folder: Path) -> _Recorded:
    """Profile some steps."""
    options = tf.profiler.experimental.ProfilerOptions(2, python_tracer_level=0, device_tracer_level=0)
    with _annotated(executor) as forget:
        step()
        forget()
        tf.profiler.experimental.start(str(folder), options)
        try:
            epoch = time.time_ns()
            with tf.profiler.experimental.Trace(_BEGIN):
                pass
            begin = perf_counter()
            for _ in range(steps):
                step()
                forget()
            seconds = (perf_counter() - begin) / steps
        finally:
            tf.profiler.experimental.stop()
    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    found = xplane.lines(space)
    began = next((each.start - epoch for line in found for each, _ in line if each.what == _BEGIN), 0.0)
    if executor.mode == "eager":
        intervals, owners = _annotations(found)
    else:
        intervals, owners = xplane.kernel_runs(found, xplane.function_graph(found, eager.context()))
        compiled, modules = xplane.instructions(found)
        intervals, owners = [*intervals, *compiled], owners | xplane.program_owners(_programs(space), modules)
    return _Recorded(intervals, owners, seconds, space, began)


_BEGIN = "d5suite begins"


def kernels(executor: Executor, step: Callable[[], None], feed: Native, backward: bool, folder: Path) -> Kernels:
    """Return oneDNN's kernels in a step; see `d5suite.levels.profile`.

    TensorFlow has no switch for oneDNN's verbose output, so the step runs in a process of its own,
    one kernel after another. Each line of the output is joined to the kernel that ran at its time.
    """
    arrays = {name: array.astype(executor.network.dtypes[name]) for name, array in executor.fetch(feed).items()}
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    asked = Repeated(executor.network, executor.mode, executor.precision, threads, backward, arrays)
    told = asked.lines(__name__, folder)
    intervals = [Interval(*each) for each in json.loads((folder / _INTERVALS).read_text())]
    owners = {what: Owner(tuple(nodes), *more) for what, (nodes, *more) in json.loads((folder / _OWNERS).read_text())}
    return kernels_of(executor.network, kernels_by_time(told, intervals), owners)


def _repeat(folder: Path) -> None:
    """Make a step for `kernels`; write when TensorFlow's kernels ran, and the kernels' owners."""
    asked = Repeated.given()
    configure(threads=asked.threads, seed=0, device="cpu")
    tf.config.threading.set_inter_op_parallelism_threads(1)
    executor = Executor(asked.network, mode=asked.mode, device="cpu", precision=asked.precision)
    call = executor.forward_backward if asked.backward else executor.forward
    feed = executor.feed(asked.arrays)

    def step() -> None:
        step_begins()
        call(feed)
        executor.synchronize()

    step()
    found = _recorded(executor, step, 1, folder)
    shifted = [(each.start - found.begin_ns, each.end - found.begin_ns, each.what) for each in found.intervals]
    (folder / _INTERVALS).write_text(json.dumps(shifted))
    (folder / _OWNERS).write_text(json.dumps(list(found.owners.items())))


_INTERVALS, _OWNERS = "intervals.json", "owners.json"


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

    A gradient function is called with the operator's tensors, which identify the node.
    """

    def __init__(self) -> None:
        self._current = ""
        self._tensors: dict[tuple[str, int], tuple[str, Any]] = {}  # ids are unique while the tensors are held

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
        """Note the node of an operator's tensors; TensorFlow calls this for each operator."""
        if self._current:
            held = self._current
            self._tensors.update({(op_type, id(tensor)): (held, tensor) for tensor in (*inputs, *outputs)})

    def gradient(self, op_name: str, attributes: Any, count: int, inputs: Any, outputs: Any, *more: Any) -> Any:
        """Run an operator's gradient function, marked with the operator's node."""
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


def _programs(space: Any) -> Iterator[tuple[str, xplane.CompiledProgram]]:
    """Yield the compiled programs that a profile contains."""
    for plane in space.planes:
        for metadata in plane.event_metadata.values():
            for stat in metadata.stats:
                if plane.stat_metadata[stat.metadata_id].name == "Hlo Proto":
                    proto = hlo_pb2.HloProto.FromString(stat.bytes_value)
                    yield proto.hlo_module.name, xplane.program(proto.hlo_module)


def _annotations(found: Iterable[xplane.Line]) -> tuple[list[Interval], dict[str, Owner]]:
    """Return the annotations of nodes, the operators outside annotations, and their owners."""
    intervals: list[Interval] = []
    owners: dict[str, Owner] = {}
    for line in found:
        marked = [each for each, _ in line if labelled(each.what) or each.what == OPTIMIZER]
        operators = [each for each, _ in line if each.what.startswith("EagerLocalExecute: ")]
        inside = {id(part) for part in operators if any(m.start <= part.start and part.end <= m.end for m in marked)}
        intervals += innermost([*marked, *(each for each in operators if id(each) not in inside)])
    for what in {each.what for each in intervals}:
        other = OPTIMIZER if what == OPTIMIZER else OTHER_OPERATORS
        owners[what] = Owner(tuple(sorted(set(labelled(what)))), xplane.is_backward(what), other)
    return intervals, owners


if __name__ == "__main__":
    _repeat(Path(sys.argv[1]))
