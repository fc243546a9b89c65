"""Knobs that every backend has: threads and their places, the memory allocator, loaders, ranks.

A library is among the values where this system has it. Imports `d5suite.levels`,
`d5suite.instruments` and `d5suite.distributed`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from d5suite.data.prefetch import PREFETCH
from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.communicators import COMMUNICATORS, problem
from d5suite.distributed.schemes import SCHEMES
from d5suite.instruments.threads import PLACEMENT, PLACEMENTS, choose_cpus
from d5suite.job import Ranks
from d5suite.levels.backend import Backend
from d5suite.levels.knobs import LOADERS, TuningKnob, variable_knob

_GUIDE = "PyTorch, Performance Tuning Guide (https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html)"
_GLIBC = "glibc, Memory Allocation Tunables (https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html)"
_INTEL = "Intel, oneAPI DPC++/C++ Compiler, Supported Environment Variables: KMP_BLOCKTIME"
_MIMALLOC = "mimalloc, Environment Options (https://microsoft.github.io/mimalloc/environment.html)"
_PLACES = "hwloc's lstopo on the machine; A. Mazouz et al., A study of thread placement (2011)"
_LOADER = "d5suite.data.loader; Murray et al., tf.data (VLDB 2021), section 3: parallelism and prefetching"
_BUCKETS = "Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3: buckets; Thakur et al. (2005): algorithms"

ALLOCATORS = {"jemalloc": "libjemalloc.so*", "tcmalloc": "libtcmalloc*.so*", "mimalloc": "libmimalloc.so*"}
"""Allocators that are loaded ahead of the C library, by file name."""

INTEL_OPENMP = {"intel": "libiomp5.so"}
"""Intel's OpenMP, of the package ``intel-openmp``; it serves what GNU's OpenMP was linked to."""

KEEP = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
"""Freed memory stays with the process, so that the next step finds its pages there."""

JEMALLOC = "metadata_thp:auto,dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
"""The same for jemalloc."""

MIB = 2**20

BUCKETS = (1, 4, 100)
"""Mebibytes of a bucket of gradients, beside the scheme's own 25."""


def library_folders() -> list[Path]:
    """Return the folders that hold shared libraries of the system and of this environment."""
    machine = platform.machine()
    names = [f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"]
    return [*map(Path, names), Path(sys.prefix) / "lib"]


def found_libraries(patterns: dict[str, str], folders: Iterable[Path]) -> dict[str, str]:
    """Return the path of each library that is there, by its name."""
    found: dict[str, str] = {}
    for name, pattern in patterns.items():
        for folder in folders:
            paths = sorted(path for path in folder.glob(pattern) if path.is_file())
            if paths and name not in found:
                found[name] = str(paths[0])
    return found


def _preloaded(
    name: str, patterns: dict[str, str], folders: Iterable[Path], bound: tuple[str, ...] = ()
) -> list[TuningKnob]:
    found = found_libraries(patterns, folders)
    knob = TuningKnob(name, ("", *found), _GUIDE, variable="LD_PRELOAD", joins=":", texts=found, bound=bound)
    return [knob] * bool(found)


def common_knobs(threads: int, most: int, folders: Iterable[Path] | None = None) -> list[TuningKnob]:
    """Return the knobs that every backend has here.

    Parameters
    ----------
    threads : int
        The threads of the default.
    most : int
        CPUs that this process may use. More threads than that are never tried.
    folders : iterable of Path, optional
        Where libraries may be; by default `library_folders`.
    """
    folders = library_folders() if folders is None else list(folders)
    counts = [*dict.fromkeys([threads, most, *(2**power for power in range(most.bit_length()) if 2**power <= most)])]
    knobs = []
    if len(counts) > 1:
        knobs.append(TuningKnob("threads", tuple(map(str, counts)), _GUIDE))
    places = [each for each in PLACEMENTS[1:] if any(_differs(each, count) for count in counts)]
    if places:
        knobs.append(variable_knob(PLACEMENT, tuple(places), _PLACES))
    allocators = _preloaded("allocator", ALLOCATORS, folders, ("memory",))
    knobs += allocators
    values = allocators[0].values if allocators else ()
    for name, variable, tuned, source in (
        ("jemalloc", "MALLOC_CONF", (JEMALLOC, f"{JEMALLOC},thp:always"), _GUIDE),
        ("mimalloc", "MIMALLOC_ALLOW_LARGE_OS_PAGES", ("1",), _MIMALLOC),
    ):
        if name in values:
            knobs.append(variable_knob(variable, tuned, source, bound=("memory",), allocator=(name,)))
    if platform.libc_ver()[0] == "glibc":
        own = {"allocator": ("",)} if allocators else {}
        huge = "glibc.malloc.hugetlb=1"
        texts = {"keep": KEEP, "huge": huge, "keep huge": f"{KEEP}:{huge}"}
        knobs.append(TuningKnob("malloc", ("", *texts), _GLIBC, variable="GLIBC_TUNABLES", joins=":", texts=texts,
                                when=own, bound=("memory",)))  # fmt: skip
    intel = _preloaded("openmp", INTEL_OPENMP, folders)
    if intel:
        knobs += [*intel, variable_knob("KMP_BLOCKTIME", ("0", "1", "infinite"), _INTEL, openmp=("intel",))]
    return knobs


def _differs(placement: str, threads: int) -> bool:
    return choose_cpus(threads, placement=placement) != choose_cpus(threads, placement=PLACEMENTS[0])


def loader_knobs(workers: int, most: int) -> list[TuningKnob]:
    """Return the knobs of d5suite's loader, and of frameworks' own: processes, and batches ahead.

    Parameters
    ----------
    workers : int
        Those of the default.
    most : int
        CPUs that this process may use; more workers than that are refused.
    """
    counts = [*dict.fromkeys(each for each in (workers, *(2**power for power in range(9)), most) if each <= most)]
    knobs = [TuningKnob(LOADERS, tuple(map(str, counts)), _LOADER)] * (len(counts) > 1)
    return [*knobs, variable_knob(PREFETCH, ("1", "4", "8"), _LOADER)]


def rank_knobs(ranks: Ranks, backend: Backend, device: str = "cpu") -> list[TuningKnob]:
    """Return what can be set of ranks that train together: schemes, buckets, algorithms, transport.

    Only schemes whose steps equal one process's step on all batches: others train differently. What
    fails here is listed as failed.

    Parameters
    ----------
    ranks : Ranks
        The default.
    backend : Backend
        Its own schemes are among the values.
    device : str
    """
    how = ranks.distributed
    default = scheme_text(how.scheme, how.settings)
    own = {name: each for name, each in SCHEMES.items() if each.synchronous and not each.compresses}
    schemes = [default, *own, *(f"all_reduce:bucket_bytes={size * MIB}" for size in BUCKETS if "all_reduce" in own)]
    if "all_reduce" in own:
        schemes.append("all_reduce:overlap=false")
    for name, scheme in backend.schemes.items():
        if scheme.synchronous and not backend.lacks_scheme(
            name, mode=backend.default_mode, device=device, precision="fp32"
        ):  # fmt: skip
            schemes.append(name)
            for setting, knob in scheme.knobs.items():
                schemes += [scheme_text(name, {setting: value}) for value in _others(knob.default)]
    values = tuple(dict.fromkeys(schemes))
    found = [TuningKnob("scheme", values, _BUCKETS)] * (len(values) > 1)
    collective = tuple(each for each in values if getattr(SCHEMES.get(each.partition(":")[0]), "collective", ""))
    algorithms = [how.algorithm, *(name for name, each in ALGORITHMS.items() if not each or "all_reduce" in each)]
    if found and collective:
        found.append(TuningKnob("algorithm", tuple(dict.fromkeys(algorithms)), _BUCKETS, when={"scheme": collective}))
    transports = [
        name for name, each in COMMUNICATORS.items()
        if each.launcher == COMMUNICATORS[how.communicator].launcher and device in each.devices and not problem(name)
    ]  # fmt: skip
    transports = [*dict.fromkeys([how.communicator, *transports])]
    return [*found, *[TuningKnob("communicator", tuple(transports), _BUCKETS)] * (len(transports) > 1)]


def _others(default: object) -> list[object]:
    """Return other values of a scheme's setting: the opposite, a quarter and four times as much."""
    if isinstance(default, bool):
        return [not default]
    return [default / 4, default * 4] if isinstance(default, float) else []


def scheme_text(name: str, settings: Mapping[str, Any]) -> str:
    """Return a scheme as ``--scheme`` has it."""
    pairs = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items())
    return ":".join([name, *pairs])
