"""Layer times as CSV and JSON, all rows, in seconds. Imports its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d5suite.report.layers import Comparison, LayerRow
from d5suite.report.page.csv_files import csv_bytes

HEAD = ("case", "measurement", "nodes", "operator", "stage", "direction", "backend", "seconds", "least_seconds",
        "most_seconds", "to_fastest")  # fmt: skip
FURTHER = ("flops", "bytes", "part_of_ceiling", "kernels")


def csv_of(found: Sequence[Comparison]) -> bytes:
    """Return one line per row and backend."""
    conditions, lines = list(dict.fromkeys(name for each in found for name in each.conditions)), []
    for each in found:
        case, _, measurement = each.title.partition("/")
        for row in each.rows:
            for backend, seconds in row.seconds.items():
                line = [case, measurement, " ".join(row.nodes), row.op_type, row.stage, row.direction, backend, seconds]
                line += row.ranges[backend]
                line += [seconds / row.fastest if row.fastest else None, row.flops, row.bytes]
                line += [each.part_of_ceiling(row, seconds), row.kernels.get(backend, "")]
                lines.append([*line, *(each.conditions.get(name) for name in conditions)])
    return csv_bytes([*HEAD, *FURTHER, *conditions], lines)


def json_of(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return what `csv_of` holds, and each backend's step, as JSON values."""
    return [
        {
            "measurement": each.title,
            "conditions": each.conditions,
            "backends": {
                name: {key: value for key, value in part.items() if key not in ("times", "graph")}
                for name, part in each.parts.items()
            },
            "missing": each.missing,
            "ceiling": each.ceiling,
            "rows": [_row(each, row) for row in each.rows],
        }
        for each in found
    ]


def _row(found: Comparison, row: LayerRow) -> dict[str, Any]:
    return {
        "nodes": list(row.nodes),
        "direction": row.direction,
        "operator": row.op_type,
        "stage": row.stage,
        "seconds": row.seconds,
        "ranges": row.ranges,
        "flops": row.flops,
        "bytes": row.bytes,
        "part_of_ceiling": {name: found.part_of_ceiling(row, seconds) for name, seconds in row.seconds.items()},
        "kernels": row.kernels,
    }
