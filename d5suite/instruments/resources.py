"""Samples of what a process uses while it is recorded: CPU, memory, network, disk and GPU.

A thread reads the counters periodically. What the machine does not count is left out.
Imports the standard library, its neighbours and, lazily, psutil and pynvml.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from d5suite.instruments.background import repeated
from d5suite.instruments.nvml import Gpu, used_gpu
from d5suite.instruments.recorder import Recorder

PERIOD_S = 0.5
"""Seconds between two samples: one takes 0.3 ms, in which the step may have to wait."""

Values = dict[tuple[str, str], float]
"""Figures by name and unit."""


@contextmanager
def sampled(recorder: Recorder, *, gpu: bool = False) -> Iterator[None]:
    """Record samples, as metrics, while the context lasts.

    Parameters
    ----------
    recorder : Recorder
    gpu : bool
        Whether to sample the GPU that is used, if NVML is there.
    """
    device = used_gpu()[0] if gpu else None
    counters, stream = Counters(recorder.clock, device), recorder.stream("resources")

    def look() -> None:
        for (name, unit), value in counters.read().items():
            stream.read(recorder.metric(name, unit), value)

    with repeated(look, PERIOD_S, "resources"):
        yield


class Counters:
    """Counters of this process and of the machine, as rates since the last reading.

    Parameters
    ----------
    clock : callable
        Returns nanoseconds.
    gpu : Gpu or None
    """

    def __init__(self, clock: Callable[[], int], gpu: Gpu | None = None) -> None:
        self._clock, self._gpu = clock, gpu
        self._then, self._before = clock(), _totals()

    def read(self) -> Values:
        """Return rates since the last reading, and what is used now."""
        now, totals = self._clock(), _totals()
        seconds = max(now - self._then, 1) * 1e-9
        found: Values = {}
        for (name, unit), total in totals.items():
            before = self._before.get((name, unit))
            if before is not None and total >= before:
                rate = (total - before) / seconds
                found[name, f"{unit}/s" if unit == "bytes" else "%"] = rate if unit == "bytes" else 100 * rate
        self._then, self._before = now, totals
        with suppress(OSError, ValueError, IndexError):
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            found["memory of the process", "bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
        if self._gpu is not None:
            found |= _of_gpu(self._gpu)
        return found


def _totals() -> Values:
    """Return counters that only grow: CPU seconds, bytes."""
    import psutil

    own = os.times()
    found: Values = {("CPU of the process", "s"): own.user + own.system}
    with suppress(Exception):  # containers hide some of them
        machine: Any = psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        guest = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        found["CPU of the machine", "s"] = sum(machine) - guest - idle
    with suppress(Exception):
        network = psutil.net_io_counters()
        found["network, received", "bytes"] = float(network.bytes_recv)
        found["network, sent", "bytes"] = float(network.bytes_sent)
    with suppress(OSError, ValueError):
        with open("/proc/self/io") as file:
            lines = dict(line.split(": ") for line in file.read().splitlines())
        found["disk, read", "bytes"] = float(lines["read_bytes"])
        found["disk, written", "bytes"] = float(lines["write_bytes"])
    return found


def _of_gpu(gpu: Gpu) -> Values:
    found: Values = {}
    busy, memory, power = gpu.ask("nvmlDeviceGetUtilizationRates"), gpu.memory_bytes(), gpu.power_w()
    if busy is not None:
        found["GPU", "%"] = float(busy.gpu)
    if memory is not None:
        found["memory of the GPU", "bytes"] = float(memory[0])
    if power is not None:
        found["power of the GPU", "W"] = float(power)
    return found
