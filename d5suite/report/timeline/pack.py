"""A trace as columns for the page's script, compressed. Imports NumPy and `d5suite.traces`."""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np

from d5suite.traces.analysis import Analysis
from d5suite.traces.waits import PATTERNS

DEEPEST = 40
"""Levels of nested regions that the page shows."""

MOST_REGIONS = 2**16 - 1
"""Regions that have a name of their own; the others share the last one."""

NANOSECOND = 10**9


def pack(found: Analysis, *, step: str) -> tuple[dict[str, Any], str, list[str]]:
    """Return what the page's script needs.

    Parameters
    ----------
    found : Analysis
    step : str
        The region that is one step.

    Returns
    -------
    facts : dict
        Names, sizes of columns, steps; times in nanoseconds since the trace's first event.
    data : str
        The columns, compressed by gzip, in base64.
    notices : list of str
        What the page leaves out.
    """
    trace, calls = found.trace, found.states.calls
    begin, scale = trace.begin, NANOSECOND / trace.ticks_per_second
    notices: list[str] = []
    depths = [each.depth for each in calls]
    kept = [np.flatnonzero(each < DEEPEST) for each in depths]
    if hidden := sum(map(len, depths)) - sum(map(len, kept)):
        notices.append(f"{hidden:,} regions that lie more than {DEEPEST} deep in others are not shown")
    gaps = [np.diff(each.enter[chosen], prepend=begin) for each, chosen in zip(calls, kept, strict=True)]
    lengths = [(each.leave - each.enter)[chosen] for each, chosen in zip(calls, kept, strict=True)]
    longest = max((int(each.max()) for each in (*gaps, *lengths) if len(each)), default=0)
    unit = longest // (2**32 - 1) + 1  # 32 bits hold 4.3 s in nanoseconds; a longer trace is rounded
    if unit > 1:
        starts = [((each.enter[chosen] - begin) // unit) for each, chosen in zip(calls, kept, strict=True)]
        gaps = [np.diff(each, prepend=0) for each in starts]
        notices.append(f"times on this page are rounded to {unit} ticks of {scale:g} ns; the tables are exact")
    regions = [np.minimum(each.region[chosen], MOST_REGIONS) for each, chosen in zip(calls, kept, strict=True)]
    waits = found.states.waits
    messages = sorted(found.states.arrows)
    columns = [
        _joined(gaps, np.uint32),
        _joined([each // unit for each in lengths], np.uint32),
        _joined(regions, np.uint16),
        _joined([each[chosen] for each, chosen in zip(depths, kept, strict=True)], np.uint8),
        np.array([wait.location for wait in waits], np.uint16),
        np.array([wait.cause for wait in waits], np.int32),
        np.array([list(PATTERNS).index(wait.pattern) for wait in waits], np.uint8),
        np.array([(wait.begin - begin) * scale for wait in waits], np.float64),
        np.array([(wait.end - begin) * scale for wait in waits], np.float64),
        np.array([each[1] for each in messages], np.uint16),
        np.array([each[3] for each in messages], np.uint16),
        np.array([(each[0] - begin) * scale for each in messages], np.float64),
        np.array([(each[2] - begin) * scale for each in messages], np.float64),
    ]
    for metric in trace.metrics:
        columns += [(metric.time - begin) * scale, metric.value.astype(np.float64)]
    by_location, whole = step_spans(found, step)
    facts = {
        "length": max(1.0, (trace.end - begin) * scale),
        "unit": unit * scale,
        "ranks": len(found.ranks),
        "locations": [
            {"name": each.name, "process": each.process, "host": each.host, "slices": len(chosen)}
            for each, chosen in zip(trace.locations, kept, strict=True)
        ],
        "regions": [
            {"name": each.name, "is_mpi": each.is_mpi, "waits": each.waits, "file": each.file, "line": each.line}
            for each in (*trace.regions[:MOST_REGIONS],)
        ]
        or [{"name": "", "is_mpi": False, "waits": False, "file": "", "line": 0}],
        "patterns": list(PATTERNS),
        "steps": {"spans": whole, "by_location": by_location},
        "longest_step": max((end - start for rows in by_location.values() for start, end in rows), default=1.0),
        "longest_message": max(((each[2] - each[0]) * scale for each in messages), default=0.0),
        "metrics": [
            {"name": each.name, "unit": each.unit, "location": each.location, "count": len(each.time)}
            for each in trace.metrics
        ],
        "sizes": {"slices": sum(map(len, kept)), "waits": len(waits), "messages": len(messages)},
    }
    raw = b"".join(_padded(each) for each in columns)
    return facts, base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode("ascii"), notices


def _joined(parts: list[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate(parts).astype(kind) if parts else np.empty(0, kind)


def _padded(column: np.ndarray) -> bytes:
    """Return a column's bytes, little-endian, up to the next multiple of 8."""
    raw = column.astype(column.dtype.newbyteorder("<")).tobytes()
    return raw + bytes(-len(raw) % 8)


Span = tuple[float, float]
"""Begin and end in nanoseconds of the trace."""


def step_spans(found: Analysis, step: str) -> tuple[dict[int, list[Span]], list[Span]]:
    """Return the spans of each location's steps, and of each step over all locations."""
    begin, scale = found.trace.begin, NANOSECOND / found.trace.ticks_per_second
    wanted = [index for index, each in enumerate(found.trace.regions) if each.name == step]
    spans: dict[int, list[Span]] = {}
    for rank in found.ranks:
        calls = found.states.calls[rank.location]
        chosen = np.isin(calls.region, wanted)
        if chosen.any():
            ends = (calls.enter[chosen] - begin) * scale, (calls.leave[chosen] - begin) * scale
            spans[rank.location] = list(zip(*(each.tolist() for each in ends), strict=True))
    together = zip(*spans.values(), strict=False)
    return spans, [(min(start for start, _ in each), max(end for _, end in each)) for each in together]
