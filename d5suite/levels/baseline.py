"""What a framework's hand-written training step offers, so that d5suite's own step can be compared with it.

The baseline shares no code with d5suite's adapter beyond this declaration: it is what an expert of the framework would
write without d5suite. Imports NumPy only.
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
