"""Thread budget and CPU affinity: one rule for every framework.

Call `set_affinity` first in a process, before anything starts threads; `thread_environment` goes into the environment
of a process before it starts, because the libraries read it when they load. A framework's own thread settings belong
to its adapter.

Imports the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from d5suite.errors import ConfigurationError

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",  # OpenMP runtimes (GNU, LLVM, Intel) and most numerical libraries
    "MKL_NUM_THREADS",  # Intel MKL
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",  # Apple Accelerate
    "NUMEXPR_NUM_THREADS",
)
"""The framework-neutral variables that set the number of threads."""


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment variables that give a process its thread budget.

    Raises
    ------
    ConfigurationError
        If threads is not at least 1.
    """
    _check_threads(threads)
    return {name: str(threads) for name in THREAD_VARIABLES}


def allowed_cpus() -> list[int]:
    """List the logical CPUs this process may run on, ascending; all of them where the system knows no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def choose_cpus(threads: int, allowed: Iterable[int] | None = None) -> list[int]:
    """Choose CPUs for a thread budget: one per physical core, package by package, then the cores' second threads.

    Neighbouring cores of one package share a cache and a memory controller; two threads on one core share everything.

    Parameters
    ----------
    threads : int
        At least 1.
    allowed : iterable of int, optional
        The CPUs to choose from; by default those this process may run on.

    Returns
    -------
    list of int
        ``threads`` CPUs, ascending, or all that are allowed if those are fewer.

    Raises
    ------
    ConfigurationError
        If threads is not at least 1.
    """
    _check_threads(threads)
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed_cpus() if allowed is None else allowed):
        cores.setdefault(_core_of(cpu), []).append(cpu)
    ranked = sorted(
        (place_in_core, core, cpu) for core, cpus in cores.items() for place_in_core, cpu in enumerate(cpus)
    )
    return sorted(cpu for _, _, cpu in ranked[:threads])


def set_affinity(threads: int, notes: list[str] | None = None) -> list[int]:
    """Choose the CPUs for a thread budget (`choose_cpus`) and confine this process, all its threads, to them.

    Parameters
    ----------
    threads : int
        At least 1.
    notes : list of str, optional
        Receives a sentence for what could not be done as asked, to be recorded with the result.

    Returns
    -------
    list of int
        The CPUs the process is confined to; empty where that is not possible.

    Raises
    ------
    ConfigurationError
        If threads is not at least 1.
    """
    notes = notes if notes is not None else []
    cpus = choose_cpus(threads)
    if not hasattr(os, "sched_setaffinity"):
        notes.append("CPU affinity was not set: this operating system has no call for it")
        return []
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        notes.append(f"CPU affinity was not set: {error.strerror}")
        return []
    for thread in _other_threads():
        try:
            os.sched_setaffinity(thread, cpus)
        except OSError:  # it ended meanwhile
            continue
    if len(cpus) < threads:
        notes.append(f"{threads} threads share {len(cpus)} CPUs: this process is allowed no more")
    return cpus


def _other_threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    except OSError:
        return []


def _core_of(cpu: int) -> tuple[int, int]:
    """Return (package, core) of a logical CPU; a core of its own where the system does not tell."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu


def _check_threads(threads: int) -> None:
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigurationError(
            f"a thread budget of {threads!r} is not a whole number, at least 1",
            where="threads",
            hint="Give --threads the number of CPU threads that each framework may use.",
        )
