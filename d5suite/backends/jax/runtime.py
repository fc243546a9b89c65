"""Process-wide settings of JAX, and the devices and libraries it uses.

Imports JAX, NumPy and `d5suite.levels`.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import numpy as np

from d5suite.levels.device import processor_name

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
"""Distributions whose versions matter to results, if installed."""

_seed = 0


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set thread pools and the seed. Call it once, before anything else.

    Parameters
    ----------
    threads : int
        Size of XLA's thread pool on the CPU; XLA reads it only when JAX is first used.
    seed : int
        Seed of the random keys (Dropout) of executors built from now on.
    device : str
        ``cpu`` keeps JAX off GPUs; ``cuda`` allocates GPU memory on demand.
    """
    global _seed
    _seed = seed
    os.environ["PJRT_NPROC"] = os.environ["NPROC"] = str(threads)
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def initial_key() -> jax.Array:
    """Return the random key of the configured seed."""
    return jax.random.key(_seed % 2**31)


def double_precision() -> AbstractContextManager[None]:
    """Return a scope in which JAX has 64-bit types, which it lacks by default."""
    if hasattr(jax, "enable_x64"):
        scope: AbstractContextManager[None] = jax.enable_x64(True)
        return scope
    from jax.experimental import enable_x64  # before JAX 0.8

    older: AbstractContextManager[None] = enable_x64()
    return older


def native_device(device: str) -> jax.Device:
    """Return JAX's first device of this kind."""
    return jax.local_devices(backend=device)[0]


def versions() -> dict[str, str]:
    """Return the versions of JAX and of the libraries it uses."""
    found = {"jax": jax.__version__, "numpy": np.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def mode_problem(mode: str) -> str | None:
    """Return how the environment switches off `jax.jit` where a mode needs it, else None."""
    if mode != "eager" and jax.config.jax_disable_jit:
        return "JAX_DISABLE_JIT switches jax.jit off"
    return None


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used; None if it can."""
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
    """Return the device's model name."""
    if device == "cuda":
        return str(native_device(device).device_kind)
    return processor_name()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return functions that reset and read the peak of device memory in bytes; None on the CPU.

    JAX cannot reset its peak, so the figure covers the whole process.
    """
    if device == "cpu":
        return None
    native = native_device(device)
    return lambda: None, lambda: int((native.memory_stats() or {})["peak_bytes_in_use"])
