"""A recorded trace as programs of its ranks, to be played on another network.

Time in which the main thread is in no call of MPI is computing, and of another thread what lies in
`AllReduce.average` outside such calls. Collectives that d5suite made of messages,
``all_reduce by ring``, become one call again, so that another algorithm can take their place. A
thread beside the main one begins a call no earlier than what its main thread had finished then; the
main thread waits for it where it did in the trace.

Imports NumPy, `d5suite.distributed`, `d5suite.traces`, `d5suite.errors` and `programs`.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.algorithms.costs import cost
from d5suite.distributed.schemes.all_reduce import AVERAGE
from d5suite.errors import ConfigurationError
from d5suite.simulation.programs import Noted, Op, OpKind, Streams
from d5suite.traces.calls import Calls, calls_of
from d5suite.traces.events import COLLECTIVES, Comm, Events, Trace
from d5suite.traces.events import EventKind as Event

_MADE = re.compile(r"^(?P<call>\w+) by (?P<algorithm>\w+)$")

_CALL = {int(operation): name for name, (_, operation, _) in COLLECTIVES.items()}

_BEGIN = (OpKind.COLLECTIVE, OpKind.ISEND, OpKind.COMPUTE)
"""What another thread begins no earlier than what its main thread had finished then."""

FLOAT = np.dtype(np.float32)


@dataclass(frozen=True)
class Replay:
    """The steps of a trace.

    Attributes
    ----------
    programs : tuple of Noted
        By rank.
    algorithm : str
        Algorithm of the collectives; ``ring`` if the transport chose it, which no trace shows.
    step_s : float
        Seconds of a step in the trace: the mean of all but the first, by the last rank.
    """

    programs: tuple[Noted, ...]
    algorithm: str
    step_s: float


def replay(trace: Trace, where: str, *, step: str = "step") -> Replay:
    """Make programs of a trace.

    Raises
    ------
    ConfigurationError
        If it has no ranks that sent messages, or no steps.
    """
    world = max(trace.communicators, key=lambda each: len(each.members), default=None)
    if world is None or len(world.members) < 2:
        raise ConfigurationError("this trace has no ranks that sent messages", where=where)
    homes = trace.homes
    number = next((index for index, each in enumerate(trace.regions) if each.name == step), None)
    found, algorithms = [], set()
    begins, ends = [], []
    for rank, main in enumerate(world.members):
        calls = calls_of(trace.events[main])
        own = np.flatnonzero(calls.region == number) if number is not None else np.empty(0, int)
        if not len(own):
            raise ConfigurationError(
                f"rank {rank} of this trace has no region {step!r}", where=where, hint="Name another: --step REGION."
            )
        begins.append(calls.enter[own])
        ends.append(calls.leave[own])
    start = min(int(each[0]) for each in begins)
    for rank, main in enumerate(world.members):
        threads = [main, *(index for index, home in enumerate(homes) if home == main and index != main
                           and not trace.locations[index].is_stream)]  # fmt: skip
        reader = _Reader(trace, world, rank, threads, start, ends[rank].tolist())
        found.append(reader.read())
        algorithms |= reader.algorithms
    if len({len(each.marks) for each in found}) > 1:
        raise ConfigurationError("the ranks of this trace made different numbers of steps", where=where)
    last = np.max([each - start for each in ends], axis=0)
    step_s = trace.seconds((last[-1] - last[0]) / (len(last) - 1)) if len(last) > 1 else trace.seconds(last[0])
    return Replay(tuple(found), next(iter(sorted(algorithms)), "ring"), float(step_s))


class _Reader:
    """Reads one rank's threads."""

    def __init__(
        self, trace: Trace, world: Comm, rank: int, threads: Sequence[int], start: int, ends: Sequence[int]
    ) -> None:
        self.trace, self.world, self.rank, self.threads = trace, world, rank, threads
        self.start, self.ends = start, ends
        self.algorithms: set[str] = set()

    def read(self) -> Noted:
        """Return the rank's program."""
        marks: list[int] = []
        waits: list[tuple[int, int, int]] = []  # of the main stream: where, from when, until when
        found: dict[int, tuple[list[Op], list[tuple[int, int]]]] = {}  # by thread: when each began and ended, in ticks
        cuts: list[int] = []  # of the main thread's computing: when another thread began something
        for number in [*range(1, len(self.threads)), 0]:
            ops: list[Op] = []
            ended: list[tuple[int, int]] = []
            self._thread(number, self.threads[number], ops, ended, marks, waits, sorted(set(cuts)))
            if number == 0 or any(op.kind != OpKind.COMPUTE for op in ops):
                found[number] = ops, ended
                cuts += [begin for op, (begin, _) in zip(ops, ended, strict=True) if op.kind in _BEGIN]
        kept = [found[each] for each in sorted(found)]
        return self._joined([ops for ops, _ in kept], [ended for _, ended in kept], marks, waits)

    def _thread(
        self, number: int, location: int, ops: list[Op], ended: list[tuple[int, int]], marks: list[int],
        waits: list[tuple[int, int, int]], cuts: Sequence[int],
    ) -> None:  # fmt: skip
        trace, events = self.trace, self.trace.events[location]
        calls = calls_of(events)
        regions = [trace.regions[region] for region in calls.region]
        order = np.argsort(calls.enter, kind="stable").tolist()
        skip = -1
        clock = self.start
        busy_until = -1  # of a thread beside the main one: it computes only where a region says so
        steps = list(self.ends) if number == 0 else []
        sources = _sources(events)
        by_call: dict[int, list[int]] = {}
        for index, owner in enumerate(calls.owner.tolist()):
            by_call.setdefault(owner, []).append(index)
        began: dict[int, int] = {}

        def compute(until: int, label: str) -> None:
            nonlocal clock
            if until > clock and (number == 0 or until <= busy_until):
                for end in (*cuts[bisect.bisect(cuts, clock) : bisect.bisect_left(cuts, until)], until):
                    ops.append(Op(OpKind.COMPUTE, seconds=trace.seconds(end - clock), label=label))
                    ended.append((clock, end))
                    clock = end
            clock = max(clock, until)

        def add(op: Op, enter: int, leave: int) -> None:
            ops.append(op)
            ended.append((enter, leave))

        for call in order:
            enter, leave, region = int(calls.enter[call]), int(calls.leave[call]), regions[call]
            if leave <= self.start or enter < skip:
                continue
            if number and enter >= busy_until:
                compute(busy_until, AVERAGE)
                clock = max(clock, enter)
            if number and region.name == AVERAGE:
                busy_until = leave
                continue
            while steps and enter >= steps[0]:
                compute(steps.pop(0), "step")
                marks.append(len(ops))
            made = _MADE.match(region.name)
            waiting = region.role == "task_wait" and number == 0
            if not (region.is_mpi or waiting or (made and made["algorithm"] in ALGORITHMS)):
                continue
            inside = _inside(calls, call)
            if waiting and any(regions[each].is_mpi or _MADE.match(regions[each].name) for each in inside):
                continue  # the main thread communicates by itself
            if enter < self.start or (number == 0 and enter >= self.ends[-1]):
                continue
            parent = int(calls.parent[call])
            compute(enter, regions[parent].name if parent >= 0 else "")
            if waiting:
                waits.append((len(ops), enter, leave))
                add(Op(OpKind.COMPUTE), enter, leave)
            elif made and made["algorithm"] in ALGORITHMS:
                sent = sum(int(events.sent[i]) for each in (call, *inside) for i in by_call.get(each, ())
                           if events.kind[i] in (Event.SEND, Event.ISEND))  # fmt: skip
                self.algorithms.add(made["algorithm"])
                add(self._collective(made["call"], made["algorithm"], sent), enter, leave)
                skip = leave
            else:
                for i in by_call.get(call, ()):
                    self._message(events, i, ops, began, sources, functools.partial(add, enter=enter, leave=leave))
            clock = max(clock, leave)
        if number:
            compute(busy_until, AVERAGE)
        for each in steps:
            compute(each, "step")
            marks.append(len(ops))

    def _message(
        self, events: Events, i: int, ops: list[Op], began: dict[int, int],
        sources: Mapping[int, tuple[int, int, int]], add: Callable[[Op], None],
    ) -> None:  # fmt: skip
        kind, request = int(events.kind[i]), int(events.request[i])
        peer, tag = int(events.peer[i]), int(events.tag[i])
        if kind in (Event.SEND, Event.RECV):
            sends = kind == Event.SEND
            nbytes = int(events.sent[i] if sends else events.received[i])
            add(Op(OpKind.ISEND if sends else OpKind.IRECV, peer, tag, nbytes))
            add(Op(OpKind.WAIT, ref=len(ops) - 1))
        elif kind == Event.ISEND:
            began[request] = len(ops)
            add(Op(OpKind.ISEND, peer, tag, int(events.sent[i])))
        elif kind == Event.IRECV_REQUEST and request in sources:
            began[request] = len(ops)
            add(Op(OpKind.IRECV, *sources[request]))
        elif kind in (Event.ISEND_COMPLETE, Event.IRECV) and request in began:
            add(Op(OpKind.WAIT, ref=began.pop(request)))
        elif kind == Event.COLLECTIVE:
            name = _CALL.get(int(events.region[i]))
            if name is None:
                raise ConfigurationError("this trace has a collective that is not simulated")
            nbytes = max(int(events.sent[i]), int(events.received[i]))
            add(Op(OpKind.COLLECTIVE, nbytes=nbytes, ref=peer, label=name, dtype=FLOAT))

    def _collective(self, call: str, algorithm: str, sent: int) -> Op:
        """Return the call whose messages take so many bytes."""
        size = len(self.world.members)
        hosts = [self.trace.locations[each].host for each in self.world.members]
        many = size * 4096
        own = cost(algorithm, call, rank=self.rank, size=size, length=many, itemsize=4, hosts=hosts) or cost(
            "default", call, rank=self.rank, size=size, length=many, itemsize=4, hosts=hosts
        )
        share = own.bytes_sent / (4 * many) if own else 0.0
        root = 0 if call in ("broadcast", "reduce") else -1
        return Op(OpKind.COLLECTIVE, nbytes=round(sent / share) if share else 0, ref=root, label=call, dtype=FLOAT)

    def _joined(
        self,
        streams: Streams,
        finished: list[list[tuple[int, int]]],
        marks: list[int],
        waits: list[tuple[int, int, int]],
    ) -> Noted:
        """Let threads wait for each other as they did in the trace."""
        main, ends = streams[0], [[leave for _, leave in each] for each in finished]
        for number, ops in enumerate(streams[1:], 1):
            made: list[Op] = []
            moved: dict[int, int] = {}
            for index, op in enumerate(ops):
                if op.kind in _BEGIN:
                    before = int(np.searchsorted(ends[0], finished[number][index][0], "right")) - 1
                    if before >= 0:
                        made.append(Op(OpKind.AFTER, peer=0, ref=before))
                moved[index] = len(made)
                made.append(op._replace(ref=moved[op.ref]) if op.kind == OpKind.WAIT else op)
            for at, _, until in waits:
                last = int(np.searchsorted(ends[number], until, "right")) - 1
                if last >= 0:
                    main[at] = Op(OpKind.AFTER, peer=number, ref=moved[last])
            streams[number] = made
        return Noted(streams, marks)


def _inside(calls: Calls, call: int) -> list[int]:
    """Return the calls within a call."""
    first, last = calls.enter[call], calls.leave[call]
    found: list[int] = np.flatnonzero(
        (calls.enter >= first) & (calls.leave <= last) & (np.arange(len(calls)) > call)
    ).tolist()
    return found


def _sources(events: Events) -> Mapping[int, tuple[int, int, int]]:
    """Return source, tag and bytes of each non-blocking receive, by request."""
    done = np.flatnonzero(events.kind == Event.IRECV)
    return {
        int(events.request[i]): (int(events.peer[i]), int(events.tag[i]), int(events.received[i]))
        for i in done.tolist()
    }
