"""OTF2 archives, the trace format of Score-P, Scalasca and Vampir, written and read.

The official library does both. Its Python package handles definitions; events go through the same
library with the types of the arguments set once, which is five times as fast (a million a second
written). One file, because writer and reader share the library's types and the order of the events'
columns. Imports otf2, which is imported late, and its neighbours.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import importlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import d5suite
from d5suite.errors import TraceError
from d5suite.files import atomic_folder
from d5suite.traces.events import COLUMNS, CollectiveOp, Comm, EventKind, Events, Location, MetricSeries, Region, Trace

ANCHOR = "traces.otf2"
"""Name of the file that stands for an archive."""

NO_ROOT = 0xFFFFFFFF
"""Root of a collective without one: ``OTF2_UNDEFINED_UINT32``."""

MPI = "MPI"
"""Source file of the regions that Scalasca and its like take for calls of MPI; their names begin
with ``MPI_``."""

NEEDED = "pip install 'd5suite[trace]' installs it."


def _library() -> Any:
    """Import the OTF2 package.

    Raises
    ------
    TraceError
        If it is not installed.
    """
    try:
        import otf2
    except ImportError as error:
        raise TraceError("OTF2 archives need the package otf2", hint=NEEDED) from error
    return otf2


def require_library() -> None:
    """Raise `TraceError` if no archive can be read or written."""
    _library()


def _raw_library() -> ctypes.CDLL:
    """Return the OTF2 package's own library, with functions whose types are still ours to set."""
    from _otf2.Config import lib_path

    return ctypes.CDLL(lib_path())


_ErrorCallback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p,
    ctypes.c_void_p,
)  # fmt: skip


@contextlib.contextmanager
def _errors_raised() -> Iterator[None]:
    """Raise `OSError` at the end if the library has met an error, such as a full disk.

    Its package ignores errors of files that are written when they are closed.
    """
    library, codes = _raw_library(), list[int]()

    def note(data: Any, file: Any, line: int, function: Any, code: int, message: Any, values: Any) -> int:
        codes.append(code)
        return code

    callback = _ErrorCallback(note)  # the library must not outlive it
    register = library.OTF2_Error_RegisterCallback
    register.argtypes, register.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_void_p
    before = register(ctypes.cast(callback, ctypes.c_void_p), None)
    try:
        yield
    finally:
        register(before, None)
    if codes:
        describe = library.OTF2_Error_GetDescription
        describe.argtypes, describe.restype = [ctypes.c_int], ctypes.c_char_p
        raise OSError(None, describe(codes[0]).decode())


def write_archive(trace: Trace, folder: Path, *, description: str = "") -> Path:
    """Write a trace as an OTF2 archive.

    The archive appears as a whole or not at all.

    Parameters
    ----------
    trace : Trace
    folder : Path
        Must not exist yet, or be empty.
    description : str
        Description of the run.

    Returns
    -------
    Path
        The archive's anchor file.

    Raises
    ------
    TraceError
        If the folder holds something, the times of a location decrease, or it cannot be written.
    """
    otf2 = _library()
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TraceError("exists already", where=str(folder), hint="Name a new folder, or remove this one.")
    for location, events in zip(trace.locations, trace.events, strict=True):
        if len(events) and (np.diff(events.time) < 0).any():
            raise TraceError(f"times of {location.process}, {location.name}, decrease", where=str(folder))
    try:
        with (
            atomic_folder(folder) as partial,
            _errors_raised(),
            otf2.writer.open(str(partial), timer_resolution=trace.ticks_per_second) as writer,
        ):
            writer.creator = f"d5suite {d5suite.__version__}"
            if description:
                writer.description = description
            _set_properties(writer, trace)
            locations, regions, communicators = _define(otf2, writer.definitions, trace)
            metrics = _define_metrics(otf2, writer.definitions, trace)
            for index, (location, events) in enumerate(zip(locations, trace.events, strict=True)):
                own = [
                    (metric, each)
                    for metric, each in zip(metrics, trace.metrics, strict=True)
                    if each.location == index
                ]
                _write_location(writer, location, events, own, regions, communicators)
    except OSError as error:
        raise TraceError(f"cannot be written: {error.strerror or error}", where=str(folder)) from error
    except otf2.error.TraceWriterError as error:
        raise TraceError(f"cannot be written: {error}", where=str(folder)) from error
    return folder / ANCHOR


PROPERTY = "D5SUITE::"
"""Beginning of the names of our properties of an archive."""


def _set_properties(writer: Any, trace: Trace) -> None:
    """Write what a reader must know of the trace as properties of the archive."""
    from _otf2.Archive import Archive_SetProperty

    notes = {f"note {number}": each for number, each in enumerate(trace.notes, 1)}
    for name, value in {**trace.properties, **notes}.items():
        Archive_SetProperty(writer.handle, PROPERTY + name.upper().replace(" ", "_"), value, True)


def _properties(reader: Any) -> tuple[dict[str, str], list[str]]:
    """Read our properties of an archive, and the notes among them."""
    from _otf2.Reader import Reader_GetProperty, Reader_GetPropertyNames

    found = {
        name.removeprefix(PROPERTY).lower().replace("_", " "): Reader_GetProperty(reader.handle, name)
        for name in Reader_GetPropertyNames(reader.handle)
        if name.startswith(PROPERTY)
    }
    numbers = sorted((int(name[5:]), name) for name in found if name.startswith("note ") and name[5:].isdecimal())
    return found, [found.pop(name) for _, name in numbers]


def _define(otf2: Any, definitions: Any, trace: Trace) -> tuple[list[Any], list[int], list[int]]:
    """Write the definitions; return the locations, and the numbers of regions and communicators."""
    enums = otf2.enums
    machine = definitions.system_tree_node("machine", class_name="machine")
    nodes: dict[str, Any] = {}
    processes: dict[tuple[str, str], Any] = {}
    locations = []
    for each in trace.locations:
        if each.host not in nodes:
            nodes[each.host] = definitions.system_tree_nodes.create(each.host, class_name="node", parent=machine)
        process = each.process, each.host
        if process not in processes:
            processes[process] = definitions.location_groups.create(
                each.process,
                system_tree_parent=nodes[each.host],
                location_group_type=enums.LocationGroupType.PROCESS,
            )
        kind = enums.LocationType.ACCELERATOR_STREAM if each.is_stream else enums.LocationType.CPU_THREAD
        locations.append(definitions.locations.create(each.name, type=kind, group=processes[process]))
    regions = [
        definitions.regions.create(
            each.name,
            canonical_name=each.name,
            region_role=getattr(enums.RegionRole, each.role.upper(), enums.RegionRole.UNKNOWN),
            paradigm=enums.Paradigm.MPI if each.is_mpi else enums.Paradigm.USER,
            source_file=MPI if each.is_mpi else each.file,
            begin_line_number=each.line,
        )._ref
        for each in trace.regions
    ]
    ranks = [location for location, each in zip(locations, trace.locations, strict=True) if each.is_main]
    order = [index for index, each in enumerate(trace.locations) if each.is_main]
    communicators = []
    if trace.communicators:
        definitions.group(
            "ranks", group_type=enums.GroupType.COMM_LOCATIONS, paradigm=enums.Paradigm.MPI, members=ranks
        )
    for comm in trace.communicators:
        group = definitions.groups.create(
            comm.name,
            group_type=enums.GroupType.COMM_GROUP,
            paradigm=enums.Paradigm.MPI,
            members=[order.index(member) for member in comm.members],
        )
        communicators.append(definitions.comms.create(comm.name, group=group, _type=otf2.definitions.Comm)._ref)
    return locations, regions, communicators


def _define_metrics(otf2: Any, definitions: Any, trace: Trace) -> list[Any]:
    """Write the definition of each metric, once for all locations that have it."""
    found: dict[tuple[str, str], Any] = {}
    for each in trace.metrics:
        if (each.name, each.unit) not in found:
            member = definitions.metric_member(
                each.name, unit=each.unit, value_type=otf2.enums.Type.DOUBLE,
                metric_mode=otf2.enums.MetricMode.ABSOLUTE_POINT,
            )  # fmt: skip
            found[each.name, each.unit] = definitions.metric_class([member])
    return [found[each.name, each.unit] for each in trace.metrics]


def _write_location(
    writer: Any,
    location: Any,
    events: Events,
    metrics: list[tuple[Any, MetricSeries]],
    regions: list[int],
    communicators: list[int],
) -> None:
    """Write a location's events and readings of metrics, in the order of their times."""
    own = writer.event_writer_from_location(location)
    readings = sorted(
        ((time, number, value) for number, (_, each) in enumerate(metrics)
         for time, value in zip(each.time.tolist(), each.value.tolist(), strict=True)),
    )  # fmt: skip
    times, start = events.time.tolist(), 0
    put = _event_writer(own.handle, events, times, regions, communicators)
    for time, number, value in readings:
        end = bisect.bisect_right(times, time, start)
        put(start, end)
        own.metric(time, metrics[number][0], [value])
        start = end
    put(start, len(times))
    if times:
        location._number_of_events_written += len(times)
        writer._update_timestamps(times[0])
        writer._update_timestamps(times[-1])


def _event_writer(
    handle: Any, events: Events, times: list[int], regions: list[int], communicators: list[int]
) -> Callable[[int, int], None]:
    """Return a function that writes the events from one index up to another.

    Most events are entries and exits, which use three columns; the others are read as needed.
    """
    library = _raw_library()
    calls = {}
    for kind, (name, columns) in _RECORDS.items():
        calls[kind] = function = getattr(library, f"OTF2_EvtWriter_{name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, *columns.values()]
        function.restype = ctypes.c_int
    enter, leave = calls[EventKind.ENTER], calls[EventKind.LEAVE]
    raw = ctypes.cast(handle, ctypes.c_void_p)
    numbers = events.region.copy()
    nested = events.kind <= EventKind.LEAVE
    numbers[nested] = np.array(regions or [0], np.int64)[events.region[nested]]
    kinds, whats = events.kind.tolist(), numbers.tolist()

    def other(index: int, kind: EventKind) -> int:
        values = {name: int(getattr(events, name)[index]) for name in _RECORDS[kind][1]}
        if "communicator" in values:
            values["communicator"] = communicators[values["communicator"]] if values["communicator"] >= 0 else 0
        if kind is EventKind.COLLECTIVE and values["peer"] < 0:
            values["peer"] = NO_ROOT
        failed: int = calls[kind](raw, None, times[index], *values.values())
        return failed

    def put(start: int, end: int) -> None:
        failed, index = 0, start
        for time, kind, what in zip(times[start:end], kinds[start:end], whats[start:end], strict=True):
            if kind == 0:
                failed |= enter(raw, None, time, what)
            elif kind == 1:
                failed |= leave(raw, None, time, what)
            else:
                failed |= other(index, EventKind(kind))
            index += 1
        if failed:
            raise OSError(None, "the OTF2 library refused an event, or its disk is full")

    return put


_U8, _U32, _U64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64
_MESSAGE = {"peer": _U32, "communicator": _U32, "tag": _U32}

_RECORDS: dict[EventKind, tuple[str, dict[str, Any]]] = {
    EventKind.ENTER: ("Enter", {"region": _U32}),
    EventKind.LEAVE: ("Leave", {"region": _U32}),
    EventKind.SEND: ("MpiSend", _MESSAGE | {"sent": _U64}),
    EventKind.RECV: ("MpiRecv", _MESSAGE | {"received": _U64}),
    EventKind.ISEND: ("MpiIsend", _MESSAGE | {"sent": _U64, "request": _U64}),
    EventKind.ISEND_COMPLETE: ("MpiIsendComplete", {"request": _U64}),
    EventKind.IRECV_REQUEST: ("MpiIrecvRequest", {"request": _U64}),
    EventKind.IRECV: ("MpiIrecv", _MESSAGE | {"received": _U64, "request": _U64}),
    EventKind.COLLECTIVE: (
        "MpiCollectiveEnd", {"region": _U8, "communicator": _U32, "peer": _U32, "sent": _U64, "received": _U64}
    ),
}  # fmt: skip
"""OTF2's name of each record, and its columns behind the time, with their types, in the order of
OTF2's header ``OTF2_EvtWriter.h``."""


def read_archive(path: Path) -> Trace:
    """Read an OTF2 archive, whoever wrote it.

    Parameters
    ----------
    path : Path
        The anchor file, or the folder that holds one.

    Raises
    ------
    TraceError
        If it is no OTF2 archive, or is damaged.
    """
    otf2 = _library()
    anchor = _anchor_of(Path(path))
    try:
        with contextlib.closing(otf2.reader.Reader(str(anchor))) as reader:
            return _read(reader, anchor)
    except TraceError:
        raise
    except Exception as error:  # the library raises what it likes for a file that is not an archive
        raise TraceError(
            f"is no OTF2 archive, or is damaged: {error}", where=str(anchor), hint="otf2-print shows what is in it."
        ) from error


def _anchor_of(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise TraceError("does not exist", where=str(path))
        return path
    anchors = sorted(path.glob("*.otf2"))
    if len(anchors) != 1:
        what = f"holds {len(anchors)} OTF2 archives" if anchors else "holds no OTF2 archive"
        hint = f"Name one of {', '.join(each.name for each in anchors)}." if anchors else None
        raise TraceError(what, where=str(path), hint=hint)
    return anchors[0]


class _Columns:
    """The events of one location while they are read.

    Most events are entries and exits, which use three columns; the others' further values are kept
    apart, each with its event's index.
    """

    def __init__(self) -> None:
        self.times, self.kinds, self.regions = array("q"), array("b"), array("i")
        self.further: list[tuple[int, ...]] = []

    def events(self) -> Events:
        count = len(self.times)
        indices, *values = np.array(self.further, np.int64).reshape(-1, 7).T
        empty = {"sent": 0, "received": 0}
        columns = [np.full(count, empty.get(name, -1), kind) for name, kind in list(COLUMNS.items())[3:]]
        for column, value in zip(columns, values, strict=True):
            column[indices] = value
        known = zip((self.times, self.kinds, self.regions), COLUMNS.values(), strict=False)
        return Events(*(np.array(column, kind) for column, kind in known), *columns)


def _read(reader: Any, anchor: Path) -> Trace:
    import _otf2

    definitions = reader.definitions
    locations = list(definitions.locations)
    if not locations:
        raise TraceError("has no locations", where=str(anchor))
    index_of = {each._ref: index for index, each in enumerate(locations)}
    regions = {each._ref: index for index, each in enumerate(definitions.regions)}
    intra = [each for each in definitions.comms if hasattr(each, "group")]
    communicators = {each._ref: index for index, each in enumerate(intra)}
    columns = {each._ref: _Columns() for each in locations}
    skipped: Counter[str] = Counter()
    readings: dict[tuple[int, int, int], list[tuple[int, float]]] = defaultdict(list)

    handle = reader._get_global_evt_reader_handle(None)
    callbacks = _otf2.GlobalEvtReaderCallbacks_New()
    kept = list(_callbacks(_otf2, callbacks, columns, regions, communicators, readings, skipped))
    _otf2.GlobalEvtReader_SetCallbacks(handle, callbacks, None)
    _otf2.GlobalEvtReaderCallbacks_Delete(callbacks)
    _otf2.Reader_ReadAllGlobalEvents(reader.handle, handle)
    del kept  # the library must not outlive them
    announced = sum(each.number_of_events for each in locations)
    read = sum(len(each.times) for each in columns.values()) + sum(skipped.values())
    read += sum(len(rows) for (_, _, member), rows in readings.items() if member == 0)
    if read < announced:
        raise TraceError(f"ends after {read:,} of {announced:,} events", where=str(anchor))

    properties, notes = _properties(reader)
    main: dict[Any, Any] = {}
    ranked = {member for comm in intra for member in _members(comm, index_of)}
    for each in locations:
        main.setdefault(each.group, each)
    return Trace(
        [_location(each, index_of[each._ref] in ranked or main[each.group] is each) for each in locations],
        [_region(each) for each in definitions.regions],
        [Comm(each.name, tuple(_members(each, index_of))) for each in intra],
        [columns[each._ref].events() for each in locations],
        definitions.clock_properties.timer_resolution,
        _metrics(definitions, readings, index_of),
        dict(skipped),
        notes,
        properties,
    )


def _metrics(
    definitions: Any, readings: dict[tuple[int, int, int], list[tuple[int, float]]], index_of: dict[int, int]
) -> list[MetricSeries]:
    """Return the readings as named series; drop the readings of undefined metrics."""
    members = {
        each._ref: getattr(each, "metric_class", each).members for each in definitions._metrics if each is not None
    }
    found = []
    for (location, metric, number), rows in readings.items():
        if number < len(members.get(metric, ())):
            member = members[metric][number]
            times, values = zip(*rows, strict=True)
            found.append(
                MetricSeries(
                    member.name, member.unit, index_of[location], np.array(times, np.int64), np.array(values, float)
                )
            )
    return found


def _members(comm: Any, index_of: dict[int, int]) -> list[int]:
    return [index_of[each._ref] for each in comm.group.members if hasattr(each, "_ref")]


def _location(definition: Any, is_main: bool) -> Location:
    group = definition.group
    node = group.system_tree_parent
    is_stream = str(definition.type).endswith(("ACCELERATOR_STREAM", "GPU"))
    return Location(definition.name, group.name, node.name if node is not None else "", is_main, is_stream)


def _region(definition: Any) -> Region:
    source = str(definition.source_file) if definition.source_file is not None else ""
    role = str(definition.region_role).rpartition(".")[2].lower()
    is_mpi = source == MPI and definition.name.startswith("MPI_")
    return Region(definition.name, role, is_mpi, source, definition.begin_line_number)


_METRIC_TYPES = {4: "unsigned_int", 8: "signed_int", 10: "floating_point"}
"""Members of a metric's value, by ``OTF2_Type``."""


def _callbacks(
    _otf2: Any,
    callbacks: Any,
    columns: dict[int, _Columns],
    regions: dict[int, int],
    communicators: dict[int, int],
    readings: dict[tuple[int, int, int], list[tuple[int, float]]],
    skipped: Counter[str],
) -> Iterator[Any]:
    """Register a function for each kind of record; yield what must live as long as the reader."""
    library = _raw_library()
    binding = importlib.import_module("_otf2.GlobalEvtReaderCallbacks")  # the package has a class of this name

    times = {ref: each.times.append for ref, each in columns.items()}
    kinds = {ref: each.kinds.append for ref, each in columns.items()}
    whats = {ref: each.regions.append for ref, each in columns.items()}

    def entry(kind: int) -> Callable[..., int]:
        def record(location: int, time: int, _data: object, _attributes: object, region: int) -> int:
            times[location](time)
            kinds[location](kind)
            whats[location](regions[region])
            return 0

        return record

    def add(location: int, time: int, kind: EventKind, operation: int, *values: int) -> int:
        columns[location].further.append((len(columns[location].times), *values))
        times[location](time)
        kinds[location](kind)
        whats[location](operation)
        return 0

    def message(kind: EventKind, is_send: bool) -> Callable[..., int]:
        def record(
            location: int, time: int, _data: object, _attributes: object, peer: int, comm: int, tag: int, size: int,
            request: int = -1,
        ) -> int:  # fmt: skip
            sent, received = (size, 0) if is_send else (0, size)
            return add(location, time, kind, -1, communicators.get(comm, -1), peer, tag, sent, received, request)

        return record

    def requested(kind: EventKind) -> Callable[..., int]:
        def record(location: int, time: int, _data: object, _attributes: object, request: int) -> int:
            return add(location, time, kind, -1, -1, -1, -1, 0, 0, request)

        return record

    def collective(
        location: int, time: int, _data: object, _attributes: object, code: Any, comm: int, root: int, sent: int,
        received: int,
    ) -> int:  # fmt: skip
        operation = code.value
        if operation not in CollectiveOp._value2member_map_:
            return skip("MpiCollectiveEnd of memory or handles")(location, time)
        root = -1 if root == NO_ROOT else root
        return add(
            location, time, EventKind.COLLECTIVE, operation, communicators.get(comm, -1), root, -1, sent, received, -1
        )

    def metric(
        location: int, time: int, _data: object, _attributes: object, ref: int, count: int, types: Any, values: Any
    ) -> int:
        for number in range(count):
            value = getattr(values[number], _METRIC_TYPES.get(types[number].value, "floating_point"))
            readings[location, ref, number].append((time, float(value)))
        return 0

    def skip(name: str) -> Callable[..., int]:
        def record(*_: object) -> int:
            skipped[name] += 1
            return 0

        return record

    known: dict[str, Callable[..., int]] = {
        "Enter": entry(EventKind.ENTER),
        "Leave": entry(EventKind.LEAVE),
        "MpiSend": message(EventKind.SEND, True),
        "MpiRecv": message(EventKind.RECV, False),
        "MpiIsend": message(EventKind.ISEND, True),
        "MpiIrecv": message(EventKind.IRECV, False),
        "MpiIsendComplete": requested(EventKind.ISEND_COMPLETE),
        "MpiIrecvRequest": requested(EventKind.IRECV_REQUEST),
        "MpiCollectiveEnd": collective,
        "Metric": metric,
    }
    for attribute in dir(binding):
        prefix = "_GlobalEvtReaderCallback_FP_"
        if not attribute.startswith(prefix):
            continue
        name = attribute.removeprefix(prefix)
        if name == "Unknown":
            continue
        pointer = getattr(binding, attribute)(known.get(name) or skip(name))
        setter = getattr(library, f"OTF2_GlobalEvtReaderCallbacks_Set{name}Callback")
        setter.argtypes = [ctypes.c_void_p, type(pointer)]
        setter(ctypes.cast(callbacks, ctypes.c_void_p), pointer)
        yield pointer
