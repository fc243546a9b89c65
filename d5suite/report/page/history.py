"""The history of a page's benchmarks: levels, and changes dated to their runs.

Imports its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from d5suite.report.history import HistoryPoint, changes, changes_beside, read
from d5suite.statistics.decisions import Threshold
from d5suite.statistics.history import LevelChange

DAY_S = 86_400
"""Seconds that count at least as the usual distance of two runs: runs on one day make no gaps."""

LONG_GAP = 5.0
"""Multiple of the usual distance of two runs from which a gap is marked."""


class BenchmarkHistory(NamedTuple):
    """One benchmark's runs.

    Attributes
    ----------
    name, conditions : str
        The conditions distinguish it from others of its name.
    points : list of HistoryPoint
        In order of time.
    changes : list of LevelChange
    beside : mapping of str to list of LevelChange
        Changes of memory and of the first call, by what changed.
    gaps : list of str
        Days without a run, where that is unusual.
    """

    name: str
    conditions: str
    points: Sequence[HistoryPoint]
    changes: list[LevelChange]
    beside: Mapping[str, Sequence[LevelChange]]
    gaps: list[str]


def histories_of(folder: Path) -> list[BenchmarkHistory]:
    """Read a history; benchmarks whose level changed come first.

    Raises
    ------
    ConfigurationError, JobError
        As `d5suite.report.history.read` does.
    """
    history = read(folder)
    alike: dict[str, list[dict[str, str]]] = {}
    for name, conditions in history:
        alike.setdefault(name, []).append(dict(conditions))
    histories = []
    for (name, conditions), points in history.items():
        own = dict(conditions)
        apart = [f"{key} {value}" for key, value in own.items() if any(each.get(key) != value for each in alike[name])]
        steps, beside = changes(points, Threshold()), changes_beside(points, Threshold())
        histories.append(BenchmarkHistory(name, ", ".join(apart), points, steps, beside, _gaps(points)))
    return sorted(histories, key=lambda each: (not each.changes, each.name))


def _gaps(points: Sequence[HistoryPoint]) -> list[str]:
    dates = [date for date in (when(point.date) for point in points) if date is not None]
    return [f"no run from {dates[i - 1]:%Y-%m-%d} to {dates[i]:%Y-%m-%d}" for i in after_gaps(dates)]


def after_gaps(dates: Sequence[datetime]) -> list[int]:
    """Return the places of runs after an unusually long gap; empty for fewer than four runs."""
    distances = [(after - before).total_seconds() for before, after in itertools.pairwise(dates)]
    if len(distances) < 3:
        return []
    usual = max(sorted(distances)[len(distances) // 2], DAY_S)
    return [i for i, distance in enumerate(distances, start=1) if distance > LONG_GAP * usual]


def when(date: str) -> datetime | None:
    """Return a point's date in UTC; None if it is not a date."""
    try:
        return datetime.fromisoformat(date).replace(tzinfo=None)
    except ValueError:
        return None
