"""Plans for a network whose steps were measured: ZeRO's bytes, ranks, and what decides."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import MemoryLevel, Roof
from d5suite.models.communication import Link
from d5suite.models.network_plans import (
    BatchCounts,
    GraphNode,
    NetworkModel,
    NetworkPlan,
    StateBytes,
    advice_on,
    advise_network,
    deciding_assumption,
    network_plans,
    tensor_parallel_bytes,
)
from d5suite.models.node_time import NodeTimes, NodeWork
from d5suite.models.peak import PeakModel
from d5suite.models.pipeline import balanced
from d5suite.models.site import Site

ROOF = Roof(1e12, (MemoryLevel("memory", 0, 1e11),))
SITE = Site(8, 16 * 2**30, ROOF, Link(1e-5, 1e-10))


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_bytes_of_zero_are_those_that_it_published(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters on 64 devices; arXiv:1910.02054, figure 1: 2 + 2 + 12 bytes each."""
    assert 7.5 * StateBytes(2, 2, 12).held(stage, 64) == pytest.approx(gigabytes, rel=0.005)


def counts(batch: int) -> BatchCounts:
    nodes = [NodeWork("Conv", each, batch * 1e10, batch * 1e8) for each in ("forward", "backward")]
    return BatchCounts(nodes, batch * 2**28, batch * 2**27, 4)


MODEL = NetworkModel(
    parameters=25_000_000,
    node_count=100,
    state=StateBytes(4, 4, 4),
    counts=counts,
    times=NodeTimes(
        {("convolution", each, "flops"): 2.0 for each in ("forward", "backward")}, 1.0, 6.0, 1e-3, factor=1.2
    ),
    peaks=PeakModel(2**28, 1.0, 1.0, 1e5, factor=1.1),
)


def test_a_step_is_computing_reducing_and_updating() -> None:
    found = advice_on(MODEL, SITE, NetworkPlan(data=8, batch=64, micro_batch=8))
    assert found.time.computing == pytest.approx(2 * 8 * 2e-2)
    assert found.time.gradients == pytest.approx(14 * 1e-5 + 1.75 * 1e8 * 1e-10)
    assert found.time.update == pytest.approx(6 * 20 * 25e6 / 1e11)  # reads 12 bytes, and writes 8
    assert found.seconds == pytest.approx(sum(found.time)) and found.time.bound == "computing"
    hidden = found.seconds - found.time.gradients  # the backward pass takes longer
    assert found.interval_s == pytest.approx((hidden / 1.2, found.seconds * 1.2))
    assert found.sent_bytes == pytest.approx(1.75 * 1e8)


def test_memory_is_saved_by_sharding_recomputation_and_smaller_passes() -> None:
    plain = advice_on(MODEL, SITE, NetworkPlan(8, 64, 8))
    assert plain.memory_bytes == pytest.approx(2**28 + 3e8 + 8 * 2**28 + 1e7)
    sharded = advice_on(MODEL, SITE, NetworkPlan(8, 64, 8, sharding=3))
    assert plain.memory_bytes - sharded.memory_bytes == pytest.approx(12 * 25e6 * 7 / 8)
    assert sharded.time.gradients == pytest.approx(1.5 * plain.time.gradients)
    again = advice_on(MODEL, SITE, NetworkPlan(8, 64, 8, recompute=True))
    assert again.memory_bytes < plain.memory_bytes and again.time.recomputing == pytest.approx(0.75 * 0.16)
    passes = advice_on(MODEL, SITE, NetworkPlan(8, 64, 1))
    assert passes.memory_bytes < plain.memory_bytes and passes.time.fixed == pytest.approx(8e-3)


def test_goals_order_differently_and_batches_compete() -> None:
    best = {goal: advise_network(MODEL, SITE, [64, 128], goal=goal)[0].plan for goal in ("time", "memory", "cost")}
    assert best["time"] == NetworkPlan(8, 128, 16, sharding=2)  # each replica updates its part only
    assert best["memory"].micro_batch == 1 and best["memory"].recompute
    assert best["cost"].data == 1


def test_what_does_not_fit_or_divide_is_said() -> None:
    with pytest.raises(ConfigurationError, match="the least needs"):
        advise_network(MODEL, replace(SITE, memory_bytes=1e8), [64], goal="time")
    with pytest.raises(ConfigurationError, match="no plan divides a batch of 3 among 8 devices"):
        advise_network(MODEL, SITE, [3], goal="time")
    alone = advise_network(MODEL, replace(SITE, link=None), [64], goal="time")
    assert {each.plan.data for each in alone} == {1}  # without a link, nothing is known of several


def test_the_assumption_that_decides_is_named() -> None:
    far = replace(SITE, link=Link(1e-5, 2e-9))
    one, other = NetworkPlan(8, 64, 8, recompute=True), NetworkPlan(4, 64, 16)
    name, _ = deciding_assumption(MODEL, far, one, other)
    assert name == "that nothing hides the reduction of gradients"
    assert deciding_assumption(MODEL, SITE, NetworkPlan(8, 64, 8), NetworkPlan(8, 64, 8, recompute=True))[1] is False


def slowest(seconds: list[float], messages: list[float], stages: int) -> float:
    """The fastest slowest stage, of all ways to cut."""
    best = math.inf
    for cuts in itertools.combinations(range(1, len(seconds)), stages - 1):
        ends = (0, *cuts, len(seconds))
        parts = [sum(seconds[a:b]) + (messages[a - 1] if a else 0) for a, b in itertools.pairwise(ends)]
        best = min(best, max(parts))
    return best


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 9])
def test_stages_are_cut_where_the_slowest_is_fastest(stages: int) -> None:
    rng = np.random.default_rng(stages)
    seconds, messages = (list(map(float, rng.uniform(0, most, 9))) for most in (1, 0.5))
    found = balanced(seconds, messages, stages)
    assert [each.first for each in found] == [0, *(each.end for each in found[:-1])] and found[-1].end == 9
    assert max(each.seconds for each in found) == pytest.approx(slowest(seconds, messages, stages))
    with pytest.raises(ValueError, match="9 nodes cannot be cut into 10 stages"):
        balanced(seconds, messages, 10)


def graph_counts(batch: int) -> BatchCounts:
    """Four equal nodes, of which the second is a quarter of the parameters."""
    works = [NodeWork("Conv", each, batch * 2.5e9, 0.0) for each in ("forward", "backward")]
    graph = [GraphNode(works, 6_250_000, batch * 2**26, batch * 1e6) for _ in range(4)]
    return replace(counts(batch), nodes=works * 4, graph=graph)


def test_a_pipeline_takes_turns_of_its_slowest_stage() -> None:
    model = replace(MODEL, counts=graph_counts)
    plan = NetworkPlan(data=2, batch=64, micro_batch=4, pipeline=4)
    found = advice_on(model, SITE, plan)
    stage = 4 * 2 * 2.5e9 * 2 / 1e12  # a micro-batch of 4, two directions, half of the ceiling
    message = 2 * 1e-5 + 2 * 4e6 * 1e-10
    assert plan.passes == 8 and plan.devices == 8
    assert found.time.computing == pytest.approx(8 * stage)
    assert found.time.bubble == pytest.approx((8 + 4 - 1) * (stage + message) - 8 * stage)
    assert found.time.gradients == pytest.approx(1e-5 + 2.5e7 * 1e-10)  # a stage's, between two replicas
    assert found.sent_bytes == pytest.approx(2.5e7 + 2 * 8 * 4e6)
    assert found.memory_bytes == pytest.approx(2**28 + 12 * 6.25e6 + 4 * 4 * 2**26 + 4e6 + 1e5)
    whole = advice_on(model, SITE, NetworkPlan(8, 64, 4))
    assert found.memory_bytes < whole.memory_bytes and found.seconds > whole.seconds


def test_a_pipeline_is_chosen_where_nothing_else_fits() -> None:
    model = replace(MODEL, counts=graph_counts)
    (first, *_) = advise_network(model, SITE, [64], goal="time")
    assert first.plan.pipeline == 1
    small = replace(SITE, memory_bytes=(2**28 + 3.5e8) / 0.9)  # less than all parameters and an image need
    plans = [each.plan for each in advise_network(model, small, [64], goal="time")]
    assert {each.pipeline for each in plans} == {4}
    assert not any(each.pipeline > 1 and (each.recompute or each.sharding > 1) for each in plans)
    assert {each.pipeline for each in network_plans(SITE, [64], fewer=False, stages=3)} == {1, 2}


def test_divided_channels_send_more_than_gradients() -> None:
    """Of a convolution of 64 channels, 4 images: 7/8 of 2 · 4 · 64 · 224² values."""
    size = 4 * 64 * 224**2 * 4
    node = NodeWork("Conv", "forward", 1e9, 2 * size + 147456, "convolution", 147456)
    view = NodeWork("Relu", "forward", 0, 2 * size)
    assert tensor_parallel_bytes([node, view, node._replace(direction="backward")], 8) == pytest.approx(1.75 * size)
