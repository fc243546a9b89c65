"""Samplers: the order of images depends on seed and epoch only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d5suite.data.samplers import ClassBalanced, Ordered, Sharded, Shuffled
from d5suite.errors import ConfigurationError


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 9), st.integers(0, 4))
def test_samplers_depend_on_seed_and_epoch_only(labels: list[int], seed: int, epoch: int) -> None:
    count = len(labels)
    for sampler in (Ordered(count), Shuffled(count, seed), ClassBalanced(np.array(labels), seed)):
        order = sampler.order(epoch)
        assert len(order) == len(sampler) == count
        assert order.min() >= 0 and order.max() < count
        np.testing.assert_array_equal(order, sampler.order(epoch))
    assert sorted(Shuffled(count, seed).order(epoch)) == list(range(count))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 9))
def test_a_balanced_epoch_holds_every_class_alike(labels: list[int], seed: int) -> None:
    known = np.array(labels)
    order = ClassBalanced(known, seed, length=100).order(0)
    counts = np.array([np.sum(known[order] == label) for label in np.unique(known)])
    assert counts.max() - counts.min() <= 1
    for label in np.unique(known):
        uses = np.array([np.sum(order == image) for image in np.flatnonzero(known == label)])
        assert uses.max() - uses.min() <= 1


def test_a_balanced_sampler_needs_one_class_per_image() -> None:
    with pytest.raises(ConfigurationError, match="one class per image"):
        ClassBalanced(np.zeros((4, 3), np.int64))


@given(st.integers(1, 90), st.integers(1, 7), st.integers(1, 9), st.integers(0, 3))
def test_ranks_divide_an_epoch_without_overlap_or_loss(count: int, ranks: int, batch_size: int, epoch: int) -> None:
    whole = Shuffled(count, seed=1)
    shards = [Sharded(whole, rank, ranks, batch_size) for rank in range(ranks)]
    orders = [shard.order(epoch) for shard in shards]
    assert [len(order) for order in orders] == [len(shard) for shard in shards]
    np.testing.assert_array_equal(np.sort(np.concatenate(orders)), np.arange(count))
    batches = np.split(whole.order(epoch), range(batch_size, count, batch_size))
    for number, batch in enumerate(batches):  # batch i of rank r is batch i * ranks + r of one process
        of_rank = orders[number % ranks][number // ranks * batch_size :][: len(batch)]
        np.testing.assert_array_equal(of_rank, batch)
