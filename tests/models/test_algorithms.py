"""Predicted all-reduces: their messages and bytes are those that the algorithms send."""

from __future__ import annotations

import math

import pytest

from d5suite.distributed.algorithms.costs import cost
from d5suite.errors import ConfigurationError
from d5suite.models.algorithms import ALGORITHMS, SERVERS, algorithm_s, crossover
from d5suite.models.communication import Link

LINK = Link(2e-5, 1e-9)
BYTES = Link(0.0, 1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13, 16])
def test_predicted_bytes_are_those_of_the_rank_that_moves_most(algorithm: str, ranks: int) -> None:
    length = 5 * 7 * 13 * 16 * 9  # every segment has the same length
    costs = [cost(algorithm, "all_reduce", rank=rank, size=ranks, length=length, itemsize=4) for rank in range(ranks)]
    most = max(max(each.bytes_sent, each.bytes_received) for each in costs if each is not None)
    moved = ALGORITHMS[algorithm](ranks)[1] * length * 4
    assert most * (1 - 1e-9) <= moved <= 2 * most  # phases follow each other, and ranks left over wait
    if algorithm == "ring" or ("doubling" in algorithm and ranks & (ranks - 1) == 0):
        assert moved == pytest.approx(most)


def test_published_costs() -> None:
    """Thakur et al. (2005); Li et al. (OSDI 2014)."""
    n, a, b = 1e6, LINK.alpha_s, LINK.beta_s_per_byte
    for p in (2, 4, 16, 64):
        rounds = math.log2(p)
        assert algorithm_s("ring", p, n, LINK) == pytest.approx(2 * (p - 1) * a + 2 * n * b * (p - 1) / p)
        assert algorithm_s("halving_doubling", p, n, LINK) == pytest.approx(2 * rounds * a + 2 * n * b * (p - 1) / p)
        assert algorithm_s("recursive_doubling", p, n, LINK) == pytest.approx(rounds * (a + n * b))
        assert algorithm_s("parameter_server", p, n, LINK) == pytest.approx(2 * a + 2 * n * b * max(1, p - 1))
        assert algorithm_s("ring", p, n, LINK, tensors=10) == pytest.approx(10 * algorithm_s("ring", p, n / 10, LINK))
    assert algorithm_s("ring", 1, n, LINK) == 0.0


def test_a_server_is_never_ahead_by_bytes_alone_and_more_servers_move_the_crossover() -> None:
    assert crossover("parameter_server", 1e8, BYTES, range(2, 65)) == 2
    found = [crossover(servers, 1e5, LINK, range(2, 1025), against=["ring"]) for servers in SERVERS]
    assert all(each is not None for each in found)
    assert found == sorted(found, key=lambda each: each or math.inf) and found[0] != found[-1]
    few, many = (
        crossover("parameter_server", 1e6, LINK, range(2, 1025), tensors=count, against=["ring"]) for count in (1, 100)
    )
    assert (few, many) == (2, None)  # where a message takes longer than its bytes, a ring never catches up


def test_a_server_takes_the_messages_of_many_ranks_one_by_one() -> None:
    gap, p, n = Link(2e-5, 1e-9, 3e-6), 12, 1e4
    for servers in SERVERS:
        assert algorithm_s(servers, p, n, gap) == pytest.approx(algorithm_s(servers, p, n, LINK) + 2 * (p - 2) * 3e-6)
    assert algorithm_s("parameter_server", p, n, gap, tensors=5) == pytest.approx(
        5 * algorithm_s("parameter_server", p, n / 5, gap)
    )
    assert algorithm_s("ring", p, n, gap) == algorithm_s("ring", p, n, LINK)
    # Four bytes: by the gap alone, a thousand messages take longer than the rounds of doubling.
    assert crossover("parameter_server", 4, LINK, range(2, 1025)) is None
    assert crossover("parameter_server", 4, gap, range(2, 1025)) is not None


def test_what_has_no_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no model of 'native'"):
        algorithm_s("native", 2, 1.0, LINK)
