"""Stages of a pipeline: a network's nodes in order, cut where the slowest stage is fastest.

Imports NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST_STAGES = 16
"""Stages that are tried."""


class Stage(NamedTuple):
    """Consecutive nodes.

    Attributes
    ----------
    first, end : int
        The first one, and the first one of the next stage.
    seconds : float
        Of a micro-batch, forward and backward, with what the stage before sends and gets back.
    """

    first: int
    end: int
    seconds: float


def balanced(seconds: Sequence[float], messages: Sequence[float], stages: int) -> list[Stage]:
    """Return the stages whose slowest one is fastest.

    Parameters
    ----------
    seconds : sequence of float
        Seconds of each node, in execution order.
    messages : sequence of float
        Seconds of what crosses from each node to the next ones, forth and back.
    stages : int
        From 1 to the number of nodes.

    Notes
    -----
    Dynamic programming over the ends of stages: the slowest of k stages that end with node j is the
    least, over the node i that stage k - 1 ends with, of the larger of its own slowest and stage k.
    """
    count = len(seconds)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} nodes cannot be cut into {stages} stages")
    total = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, np.float64))])
    sent = np.asarray(messages, np.float64)
    between = total[None, 1:] - total[1:, None] + sent[:, None]  # from behind node i to node j
    between[np.tril_indices(count)] = np.inf
    best, before = total[1:].copy(), []
    for _ in range(stages - 1):
        slowest = np.maximum(best[:, None], between)
        before.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    ends = [count - 1]
    for chosen in reversed(before):
        ends.append(int(chosen[ends[-1]]))
    found, first = [], 0
    for last in reversed(ends):
        message = float(sent[first - 1]) if first else 0.0
        found.append(Stage(first, last + 1, float(total[last + 1] - total[first]) + message))
        first = last + 1
    return found
