"""The same work by hand, as an expert in each framework would write it without d5suite.

A module per framework has two functions, and shares no code with the framework's adapter but its
``baseline``, which is written by hand as well:

``operator_call(name, arrays, *, mode, device)``
    returns an `OperatorCall` for ``Relu`` or ``Gemm``; ``bench_operators.py`` compares it with
    level 0.
``lenet5_epoch(network, optimizer, *, mode, device)``
    returns an `Epoch` of the zoo's LeNet-5 in float32; ``bench_training_loop.py`` compares it with
    the neutral loop.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from d5suite.levels.backend import Backend

Epoch = Callable[[Iterable[tuple[np.ndarray, np.ndarray]]], list[float]]
"""Trains on batches (images float32 (N, 1, 32, 32), labels int64 (N,)), one step each, and returns
the losses before the updates, read after the last step. The next call continues from the parameters
reached."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator's native call, for a bare loop.

    Attributes
    ----------
    call : callable
        The native callable, unwrapped.
    arguments : tuple
        Native tensors, on the device.
    synchronize : callable
        Takes the last call's result; returns only after all calls have finished.
    fetch : callable
        Converts a call's result to NumPy.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    synchronize: Callable[[Any], None]
    fetch: Callable[[Any], np.ndarray]


def handwritten(backend: Backend) -> ModuleType | None:
    """Import a framework's module; return None for a backend without a baseline."""
    if "baseline" in backend.absent:
        return None
    backend.load("baseline")  # sets the mode's environment before the framework is imported
    return importlib.import_module(f"benchmarks.handwritten.{backend.name}")
