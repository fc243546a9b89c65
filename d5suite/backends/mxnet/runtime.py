"""The process-wide settings of MXNet, and what it runs on. Imports MXNet, and mends NumPy for it first.

The other modules take MXNet from here (``from d5suite.backends.mxnet.runtime import mx``), because MXNet 1.9.1, the
last release, asks on import for names that NumPy has dropped since. They are put back in the process that runs MXNet
only.
"""

from __future__ import annotations

import ctypes
import math
import platform
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np


def _absent(*_: Any, **__: Any) -> None:
    """Stands for a financial function, which MXNet lists and never calls.

    Raises
    ------
    NotImplementedError
    """
    raise NotImplementedError("NumPy has no financial functions any more")


def _supply_numpy_names() -> None:
    """Put back what MXNet 1.9.1 expects of NumPy: names removed in NumPy 1.20 and 2.0 to 2.4."""
    names: dict[str, Any] = {
        "PZERO": 0.0,
        "NZERO": -0.0,
        "PINF": math.inf,
        "NINF": -math.inf,
        "Inf": math.inf,
        "NAN": math.nan,
        "NaN": math.nan,
        "alltrue": np.all,
        "sometrue": np.any,
        "product": np.prod,
        "cumproduct": np.cumprod,
        "round_": np.round,
        "row_stack": np.vstack,
        "in1d": np.isin,
        "trapz": getattr(np, "trapezoid", None),
        "msort": lambda a: np.sort(a, axis=0),
        "asfarray": lambda a, dtype=np.float64: np.asarray(a, dtype),
        **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), _absent),
    }
    for name, value in names.items():
        if name not in vars(np):
            setattr(np, name, value)


_supply_numpy_names()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of distutils, and of invalid escapes in docstrings
    import mxnet as mx

__all__ = ["CONTEXTS", "configure", "device_memory", "device_name", "device_problem", "mx", "versions"]

CONTEXTS = {"cpu": mx.cpu, "cuda": mx.gpu}
"""MXNet's context for each kind of device."""


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set the thread budget and seeds; called once, before anything else.

    Parameters
    ----------
    threads : int
        OpenMP threads of one operator. MXNet's engine runs operators on one worker thread (`BACKEND.environment`), so
        that no two of them have their threads at work at a time.
    seed : int
        Of MXNet's generators on every device (Dropout).
    device : str
        ``cpu`` or ``cuda``.
    """
    # MXNet reads OMP_NUM_THREADS at its import only; this holds the budget where it came earlier.
    mx.base.check_call(mx.base._LIB.MXSetNumOMPThreads(ctypes.c_int(threads)))
    mx.random.seed(seed)


def versions() -> dict[str, str]:
    """The framework, and the libraries that do its work, as far as they are there."""
    features = mx.runtime.Features()
    found = {"mxnet": str(mx.__version__), "numpy": np.__version__}
    found["onednn"] = "in the build" if features.is_enabled("MKLDNN") else "none"
    found["blas"] = next(
        (name for name in ("MKL", "APPLE", "ATLAS", "OPEN") if features.is_enabled(f"BLAS_{name}")), "none"
    )
    if features.is_enabled("CUDA"):
        found["cudnn"] = "in the build" if features.is_enabled("CUDNN") else "none"
    return found


def device_problem(device: str) -> str | None:
    """Why a device cannot be used, or None."""
    if device == "cpu":
        return None
    if not mx.runtime.Features().is_enabled("CUDA"):
        return f"MXNet {mx.__version__} is built without CUDA, and its last CUDA build is for CUDA 11.2"
    if not mx.context.num_gpus():
        return "MXNet sees no CUDA GPU; check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return None


def device_name(device: str) -> str:
    """The device as its maker calls it; of a GPU MXNet knows no name."""
    if device == "cuda":
        return "cuda"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Functions that reset and read the peak of device memory in bytes; None, because MXNet keeps no peak."""
    return None
