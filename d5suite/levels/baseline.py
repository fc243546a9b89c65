"""A training step written by hand, to compare with a trainer's.

An adapter's module ``baseline`` has ``resnet50_training_step``, which returns a `Baseline`.
``recipes/test_cost_of_neutrality.py`` compares it with the trainer's step. The module shares no
code with the rest of the adapter: it is what an expert in the framework would write without
d5suite.

Imports NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


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
