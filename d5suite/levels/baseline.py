"""What an adapter's hand-written native code offers, so that d5suite's own can be compared with it.

The module ``baseline`` shares no code with the rest of its adapter: it is what an expert of the framework would write
without d5suite. It has three functions:

``resnet50_training_step``
    gives a `Baseline`; ``recipes/test_cost_of_neutrality.py`` compares a trainer's step with it;
``operator_call(name, arrays, *, mode, device)``
    gives an `OperatorCall` for one of `OPERATOR_CALLS`; ``benchmarks/bench_operators.py`` compares level 0 with it;
``lenet5_epoch(network, optimizer, *, mode, device)``
    gives an `Epoch` of the zoo's LeNet-5 in float32; ``benchmarks/bench_training_loop.py`` compares the neutral loop
    with it.

Imports NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

OPERATOR_CALLS = ("Relu", "Gemm")
"""The ONNX operators that are written by hand: of one tensor, and the plain product of two matrices."""

Epoch = Callable[[Iterable[tuple[np.ndarray, np.ndarray]]], list[float]]
"""Trains on batches, images float32 (N, 1, 32, 32) and labels int64 (N,), in their order: feeds each and makes a step,
as a loop written by hand does, and reads the losses when the last step is over. Gives each step's loss before its
update. The next call goes on from the parameters that this one leaves."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator's native call, for a bare loop.

    Attributes
    ----------
    call : callable
        The native callable itself, with nothing around it.
    arguments : tuple
        Native tensors, on the device.
    synchronize : callable
        Takes what the last call returned; returns only when all calls so far have finished.
    fetch : callable
        Brings what a call returned to NumPy.
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
        Runs forward, backward and the optimizer's update once; work may still be pending on the device afterwards.
    synchronize : callable
        Returns only when all work issued so far has finished.
    loss : callable
        The loss of the last step, before its update.
    parameters : callable
        The current parameters, without running statistics, by their neutral names and in the neutral layout: float64
        for ``fp64``, float32 otherwise.
    """

    step: Callable[[], Any]
    synchronize: Callable[[], None]
    loss: Callable[[], float]
    parameters: Callable[[], dict[str, np.ndarray]]
