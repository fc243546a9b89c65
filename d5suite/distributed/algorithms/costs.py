"""What each algorithm sends, exactly: messages and bytes of one rank, for any length.

The published formulas are for lengths that the number of ranks divides; here each segment has its
own length. With p ranks, n bytes in all, k = ⌊lg p⌋ and q = 2^k, each rank sends:

================== ============ ====================
all-reduce         messages     bytes
================== ============ ====================
ring               2(p - 1)     2n(p - 1)/p
recursive doubling k            kn
halving-doubling   2k           2n(q - 1)/q
================== ============ ====================

Reduce-scatter and all-gather by a ring each send half as much. If p > q, another message of n bytes
goes from each of p - q ranks to another rank, and back. Sources: Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", Int. J. High Perform. Comput. Appl.
19(1), 2005; Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009. With k servers, one for
each segment, a worker sends n to them, and a server n/k to each other rank (Li et al., OSDI 2014).

Imports `d5suite.distributed.algorithms.hierarchical` for its groups, and
`d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from d5suite.distributed.algorithms.hierarchical import groups
from d5suite.levels.distributed import segments


@dataclass(frozen=True)
class Cost:
    """One rank's messages and their bytes, as `d5suite.levels.distributed.Traffic` counts them."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.messages_sent + other.messages_sent,
            self.bytes_sent + other.bytes_sent,
            self.messages_received + other.messages_received,
            self.bytes_received + other.bytes_received,
        )


@dataclass(frozen=True)
class RankCall:
    """One rank's call of a collective.

    Attributes
    ----------
    place : int
        The rank, counted from the root of a tree.
    size : int
        Number of ranks.
    length : int
        Elements of the array.
    itemsize : int
        Bytes of an element.
    """

    place: int
    size: int
    length: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.length * self.itemsize

    def part(self, place: int, parts: int | None = None, width: int = 1) -> int:
        """Return the bytes of one segment, or of ``width`` consecutive segments."""
        found = segments(self.length, parts or self.size)
        place %= len(found)
        return (found[place + width - 1].stop - found[place].start) * self.itemsize


def _ring_reduce_scatter(call: RankCall) -> Cost:
    """Send all segments but one's own; receive all but the predecessor's."""
    n, ticks = call.nbytes, call.size - 1
    return Cost(ticks, n - call.part(call.place), ticks, n - call.part(call.place - 1))


def _ring_all_gather(call: RankCall) -> Cost:
    """Send all segments but the successor's; receive all but one's own."""
    n, ticks = call.nbytes, call.size - 1
    return Cost(ticks, n - call.part(call.place + 1), ticks, n - call.part(call.place))


def _ring_all_reduce(call: RankCall) -> Cost:
    return _ring_reduce_scatter(call) + _ring_all_gather(call)


def _folded(call: RankCall, inner: Callable[[int, int], tuple[int, int]]) -> Cost:
    """Return the cost of ``inner(place, rounds)``, equal both ways, and of folding the surplus."""
    rounds = call.size.bit_length() - 1
    surplus, once = call.size - 2**rounds, Cost(1, call.nbytes, 1, call.nbytes)
    folds = call.place < 2 * surplus
    if folds and call.place % 2 == 0:
        return once
    messages, sent = inner(call.place // 2 if folds else call.place - surplus, rounds)
    return Cost(messages, sent, messages, sent) + (once if folds else Cost())


def _recursive_doubling(call: RankCall) -> Cost:
    return _folded(call, lambda _, rounds: (rounds, rounds * call.nbytes))


def _halving_doubling(call: RankCall) -> Cost:
    """Halving sends all but the own segment; doubling sends the known 1, 2, 4, ... segments."""

    def inner(place: int, rounds: int) -> tuple[int, int]:
        known = sum(call.part(place & -(1 << j), 2**rounds, 1 << j) for j in range(rounds))
        return 2 * rounds, call.nbytes - call.part(place, 2**rounds) + known

    return _folded(call, inner)


def _children(call: RankCall) -> int:
    """Count a rank's children, which have one more bit below its lowest; the root has ⌈lg p⌉."""
    lowest = call.place & -call.place or call.size
    return sum((1 << j) < lowest and call.place + (1 << j) < call.size for j in range(call.size.bit_length()))


def _tree_broadcast(call: RankCall) -> Cost:
    children, parents = _children(call), int(call.place > 0)
    return Cost(children, children * call.nbytes, parents, parents * call.nbytes)


def _tree_reduce(call: RankCall) -> Cost:
    children, parents = _children(call), int(call.place > 0)
    return Cost(parents, parents * call.nbytes, children, children * call.nbytes)


def _tree_all_reduce(call: RankCall) -> Cost:
    return _tree_reduce(call) + _tree_broadcast(call)


def _parameter_server(servers: int) -> Callable[[RankCall], Cost]:
    def all_reduce(call: RankCall) -> Cost:
        count, others = min(servers, call.size), call.size - 1
        serves = call.place < count
        own = call.part(call.place, count) if serves else 0
        messages, moved = count - serves + serves * others, call.nbytes - own + own * others
        return Cost(messages, moved, messages, moved)

    return all_reduce


def _all_to_all(call: RankCall) -> Cost:
    ticks, moved = call.size - 1, call.nbytes - call.part(call.place)
    return Cost(ticks, moved, ticks, moved)


def _barrier(call: RankCall) -> Cost:
    rounds = (call.size - 1).bit_length()
    return Cost(rounds, 0, rounds, 0)


Formulas = Mapping[str, Callable[[RankCall], Cost]]
TREE: Formulas = {"broadcast": _tree_broadcast, "reduce": _tree_reduce, "all_reduce": _tree_all_reduce}
RING: Formulas = {
    "all_reduce": _ring_all_reduce,
    "reduce_scatter": _ring_reduce_scatter,
    "all_gather": _ring_all_gather,
}
FORMULAS: Mapping[str, Formulas] = {
    "ring": RING,
    "halving_doubling": {"all_reduce": _halving_doubling},
    "recursive_doubling": {"all_reduce": _recursive_doubling},
    "tree": TREE,
    **{f"parameter_server{name}": {"all_reduce": _parameter_server(k)} for name, k in (("", 1), ("_2", 2), ("_4", 4))},
    "default": {**TREE, **RING, "all_to_all": _all_to_all, "barrier": _barrier},
}
"""Costs by algorithm and collective; ``default`` is `d5suite.distributed.algorithms.DEFAULTS`."""


def cost(
    algorithm: str,
    collective: str,
    *,
    rank: int,
    size: int,
    length: int,
    itemsize: int,
    root: int = 0,
    hosts: Sequence[str] | None = None,
) -> Cost | None:
    """Return what one rank sends and receives; None for the transport's own collective.

    Parameters
    ----------
    algorithm : str
        A key of `d5suite.distributed.algorithms.ALGORITHMS`, or ``default``.
    collective : str
    rank, size : int
    length, itemsize : int
        Elements of the array, and bytes of one.
    root : int
        The root of a broadcast or reduce.
    hosts : sequence of str, optional
        Hosts by rank, for the hierarchical algorithm; one host if not given.
    """
    if algorithm == "hierarchical" and collective in TREE:
        found = groups(hosts or [""] * size, root)
        own, speakers = next(group for group in found if rank in group), [group[0] for group in found]
        within = TREE[collective](RankCall(own.index(rank), len(own), length, itemsize))
        between = {**TREE, "all_reduce": _ring_all_reduce}[collective]
        speaks = rank == own[0]
        return within + (between(RankCall(speakers.index(rank), len(found), length, itemsize)) if speaks else Cost())
    formula = FORMULAS.get(algorithm, {}).get(collective)
    if formula is None:
        return None
    return formula(RankCall((rank - root) % size, size, length, itemsize))
