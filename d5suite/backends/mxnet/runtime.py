"""Process-wide settings of MXNet, and the devices and libraries it uses.

Other modules import MXNet from here (``from d5suite.backends.mxnet.runtime import mx``): MXNet
1.9.1, the last release, needs names on import that NumPy has since removed. This module restores
them, in processes that run MXNet only. Imports MXNet, NumPy and `d5suite.levels`.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from d5suite.levels.device import processor_name


def _absent(*_: Any, **__: Any) -> None:
    """Stand in for a financial function, which MXNet lists and never calls."""
    raise NotImplementedError("NumPy no longer has financial functions")


def _supply_numpy_names() -> None:
    """Restore the names that MXNet 1.9.1 needs and NumPy removed in 1.20 and 2.0 to 2.4."""
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
    warnings.simplefilter("ignore")  # about distutils, and invalid escapes in docstrings
    import mxnet as mx

__all__ = ["CONTEXTS", "address", "configure", "device_memory", "device_name", "device_problem", "mx", "versions"]

CONTEXTS = {"cpu": mx.cpu, "cuda": mx.gpu}
"""MXNet's context for each kind of device."""


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set the thread budget and the seed. Call it once, before anything else.

    Parameters
    ----------
    threads : int
        OpenMP threads of one operator. MXNet's engine runs operators on a single worker thread
        (`BACKEND.environment`), so operators never compete for threads.
    seed : int
        Seed of MXNet's generators on every device (Dropout).
    device : str
        ``cpu`` or ``cuda``.
    """
    # MXNet reads OMP_NUM_THREADS on import only, which may have come before the budget.
    mx.base.check_call(mx.base._LIB.MXSetNumOMPThreads(ctypes.c_int(threads)))
    mx.random.seed(seed)


def address(array: Any) -> int:
    """Return where an array on the CPU lies in memory."""
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def versions() -> dict[str, str]:
    """Return the versions of MXNet and NumPy, and the libraries in MXNet's build."""
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
    """Return why a device cannot be used; None if it can."""
    if device == "cpu":
        return None
    if not mx.runtime.Features().is_enabled("CUDA"):
        return f"MXNet {mx.__version__} is built without CUDA, and its last CUDA build is for CUDA 11.2"
    if not mx.context.num_gpus():
        return "MXNet sees no CUDA GPU; check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return None


def device_name(device: str) -> str:
    """Return the device's model name; MXNet reports none for a GPU."""
    if device == "cuda":
        return "cuda"
    return processor_name()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return None: MXNet does not record peak memory."""
    return None
