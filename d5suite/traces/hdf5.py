"""A trace as an HDF5 file: columns that any array library reads. Imports h5py and its neighbours.

``definitions`` is JSON: locations, regions, communicators, metrics, notes. ``events/N`` holds the
columns of location N, ``metrics/N`` times and values of metric N.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.errors import TraceError
from d5suite.files import atomic_hdf5
from d5suite.traces.events import COLUMNS, Comm, EventKind, Events, Location, MetricSeries, Region, Trace

FORMAT = "d5suite-trace-1"


def write_hdf5(trace: Trace, path: Path) -> None:
    """Write a trace; the file appears as a whole or not at all.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    definitions = {
        "ticks_per_second": trace.ticks_per_second,
        "locations": [asdict(each) for each in trace.locations],
        "regions": [asdict(each) for each in trace.regions],
        "communicators": [asdict(each) for each in trace.communicators],
        "metrics": [{"name": each.name, "unit": each.unit, "location": each.location} for each in trace.metrics],
        "kinds": {each.name: int(each) for each in EventKind},
        "skipped": dict(trace.skipped),
        "notes": list(trace.notes),
        "properties": dict(trace.properties),
    }
    with atomic_hdf5(path) as file:
        file.attrs["format"] = FORMAT
        file.create_dataset("definitions", data=json.dumps(definitions))
        for number, events in enumerate(trace.events):
            group = file.create_group(f"events/{number}")
            for name in COLUMNS:
                column = getattr(events, name)
                group.create_dataset(name, data=column, **({"compression": "gzip"} if len(column) else {}))
        for number, metric in enumerate(trace.metrics):
            group = file.create_group(f"metrics/{number}")
            group.create_dataset("time", data=metric.time)
            group.create_dataset("value", data=metric.value)


def read_hdf5(path: Path) -> Trace:
    """Read what `write_hdf5` has written.

    Raises
    ------
    TraceError
        If the file is of another kind, or is damaged.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") != FORMAT:
                raise TraceError("is no trace of d5suite", where=str(path), hint="d5suite trace convert writes them.")
            return _read(file)
    except TraceError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"is no HDF5 file, or is damaged: {error}", where=str(path)) from error


def _read(file: Any) -> Trace:
    known = json.loads(file["definitions"][()])
    locations = [Location(**each) for each in known["locations"]]
    regions = [Region(**each) for each in known["regions"]]
    communicators = [Comm(each["name"], tuple(map(int, each["members"]))) for each in known["communicators"]]
    events, metrics = [], []
    for number in range(len(locations)):
        group = file[f"events/{number}"]
        columns = [np.asarray(group[name], kind) for name, kind in COLUMNS.items()]
        if len({each.shape for each in columns}) > 1 or columns[0].ndim != 1:
            raise ValueError("columns of different lengths")
        events.append(Events(*columns))
        _check(events[-1], len(regions), len(communicators))
    for number, each in enumerate(known["metrics"]):
        time, value = (np.asarray(file[f"metrics/{number}/{name}"], kind) for name, kind in
                       (("time", np.int64), ("value", np.float64)))  # fmt: skip
        metrics.append(MetricSeries(each["name"], each["unit"], int(each["location"]), time, value))
    if any(not 0 <= member < len(locations) for comm in communicators for member in comm.members):
        raise ValueError("a communicator has a member that is no location")
    return Trace(
        locations, regions, communicators, events, int(known["ticks_per_second"]), metrics, known["skipped"],
        known["notes"], known["properties"],
    )  # fmt: skip


def _check(events: Events, regions: int, communicators: int) -> None:
    """Raise `ValueError` if events name what is not defined."""
    nested = events.region[events.kind <= EventKind.LEAVE]
    if len(nested) and not 0 <= nested.min() <= nested.max() < regions:
        raise ValueError("an event is in a region that is not defined")
    if len(events) and (events.communicator.max() >= communicators or events.kind.min() < 0):
        raise ValueError("an event is of a communicator or kind that is not defined")
