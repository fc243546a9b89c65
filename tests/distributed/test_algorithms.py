"""Collective algorithms: right sums, equal bits, and the published formulas' bytes, for any number
of ranks, any length, dtype, root and distribution over hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.distributed import algorithms
from d5suite.distributed.algorithms import ALGORITHMS, ring, tree
from d5suite.distributed.algorithms.costs import Cost, cost
from d5suite.distributed.algorithms.messages import TAG
from d5suite.distributed.communicators import threads
from d5suite.levels.distributed import Collective, Communicator, segments
from tests.distributed import checks

MOST_RANKS = 9


def check(c: Communicator, length: int, dtype: np.dtype, root: int) -> None:
    checks.check_collectives(c, length, dtype, root)
    checks.check_equal_bits(c, length, dtype)
    checks.check_costs(c, length, dtype, root)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_bits_and_bytes_are_right(algorithm: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        size = data.draw(st.integers(1, MOST_RANKS), "ranks")
        length = data.draw(st.integers(0, 3 * size), "length")
        dtype = data.draw(st.sampled_from(checks.DTYPES), "dtype")
        root = data.draw(st.integers(0, size - 1), "root")
        hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size), "hosts")
        threads.run(size, lambda c: check(c, length, dtype, root), algorithm, hosts)

    holds()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_number_of_ranks_and_a_long_array(algorithm: str) -> None:
    for size in range(1, MOST_RANKS + 1):
        threads.run(size, lambda c: check(c, 1000, checks.DTYPES[2], 0), algorithm, list("abacabcab")[:size])


def test_the_formulas_are_the_published_ones() -> None:
    for size in range(2, MOST_RANKS + 1):
        rounds = size.bit_length() - 1
        power = 2**rounds
        length = size * power * 4
        n = 4 * length
        last: dict[str, Any] = {
            "rank": size - 1,
            "size": size,
            "length": length,
            "itemsize": 4,
        }  # never folded into another one

        def sent(algorithm: str, collective: str = "all_reduce", of: dict[str, Any] = last) -> tuple[int, int]:
            found = cost(algorithm, collective, **of)
            assert found is not None
            return found.messages_sent, found.bytes_sent

        assert sent("ring") == (2 * (size - 1), 2 * n * (size - 1) // size)
        assert sent("ring", "reduce_scatter") == sent("ring", "all_gather") == (size - 1, n * (size - 1) // size)
        folded = sum(sent("halving_doubling", of={**last, "rank": rank})[0] for rank in range(size))
        assert folded == power * 2 * rounds + 2 * (size - power)
        if size == power:
            assert sent("recursive_doubling") == (rounds, n * rounds)
            assert sent("halving_doubling") == (2 * rounds, 2 * n * (size - 1) // size)
        assert sent("parameter_server") == (1, n)
        assert sent("parameter_server", of={**last, "rank": 0}) == (size - 1, n * (size - 1))
        assert sent("tree", "broadcast", {**last, "rank": 0}) == ((size - 1).bit_length(), n * (size - 1).bit_length())


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "default"])
def test_what_is_sent_is_received(algorithm: str) -> None:
    for collective in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "barrier"):
        for size in range(1, 20):
            place: dict[str, Any] = {"size": size, "length": 13, "itemsize": 2, "hosts": (list("abbac") * 4)[:size]}
            found = [cost(algorithm, collective, rank=rank, **place) for rank in range(size)]
            each = [one for one in found if one is not None]
            everyone = sum(each, Cost())
            assert len(each) in (0, size)
            assert everyone.messages_sent == everyone.messages_received
            assert everyone.bytes_sent == everyone.bytes_received


# What the checks exist for


def skips_a_segment(c: Communicator, array: np.ndarray) -> None:
    """A ring whose last tick sends an old segment."""
    before = array.copy()
    ring.all_reduce(c, array)
    part = segments(array.size, c.size)[(c.rank + 1) % c.size]
    array[part] = before[part]


def sums_twice(c: Communicator, array: np.ndarray) -> None:
    ring.all_reduce(c, array)
    array += array


def does_nothing(c: Communicator, array: np.ndarray) -> None:
    """Neither sends nor sums."""


def sends_uncounted(c: Communicator, array: np.ndarray) -> None:
    if c.rank == 0:
        c._send(array, c.size - 1, TAG)
    elif c.rank == c.size - 1:
        c._receive(array.copy(), 0, TAG)
    ring.all_reduce(c, array)
    assert c._outermost is not None
    c._outermost.messages_sent -= 1


def sends_once_more(c: Communicator, array: np.ndarray) -> None:
    ring.all_reduce(c, array)
    algorithms.pairwise.barrier(c, np.empty(0, np.uint8))


def sends_more_than_it_need(c: Communicator, array: np.ndarray) -> None:
    """Right sums, by a tree that calls itself a ring."""
    tree.all_reduce(c, array)


def adds_in_its_own_order(c: Communicator, array: np.ndarray) -> None:
    """Each rank adds the others' arrays to its own."""
    rows = np.zeros((c.size, array.size), array.dtype)
    rows[c.rank] = array
    for turn in range(c.size):
        tree.broadcast(c, rows[turn], root=turn)
    array[:] = rows[c.rank]
    for turn in range(c.size):
        if turn != c.rank:
            array += rows[turn]


LIARS: dict[Callable[..., None], str] = {
    skips_a_segment: "all_reduce, rank",
    sums_twice: "all_reduce, rank",
    does_nothing: "all_reduce, rank",
    sends_uncounted: "all_reduce, {",
    sends_once_more: "all_reduce, {",
    sends_more_than_it_need: "all_reduce, {",
    adds_in_its_own_order: "ring, 1000",
}


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_an_algorithm_that_lies_is_caught(liar: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Any = ALGORITHMS
    monkeypatch.setitem(honest, "ring", {"all_reduce": liar})
    with pytest.raises(AssertionError, match=LIARS[liar]):
        threads.run(3, lambda c: check(c, 1000, np.dtype(np.float32), 0), "ring")
