"""Process-wide settings of NumPy, and the devices and libraries it uses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from d5suite.levels.device import processor_name


def configure(*, threads: int, seed: int, device: str) -> None:
    """Set threads and seed, once and before anything else.

    NumPy reads its threads from the environment, which d5suite has set; nothing here is random.
    """


def versions() -> dict[str, str]:
    """Return the framework's version under the backend's name, and those of its libraries."""
    return {"skeleton": np.__version__}


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used, or None."""
    return None if device == "cpu" else "NumPy computes on the CPU only"


def device_name(device: str) -> str:
    """Return the vendor's name of the device."""
    return processor_name()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return None, as on every CPU; for a GPU, a pair: forget the peak, and read it in bytes."""
    return None
