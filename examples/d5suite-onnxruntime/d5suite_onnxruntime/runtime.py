"""The process-wide settings of ONNX Runtime, and what it runs on."""

from __future__ import annotations

import platform
from collections.abc import Callable

import onnxruntime

_threads = 1


def configure(*, threads: int, seed: int, device: str) -> None:
    """Remember the thread budget for the sessions to come; seed the generators of random operators."""
    global _threads
    _threads = threads
    onnxruntime.set_seed(seed)


def session_options() -> onnxruntime.SessionOptions:
    """Options of a session within the thread budget."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


def versions() -> dict[str, str]:
    """The framework's version."""
    return {"onnxruntime": onnxruntime.__version__}


def device_problem(device: str) -> str | None:
    """Why a device cannot be used, or None."""
    return None if device == "cpu" else "this backend runs on the CPU only"


def device_name(device: str) -> str:
    """The device as its maker calls it."""
    return platform.processor() or platform.machine()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Functions that reset and read a device's peak memory; None on the CPU."""
    return None
