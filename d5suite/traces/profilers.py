"""Traces that profilers write: Chrome's format and XLA's ``xplane.pb``.

PyTorch's, MXNet's and onnxruntime's profilers and Horovod's timeline write Chrome's format ("Trace
Event Format", Google, 2016), and XLA's profiler, which TensorFlow and JAX use, an ``XSpace``
message. Imports NumPy, protobuf and its neighbours, and no framework.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from d5suite.errors import TraceError
from d5suite.traces.events import Trace
from d5suite.traces.slices import RankNames, TimeSlice, Track, trace_of

SUFFIXES = (".json", ".json.gz", ".pb")
"""Ends of names of files that profilers write."""

LARGEST = 2**31
"""Bytes of a file that are read, unpacked."""

_LEFT_OUT = {"s": "flow", "t": "flow", "f": "flow", "b": "async", "e": "async", "n": "async", "i": "instant",
             "I": "instant", "R": "instant", "P": "sample", "N": "object", "O": "object", "D": "object"}  # fmt: skip

_OF_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

_FARTHEST_US = 9e15
"""Largest time in microseconds that fits into 64 bits as nanoseconds."""


def is_profile(path: Path) -> bool:
    """Return whether a file's name is that of a profile."""
    return path.name.lower().endswith(SUFFIXES)


def read_profiles(paths: Sequence[Path]) -> Trace:
    """Read the profile of one process, or those of all ranks of a run.

    Parameters
    ----------
    paths : sequence of Path
        Several files need the ranks in them, as PyTorch's profiler writes them.

    Raises
    ------
    TraceError
        If a file is no profile, or several files are not the ranks of one run.
    """
    if len(paths) == 1 and paths[0].name.lower().endswith(".pb"):
        return _read_xspace(paths[0])
    files = [_File(path) for path in paths]
    groups: list[RankNames] = []
    if len(files) > 1:
        ranks = [each.rank for each in files]
        if sorted(ranks) != list(range(len(files))):
            raise TraceError(
                f"holds {len(files)} profiles that are not ranks 0 to {len(files) - 1} of one run",
                where=str(paths[0].parent),
                hint=f"Name one of {', '.join(path.name for path in list(paths)[:8])}.",
            )
        files.sort(key=lambda each: each.rank)
        groups = [RankNames("world", tuple(each.process for each in files))]
    skipped: Counter[str] = Counter()
    for each in files:
        skipped.update(each.skipped)
    return trace_of(
        [row for each in files for row in each.rows],
        groups=groups,
        metrics=[metric for each in files for metric in each.metrics],
        skipped=dict(skipped),
        notes=[note for each in files for note in each.notes],
    )


class _File:
    """One file in Chrome's format."""

    def __init__(self, path: Path) -> None:
        self.rank, self.process = -1, ""
        self.notes: list[str] = []
        self.skipped: Counter[str] = Counter()
        self._rows: dict[tuple[str, str], Track] = {}
        self._open: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._metrics: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
        found, events = _documents(path, self.notes)
        told = found.get("distributedInfo")
        if isinstance(told, dict) and isinstance(told.get("rank"), int):
            self.rank, self.process = told["rank"], f"rank {told['rank']}"
        count = 0
        for event in events:
            count += 1
            if not self._add(event):
                self.skipped["malformed"] += 1
        if count == self.skipped["malformed"]:
            raise TraceError("holds no events in Chrome's trace format", where=str(path))
        self._close()
        self.rows = self._named()

    @property
    def metrics(self) -> list[tuple[str, str, str, list[int], list[float]]]:
        """Counters, with the process that they belong to."""
        homes = {pid: row.process for (pid, _), row in self._rows.items()}
        first = next(iter(homes.values()), "")
        return [
            (homes.get(pid, first), name, "", *_in_order(times, values))
            for (pid, name), (times, values) in self._metrics.items()
        ]

    def _add(self, event: Any) -> bool:
        """Keep an event; return whether it has the form of one."""
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            return False
        kind, key = event["ph"], (str(event.get("pid", 0)), str(event.get("tid", 0)))
        name, category = str(event.get("name", "")), str(event.get("cat", ""))
        if kind == "M":
            arguments = event.get("args")
            told = arguments.get("name") if isinstance(arguments, dict) else None
            if told is not None and name in ("process_name", "thread_name"):
                self._names[key if name == "thread_name" else (key[0], "")] = str(told)
            return True
        time = _nanoseconds(event.get("ts"))
        if kind in _LEFT_OUT or category == "Trace":
            self.skipped[_LEFT_OUT.get(kind, "span of the profiler")] += 1
            return True
        if time is None:
            return False
        if kind == "X":
            length = _nanoseconds(event.get("dur", 0))
            if length is None or length < 0:
                return False
            self._row(key).slices.append(TimeSlice(time, time + length, name, category))
        elif kind == "B":
            self._open.setdefault(key, []).append((time, name, category))
        elif kind == "E":
            if not self._open.get(key):
                self.skipped["end without a begin"] += 1
                return True
            begin, name, category = self._open[key].pop()
            self._row(key).slices.append(TimeSlice(begin, max(begin, time), name, category))
        elif kind == "C":
            for what, value in (event.get("args") or {}).items() if isinstance(event.get("args"), dict) else ():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    label = name if what in ("value", name) else f"{name} {what}"
                    times, values = self._metrics.setdefault((key[0], label), ([], []))
                    times.append(time)
                    values.append(float(value))
        else:
            return False
        return True

    def _row(self, key: tuple[str, str]) -> Track:
        if key not in self._rows:
            self._rows[key] = Track("", "")
        return self._rows[key]

    def _close(self) -> None:
        """End unfinished slices, which a killed program leaves, with their thread's last event."""
        unfinished = 0
        for key, begun in self._open.items():
            row = self._row(key)
            end = max([each.end for each in row.slices] + [time for time, _, _ in begun], default=0)
            row.slices += [TimeSlice(time, end, name, category) for time, name, category in begun]
            unfinished += len(begun)
        if unfinished:
            self.notes.append(f"{unfinished:,} slices never ended: they end with their thread's last event")

    def _named(self) -> list[Track]:
        """Give each row its name and its process; streams belong to the process that launched."""
        for row in self._rows.values():
            row.stream = any(each.category in _OF_A_GPU for each in row.slices)
        hosts = list(dict.fromkeys(pid for (pid, _), row in self._rows.items() if not row.stream))
        told = {pid: self._names.get((pid, ""), f"process {pid}") for pid, _ in self._rows}
        often = Counter(told[pid] for pid in hosts)
        for (pid, tid), row in self._rows.items():
            home = hosts[0] if row.stream and len(hosts) == 1 else pid
            row.process = self.process or (told[home] if often[told[home]] <= 1 else f"{told[home]} {home}")
            row.name = self._names.get((pid, tid), f"thread {tid}")
            if row.stream:
                row.name = f"{told[pid]} {row.name}"
        for process in {row.process for row in self._rows.values()}:
            threads = [(key, row) for key, row in self._rows.items() if row.process == process and not row.stream]
            for _, row in sorted(threads, key=lambda one: (one[1].name != "main", one[0][0] != one[0][1]))[:1]:
                row.is_main = True  # on Linux the main thread has the process's number
        return list(self._rows.values())


def _in_order(times: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    order = sorted(range(len(times)), key=times.__getitem__)
    return [times[index] for index in order], [values[index] for index in order]


def _nanoseconds(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _FARTHEST_US:
        return None
    return value * 1000 if isinstance(value, int) else round(value * 1000)


def _contents(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, EOFError) as error:
        raise TraceError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path)) from error
    if len(content) > LARGEST:
        raise TraceError(f"has more than {LARGEST / 2**30:.0f} GiB, which is the limit", where=str(path))
    return content


def _documents(path: Path, notes: list[str]) -> tuple[dict[str, Any], Iterator[Any]]:
    """Return a file's facts and its events. A list that was cut off is read as far as it goes."""
    text = _contents(path).decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except RecursionError:
        raise TraceError("is nested too deep to be a trace", where=str(path)) from None
    except ValueError:
        return {}, _events(text, path, notes)
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise TraceError("holds no events in Chrome's trace format", where=str(path))
    return found if isinstance(found, dict) else {}, iter(events)


_BEGIN = re.compile(r'^\s*(?:\{(?:[^\[\]]*?)"traceEvents"\s*:\s*)?\[')
_BETWEEN = re.compile(r"[\s,]*")


def _events(text: str, path: Path, notes: list[str]) -> Iterator[Any]:
    """Read a list that is no valid JSON: cut off, or with a comma too many."""
    begin = _BEGIN.match(text)
    if begin is None:
        raise TraceError("is neither JSON nor a list of events", where=str(path))
    decoder, at = json.JSONDecoder(), begin.end()
    while True:
        between = _BETWEEN.match(text, at)
        assert between is not None
        at = between.end()
        if at >= len(text):
            notes.append(f"{path.name} was cut off: its last events are missing")
            return
        if text[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            notes.append(f"{path.name} was cut off or is damaged after {at:,} characters: the rest is missing")
            return
        yield event


# XLA's profiles.

_MESSAGES = {
    "XSpace": "1*XPlane planes, 2*str errors, 3*str warnings",
    "XPlane": "2 str name, 3*XLine lines, 4*EventEntry event_metadata",
    "XLine": "2 str name, 11 str display_name, 3 int timestamp_ns, 4*XEvent events",
    "XEvent": "1 int metadata_id, 2 int offset_ps, 3 int duration_ps",
    "EventEntry": "1 int key, 2 XEventMetadata value",
    "XEventMetadata": "1 int id, 2 str name, 4 str display_name",
}
"""What is read of ``xplane.proto`` (github.com/openxla/xla, ``xla/tsl/profiler/protobuf``)."""

_DEVICE = "/device:"


@cache
def _xspace() -> Any:
    """Return the class of ``XSpace``."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    package = "d5suite.xplane"
    file = descriptor_pb2.FileDescriptorProto(name="d5suite_xplane.proto", package=package, syntax="proto3")
    of = descriptor_pb2.FieldDescriptorProto
    kinds = {"int": of.TYPE_INT64, "str": of.TYPE_STRING}
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, repeated, kind, label in re.findall(r"(\d+)([* ])(\w+) (\w+)", fields):
            made = message.field.add(name=label, number=int(number))
            made.label = made.LABEL_REPEATED if repeated == "*" else made.LABEL_OPTIONAL
            if kind in kinds:
                made.type = kinds[kind]
            else:
                made.type, made.type_name = made.TYPE_MESSAGE, f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.XSpace"))


def _read_xspace(path: Path) -> Trace:
    from google.protobuf.message import DecodeError

    try:
        space = _xspace().FromString(_contents(path))
    except DecodeError as error:
        raise TraceError("is no profile of XLA, or is damaged", where=str(path)) from error
    rows = []
    host = next((plane.name for plane in space.planes if not plane.name.startswith(_DEVICE) and plane.lines), "")
    for plane in space.planes:
        names = {entry.key: entry.value.display_name or entry.value.name for entry in plane.event_metadata}
        stream = plane.name.startswith(_DEVICE)
        for line in plane.lines:
            label = line.display_name or line.name or "thread"
            row = Track(host or plane.name, f"{plane.name} {label}" if stream else label, stream)
            for event in line.events:
                begin = line.timestamp_ns + event.offset_ps // 1000
                end = begin + max(0, event.duration_ps) // 1000
                row.slices.append(TimeSlice(begin, end, names.get(event.metadata_id, "?"), "kernel" if stream else ""))
            rows.append(row)
    threads = [row for row in rows if not row.stream]
    if not any(row.slices for row in rows):
        raise TraceError("holds no events of XLA's profiler", where=str(path))
    for row in sorted(threads, key=lambda one: ("python" not in one.name, -len(one.slices)))[:1]:
        row.is_main = True
    return trace_of(rows, notes=[*space.errors, *space.warnings])
