"""The heat equation: order of convergence, and the same on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from d5suite.distributed.communicators.threads import run
from d5suite.levels.distributed import Communicator
from d5suite.workflows.group import Subcommunicator
from d5suite.workflows.heat import RATIO, Stencil, waves

MODES = [(1, 1, 1.0), (2, 1, 0.5)]


def error(points: int, moment: float) -> float:
    """Return the largest error against the equation's closed form, in kelvin."""
    stencil = Stencil(points)
    stencil.set(MODES)
    stencil.advance(round(moment / (RATIO * stencil.h**2)))
    return float(np.abs(stencil.field - waves(points, MODES, moment=stencil.time)).max())


def test_the_error_is_of_second_order() -> None:
    errors = [error(points, 0.02) for points in (9, 19, 39)]  # h is halved
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    assert np.all(np.abs(orders - 2.0) < 0.1), orders


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_find_what_one_process_finds(ranks: int) -> None:
    def work(of: Communicator) -> np.ndarray:
        stencil = Stencil(12, Subcommunicator(of, list(range(ranks)), 0))
        stencil.set(MODES)
        stencil.advance(7)
        return stencil.field.copy()

    alone = Stencil(12)
    alone.set(MODES)
    alone.advance(7)
    assert np.array_equal(np.concatenate(run(ranks, work)), alone.field)
    assert np.abs(alone.field - waves(12, MODES, steps=7)).max() < 1e-14
