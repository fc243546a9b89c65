"""The layer times on a page: rows of nodes, a column for each backend.

Imports its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from d5suite.report.layers import SORTS, Comparison, LayerRow, comparisons, reorders
from d5suite.report.page.facts import seconds
from d5suite.report.page.gather import Page

MOST_LAYERS = 60
"""Most rows of a comparison on a page; those that take longest are shown."""


def layer_tables(page: Page) -> Iterator[dict[str, Any]]:
    """Yield what the template shows of all layer times that the page's results hold."""
    for section in page.sections:
        for number, found in enumerate(comparisons(section.records)):
            rows = sorted(found.rows, key=SORTS["time"])
            yield {
                "id": f"l-{section.id}-{number}",
                "title": found.title,
                "setting": " · ".join(section.setting),
                "backends": found.backends,
                "steps": [_step(found, backend) for backend in found.backends],
                "missing": found.missing,
                "rows": [_row(found, row) for row in rows[:MOST_LAYERS]],
                "left_out": max(0, len(rows) - MOST_LAYERS),
                "peak": bool(found.ceiling),
            }


def _step(found: Comparison, backend: str) -> tuple[str, ...]:
    part = found.parts[backend]
    elsewhere = ", ".join(f"{name} {each / part['step_s']:.0%}" for name, each in part["other"].items())
    left = part.get("left_over_s", 0.0) / part["step_s"]
    figures = f"{part['slowdown']:.2f}", f"{part['coverage']:.0%}", elsewhere or "–", f"{left:.0%}"
    count, took = reorders(part)
    more = [f"{count:.0f} changes of layout by oneDNN, {took / part['plain_step_s']:.1%} of the step"] if count else []
    said = "; ".join([part["method"], *more, *part.get("notes", [])])
    return backend, seconds(part["plain_step_s"]), *figures, said


def _row(found: Comparison, row: LayerRow) -> dict[str, Any]:
    part = found.part_of_ceiling(row, row.fastest)
    cells = []
    for backend in found.backends:
        took = row.seconds.get(backend)
        slower = bool(took and row.fastest and took > row.fastest)
        told = not slower or row.ranges[backend][0] > min(high for _, high in row.ranges.values())
        ratio = f" {'×' if told else '≈'}{took / row.fastest:.3g}" if slower and took else ""
        low, high = row.ranges.get(backend, (0.0, 0.0))
        between = f"{1e3 * low:.3g} to {1e3 * high:.3g} ms" if high > low else ""
        tip = ", ".join(filter(None, (between, row.kernels.get(backend))))
        cells.append(
            {"text": "–" if took is None else f"{1e3 * took:.3g}{ratio}", "best": took == row.fastest, "tip": tip}
        )
    return {
        "label": row.label,
        "nodes": ", ".join(row.nodes),
        "facts": f"{row.op_type}, {row.direction}",
        "cells": cells,
        "flops": "–" if row.flops is None else f"{row.flops / 1e9:.3g}",
        "bytes": "–" if row.bytes is None else f"{row.bytes / 1e6:.3g}",
        "peak": "–" if part is None else f"{part:.0%}",
    }
