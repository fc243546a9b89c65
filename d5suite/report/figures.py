"""The judged figures of a record: columns of its measurement and passes that say what is better.

Imports `d5suite.measurements.tables`, `d5suite.statistics`, `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from d5suite.errors import JobError
from d5suite.measurements.tables import Column
from d5suite.report.formats import at, figure, pass_columns
from d5suite.statistics.figures import Figure


def judged_figures(record: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the figures of a record that are to be judged, by their headings.

    Parameters
    ----------
    record : mapping
        A d5suite record, with ``table``: the measurement's `Table`.

    Raises
    ------
    JobError
        If a figure is not a number, or negative.
    """
    return {heading: Figure(value, column.better, column.least) for heading, column, value in _judged(record)}


def _judged(record: Mapping[str, Any]) -> Iterator[tuple[str, Column, float]]:
    for column in (*record["table"].columns, *pass_columns([record])):
        value = at(record, column.value) if column.better else None
        if value is None:  # a pass may not have been taken
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise JobError(f"{column.value} is to be judged, but is {str(value)[:100]}",
                           where=record.get("place"), hint="Give a number from 0 on.")  # fmt: skip
        yield column.heading, column, float(value)


def said_of(heading: str, base: Figure, new: Figure, worse: float) -> str:
    """Say how much worse a figure became."""
    times = "worse" if worse == math.inf else f"{figure(worse)} times worse"
    return f"{heading} became {times}: {figure(new.value)} instead of {figure(base.value)} ({base.better} is better)"
