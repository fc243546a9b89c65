"""Layer times on JAX: its own profiler, and the scopes of nodes in XLA's compiled programs.

Imports JAX, `d5suite.errors`, `d5suite.levels` and the adapter's `network`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import jax

from d5suite.backends.jax.network import Executor
from d5suite.errors import BackendError
from d5suite.levels.attribution import Interval, divided
from d5suite.levels.profile import Profile
from d5suite.levels.training import Trainer
from d5suite.levels.xplane import UNNAMED, Line, Program, instructions, program_owners, read_hlo

_METHOD = (
    "JAX's profiler: wall time of each instruction of XLA's program, until its threads have finished; where several "
    "run, each counts its part"
)


def profile(
    executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None = None
) -> Profile:
    """Return where the time of some steps went; see `d5suite.levels.profile`."""
    if executor.device != "cpu":
        raise BackendError("layer times of JAX are taken on the CPU only")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    step()
    with jax.profiler.trace(str(folder), profiler_options=options):
        begin = perf_counter()
        for _ in range(steps):
            step()
        seconds = (perf_counter() - begin) / steps
    (path,) = folder.rglob("*.xplane.pb")
    intervals, modules = instructions(_lines(path))
    owners = program_owners(_programs(executor), modules)
    layers, other = divided(executor.network, intervals, owners, steps)
    return Profile(layers, other, seconds, _METHOD, notes=(UNNAMED,))


def _lines(path: Path) -> list[Line]:
    """Return the events of each thread with their attributes."""
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return [
        [
            (Interval(event.start_ns, event.start_ns + event.duration_ns, event.name), dict(event.stats))
            for event in line.events
        ]
        for plane in planes
        for line in plane.lines
    ]


def _programs(executor: Executor) -> Iterator[tuple[str, Program]]:
    """Yield the compiled programs of the process in the executor's precision."""
    exact = executor.precision == "fp64"
    for executable in executor.native_device.client.live_executables():
        for module in executable.hlo_modules():
            text = module.to_string()
            if ("f64[" in text) == exact:
                yield module.name, read_hlo(text)
