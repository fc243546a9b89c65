"""The process-wide settings of PyTorch, and what it runs on. Imports PyTorch and NumPy."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable

import numpy as np
import torch


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set thread pools, seeds and true float32; called once, before anything else.

    Parameters
    ----------
    threads : int
        Threads of one operator. Operators run one after another, so the pool between operators gets as many and idles.
    seed : int
        Of PyTorch's generators on every device (Dropout).
    device : str
        ``cpu`` or ``cuda``.
    """
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != threads:
        with contextlib.suppress(RuntimeError):  # once started, the pool keeps its size; nothing here runs in it
            torch.set_num_interop_threads(threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = device == "cuda"


def versions() -> dict[str, str]:
    """The framework, and the libraries that do its work, as far as they are there."""
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


def device_problem(device: str) -> str | None:
    """Why a device cannot be used, or None."""
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
    """The device as its maker calls it."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Functions that reset and read the peak of tensors' memory on the device in bytes; None on the CPU."""
    if device == "cpu":
        return None
    return torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated
