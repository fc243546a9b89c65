"""The process-wide settings of JAX, and what it runs on. Imports JAX and NumPy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import numpy as np

_LIBRARIES = (
    "jaxlib",
    "optax",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
"""Distributions that do JAX's work, where they are installed."""

_seed = 0


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set thread pools and the seed; called once, before anything else.

    Parameters
    ----------
    threads : int
        Size of XLA's thread pool on the CPU. XLA reads it when JAX is first used; later it keeps its size.
    seed : int
        Of the keys that executors built from now on start with (Dropout).
    device : str
        ``cpu`` leaves GPUs alone; ``cuda`` makes GPU memory grow with need.
    """
    global _seed
    _seed = seed
    os.environ["PJRT_NPROC"] = os.environ["NPROC"] = str(threads)
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def initial_key() -> jax.Array:
    """The random key of the configured seed."""
    return jax.random.key(_seed % 2**31)


def double_precision() -> AbstractContextManager[None]:
    """A scope in which JAX has 64-bit types; elsewhere it keeps its default, which is not to have them."""
    if hasattr(jax, "enable_x64"):
        scope: AbstractContextManager[None] = jax.enable_x64(True)
        return scope
    from jax.experimental import enable_x64  # before JAX 0.8

    older: AbstractContextManager[None] = enable_x64()
    return older


def native_device(device: str) -> jax.Device:
    """JAX's first device of this kind."""
    return jax.devices(device)[0]


def versions() -> dict[str, str]:
    """The framework, and the libraries that do its work, as far as they are there."""
    found = {"jax": jax.__version__, "numpy": np.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_problem(device: str) -> str | None:
    """Why a device cannot be used, or None."""
    try:
        native_device(device)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        return (
            f"JAX {jax.__version__} sees no CUDA GPU ({first}); check the driver with nvidia-smi, and that "
            "CUDA support is installed: pip install 'd5suite[jax-gpu]'"
        )
    return None


def device_name(device: str) -> str:
    """The device as its maker calls it."""
    if device == "cuda":
        return str(native_device(device).device_kind)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Functions that reset and read the peak of arrays' memory on the device in bytes; None on the CPU.

    JAX cannot reset its peak: the figure is of the whole process.
    """
    if device == "cpu":
        return None
    native = native_device(device)
    return lambda: None, lambda: int((native.memory_stats() or {})["peak_bytes_in_use"])
