"""Free memory, and the peak memory of a function call.

Host memory is the resident set of this process, without child processes. On Linux the kernel tracks
the peak exactly (``VmHWM`` in ``/proc/self/status``, reset by writing 5 to
``/proc/self/clear_refs``; proc(5)). Elsewhere, or if a sandbox forbids the reset, a thread samples
every 2 ms and may miss a short peak; the result names the method. An adapter reports device memory
through a pair of functions.

Imports the standard library, its neighbours, and psutil lazily.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from d5suite.instruments.background import repeated
from d5suite.instruments.control_groups import available_memory, memory_limit
from d5suite.instruments.gpus import free_gpu_memory
from d5suite.instruments.nvml import used_gpu

T = TypeVar("T")

SAMPLING_PERIOD_S = 0.002
"""Period at which the fallback samples; one reading costs 20 µs, 1% of the period."""

GPU_PERIOD_S = 0.02
"""Sampling period for a GPU: frameworks hold on to their memory, and drivers may answer slowly."""

MEMORY_LIMIT = "D5SUITE_MEMORY_LIMIT"
"""Environment variable: bytes that this process and its children may use together."""


def free_memory(device: str) -> dict[str, int]:
    """Return the bytes still available to this process, by limit; the smallest counts.

    Parameters
    ----------
    device : str
        ``cuda`` includes the memory of the first visible GPU, if nvidia-smi reports it.
    """
    import psutil

    found = {"in this machine's memory": int(psutil.virtual_memory().available)}
    if memory_limit() is not None:
        found["under the memory limit of this container or batch job"] = available_memory()
    if os.environ.get(MEMORY_LIMIT):
        used = psutil.Process().memory_info().rss
        found["under the limit of --job-memory"] = max(int(os.environ[MEMORY_LIMIT]) - used, 0)
    if device == "cuda":
        free = free_gpu_memory()
        if free is not None:
            found["in the GPU's memory"] = free
    return found


@dataclass(frozen=True)
class PeakMemory:
    """The peak of memory in use, in bytes.

    Attributes
    ----------
    peak_bytes : int
        The peak, including memory in use before the call.
    baseline_bytes : int
        In use before the call.
    method : {"VmHWM", "sampled", "device"}
        The kernel's peak, samples of the resident set (a lower bound), or the device's allocator.
    """

    peak_bytes: int
    baseline_bytes: int
    method: Literal["VmHWM", "sampled", "device"]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON-able values."""
        return asdict(self)


def peak_memory(
    function: Callable[[], object], device_peak: tuple[Callable[[], None], Callable[[], int]] | None = None
) -> PeakMemory:
    """Call the function once and report the peak memory during the call.

    Parameters
    ----------
    function : callable
        What to run; must wait for work that it queues on a device.
    device_peak : (reset, read), optional
        Functions that set a device allocator's peak to the memory in use, and that return the peak
        since then in bytes; by default host memory is measured.
    """
    if device_peak is not None:
        reset, read = device_peak
        reset()
        baseline = int(read())
        function()
        return PeakMemory(int(read()), baseline, "device")
    return_freed_memory()
    if _reset_kernel_peak():
        baseline = _kernel_peak_bytes()
        function()
        return PeakMemory(_kernel_peak_bytes(), baseline, "VmHWM")
    return _sampled_peak(function)


def watch_peak(
    device_peak: tuple[Callable[[], None], Callable[[], int]] | None = None,
) -> Callable[[], int] | None:
    """Begin to watch the peak memory, at no cost to what runs.

    Parameters
    ----------
    device_peak : (reset, read), optional
        See `peak_memory`.

    Returns
    -------
    callable or None
        Returns the bytes by which the peak has exceeded the memory in use at the start, less file
        pages read in since: the kernel may have dropped such pages, as those of libraries' code,
        while the process waited. None if neither the kernel nor a device's allocator tracks a peak.
    """
    if device_peak is not None:
        reset, read = device_peak
        reset()
        start = int(read())
        return lambda: int(read()) - start
    if not _reset_kernel_peak():
        return None
    used, files = _kernel_peak_bytes(), _file_bytes()
    return lambda: _kernel_peak_bytes() - used - max(0, _file_bytes() - files)


def gpu_memory(function: Callable[[], T], name: str = "") -> tuple[T, dict[str, Any]]:
    """Call the function once, and report the first visible GPU's memory as the driver counts it.

    The driver also counts what the framework's own figure leaves out: the context, libraries and
    their workspaces, and what the allocator keeps.

    Parameters
    ----------
    function : callable
        What to run; must wait for work that it queues on a device.
    name : str
        The framework's name for the GPU.

    Returns
    -------
    result : object
        What the function returned.
    memory : dict
        ``peak_bytes`` and ``baseline_bytes`` of what ``of`` says: this process, or the whole GPU
        where the driver does not tell processes apart. Read every `GPU_PERIOD_S` and at the end, so
        a lower bound. Or ``missing``, with the reason.
    """
    gpu, problem = used_gpu(name)
    if gpu is None:
        return function(), {"missing": problem}

    def of_process() -> int | None:
        return gpu.process_bytes().get(os.getpid())

    def of_gpu() -> int | None:
        return (gpu.memory_bytes() or (None,))[0]

    read, of = (of_process, "this process") if of_process() is not None else (of_gpu, "the whole GPU")
    if read() is None:
        return function(), {"missing": f"{gpu.name}: {'; '.join(dict.fromkeys(gpu.refused.values()))}"}
    result: list[T] = []
    peak, baseline = _sampled(lambda: result.append(function()), read, GPU_PERIOD_S)
    return result[0], {"peak_bytes": peak, "baseline_bytes": baseline, "of": of}


def return_freed_memory() -> None:
    """Return freed memory to the system: baselines then exclude it, and others can use it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # GNU's C library only
    if trim is not None:
        trim(0)


class _HeapInfo(ctypes.Structure):
    """GNU's ``struct mallinfo2``; mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def free_heap_bytes() -> int:
    """Return the bytes that the C library's allocator holds and nothing uses; 0 if not known.

    Once returned to the system, their pages are not resident. Allocating as much as before, but in
    other places, makes them resident again.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # GNU's C library from 2.33
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _HeapInfo
    return int(mallinfo2().fordblks)


def _reset_kernel_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        _kernel_peak_bytes()
    except (OSError, LookupError):
        return False
    return True


def _kernel_peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _file_bytes() -> int:
    try:
        return _status_bytes("RssFile")
    except LookupError:  # before Linux 4.5, and in some sandboxes
        return 0


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"the kernel reports no {name}")


def _sampled_peak(function: Callable[[], object]) -> PeakMemory:
    import psutil

    process = psutil.Process()
    return PeakMemory(*_sampled(function, lambda: process.memory_info().rss, SAMPLING_PERIOD_S), "sampled")


def _sampled(function: Callable[[], object], read: Callable[[], int | None], period_s: float) -> tuple[int, int]:
    """Return the highest reading during a function, and the reading before it."""
    baseline = peak = read() or 0

    def look() -> None:
        nonlocal peak
        peak = max(peak, read() or 0)

    with repeated(look, period_s, "peak-memory"):
        function()
    return peak, baseline
