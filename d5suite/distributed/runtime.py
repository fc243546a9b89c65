"""Process-wide settings of a rank that runs no framework."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def configure(*, threads: int, seed: int, device: str) -> None:
    """Do nothing: communicators have no thread budget."""


def versions() -> dict[str, str]:
    """Return the version of NumPy, which adds the arrays."""
    return {"numpy": np.__version__}


def device_problem(device: str) -> str | None:
    """Return None: each communicator declares its devices."""
    return None


def device_name(device: str) -> str:
    """Return the device: its model is in the machine's description."""
    return device


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return None: memory is not measured."""
    return None
