"""The ports of a program: its ends of a coupling, one channel for each rank at the other side.

One side of a coupling has one rank, or both have equally many. Imports NumPy and its neighbours.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.levels.distributed import Communicator
from d5suite.workflows.couplings.base import (
    Account,
    Channel,
    CouplingError,
    End,
    Fields,
    Marks,
    Message,
    Reader,
    Writer,
    poll,
)


@dataclass(frozen=True)
class Joint:
    """One coupling of a workflow as a job states it.

    Attributes
    ----------
    name, source, target : str
        Its own name, and the components that it joins.
    kind : str
        A key of `d5suite.workflows.couplings.KINDS`.
    policy : str
    capacity : int
        Messages that fit into the buffer of each channel.
    write_s : float
        Seconds that every put takes longer: a planted slow writer.
    """

    name: str
    source: str
    target: str
    kind: str
    policy: str = "block"
    capacity: int = 2
    write_s: float = 0.0

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Joint:
        """Rebuild what a job states."""
        return cls(**content)


def pairs(joint: Joint, writers: int, readers: int) -> list[tuple[int, int]]:
    """Return the channels of a coupling: a rank that writes and one that reads.

    Raises
    ------
    ConfigurationError
        If neither side has one rank, and they have not equally many.
    """
    if writers == readers:
        return [(rank, rank) for rank in range(writers)]
    if 1 in (writers, readers):
        return [(writer, reader) for writer in range(writers) for reader in range(readers)]
    raise ConfigurationError(
        f"coupling {joint.name!r} joins {writers} ranks of {joint.source} to {readers} of {joint.target}",
        hint="One side needs one rank, or both equally many.",
    )


def disagreement(joint: Joint, given: Fields, taken: Fields) -> str | None:
    """Return in which array two programs disagree, in one sentence, or None."""
    for name in dict.fromkeys([*given, *taken]):
        one, other = given.get(name), taken.get(name)
        if one == other:
            continue
        if one is None or other is None:
            has, lacks = (joint.target, joint.source) if one is None else (joint.source, joint.target)
            return f"coupling {joint.name!r}: {has} knows an array {name!r}, and {lacks} does not"
        return f"coupling {joint.name!r}: {name!r} is {one} of {joint.source}, and {other} for {joint.target}"
    return None


class Port:
    """What both kinds of ports have."""

    def __init__(self, joint: Joint, fields: Fields, ends: Sequence[Any]) -> None:
        self.joint, self.fields = joint, fields
        self.ends: Sequence[End] = ends
        self.offset_ns = 0

    @property
    def waits(self) -> bool:
        """Whether it waits for the other side."""
        return any(each.waits for each in self.ends)

    @property
    def calls(self) -> int:
        """Calls so far."""
        return sum(each.calls for each in self.ends)

    def account(self) -> Account:
        """Return the sums over its channels."""
        of = [each.account for each in self.ends]
        return Account(
            sum(each.messages for each in of), sum(each.bytes for each in of), sum(each.dropped for each in of),
            sum(each.wait_s for each in of), sum(each.move_s for each in of),
            [value for each in of for value in each.latencies_s], [value for each in of for value in each.moves_s],
        )  # fmt: skip


class Out(Port):
    """Where a program gives."""

    ends: Sequence[Writer]

    def put(self, step: int, arrays: Mapping[str, np.ndarray], target: int | None = None) -> None:
        """Give a message to a rank at the other side, by default to every one.

        Parameters
        ----------
        step : int
            The program's.
        arrays : mapping of str to numpy.ndarray
            As declared; they may be overwritten afterwards.
        target : int, optional
            A rank of the other component.

        Raises
        ------
        CouplingError
            If an array is not as declared, or the data cannot be moved.
        """
        for name, each in self.fields.items():
            found = arrays.get(name)
            if found is None or found.shape != each.shape or found.dtype != np.dtype(each.dtype):
                got = "missing" if found is None else f"{found.dtype} {found.shape}"
                raise CouplingError(f"coupling {self.joint.name!r}: {name!r} is {got}, and was declared as {each}")
        for end in self.ends:
            if target not in (None, end.channel.reader):
                continue
            if self.joint.write_s:
                end._move(time.sleep, self.joint.write_s)
            end.put(step, arrays, self.offset_ns)


class In(Port):
    """Where a program takes."""

    ends: Sequence[Reader]

    def get(self, source: int | None = None) -> Message | None:
        """Take the next message of a rank, by default of whichever comes first.

        Returns
        -------
        Message or None
            None once that rank, or every rank, gives no more.
        """
        if source is not None or len(self.ends) == 1:
            return next(each for each in self.ends if source in (None, each.channel.writer)).get(self.offset_ns)
        while open_ends := [each for each in self.ends if not each.ended]:
            found = self._first(open_ends).get_ready(self.offset_ns)
            if found is not None:
                return found
        return None

    def get_all(self) -> list[Message] | None:
        """Take one message of every rank; None once one of them gives no more."""
        found = [self.get(each.channel.writer) for each in self.ends]
        complete = [each for each in found if each is not None]
        return complete if len(complete) == len(found) else None

    def _first(self, ends: Sequence[Reader]) -> Reader:
        """Wait for a message of any of the ends."""
        if self.joint.kind == "messages":
            from d5suite.workflows.couplings.messages import receive_header

            return ends[0]._await(lambda: receive_header(ends))  # type: ignore[arg-type]
        found: list[Reader] = []

        def look() -> bool:
            found.extend(each for each in ends if each.is_ready())
            return bool(found)

        ends[0]._await(lambda: poll(look))
        return found[0]

    def drain(self) -> None:
        """Take what is left."""
        while self.get() is not None:
            pass


def module_of(kind: str) -> Any:
    """Return the module of a kind of coupling."""
    return importlib.import_module(f"d5suite.workflows.couplings.{kind}")


def open_ports(
    joints: Sequence[Joint],
    places: Mapping[str, Sequence[int]],
    fields: Mapping[tuple[str, str], Fields],
    communicator: Communicator,
    folders: Mapping[str, Path],
    offset_ns: int = 0,
    marks: Mapping[str, Marks] | None = None,
) -> tuple[dict[str, Out], dict[str, In]]:
    """Open this rank's ends of all couplings. Collective.

    Parameters
    ----------
    joints : sequence of Joint
    places : mapping of str to sequence of int
        By component: its ranks in the job.
    fields : mapping
        By coupling and component: the arrays of this rank.
    communicator : Communicator
    folders : mapping of str to Path
        By kind of coupling: a folder that all ranks see; ``""`` for the others.
    offset_ns : int
        The clock of rank 0 less this one.
    marks : mapping of str to Marks, optional
        By coupling.
    """
    outs: dict[str, list[Writer]] = {}
    ins: dict[str, list[Reader]] = {}
    rank = communicator.rank
    by_name = {joint.name: joint for joint in joints}
    for number, joint in enumerate(joints):
        module = module_of(joint.kind)
        writers, readers = places[joint.source], places[joint.target]
        for writer, reader in pairs(joint, len(writers), len(readers)):
            if rank not in (writers[writer], readers[reader]):
                continue
            mine = joint.source if rank == writers[writer] else joint.target
            channel = Channel(
                joint.name, number, fields[joint.name, mine], writer, reader, writers[writer], readers[reader],
                joint.capacity, joint.policy, folders.get(joint.kind, folders[""]), communicator,
                (marks or {}).get(joint.name) or Marks(),
            )  # fmt: skip
            if rank == writers[writer]:
                outs.setdefault(joint.name, []).append(module.Writer(channel))
            else:
                ins.setdefault(joint.name, []).append(module.Reader(channel))
    communicator.barrier()  # what readers connect to exists now
    given = {name: Out(by_name[name], ends[0].channel.fields, ends) for name, ends in outs.items()}
    taken = {name: In(by_name[name], ends[0].channel.fields, ends) for name, ends in ins.items()}
    ports: list[Port] = [*given.values(), *taken.values()]
    for port in ports:
        port.offset_ns = offset_ns
    ends: list[End] = [end for port in ports for end in port.ends]
    for end in sorted(ends, key=lambda end: (end.channel.number, end.channel.writer, end.channel.reader)):
        end.connect()  # in one order on all ranks: both ends of a stream wait for each other
    return given, taken


def end_ports(given: Mapping[str, Out]) -> None:
    """Tell all readers that nothing follows."""
    for out in given.values():
        for end in out.ends:
            end.end()


def close_ports(given: Mapping[str, Out], taken: Mapping[str, In]) -> None:
    """Take what is left, and release everything; all writers have ended."""
    for port in taken.values():
        port.drain()
    ports: list[Port] = [*given.values(), *taken.values()]
    for each in ports:
        for one in each.ends:
            one.finish()
