"""Recordings of `d5suite.instruments.recorder`, read as one trace on one clock.

The clock is the first rank's. Another rank's offset was measured before and after the recording;
in between it is taken to change linearly. Ranks of one host share a clock, and nothing is changed
unless the measurement contradicts that. Imports NumPy, `d5suite.instruments.recorder` and its
neighbours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.errors import TraceError
from d5suite.files import LARGEST_JSON, read_bounded
from d5suite.instruments.recorder import FORMAT, METRIC, WORDS
from d5suite.traces.events import COLUMNS, Comm, EventKind, Events, Location, MetricSeries, Region, Trace

FASTEST_DRIFT = 500e-6
"""Seconds per second by which clocks of two machines may part; quartz clocks differ by less than
100e-6."""


@dataclass
class _Process:
    """What one process has recorded."""

    path: Path
    name: str
    run: str
    host: str
    boot: str
    began_ns: int
    regions: dict[int, Region] = field(default_factory=dict)
    metrics: dict[int, tuple[str, str]] = field(default_factory=dict)
    streams: dict[int, tuple[str, bool]] = field(default_factory=dict)
    communicators: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    readings: list[tuple[int, int, int]] = field(default_factory=list)
    dropped: int = 0
    closed: bool = False


@dataclass(frozen=True)
class Clock:
    """How times of one process become times of the first rank's clock.

    Attributes
    ----------
    at, offset : tuple of int
        Where offsets were measured, by the process's own clock, and what they were; empty if none
        is needed. Nanoseconds.
    error_ns : int or None
        By how much corrected times may be wrong; None if nothing was measured.
    drift : float
        Seconds per second by which the clocks part.
    jump_ns : int
        By how much the clocks have parted beyond what clocks do; 0 if they have not.
    """

    at: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    error_ns: int | None = 0
    drift: float = 0.0
    jump_ns: int = 0

    @classmethod
    def of(cls, readings: Sequence[tuple[int, int, int]], *, same: bool) -> Clock:
        """Return the correction that follows from readings.

        Parameters
        ----------
        readings : sequence of tuple of int
            Time by the process's own clock, the first rank's clock less that one, and the error.
        same : bool
            Whether both processes say that they read one clock.
        """
        if same and all(abs(offset) <= error for _, offset, error in readings):
            return cls()
        if not readings:
            return cls(error_ns=None)
        (first, begin, one), (last, end, other) = readings[0], readings[-1]
        error = max(one, other)
        if last <= first:
            return cls((first,), (begin,), error)
        parted, passed = end - begin, last - first
        allowed = one + other + FASTEST_DRIFT * passed
        jump = abs(parted) if abs(parted) > allowed else 0
        return cls((first, last), (begin, end), error + jump, parted / passed, jump)

    def correct(self, times: np.ndarray) -> np.ndarray:
        """Return times of the first rank's clock, int64 as given."""
        if not self.at:
            return times
        if len(self.at) == 1:
            return times + self.offset[0]
        # Integers first: a float has no nanoseconds left after 104 days.
        more = (times - self.at[0]) * ((self.offset[1] - self.offset[0]) / (self.at[1] - self.at[0]))
        return times + self.offset[0] + np.rint(more).astype(np.int64)


def is_recording(folder: Path) -> bool:
    """Return whether a folder holds a recording."""
    return folder.is_dir() and any(folder.glob("*.jsonl"))


def read_recording(folder: Path) -> Trace:
    """Read a recording, also one whose processes were killed.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    Trace
        `Trace.notes` says what is missing, and how well the clocks agree.

    Raises
    ------
    TraceError
        If it holds no recording, or those of two runs.
    """
    processes = sorted((_process(each) for each in folder.glob("*.jsonl")), key=lambda each: _number(each.name))
    if not processes:
        raise TraceError("holds no recording", where=str(folder))
    if len({each.run for each in processes}) > 1:
        names = ", ".join(each.path.name for each in processes if each.run != processes[0].run)
        raise TraceError(
            "holds recordings of two runs", where=str(folder), hint=f"Move these elsewhere: {names}."
        )  # fmt: skip
    made = _Making(folder)
    for each in processes:
        made.add(each, processes[0])
    return made.trace(processes)


def _number(name: str) -> list[str | int]:
    """Order ``rank 10`` behind ``rank 9``, whatever follows."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name))]


def _process(path: Path) -> _Process:
    """Read the definitions of a process; the last line may have been cut off."""
    lines = []
    for line in read_bounded(path, LARGEST_JSON).decode("utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    if not lines or not isinstance(lines[0], dict) or lines[0].get("recording") != FORMAT:
        raise TraceError("is no recording of this version of d5suite", where=str(path))
    try:
        return _described(path, lines)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"is damaged: {type(error).__name__}: {error}", where=str(path)) from error


def _described(path: Path, lines: Sequence[Mapping[str, Any]]) -> _Process:
    head = lines[0]
    if head["words"] != WORDS:
        raise ValueError(f"{head['words']} words")
    process, run, host, boot = (str(head[name]) for name in ("process", "run", "host", "boot"))
    found = _Process(path, process, run, host, boot, int(head["time_ns"]))
    for line in lines[1:]:
        if "region" in line:
            found.regions[line["region"]] = Region(line["name"], line["role"], line["is_mpi"], line["file"])
        elif "metric" in line:
            found.metrics[line["metric"]] = line["name"], line["unit"]
        elif "communicator" in line:
            found.communicators[line["communicator"]] = line["name"], int(line["rank"]), int(line["size"])
        elif "stream" in line:
            found.streams[int(line["stream"])] = line["name"], bool(line["is_main"])
        elif "clock_ns" in line:
            found.readings.append((int(line["clock_ns"]), int(line["offset_ns"]), int(line["error_ns"])))
        elif "closed_ns" in line:
            found.closed, found.dropped = True, int(line["dropped"])
    return found


class _Making:
    """A trace while processes are added to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._regions: dict[Region, int] = {}
        self._locations: list[Location] = []
        self._events: list[Events] = []
        self._metrics: list[MetricSeries] = []
        self._members: dict[int, dict[int, int]] = {}
        self._names: dict[int, str] = {}
        self._notes: list[str] = []
        self._clocks: list[Clock] = []

    def add(self, one: _Process, first: _Process) -> None:
        """Add a process and its threads."""
        same = one is first or (bool(one.boot) and one.boot == first.boot)
        clock = Clock.of(one.readings, same=same) if one is not first else Clock()
        self._clocks.append(clock)
        numbers = {number: self._regions.setdefault(each, len(self._regions)) for number, each in one.regions.items()}
        main = len(self._locations)
        for number, (name, is_main) in sorted(one.streams.items()):
            rows = self._rows(one, number)
            if not len(rows) and not is_main:
                continue
            back = int((np.diff(rows[:, 0]) < 0).sum())
            if back:
                most = int(-np.diff(rows[:, 0]).min())
                self._notes.append(
                    f"the clock of {one.name} went back {back:,} times, by up to {most * 1e-6:.4g} ms; the times "
                    "in between are those before"
                )
                rows[:, 0] = np.maximum.accumulate(rows[:, 0])
            rows[:, 0] = clock.correct(rows[:, 0])
            location = len(self._locations)
            self._locations.append(Location(name, one.name, one.host, is_main))
            self._add_events(rows, numbers)
            self._add_metrics(rows, one, location)
        for number, (name, rank, _) in one.communicators.items():
            self._members.setdefault(number, {})[rank] = main
            self._names[number] = name

    def _rows(self, one: _Process, number: int) -> np.ndarray:
        path = one.path.with_name(f"{one.path.stem}.{number}.events")
        try:
            words = np.fromfile(path, np.int64)
        except OSError as error:
            raise TraceError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
        rows = words[: len(words) // WORDS * WORDS].reshape(-1, WORDS)
        unwritten = np.flatnonzero(rows[:, 1] == 0)
        return rows[: unwritten[0]].copy() if len(unwritten) else rows

    def _add_events(self, rows: np.ndarray, regions: Mapping[int, int]) -> None:
        kind, number = (rows[:, 1] & 0xFF) - 1, (rows[:, 1] >> 8) - 1
        chosen = kind != METRIC
        rows, kind, number = rows[chosen], kind[chosen], number[chosen]
        nested = kind <= EventKind.LEAVE
        if len(regions):
            table = np.full(max(regions) + 1, -1, np.int64)
            table[list(regions)] = list(regions.values())
            known = nested & (number >= 0) & (number < len(table))
            number[known] = table[number[known]]
        other = ~nested
        columns = [rows[:, 0], kind, number]
        for place, empty in zip(range(2, WORDS), (-1, -1, -1, 0, 0, -1), strict=True):
            columns.append(np.where(other, rows[:, place], empty))
        self._events.append(
            Events(*(each.astype(dtype) for each, dtype in zip(columns, COLUMNS.values(), strict=True)))
        )

    def _add_metrics(self, rows: np.ndarray, one: _Process, location: int) -> None:
        chosen = rows[(rows[:, 1] & 0xFF) - 1 == METRIC]
        number = (chosen[:, 1] >> 8) - 1
        for metric, (name, unit) in one.metrics.items():
            own = chosen[number == metric]
            if len(own):
                value = np.ascontiguousarray(own[:, 2]).view(np.float64)
                self._metrics.append(MetricSeries(name, unit, location, own[:, 0].copy(), value.copy()))

    def trace(self, processes: Sequence[_Process]) -> Trace:
        """Return the trace."""
        for one, clock in zip(processes, self._clocks, strict=True):
            self._say(one, clock)
        begin = min((int(each.time[0]) for each in self._events if len(each)), default=0)
        events = [Events(each.time - begin, *_rest(each)) for each in self._events]
        metrics = [
            MetricSeries(e.name, e.unit, e.location, np.maximum(e.time - begin, 0), e.value) for e in self._metrics
        ]
        communicators = []
        for number, members in sorted(self._members.items()):
            sizes = [one.communicators[number][2] for one in processes if number in one.communicators]
            ordered = tuple(members[rank] for rank in sorted(members))
            if len(members) < max(sizes):
                self._notes.append(
                    f"{max(sizes) - len(members)} of {max(sizes)} ranks of {self._names[number]} recorded nothing: "
                    "messages are left out"
                )
                continue
            communicators.append(Comm(self._names[number], ordered))
        errors = [each.error_ns for each in self._clocks]
        killed = [one.name for one in processes if not one.closed]
        properties = {
            "clock error ns": "unknown" if None in errors else str(max(each or 0 for each in errors)),
            "dropped events": str(sum(each.dropped for each in processes)),
            **({"incomplete": ", ".join(killed)} if killed else {}),
        }
        return Trace(
            self._locations, list(self._regions), communicators, events, metrics=metrics, notes=tuple(self._notes),
            properties=properties,
        )  # fmt: skip

    def _say(self, one: _Process, clock: Clock) -> None:
        if not one.closed:
            self._notes.append(f"{one.name} did not end its recording, as if it was killed: its last events count")
        if one.dropped:
            self._notes.append(f"{one.name} dropped {one.dropped:,} events for lack of room: the end is missing")
        if clock.jump_ns:
            self._notes.append(
                f"the clock of {one.name} jumped: against the first rank's it moved by {clock.jump_ns * 1e-6:.4g} ms "
                f"in {(clock.at[1] - clock.at[0]) * 1e-9:.3g} s, so its times may be wrong by as much"
            )
        if clock.error_ns is None:
            self._notes.append(f"the clock of {one.name} was not compared with the first rank's")


def _rest(events: Events) -> list[np.ndarray]:
    return [getattr(events, name) for name in list(COLUMNS)[1:]]
