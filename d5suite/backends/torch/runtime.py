"""Process-wide settings of PyTorch, and the devices and libraries it uses.

Imports PyTorch, NumPy and `d5suite.levels`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

import numpy as np
import torch

from d5suite.levels import device as level
from d5suite.levels.device import processor_name


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set thread pools and seeds and disable TF32. Call it once, before anything else.

    Parameters
    ----------
    threads : int
        Threads of one operator. The pool between operators gets as many and idles, as operators run
        one after another.
    seed : int
        Seed of PyTorch's generators on every device (Dropout).
    device : str
        ``cpu`` or ``cuda``.
    """
    set_threads(threads)
    if torch.get_num_interop_threads() != threads:
        with contextlib.suppress(RuntimeError):  # a started pool keeps its size
            torch.set_num_interop_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = device == "cuda"


def set_threads(threads: int) -> None:
    """Set the number of threads of one operator, at any time: idle threads of OpenMP and MKL spin.

    Parameters
    ----------
    threads : int
        At least 1.

    Raises
    ------
    RuntimeError
        If ``threads`` is less.
    """
    torch.set_num_threads(threads)


def versions() -> dict[str, str]:
    """Return versions of the framework and of the libraries it uses."""
    found = {"torch": str(torch.__version__), "numpy": np.__version__}
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    if onednn:
        found["onednn"] = onednn[1]
    mkl = re.search(r"Math Kernel Library Version ([\d.]+)", torch.__config__.show())
    if mkl:
        found["mkl"] = mkl[1]
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def mode_problem(mode: str) -> str | None:
    """Return how the environment switches off `torch.compile` where a mode needs it, else None."""
    if mode != "compile":
        return None
    import torch._dynamo.config as settings

    if settings.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE switches torch.compile off"
    if settings.suppress_errors:
        return "TORCHDYNAMO_SUPPRESS_ERRORS lets torch.compile fall back to eager execution"
    return None


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used; None if it can."""
    if device == "cpu":
        return None
    if not torch.backends.cuda.is_built():
        return (
            f"PyTorch {torch.__version__} is built without CUDA; install a CUDA build (https://pytorch.org/get-started)"
        )
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU; check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return None


def device_name(device: str) -> str:
    """Return the vendor's name of the device."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return processor_name()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return functions that reset and read the peak tensor memory in bytes; None on the CPU."""
    if device == "cpu":
        return None
    return torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated


class EventTimer(level.EventTimer):
    """Two `torch.cuda.Event` on the current stream, to which all modes issue their work."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._start.record()

    def stop(self) -> None:
        self._stop.record()

    def milliseconds(self) -> float:
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop))


class L2Flush(level.L2Flush):
    """A buffer that is overwritten with zeros, as Triton's ``do_bench`` does it."""

    def __init__(self) -> None:
        self.cache_bytes = int(torch.cuda.get_device_properties("cuda").L2_cache_size)
        self._buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        self._buffer.zero_()


def l2_flush(device: str) -> L2Flush | None:
    """Return a callable that makes the device's L2 cache cold; None on the CPU."""
    return L2Flush() if device == "cuda" else None


def event_timer(device: str) -> EventTimer | None:
    """Return the device's own clock; None on the CPU."""
    return EventTimer() if device == "cuda" else None


class Sensors(level.Sensors):
    """AMD's sensors, which PyTorch reads through amdsmi. It reports 0 for a missing sensor."""

    def __init__(self) -> None:
        self.name = str(torch.cuda.get_device_name())

    def power_w(self) -> float | None:
        return self._read(torch.cuda.power_draw)  # PyTorch's page says mW: NVML's unit; amdsmi's is W

    def temperature_c(self) -> float | None:
        return self._read(torch.cuda.temperature)

    def clock_mhz(self) -> float | None:
        return self._read(torch.cuda.clock_rate)

    def used_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    @staticmethod
    def _read(sensor: Callable[[], int]) -> float | None:
        try:
            return float(sensor()) or None
        except Exception:  # amdsmi is optional, and refuses with exceptions of its own
            return None


def sensors(device: str) -> Sensors | None:
    """Return the sensors of an AMD GPU; those of NVIDIA GPUs are read through NVML."""
    return Sensors() if device == "cuda" and torch.version.hip else None
