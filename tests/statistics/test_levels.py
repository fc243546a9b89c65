"""Changes of a level over many runs are found where they are, as Mozilla finds them."""

from __future__ import annotations

import math
import statistics

import pytest

from benchmarks.bench_history import NOISES, noise
from d5suite.statistics.history import change_points


@pytest.mark.parametrize("kind", NOISES)
def test_a_step_of_a_tenth_is_found_where_it_is_and_none_where_there_is_none(kind: str) -> None:
    found = 0
    for seed in range(12):
        level = noise(kind, 60, seed)
        assert change_points(level, effect=0.05) == []
        changed = [value * (1.1 if place >= 40 else 1) for place, value in enumerate(level)]
        found += any(abs(place - 40) <= 2 for place in change_points(changed, effect=0.05))
    assert found >= 11


@pytest.mark.parametrize("kind", NOISES)
def test_a_slow_drift_is_found(kind: str) -> None:
    for seed in range(8):
        drifting = [value * 1.2 ** (place / 60) for place, value in enumerate(noise(kind, 60, seed))]
        assert change_points(drifting, effect=0.05)


def test_a_change_below_the_least_effect_and_runs_too_few_say_nothing() -> None:
    level = noise("quiet", 60, 0)
    changed = [value * (1.03 if place >= 30 else 1) for place, value in enumerate(level)]
    assert change_points(changed, effect=0.05) == [] and change_points(changed, effect=0.01) == [30]
    assert change_points([1, 1, 1, 2, 2, 2], effect=0.05) == [] and change_points([5.0] * 50, effect=0.05) == []


def test_among_many_benchmarks_a_change_needs_more_runs() -> None:
    few, more = ([*noise("quiet", 20, 0), *(1.1 * each for each in noise("quiet", runs, 1))] for runs in (4, 8))
    assert change_points(few, effect=0.05) == change_points(more, effect=0.05, p_value=1e-4) == [20]
    assert change_points(few, effect=0.05, p_value=1e-4) == []


def mozilla(values: list[float], window: int = 12, threshold: float = 7.0) -> list[int]:
    """Perfherder's rule (mozilla/treeherder): where Student's t of 12 runs and the 12 before is
    largest, and exceeds 7."""
    scores = {}
    for place in range(window, len(values) - window + 1):
        before, after = values[place - window : place], values[place : place + window]
        deviation = math.sqrt((statistics.variance(before) + statistics.variance(after)) / window)
        scores[place] = abs(statistics.fmean(after) - statistics.fmean(before)) / deviation
    near = {place: max(scores.get(place + d, 0.0) for d in range(-window, window + 1)) for place in scores}
    return [place for place, score in scores.items() if score > threshold and score == near[place]]


@pytest.mark.parametrize("seed", range(6))
def test_quiet_steps_are_those_that_mozilla_finds(seed: int) -> None:
    levels = [1.0] * 30 + [1.15] * 30 + [0.9] * 30
    values = [level * value for level, value in zip(levels, noise("quiet", 90, seed), strict=True)]
    ours, theirs = change_points(values, effect=0.05), mozilla(values)
    assert len(ours) == len(theirs) == 2
    assert all(abs(one - other) <= 1 for one, other in zip(ours, theirs, strict=True))
