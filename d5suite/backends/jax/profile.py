"""Layer times on JAX: its own profiler, and the scopes of nodes in XLA's compiled programs.

Imports JAX, `d5suite.errors`, `d5suite.levels` and the adapter's `network`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from d5suite.backends.jax.network import Executor
from d5suite.errors import BackendError
from d5suite.levels.attribution import divided
from d5suite.levels.profile import Profile, seconds_per_step
from d5suite.levels.training import Trainer
from d5suite.levels.xplane import (
    UNNAMED,
    dropped,
    event_lines,
    instructions,
    live_programs,
    program_owners,
    warnings_of,
)

_METHOD = (
    "JAX's profiler: wall time of each instruction of XLA's program, until its threads have finished; where several "
    "run, each counts its part"
)


def profile(
    executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None = None
) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    if executor.device != "cpu":
        raise BackendError("layer times of JAX are taken on the CPU only")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    step()
    with jax.profiler.trace(str(folder), profiler_options=options):
        seconds = seconds_per_step(step, steps)
    (path,) = folder.rglob("*.xplane.pb")
    intervals, modules = instructions(event_lines(jax.profiler.ProfileData.from_file(str(path)).planes))
    programs = live_programs(executor.native_device.client, exact=executor.precision == "fp64")
    layers, other = divided(executor.network, intervals, program_owners(programs, modules), steps)
    warnings = warnings_of(path.read_bytes())
    return Profile(layers, other, seconds, _METHOD, dropped(warnings), (*warnings, UNNAMED))
