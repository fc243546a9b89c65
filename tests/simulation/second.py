"""A second engine, on SimPy: messages queue for links, instead of sharing them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from d5suite.simulation.platform import Interconnect
from d5suite.simulation.programs import OpKind, Programs


def play(programs: Programs, network: Interconnect) -> float:
    """Return when the last rank ends its last step."""
    environment = simpy.Environment()
    busy: set[tuple[str, int]] = set()
    queue: list[tuple[int, int, int, list[simpy.Event]]] = []
    waiting: dict[tuple[int, int, int, bool], list[simpy.Event]] = {}
    ended = [0.0] * len(programs.streams)

    def moved(source: int, to: int, nbytes: int, arrived: list[simpy.Event]) -> Generator[Any, Any, None]:
        yield environment.timeout(nbytes / network.bytes_per_s)
        busy.difference_update({("up", source), ("down", to)})
        start()
        yield environment.timeout(network.latency_s)
        for each in arrived:
            each.succeed()

    def start() -> None:
        """Begin every message, in their order, whose two links are free."""
        for each in list(queue):
            links = {("up", each[0]), ("down", each[1])}
            if not links & busy:
                busy.update(links)
                queue.remove(each)
                environment.process(moved(*each))

    def begin(rank: int, op: Any) -> simpy.Event:
        sends = op.kind == OpKind.ISEND
        source, to = (rank, op.peer) if sends else (op.peer, rank)
        own = environment.event()
        others = waiting.get((source, to, op.tag, not sends), [])
        if others:
            queue.append((source, to, op.nbytes, [own, others.pop(0)]))
            start()
        else:
            waiting.setdefault((source, to, op.tag, sends), []).append(own)
        return own

    def rank(number: int, stream: int, done: list[list[simpy.Event]]) -> Generator[Any, Any, None]:
        begun: dict[int, simpy.Event] = {}
        for index, op in enumerate(programs.streams[number][stream]):
            if op.kind == OpKind.COMPUTE:
                yield environment.timeout(op.seconds)
            elif op.kind == OpKind.WAIT:
                yield begun[op.ref]
            elif op.kind == OpKind.AFTER:
                yield done[op.peer][op.ref]
            else:
                begun[index] = begin(number, op)
            done[stream][index].succeed()
        ended[number] = max(ended[number], environment.now)

    for number, streams in enumerate(programs.streams):
        done = [[environment.event() for _ in ops] for ops in streams]
        for stream in range(len(streams)):
            environment.process(rank(number, stream, done))
    environment.run()
    return max(ended)
