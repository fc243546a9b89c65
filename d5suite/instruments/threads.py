"""Thread budget and CPU affinity: one rule for every framework.

Call `set_affinity` before anything starts threads. Set `thread_environment` before a process
starts, because libraries read it when they load. An adapter sets its framework's own thread
settings.

Imports the standard library and threadpoolctl.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
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
"""Framework-neutral variables for the number of threads."""

PLACEMENT = "D5SUITE_PLACEMENT"
"""Variable with one of `PLACEMENTS`: on which CPUs a thread budget runs."""

PLACEMENTS = ("cores", "siblings", "packages")
"""One thread on each core, package by package; all threads of a core before the next core; one core
of each package in turn."""


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment variables that give a process its thread budget.

    Raises
    ------
    ConfigurationError
        If threads is not at least 1.
    """
    _check_threads(threads)
    return {name: str(threads) for name in THREAD_VARIABLES}


@contextlib.contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    """Let the loaded BLAS and OpenMP libraries use this many threads; restore theirs at the end.

    Idle threads of such a library spin, which takes cores from other processes. A framework's own
    pools are not affected.

    Parameters
    ----------
    threads : int
        At least 1.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads):
        yield


_confined: list[int] = []
"""CPUs to which `set_affinity` has confined this process."""


def allowed_cpus() -> list[int]:
    """List the logical CPUs this process may use, ascending; all if the system has no affinity.

    After `set_affinity` these are the CPUs it set, even if a library binds this thread to some of
    them, as OpenMP does with ``OMP_PROC_BIND``.
    """
    if hasattr(os, "sched_getaffinity"):
        own = sorted(os.sched_getaffinity(0))
        return list(_confined) if set(own) < set(_confined) else own
    return list(range(os.cpu_count() or 1))


def choose_cpus(threads: int, allowed: Iterable[int] | None = None, placement: str | None = None) -> list[int]:
    """Choose CPUs: by default one per physical core, package by package, then second threads.

    Cores of one package share a cache and a memory controller; two threads of one core share
    everything.

    Parameters
    ----------
    threads : int
        At least 1.
    allowed : iterable of int, optional
        The CPUs to choose from; by default `allowed_cpus`.
    placement : str, optional
        One of `PLACEMENTS`; by default that of the variable `PLACEMENT`, or else the first one.

    Returns
    -------
    list of int
        ``threads`` CPUs, ascending; fewer if fewer are allowed.

    Raises
    ------
    ConfigurationError
        If threads is not at least 1, or there is no such placement.
    """
    _check_threads(threads)
    placement = placement or os.environ.get(PLACEMENT) or PLACEMENTS[0]
    if placement not in PLACEMENTS:
        raise ConfigurationError(f"there is no placement {placement!r}", where=PLACEMENT,
                                 hint=f"Placements: {', '.join(PLACEMENTS)}.")  # fmt: skip
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed_cpus() if allowed is None else allowed):
        cores.setdefault(_core_of(cpu), []).append(cpu)
    met: dict[int, int] = {}
    ranked: list[tuple[tuple[int, ...], int]] = []
    for core, cpus in sorted(cores.items()):
        number = met[core[0]] = met.get(core[0], -1) + 1  # of the core in its package
        for place, cpu in enumerate(cpus):
            by = {"cores": (place, *core), "siblings": (*core, place), "packages": (place, number, core[0])}
            ranked.append((by[placement], cpu))
    return sorted(cpu for _, cpu in sorted(ranked)[:threads])


def count_cores(allowed: Iterable[int] | None = None) -> int:
    """Return the number of physical cores among CPUs, by default among `allowed_cpus`."""
    return len({_core_of(cpu) for cpu in (allowed_cpus() if allowed is None else allowed)})


def share_cpus(threads: int, ranks: int, rank: int, allowed: Iterable[int] | None = None) -> list[int]:
    """Choose the CPUs of one rank: no other rank's, and whole cores where possible.

    Only if there are more ranks than CPUs do ranks share CPUs; each rank then has one.

    Parameters
    ----------
    threads : int
        Budget of all ranks on this machine together.
    ranks, rank : int
        Number of ranks, and the rank, counted from 0.
    allowed : iterable of int, optional
        As for `choose_cpus`.
    """
    cpus = sorted(choose_cpus(threads, allowed), key=lambda cpu: (_core_of(cpu), cpu))
    each = len(cpus) // ranks
    return sorted(cpus[rank * each : (rank + 1) * each]) if each else [cpus[rank % len(cpus)]]


def set_affinity(threads: int, notes: list[str] | None = None, cpus: list[int] | None = None) -> list[int]:
    """Confine all threads of this process to the CPUs of `choose_cpus`, or to given ones.

    Parameters
    ----------
    threads : int
        At least 1.
    notes : list of str, optional
        Receives a sentence for each shortfall, to be recorded with the result.
    cpus : list of int, optional
        By default those of `choose_cpus`.

    Returns
    -------
    list of int
        The CPUs; empty if affinity cannot be set.

    Raises
    ------
    ConfigurationError
        If threads is not at least 1.
    """
    notes = notes if notes is not None else []
    cpus = choose_cpus(threads) if cpus is None else cpus
    if not hasattr(os, "sched_setaffinity"):
        notes.append("CPU affinity was not set: this operating system does not support it")
        return []
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        notes.append(f"CPU affinity was not set: {error.strerror}")
        return []
    _confined[:] = cpus
    for thread in _other_threads():
        try:
            os.sched_setaffinity(thread, cpus)
        except OSError:  # it has ended
            continue
    if len(cpus) < threads:
        notes.append(f"{threads} threads share {len(cpus)} CPUs, all that this process may use")
    return cpus


def _other_threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    except OSError:
        return []


def _core_of(cpu: int) -> tuple[int, int]:
    """Return (package, core) of a logical CPU; where unknown, each CPU is its own core."""
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
