"""Layer times in Keras: its backend's profiler, and the nodes' scopes in the recorded events.

Imports the chosen backend late, `d5suite.errors`, `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d5suite.backends.keras.network import Executor, ScopedModel
from d5suite.backends.keras.training import Trainer
from d5suite.errors import BackendError
from d5suite.levels import xplane
from d5suite.levels.attribution import Interval, Owner, divided, labelled
from d5suite.levels.profile import OPTIMIZER, OTHER_OPERATORS, Profile, seconds_per_step

_METHODS = {
    "tensorflow": "TensorFlow's profiler: wall time of each kernel; where two threads run kernels, each counts half",
    "jax": "JAX's profiler: wall time of each instruction of XLA's program, until its threads have finished; where "
    "several run, each counts its part",
    "torch": "torch.profiler: wall time of each node's call, and of the backward functions with sequence numbers that "
    "this call gave out",
}


def profile(executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    if executor.device != "cpu":
        raise BackendError("layer times of Keras are taken on the CPU only")
    read = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}[executor.mode]
    intervals, owners, seconds, warnings = read(executor, step, steps, folder, trainer)
    layers, other = divided(executor.network, intervals, owners, steps)
    notes = (*warnings, *((xplane.UNNAMED,) if executor.mode == "jax" else ()))
    return Profile(layers, other, seconds, _METHODS[executor.mode], xplane.dropped(warnings), notes)


_Trainer = Trainer | None

_Read = tuple[list[Interval], dict[str, Owner], float, list[str]]
"""The intervals, their owners, the seconds of a step, and the profiler's warnings."""


def _update(trainer: Trainer | None) -> str:
    """Return the scope of the update: Keras gives it the optimizer's name."""
    return OPTIMIZER if trainer is None else str(trainer.native.name)


def _on_tensorflow(
    executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None
) -> _Read:
    import tensorflow as tf
    from tensorflow.python.eager import context as eager
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    options = tf.profiler.experimental.ProfilerOptions(2, python_tracer_level=0, device_tracer_level=0)
    step()
    tf.profiler.experimental.start(str(folder), options)
    try:
        seconds = seconds_per_step(step, steps)
    finally:
        tf.profiler.experimental.stop()
    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    found = xplane.lines(space)
    graph = xplane.function_graph(found, eager.context())
    return *xplane.kernel_runs(found, graph, _update(trainer)), seconds, [*space.errors, *space.warnings]


def _on_jax(executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: _Trainer) -> _Read:
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    step()
    with jax.profiler.trace(str(folder), profiler_options=options):
        seconds = seconds_per_step(step, steps)
    (path,) = folder.rglob("*.xplane.pb")
    intervals, modules = xplane.instructions(xplane.event_lines(jax.profiler.ProfileData.from_file(str(path)).planes))
    programs = xplane.live_programs(jax.local_devices()[0].client, exact=executor.precision == "fp64")
    owners = xplane.program_owners(programs, modules, _update(trainer))
    return intervals, owners, seconds, xplane.warnings_of(path.read_bytes())


_EVALUATE = "autograd::engine::evaluate_function: "
_BACKWARD = "backward "


def _on_torch(executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: _Trainer) -> _Read:
    import torch
    from torch.profiler import ProfilerActivity

    made: dict[int, str] = {}  # the node by sequence number of a backward function
    with _labelled(trainer, made):
        step()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=False) as recorded:
            seconds = seconds_per_step(step, steps)
    intervals = []
    until: dict[int, int] = {}
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda e: (e.start_ns(), -e.duration_ns())):
        thread, start, end = event.start_thread_id(), event.start_ns(), event.start_ns() + event.duration_ns()
        if start >= until.get(thread, 0):  # else it is part of an event before it
            until[thread] = end
            backward = event.name().startswith(_EVALUATE) and event.sequence_nr() in made
            intervals.append(Interval(start, end, _BACKWARD + made[event.sequence_nr()] if backward else event.name()))
    owners = {
        what: Owner(
            tuple(labelled(what)), what.startswith(_BACKWARD), OPTIMIZER if what == OPTIMIZER else OTHER_OPERATORS
        )
        for what in {each.what for each in intervals}
    }
    return intervals, owners, seconds, []


@contextmanager
def _labelled(trainer: Trainer | None, made: dict[int, str]) -> Iterator[None]:
    """Label nodes and the update for PyTorch's profiler; note each node's backward functions."""
    import torch
    from torch.profiler import record_function

    @contextmanager
    def scope(name: str) -> Iterator[None]:
        before = torch.autograd._get_sequence_nr()
        with record_function(name):
            yield
        made.update(dict.fromkeys(range(before, torch.autograd._get_sequence_nr()), name))

    def labelled_update(*arguments: Any, **more: Any) -> Any:
        with record_function(OPTIMIZER):
            return apply(*arguments, **more)

    if trainer is not None:
        apply, trainer.native.apply = trainer.native.apply, labelled_update
    ScopedModel.scoped = staticmethod(scope)
    try:
        yield
    finally:
        ScopedModel.scoped = None
        if trainer is not None:
            trainer.native.apply = apply
