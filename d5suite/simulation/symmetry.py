"""Ranks that are alike: one of them stands for all, and nothing is lost.

Two ranks are alike if they make the same operations with ranks that are alike in turn. Each
operation of one kind of rank then meets the same operation of another kind, one to one, so that
every link carries in the folded step what it carries in the whole one, and all times are equal.
What is claimed here by algorithm is checked whenever a step is folded: each message of one kind
must meet its receive. Segments must be equal, so arrays are lengthened to a multiple of their
number, by less than one element a segment.

On one switch, ranks differ by what they do only. Elsewhere their places differ, and all of them
are simulated.

Imports NumPy, `d5suite.distributed`, `d5suite.errors` and `programs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.algorithms.hierarchical import groups
from d5suite.errors import D5Error
from d5suite.simulation.programs import Op, OpKind, Streams

Members = list[int]
"""By rank: a number that is equal for ranks that are alike."""


def _cyclic(size: int, hosts: Sequence[str]) -> tuple[Members, int]:
    """All ranks of a ring are alike."""
    return [0] * size, size


def _doubling(size: int, hosts: Sequence[str]) -> tuple[Members, int]:
    """Of 2^k ranks all are alike; others differ by the surplus that is folded into them.

    Kinds are refined until each kind of place exchanges with one kind in each round.
    """
    rounds = size.bit_length() - 1
    places, surplus = 1 << rounds, size - (1 << rounds)
    place = np.arange(places)
    kinds = (place < surplus).astype(np.int64)
    while True:
        columns = np.stack([kinds, *(kinds[place ^ (1 << bit)] for bit in range(rounds))], axis=1)
        refined = np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)
        if refined.max() == kinds.max():
            break
        kinds = refined
    own = kinds.tolist()
    count = max(own) + 1
    first = [own[rank // 2] + count * (rank % 2 == 0) for rank in range(2 * surplus)]
    return [*first, *(own[rank - surplus] for rank in range(2 * surplus, size))], places


def _hierarchical(size: int, hosts: Sequence[str]) -> tuple[Members, int] | None:
    """On hosts of equally many ranks, ranks with the same place on their host are alike."""
    found = groups(hosts or [str(rank) for rank in range(size)])
    if len({len(group) for group in found}) > 1:
        return None
    members = [0] * size
    for group in found:
        for place, rank in enumerate(group):
            members[rank] = place
    return members, len(found)


KINDS: Mapping[str, Callable[[int, Sequence[str]], tuple[Members, int] | None]] = {
    "native": _cyclic,  # of transports the way is not known: a ring, as the defaults have it
    "ring": _cyclic,
    "halving_doubling": _doubling,
    "recursive_doubling": lambda size, hosts: (_doubling(size, hosts)[0], 1),  # of whole arrays
    "hierarchical": _hierarchical,
}
"""By algorithm: which ranks are alike, and into how many segments arrays are divided. In trees and
with servers, no two ranks are."""


def alike(algorithm: str, calls: frozenset[str], size: int, hosts: Sequence[str]) -> tuple[Members, int] | None:
    """Return which ranks are alike and the number of segments, or None if too few are.

    Parameters
    ----------
    algorithm : str
    calls : frozenset of str
        Collectives that the step makes; none for messages to neighbours on a ring.
    size : int
    hosts : sequence of str
        By rank, for the hierarchical algorithm.
    """
    found: list[tuple[Members, int]] = []
    for call in calls or {"all_gather"}:
        own = algorithm if call in ALGORITHMS[algorithm] else "ring"
        if call not in ("all_reduce", "all_gather", "reduce_scatter") and call not in ALGORITHMS[algorithm]:
            return None
        if algorithm == "native" and call == "all_reduce":
            return None  # a tree, by the defaults
        if own not in KINDS or (one := KINDS[own](size, hosts)) is None:
            return None
        found.append(one)
    kinds = {each: number for number, each in enumerate(dict.fromkeys(zip(*(one for one, _ in found), strict=True)))}
    members = [kinds[each] for each in zip(*(one for one, _ in found), strict=True)]
    return (members, math.lcm(*(parts for _, parts in found))) if len(kinds) < size else None


def folded(streams: Streams, members: Sequence[int], numbers: Mapping[int, int]) -> Streams:
    """Return a rank's program with kinds as its peers."""
    messages = (int(OpKind.ISEND), int(OpKind.IRECV))  # an enumeration's members compare slowly
    return [[Op(op[0], numbers[members[op[1]]], *op[2:]) if op[0] in messages else op for op in ops] for ops in streams]


def check(programs: Sequence[Streams]) -> None:
    """Raise `D5Error` unless every message meets a receive of its size, in order."""
    sent: dict[tuple[int, int, int], list[int]] = {}
    taken: dict[tuple[int, int, int], list[int]] = {}
    for rank, streams in enumerate(programs):
        for op in (op for ops in streams for op in ops):
            if op.kind == OpKind.ISEND:
                sent.setdefault((rank, op.peer, op.tag), []).append(op.nbytes)
            elif op.kind == OpKind.IRECV:
                taken.setdefault((op.peer, rank, op.tag), []).append(op.nbytes)
    if sent != taken:
        key = next(key for key in {**sent, **taken} if sent.get(key) != taken.get(key))
        raise D5Error(
            f"messages of rank {key[0]} to rank {key[1]} do not meet their receives",
            hint="A fault of d5suite: an algorithm or scheme does not do what the simulation noted.",
        )
