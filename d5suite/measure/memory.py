"""Memory that is free, and the peak memory of a function, in a pass of its own: never while anything is timed.

Host memory is the resident set of this process, child processes not included. On Linux the kernel keeps the peak
itself (``VmHWM`` in ``/proc/self/status``, reset by writing 5 to ``/proc/self/clear_refs``; proc(5)), so that nothing
is missed. Elsewhere, or where a sandbox forbids the reset, a thread looks every few milliseconds and may miss a short
peak; the method is recorded. Device memory is the adapter's business: it gives a pair of callables.

Imports the standard library, `d5suite.measure.environment`, and psutil late.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from d5suite.measure.environment import query_nvidia_smi

SAMPLING_PERIOD_S = 0.002
"""Period of the fallback's looks: reading the resident set costs some 20 µs, 1% of this."""


MEMORY_LIMIT = "D5SUITE_MEMORY_LIMIT"
"""Environment variable: bytes that this process and its child processes may use together."""


def free_memory(device: str) -> dict[str, int]:
    """Bytes that this process can still have, by what limits them: the least of them counts.

    Parameters
    ----------
    device : str
        A GPU's own memory counts too, on ``cuda`` (the first that is visible) and where nvidia-smi tells it.
    """
    import psutil

    found = {"in this machine's memory": int(psutil.virtual_memory().available)}
    if os.environ.get(MEMORY_LIMIT):
        used = psutil.Process().memory_info().rss
        found["under the limit of --job-memory"] = max(int(os.environ[MEMORY_LIMIT]) - used, 0)
    if device == "cuda":
        first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
        for row in query_nvidia_smi("gpu", ("index", "uuid", "memory.free")) or []:
            if (row["index"] == first or row["uuid"].startswith(first)) and row["memory.free"].isdecimal():
                found["in the GPU's memory"] = int(row["memory.free"]) * 2**20
    return found


class DevicePeak(NamedTuple):
    """How to ask a device's allocator for its peak.

    Attributes
    ----------
    reset : callable
        Makes the peak equal to the memory now in use.
    read : callable
        The peak since then, in bytes.
    """

    reset: Callable[[], None]
    read: Callable[[], int]


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that was in use at one time, in bytes.

    Attributes
    ----------
    peak_bytes : int
        The peak, what was in use before the call included.
    baseline_bytes : int
        In use just before the call.
    method : {"VmHWM", "sampled", "device"}
        The kernel's own peak of the host, samples of the host's resident set (a lower bound), or the device's
        allocator.
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
        What to run. It must wait for the work it queues on a device.
    device_peak : (reset, read), optional
        See `DevicePeak`. Without it, host memory is measured.
    """
    if device_peak is not None:
        reset, read = device_peak
        reset()
        baseline = int(read())
        function()
        return PeakMemory(int(read()), baseline, "device")
    _return_freed_memory()
    if _reset_kernel_peak():
        baseline = _kernel_peak_bytes()
        function()
        return PeakMemory(_kernel_peak_bytes(), baseline, "VmHWM")
    return _sampled_peak(function)


def _return_freed_memory() -> None:
    """Give what set-up has freed back to the system: else the call would use it unseen, within the baseline."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # GNU's C library; others return memory by themselves
    if trim is not None:
        trim(0)


def _reset_kernel_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        _kernel_peak_bytes()
    except (OSError, LookupError):
        return False
    return True


def _kernel_peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("the kernel reports no VmHWM")


def _sampled_peak(function: Callable[[], object]) -> PeakMemory:
    import psutil

    process = psutil.Process()
    baseline = peak = process.memory_info().rss
    finished = threading.Event()

    def look() -> None:
        nonlocal peak
        while not finished.wait(SAMPLING_PERIOD_S):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=look, name="peak-memory", daemon=True)
    watcher.start()
    try:
        function()
    finally:
        finished.set()
        watcher.join()
    return PeakMemory(max(peak, process.memory_info().rss), baseline, "sampled")
