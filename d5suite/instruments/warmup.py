"""Warm-up: call until times stop falling.

Imports the standard library and its neighbours in ``d5suite.instruments``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from d5suite.instruments.settings import SamplingSettings
from d5suite.statistics.intervals import drift

WARMUP_BLOCK_CALLS = 3
"""Fewest calls in a block, the unit in which warm-up is judged: a median of three survives one
outlier."""

WARMUP_BLOCK_S = 0.05
"""Least duration of a block of short calls: clock frequency and caches settle over milliseconds."""

WARMUP_BLOCK_MAX_CALLS = 1000
"""Most calls in a block; more add nothing to its median."""

WARMUP_TIME_FACTOR = 3.0
"""Limit of automatic warm-up, in ``max_time_s``: sampling too early costs more than waiting."""

WARMUP_FREE_CALLS = 3
"""This many of the slowest calls do not count towards the time: compilation may happen more than
once."""

STEADY_FALL = 0.05
"""A block is steady if its median is at most this much below the previous one's; smaller falls are
noise."""

STEADY_EXCESS = 2.0
"""A block this many times longer than typical includes a compilation or a disturbance."""

DRIFT_P_VALUE = 0.001
"""Samples are not steady if they fall by more than `STEADY_FALL` with at most this p-value."""


class _Block:
    """Consecutive warm-up calls, judged together."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.total_s = 0.0

    def add(self, duration: float) -> None:
        self.times.append(duration)
        self.total_s += duration

    def is_full(self, max_time_s: float) -> bool:
        # Two blocks of a slow step should fit into the time for the samples.
        return (
            (len(self.times) >= WARMUP_BLOCK_CALLS and self.total_s >= WARMUP_BLOCK_S)
            or len(self.times) >= WARMUP_BLOCK_MAX_CALLS
            or self.total_s >= max_time_s / 2
        )

    def is_steady_after(self, earlier: _Block) -> bool:
        median, median_before = (statistics.median_low(block.times) for block in (self, earlier))
        # The smaller median: a block that is one recompilation must not look typical.
        typical = min(median, median_before)
        fell = median < (1 - STEADY_FALL) * median_before
        return not fell and self.total_s <= STEADY_EXCESS * typical * len(self.times)


def warm_up(call: Callable[[], float], settings: SamplingSettings) -> tuple[list[float], bool]:
    """Call until times are steady or the budget is spent; return times and whether steady.

    Without warm-up calls the samples alone decide whether the state was steady.
    """
    if settings.warmup == "off" or settings.warmup_iterations == 0:
        return [], True
    times: list[float] = []
    blocks = [_Block()]
    free: list[float] = []
    spent = 0.0
    while len(times) < settings.warmup_iterations:
        duration = call()
        times.append(duration)
        blocks[-1].add(duration)
        spent += duration
        if settings.warmup == "on":
            if blocks[-1].is_full(settings.max_time_s):
                blocks.append(_Block())
            if spent >= settings.max_time_s:
                break
            continue
        free = sorted([*free, duration])[-WARMUP_FREE_CALLS:]
        if blocks[-1].is_full(settings.max_time_s):
            if len(blocks) > 1 and blocks[-1].is_steady_after(blocks[-2]):
                return times, True
            if spent - sum(free) >= WARMUP_TIME_FACTOR * settings.max_time_s:
                return times, False
            blocks.append(_Block())
    if not blocks[-1].times:
        blocks.pop()
    return times, len(blocks) > 1 and blocks[-1].is_steady_after(blocks[-2])


def still_falls(samples_s: Sequence[float]) -> bool:
    """Tell whether samples fall too much to have been taken in a steady state."""
    trend = drift(samples_s)
    return trend.relative_change < -STEADY_FALL and trend.p_value < DRIFT_P_VALUE
