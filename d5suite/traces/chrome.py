"""Chrome's trace format, which Perfetto's page and others open. Imports its neighbours.

The format is described in "Trace Event Format" (Google, 2016); times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d5suite.files import atomic_path
from d5suite.traces.events import Trace
from d5suite.traces.waits import WaitStates, wait_states


def write_chrome(trace: Trace, path: Path) -> None:
    """Write a trace as a Chrome trace: a slice per call, wait states as slices of their own.

    Parameters
    ----------
    trace : Trace
    path : Path
        Is replaced as a whole, or not at all.
    """
    records = _records(trace, wait_states(trace))
    with atomic_path(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[')
        for number, record in enumerate(records):
            file.write(",\n" if number else "\n")
            file.write(json.dumps(record, separators=(",", ":")))
        file.write("\n]}\n")


def _records(trace: Trace, states: WaitStates) -> Iterator[dict[str, Any]]:
    begin, scale = trace.begin, 1e6 / trace.ticks_per_second
    processes: dict[tuple[str, str], int] = {}
    for number, location in enumerate(trace.locations):
        process = processes.setdefault((location.process, location.host), len(processes))
        label = f"{location.process} ({location.host})" if location.host else location.process
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": location.name}}
    pids = [processes[each.process, each.host] for each in trace.locations]
    for number, calls in enumerate(states.calls):
        rows = zip(calls.enter.tolist(), calls.leave.tolist(), calls.region.tolist(), strict=True)
        for enter, leave, index in rows:
            region = trace.regions[index]
            yield {
                "ph": "X", "name": region.name, "cat": region.role, "pid": pids[number], "tid": number,
                "ts": (enter - begin) * scale, "dur": (leave - enter) * scale,
            }  # fmt: skip
    for wait in states.waits:
        cause = trace.locations[wait.cause].process if wait.cause >= 0 else ""
        yield {
            "ph": "X", "name": wait.pattern, "cat": "wait", "pid": pids[wait.location], "tid": wait.location,
            "ts": (wait.begin - begin) * scale, "dur": wait.ticks * scale, "args": {"for": cause},
        }  # fmt: skip
