"""Process-wide settings of ONNX Runtime, and the devices and libraries it uses."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime

_threads = 1


def configure(*, threads: int, seed: int, device: str) -> None:
    """Remember the thread budget for later sessions, and seed the generators."""
    global _threads
    _threads = threads
    onnxruntime.set_seed(seed)


def session_options() -> onnxruntime.SessionOptions:
    """Return session options within the thread budget."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


def versions() -> dict[str, str]:
    """Return ONNX Runtime's version."""
    return {"onnxruntime": onnxruntime.__version__}


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used; None if it can."""
    return None if device == "cpu" else "this backend runs on the CPU only"


def device_name(device: str) -> str:
    """Return ``cpu``: the machine's description has the processor's model."""
    return device


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return None: this backend runs on the CPU only."""
    return None
