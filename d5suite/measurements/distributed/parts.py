"""Parts of a step of several ranks: computing, communicating and waiting for other ranks.

These steps come after the timed ones, so that they do not disturb them: a barrier before each
collective waits for the slowest rank, which separates waiting from communicating.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from d5suite.levels.distributed import Communicator, Scheme
from d5suite.measurements.schemas import mapping, number, or_null

STEPS = (3, 30)
"""Fewest and most steps whose parts are clocked; in between, a third of the timed steps."""

COLLECTIVES = ("broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all")

SCHEMA = mapping(
    {
        "step_s": number(minimum=0),
        "computing_s": number("copies for messages included", minimum=0),
        "communicating_s": number("in calls of the communicator", minimum=0),
        "waiting_s": or_null(
            number(
                "in a barrier before each collective, for the slowest rank; null without collectives: waiting for "
                "single messages is part of communicating_s",
                minimum=0,
            )
        ),
        "overlapped_s": number("of communicating_s and waiting_s, while the rank computes", minimum=0),
    },
    description="of a step, in steps of their own: computing + communicating + waiting - overlapped",
)


def steps_of(timed: int) -> int:
    """Return the number of steps to clock after this many timed ones."""
    return max(STEPS[0], min(STEPS[1], timed // 3))


def take_parts(scheme: Scheme, step: Callable[[], float], steps: int) -> dict[str, float | None]:
    """Make steps, and return the means of their parts on this rank, in seconds.

    Medians would hide communication that happens in some steps only.

    Parameters
    ----------
    scheme : Scheme
        It clocks the time in which it only communicates.
    step : callable
        Makes a step and returns its seconds.
    steps : int
        The same on all ranks.
    """
    communicator = scheme.communicator

    def clocks() -> tuple[float, float, float]:
        calls = communicator.traffic.items()
        called = sum(each.seconds for call, each in calls if call != "barrier")
        barrier = communicator.traffic.get("barrier")
        return scheme.exposed_s, called, barrier.seconds if barrier is not None else 0.0

    found = []
    with _paced(communicator):
        for _ in range(steps):
            before = clocks()
            took = step()
            found.append((took, *(after - earlier for after, earlier in zip(clocks(), before, strict=True))))
        scheme.settle()
    took, exposed, communicating, waiting = (statistics.fmean(each) for each in zip(*found, strict=True))
    overlapped = max(0.0, communicating + waiting - exposed)
    return {
        "step_s": took,
        "computing_s": max(0.0, took - communicating - waiting + overlapped),
        "communicating_s": communicating,
        "waiting_s": waiting if waiting > 0 or communicator.size == 1 else None,
        "overlapped_s": overlapped,
    }


@contextmanager
def _paced(communicator: Communicator) -> Iterator[None]:
    """Put a barrier before each collective of a communicator."""

    def after_a_barrier(call: Callable[..., Any]) -> Callable[..., Any]:
        def paced(*given: Any, **more: Any) -> Any:
            communicator.barrier()
            return call(*given, **more)

        return paced

    for name in COLLECTIVES:
        setattr(communicator, name, after_a_barrier(getattr(communicator, name)))
    try:
        yield
    finally:
        for name in COLLECTIVES:
            delattr(communicator, name)
