"""Seconds of an all-reduce from the latency and bandwidth of a link, by algorithm.

Every rank has a link of its own, which carries β seconds per byte in each direction at the same
time; a message takes α seconds more, and messages that reach a server together take g seconds each.
Adding up takes no time, and the network in between is never full. Sources: LogGP's g, Alexandrov et
al., SPAA 1995; Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19(1), 2005;
Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009; Li et al., OSDI 2014.

Imports `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from d5suite.errors import ConfigurationError
from d5suite.models.communication import Link


def _ring(ranks: int) -> tuple[float, float]:
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


def _rounds(ranks: int) -> tuple[int, bool]:
    """Return ⌊lg p⌋, and whether ranks are left over."""
    rounds = ranks.bit_length() - 1
    return rounds, ranks > 2**rounds


def _recursive_doubling(ranks: int) -> tuple[float, float]:
    rounds, surplus = _rounds(ranks)
    return rounds + 2 * surplus, rounds + 2 * surplus


def _halving_doubling(ranks: int) -> tuple[float, float]:
    rounds, surplus = _rounds(ranks)
    return 2 * (rounds + surplus), 2 * (2**rounds - 1) / 2**rounds + 2 * surplus


def _tree(ranks: int) -> tuple[float, float]:
    rounds = (ranks - 1).bit_length()
    return 2 * rounds, 2 * rounds


def _parameter_server(servers: int) -> Callable[[int], tuple[float, float]]:
    def cost(ranks: int) -> tuple[float, float]:
        """Return the cost of a server or a worker, whichever moves more; servers also work."""
        count = min(servers, ranks)
        worker = 1.0 if count < ranks else (count - 1) / count
        return 2, 2 * max(worker, (ranks - 1) / count)

    return cost


ALGORITHMS: Mapping[str, Callable[[int], tuple[float, float]]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "tree": _tree,
    "parameter_server": _parameter_server(1),
    "parameter_server_2": _parameter_server(2),
    "parameter_server_4": _parameter_server(4),
}
"""By algorithm: messages one after the other, and sent or received bytes over those of the array,
of the rank that takes longest. What a transport or a hierarchy does is not known in advance."""

SERVERS = tuple(name for name in ALGORITHMS if name.startswith("parameter_server"))
COLLECTIVE = tuple(name for name in ALGORITHMS if name not in SERVERS)


def algorithm_s(algorithm: str, ranks: int, nbytes: float, link: Link, *, tensors: int = 1) -> float:
    """Return the seconds of an all-reduce by one algorithm.

    Parameters
    ----------
    algorithm : str
        A key of `ALGORITHMS`.
    ranks : int
    nbytes : float
        Bytes of all tensors together.
    link : Link
    tensors : int
        Equal tensors that are reduced one after the other.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(f"no model of {algorithm!r}", hint=f"Known: {', '.join(ALGORITHMS)}.")
    if ranks == 1:
        return 0.0
    messages, share = ALGORITHMS[algorithm](ranks)
    # Each server takes a message of every other rank, and sends as many, however few their bytes.
    apart = 2 * (ranks - 2) * link.gap_s if algorithm in SERVERS else 0.0
    return link.seconds(messages * tensors, share * nbytes) + tensors * apart


def crossover(
    servers: str,
    nbytes: float,
    link: Link,
    ranks: Iterable[int],
    *,
    tensors: int = 1,
    against: Sequence[str] = COLLECTIVE,
) -> int | None:
    """Return the fewest ranks from which on an all-reduce is faster than a parameter server.

    Parameters
    ----------
    servers : str
        One of `SERVERS`.
    nbytes, link, tensors
        As of `algorithm_s`.
    ranks : iterable of int
        Numbers of ranks to look at; with each larger one of them the all-reduce is faster, too.
    against : sequence of str
        Algorithms of all-reduce, of which the fastest counts.

    Returns
    -------
    int or None
        None if the parameter server is as fast with the most ranks.
    """
    found = None
    for count in sorted(set(ranks), reverse=True):
        fastest = min(algorithm_s(name, count, nbytes, link, tensors=tensors) for name in against)
        if fastest >= algorithm_s(servers, count, nbytes, link, tensors=tensors):
            break
        found = count
    return found
