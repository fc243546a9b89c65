"""Process-wide settings of tinygrad, and the devices and libraries it uses."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable

from tinygrad import Tensor
from tinygrad.helpers import NUM_CPU_THREADS, PARALLEL, getenv


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set the thread budget, compile in this process, and seed Dropout's generator."""
    NUM_CPU_THREADS.value = threads
    PARALLEL.value = 0
    Tensor.manual_seed(seed)
    Tensor.rand(1).realize()  # makes the generator's counter, whose memory captured passes refer to


def versions() -> dict[str, str]:
    """Return the versions of tinygrad and of the compiler."""
    found = {"tinygrad": importlib.metadata.version("tinygrad")}
    compiler = getenv("CC", "clang")
    if shutil.which(compiler):
        found["compiler"] = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.split("\n")[
            0
        ]
    return found


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used, or None."""
    if device != "cpu":
        return "this example runs on the CPU only"
    if shutil.which(getenv("CC", "clang")) is None:
        return "tinygrad compiles its kernels with clang, which is not found; install it, or name it in CC"
    return None


def device_name(device: str) -> str:
    """Return the device's model name."""
    return platform.processor() or platform.machine()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return None: this backend runs on the CPU only."""
    return None
