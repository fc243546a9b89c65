"""Process-wide settings of deep500's reference, which is NumPy, and the libraries it uses."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

from d5suite.backends.deep500 import operators
from d5suite.levels.device import processor_name


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set threads and seed. Call it once, before anything else.

    Parameters
    ----------
    threads : int
        Threads of NumPy's linear algebra; only matrix products use them. NumPy reads their number
        on import, from the environment that the worker sets; threadpoolctl, if installed, sets it
        again.
    seed : int
        Seed of Dropout's generator.
    device : str
        ``cpu``.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("threadpoolctl").threadpool_limits(threads, user_api="blas")
    operators.seed(seed)


def versions() -> dict[str, str]:
    """Return versions of the framework and of the libraries it uses."""
    blas = np.show_config("dicts")["Build Dependencies"]["blas"]
    return {
        "deep500": version("deep500"),
        "numpy": np.__version__,
        "networkx": version("networkx"),
        "blas": f"{blas['name']} {blas['version']}",
    }


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used; None if it can."""
    return None if device == "cpu" else "deep500's reference operators run on the CPU only"


def device_name(device: str) -> str:
    """Return the vendor's name of the device."""
    return processor_name()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return None, as on every CPU."""
    return None
