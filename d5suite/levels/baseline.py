"""Hand-written native code that an adapter offers for comparison with d5suite's own.

The module ``baseline`` shares no code with the rest of its adapter: it is what an expert of the
framework would write without d5suite. It has three functions:

``resnet50_training_step``
    returns a `Baseline`, compared with a trainer's step in ``recipes/test_cost_of_neutrality.py``;
``operator_call(name, arrays, *, mode, device)``
    returns an `OperatorCall` for ``Relu`` or ``Gemm``, compared with level 0 in
    ``benchmarks/bench_operators.py``;
``lenet5_epoch(network, optimizer, *, mode, device)``
    returns an `Epoch` of the zoo's LeNet-5 in float32, compared with the neutral loop in
    ``benchmarks/bench_training_loop.py``.

Imports NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

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


@dataclass(frozen=True)
class Baseline:
    """A training step written by hand in a framework's own style, on one fixed batch.

    Attributes
    ----------
    step : callable
        Runs forward, backward and the optimizer's update once; may return before they finish.
    synchronize : callable
        Returns only after all issued work has finished.
    loss : callable
        Returns the loss of the last step, before its update.
    parameters : callable
        Returns the current parameters, without running statistics, under their neutral names and
        in the neutral layout: float64 for ``fp64``, float32 otherwise.
    """

    step: Callable[[], Any]
    synchronize: Callable[[], None]
    loss: Callable[[], float]
    parameters: Callable[[], dict[str, np.ndarray]]
