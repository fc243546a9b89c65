"""Within each host first, then between one rank of each host: the network carries less.

Imports NumPy and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from d5suite.distributed.algorithms import ring, tree
from d5suite.levels.distributed import Collective, Communicator


def groups(hosts: Sequence[str], root: int = 0) -> list[list[int]]:
    """Return the ranks of each host; a group's first rank leads it, and the root leads its own."""
    by_host: dict[str, list[int]] = {}
    for rank in [root, *(rank for rank in range(len(hosts)) if rank != root)]:
        by_host.setdefault(hosts[rank], []).append(rank)
    return list(by_host.values())


def all_reduce(communicator: Communicator, array: np.ndarray) -> None:
    """Reduce by a tree within hosts, by a ring between them, and broadcast within hosts."""
    own, speakers = _places(communicator, 0)
    tree.reduce(communicator, array, root=own[0], ranks=own)
    if communicator.rank == own[0]:
        ring.all_reduce(communicator, array, speakers)
    tree.broadcast(communicator, array, root=own[0], ranks=own)


def broadcast(communicator: Communicator, array: np.ndarray, *, root: int = 0) -> None:
    """Send to one rank of each host, which sends to the others."""
    own, speakers = _places(communicator, root)
    if communicator.rank == own[0]:
        tree.broadcast(communicator, array, root=root, ranks=speakers)
    tree.broadcast(communicator, array, root=own[0], ranks=own)


def reduce(communicator: Communicator, array: np.ndarray, *, root: int = 0) -> None:
    """Add within each host, then between them."""
    own, speakers = _places(communicator, root)
    tree.reduce(communicator, array, root=own[0], ranks=own)
    if communicator.rank == own[0]:
        tree.reduce(communicator, array, root=root, ranks=speakers)


def _places(communicator: Communicator, root: int) -> tuple[list[int], list[int]]:
    found = groups(communicator.hosts, root)
    return next(group for group in found if communicator.rank in group), [group[0] for group in found]


HIERARCHICAL: Mapping[str, Collective] = {"all_reduce": all_reduce, "broadcast": broadcast, "reduce": reduce}
