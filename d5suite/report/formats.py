"""Formats of the figures in tables, by the names that `d5suite.measurements.tables.Column` uses.

Imports `d5suite.measurements.tables` and its neighbours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from d5suite.errors import JobError
from d5suite.measurements.tables import Column, Table
from d5suite.report.ceilings import share_of_ceiling

CONFIDENCE = 0.95
"""Confidence of intervals with enough samples."""


BY_DEFINITION = ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes")
"""Parts of the memory that a step needs by definition: see ``results/schema.json``."""


class CellInput(NamedTuple):
    """Input of a format.

    Attributes
    ----------
    value : object
        The value at the column's path.
    scale : float
    record : mapping
        The whole record.
    wide : bool
        Whether the terminal is wide.
    """

    value: Any
    scale: float
    record: Mapping[str, Any]
    wide: bool


def figure(value: float) -> str:
    """Format four significant digits without an exponent."""
    rounded = float(f"{value:.4g}")
    return f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:.4g}"


def times(ratio: float) -> str:
    """Format a ratio."""
    return f"{ratio:.2f}" if ratio < 10 else "∞" if math.isinf(ratio) else figure(ratio)


def _interval(cell: CellInput) -> str:
    shown = "–".join(figure(cell.scale * bound) for bound in cell.value)
    confidence = cell.record["median_ci_confidence"]
    return f"{shown} ({confidence:.0%})" if cell.wide and confidence < CONFIDENCE else shown


def _interval_with_confidence(cell: CellInput) -> str:
    shown = "–".join(figure(cell.scale * bound) for bound in cell.value)
    return f"{shown} ({cell.record['median_ci_confidence']:.0%})"


def worst_share(checks: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest error over its tolerance; the error itself if nothing is tolerated."""
    return max(each["error"] / each["tolerance"] if each["tolerance"] else each["error"] for each in checks)


def needed_bytes(memory: Mapping[str, Any]) -> int:
    """Return the memory that a network needs by definition; 0 if that is unknown."""
    return sum(memory.get(part, 0) for part in BY_DEFINITION)


def _needed(cell: CellInput) -> str:
    needed = needed_bytes(cell.value)
    return f"{needed / 2**20:.0f}" if needed else "–"


def _of_peak(cell: CellInput) -> str:
    """Return the part of the ceiling of arithmetic; ? if it is more, and nothing explains that."""
    return f"{100 * cell.value:.0f}%" if share_of_ceiling(cell.record, "flops_per_s").believed else "?"


def _slowest_rank(cell: CellInput) -> str:
    """Return the straggler ratio, and the number of the slowest rank if the record has it."""
    ratio, rank = cell.value["straggler_ratio"], cell.value.get("slowest_rank")
    return "–" if ratio is None else times(ratio) + (f" #{rank}" if rank is not None else "")


def _runs_there(cell: CellInput) -> str:
    return f"{sum('seconds' in run for run in cell.value)} of {len(cell.value)}"


FORMATS: Mapping[str, Callable[[CellInput], str]] = {
    "figure": lambda cell: figure(cell.scale * cell.value),
    "tenths": lambda cell: f"{cell.scale * cell.value:.1f}",
    "hundredths": lambda cell: f"{cell.scale * cell.value:.2f}",
    "thousandths": lambda cell: f"{cell.scale * cell.value:.3f}",
    "range of thousandths": lambda cell: "–".join(f"{cell.scale * bound:.3f}" for bound in cell.value),
    "percent": lambda cell: f"{100 * cell.value:.0f}%",
    "part of the arithmetic ceiling": _of_peak,
    "efficiency": lambda cell: f"{100 * cell.value['efficiency']:.0f}% {cell.value['mode']}",
    "mebibytes": lambda cell: f"{cell.value / 2**20:.0f}",
    "needed mebibytes": _needed,
    "interval": _interval,
    "interval with its confidence": _interval_with_confidence,
    "median": lambda cell: figure(cell.scale * statistics.median(cell.value)),
    "runs that got there": _runs_there,
    "slowest rank": _slowest_rank,
    "sum in tenths": lambda cell: f"{cell.scale * sum(cell.value.values()):.1f}",
    "text": lambda cell: str(cell.value),
    "worst share": lambda cell: f"{worst_share(cell.value):.2g}",
}
"""Formats by name."""


def at(record: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; for a list, the values of its items.

    None if there is no value.
    """
    value: Any = record
    for name in path.split("."):
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = [item[name] for item in value if name in item] or None
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            return None
    return value


def pass_columns(records: Iterable[Mapping[str, Any]]) -> list[Column]:
    """Return the columns that records declare for passes which are not d5suite's own."""
    declared = (each for record in records for one in record.get("passes", {}).values() for each in one["columns"])
    return list(dict.fromkeys(Column(**each) for each in declared))


def with_passes(table: Table, records: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of records with their `pass_columns`, before the column of errors."""
    columns = list(table.columns)
    place = len(columns) - (columns[-1].value == "validation.checks")
    columns[place:place] = pass_columns(records)
    return replace(table, columns=tuple(columns))


def text_of(column: Column, record: Mapping[str, Any], wide: bool) -> str:
    """Return a column's text for a record from `d5suite.report.reading`.

    Raises
    ------
    JobError
        If the column's format is unknown or does not fit the value.
    """
    value = at(record, column.value)
    try:
        return "–" if value is None else FORMATS[column.format](CellInput(value, column.scale, record, wide))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of a plug-in that is not installed
        raise JobError(f"{column.value} cannot be shown as {column.format!r}: {error}", where=record["place"]) from None
