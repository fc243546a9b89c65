"""Models that are fitted to results: they find planted constants, and know how far they are off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import MemoryLevel, Roof
from d5suite.models.fitting import by_network, covering_factor, judge
from d5suite.models.node_time import (
    GROUPED,
    POINTWISE,
    MeasuredStep,
    NodeTimes,
    NodeWork,
    TimedNodes,
    class_of,
    fit_node_times,
    fit_once,
    fit_steps,
    node_work,
    predicted_s,
)
from d5suite.models.peak import MeasuredPeak, fit_peaks

ROOF = Roof(1e11, (MemoryLevel("L2", 1 << 20, 1e11), MemoryLevel("memory", 0, 1e10)))
TRUE = {"convolution": (0.5, 0.8, 3e-6), "normalization": (0.1, 0.6, 2e-6), "other": (1.0, 0.7, 1e-6)}
"""Efficiencies of arithmetic and memory, and seconds of a call, by class."""
OPERATORS = ("Conv", "BatchNormalization", "Relu")


def true_s(node: NodeWork) -> float:
    arithmetic, memory, call = TRUE[class_of(node.op_type)]
    return node.flops / 1e11 / arithmetic + node.bytes / bandwidth_of(node) / memory + call


def steps(networks: int, noise: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    """Steps of networks with other sizes of nodes; times are the true ones but for noise."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(networks):
        for batch in (1, 4):
            nodes, timed = [], []
            for _ in range(2 * int(rng.integers(10, 20))):
                op_type = OPERATORS[rng.integers(3)]
                size = batch * 10 ** rng.uniform(4, 7)
                flops = size * (50 if op_type == "Conv" else 1) * rng.uniform(0.5, 2)
                node = NodeWork(op_type, "forward", flops, size)
                nodes.append(node)
                timed.append(TimedNodes([node], true_s(node) * math.exp(noise * rng.standard_normal())))
            seconds = 1.1 * sum(each.seconds for each in timed) + 1e-4
            found.append(MeasuredStep(f"network{number}", nodes, timed, 0.0, seconds, ROOF))
    return found


def test_planted_times_are_found() -> None:
    model = fit_node_times(steps(4))
    assert model.efficiency("convolution", "forward") == pytest.approx(TRUE["convolution"][0], rel=0.1)
    assert model.scale == pytest.approx(1.1, rel=1e-2)
    assert model.factor < 1.05


def test_nodes_that_ran_as_one_are_of_the_class_of_the_heaviest() -> None:
    apart = steps(4)
    fused = [
        replace(each, timed=[
            TimedNodes([*one.nodes, *other.nodes], one.seconds + other.seconds)
            for one, other in zip(each.timed[::2], each.timed[1::2], strict=True)
        ])
        for each in apart
    ]  # fmt: skip
    model = fit_once(fused)
    assert [predicted_s(model, each) for each in apart] == pytest.approx([each.seconds for each in apart], rel=0.1)


def test_a_class_that_always_ran_as_one_with_others_is_known() -> None:
    loss = NodeWork("Softmax", "forward", 1e3, 1e3)
    fused = [
        replace(each, nodes=[*each.nodes, loss], timed=[
            TimedNodes([*each.timed[0].nodes, loss], each.timed[0].seconds), *each.timed[1:]
        ])
        for each in steps(4)
    ]  # fmt: skip
    model = fit_once(fused)
    assert not model.unknown([loss])
    assert [predicted_s(model, each) for each in fused] == pytest.approx([each.seconds for each in fused], rel=0.1)
    assert model.unknown([loss._replace(op_type="Tanh")]) == ["Tanh"]
    assert fit_once(steps(4)).unknown([loss]) == ["Softmax"]


def small_images(networks: int) -> list[MeasuredStep]:
    """Planted: 1 × 1 convolutions at half of the ceiling, and on images of 2 × 2 places at 0.06."""
    rng = np.random.default_rng(4)
    found = []
    for number in range(networks):
        nodes = [
            NodeWork("Conv", "forward", size * 100, size, POINTWISE, 0.0, size / 8, places)
            for places in (4, 4, 256, 256, 1024, 1024) for size in 10 ** rng.uniform(5, 6, 3)
        ]  # fmt: skip
        took = [each.flops / 1e11 / (0.06 if each.places == 4 else 0.5) for each in nodes]
        timed = [TimedNodes([node], seconds) for node, seconds in zip(nodes, took, strict=True)]
        found.append(MeasuredStep(f"network{number}", nodes, timed, 0.0, sum(took), ROOF))
    return found


def test_nodes_of_like_shape_correct_their_class() -> None:
    points = small_images(5)
    judged = judge(by_network(points), fit_once, predicted_s, lambda each: each.seconds)
    assert max(abs(each.error) for each in judged) < 0.1
    model = fit_once(points)
    slow = [each for each in points[0].nodes if each.places == 4]
    alone = replace(model, like={})  # planted: the class alone
    assert model.nodes_s(slow, ROOF) == pytest.approx(sum(each.flops for each in slow) / 6e9, rel=0.1)
    assert alone.nodes_s(slow, ROOF) < 0.6 * model.nodes_s(slow, ROOF)
    unlike = [each._replace(flops=each.flops * 1e4, bytes=each.bytes * 1e4, sums=each.sums * 1e4) for each in slow]
    assert model.nodes_s(unlike, ROOF) == pytest.approx(alone.nodes_s(unlike, ROOF), rel=1e-3)


def test_intervals_hold_what_they_promise_and_errors_are_of_networks_left_out() -> None:
    points = steps(12, noise=0.3)
    judged = judge(by_network(points), fit_once, predicted_s, lambda each: each.seconds)
    assert len(judged) == 24
    assert 0.75 <= np.mean([each.covered for each in judged]) <= 1
    assert np.median([abs(each.error) for each in judged]) < 0.1
    odd = [replace(each, seconds=3 * each.seconds) if each.network == "network0" else each for each in points]
    judged = judge(by_network(odd), fit_once, predicted_s, lambda each: each.seconds)  # planted: one that differs
    assert not any(each.covered for each in judged[:2])


def test_a_model_needs_three_networks_and_names_operators_that_it_has_not_seen() -> None:
    with pytest.raises(ConfigurationError, match="2 measured networks are too few for a model of times"):
        fit_node_times(steps(2))
    model = fit_node_times(steps(3))
    assert model.unknown([NodeWork("LSTM", "forward", 1, 1), NodeWork("Conv", "forward", 1, 1)]) == ["LSTM"]
    assert model.unknown([NodeWork("Conv", "backward", 1, 1)]) == ["Conv"]


def test_peaks_follow_base_parameters_and_activations() -> None:
    rng = np.random.default_rng(1)
    sizes = [(10 ** rng.uniform(6, 8), 10 ** rng.uniform(6, 9), int(rng.integers(20, 300))) for _ in range(6)]
    points = [
        MeasuredPeak(f"network{number % 3}", p, a, n, 4e8 + 3 * p + 1.2 * a + 1e5 * n)
        for number, (p, a, n) in enumerate(sizes)
    ]
    model = fit_peaks(points)
    assert (model.base_bytes, model.parameters, model.activations, model.node_bytes) == pytest.approx(
        (4e8, 3, 1.2, 1e5), rel=1e-3
    )
    assert model.factor < 1.001
    with pytest.raises(ConfigurationError, match="too few for a model of memory"):
        fit_peaks(points[:2])


def test_a_factor_covers_nine_in_ten() -> None:
    assert covering_factor([1.1] * 9 + [2.0]) == pytest.approx(2.0)  # ten points: the tenth
    assert covering_factor([1.1, 0.8] * 20) == pytest.approx(1.25)
    assert covering_factor([]) == math.inf


def test_few_networks_have_a_factor_of_students_t() -> None:
    """Of two logarithms ±0.1 the root mean square is 0.1, and t of 2 degrees of freedom is 2.92."""
    assert covering_factor([math.exp(0.1), math.exp(-0.1)]) == pytest.approx(math.exp(0.292), rel=1e-3)
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(400):
        *known, new = rng.normal(0, 0.2, 5)
        held += abs(new) <= math.log(covering_factor(list(np.exp(known))))
    assert held / 400 == pytest.approx(0.9, abs=0.04)
    largest = [abs(new) <= max(map(abs, known)) for *known, new in rng.normal(0, 0.2, (400, 5))]
    assert np.mean(largest) < 0.86  # planted: the largest of four, as it was


def test_a_network_with_operators_of_its_own_is_not_judged() -> None:
    """Planted: one network has a product that no other one has, and takes any time."""
    points = steps(5)
    own = NodeWork("MatMul", "forward", 1e9, 1e6)
    alone = [
        replace(each, nodes=[*each.nodes, own], timed=[*each.timed, TimedNodes([own], 5.0)], seconds=each.seconds + 5)
        if each.network == "network0" else each
        for each in points
    ]  # fmt: skip
    judged = judge(by_network(alone), fit_once, predicted_s, lambda each: each.seconds)
    assert {each.network for each in judged} == {f"network{number}" for number in range(1, 5)}
    assert max(abs(each.error) for each in judged) < 0.06 and all(each.covered for each in judged)
    only = [replace(each, nodes=[NodeWork(f"Conv{each.network}", "forward", 1, 1)], timed=[]) for each in points]
    with pytest.raises(ConfigurationError, match="0 of 5 measured networks have operators that others have, too"):
        fit_node_times([replace(each, timed=[TimedNodes(each.nodes, 1.0)]) for each in only], fit_known)


def fit_known(points: Sequence[MeasuredStep]) -> NodeTimes:
    """A model that has seen nothing."""
    return replace(fit_steps(points), constants={})


CONVOLUTION = {
    "op_type": "Conv", "shape": (8, 128, 16, 16), "flops": 2 * 8 * 128 * 256 * 64 * 9,
    "bytes": 4 * (8 * 64 * 256 + 128 * 64 * 9 + 8 * 128 * 256),
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "convolution"),  # 3 × 3 of 64 channels
        ({"flops": 2 * 8 * 128 * 256 * 64, "bytes": 4 * (8 * 64 * 256 + 128 * 64 + 8 * 128 * 256)}, POINTWISE),
        ({"flops": 2 * 8 * 128 * 256 * 64, "bytes": 4 * (8 * 64 * 1024 + 128 * 64 + 8 * 128 * 256)}, POINTWISE),  # / 2
        ({"flops": 2 * 8 * 128 * 256 * 9, "bytes": 4 * (8 * 128 * 256 + 128 * 9 + 8 * 128 * 256)}, GROUPED),  # by depth
        ({"flops": 2 * 8 * 128 * 256 * 9, "bytes": 4 * (8 * 128 * 1024 + 128 * 9 + 8 * 128 * 256)}, GROUPED),
        ({"flops": 2 * 8 * 128 * 256 * 27, "bytes": 4 * (8 * 3 * 1024 + 128 * 27 + 8 * 128 * 256)}, "convolution"),
        ({"op_type": "MatMul"}, "product"),
        ({"op_type": "Relu"}, ""),
        ({"op_type": "Gelu"}, ""),
    ],
)
def test_shapes_tell_kinds_of_convolutions(values: dict[str, Any], kind: str) -> None:
    assert node_work(CONVOLUTION | values, "forward").kind == kind


def test_weights_come_from_the_level_that_holds_all_of_them() -> None:
    """Planted: 24 products whose weights of 1 MB each fit into the cache, but not together."""
    one = NodeWork("Gemm", "forward", 0, 1_000_000, "product", 1_000_000)
    alone = {**fit_once(steps(3)).constants, ("product", "forward", "bytes"): 1.0}
    model = replace(fit_once(steps(3)), constants=alone)
    assert model.nodes_s([one], ROOF) == pytest.approx(1e6 / 1e11)
    assert model.nodes_s([one] * 24, ROOF) == pytest.approx(24e6 / 1e10)


def test_published_steps_give_few_constants() -> None:
    """Planted: convolutions at 0.8, products at 0.5, memory at 0.6 of the ceiling, 1 µs a call."""
    rng = np.random.default_rng(3)
    points = []
    for number in range(5):
        nodes = [
            NodeWork("Conv", direction, 10 ** rng.uniform(7, 9), 1e5, kind)
            for kind in ("convolution", POINTWISE) for direction in ("forward", "backward") for _ in range(9)
        ]  # fmt: skip
        nodes += [NodeWork("Relu", "forward", 0, 10 ** rng.uniform(5, 7)) for _ in range(9)]
        rate = {"convolution": 0.8, POINTWISE: 0.5}
        seconds = sum(
            each.flops / 1e11 / rate[each.kind] if each.kind else each.bytes / bandwidth_of(each) / 0.6
            for each in nodes
        ) + 1e-6 * len(nodes)
        points.append(MeasuredStep(f"network{number}", nodes, [], 0.0, seconds, ROOF))
    model = fit_node_times(points, fit_steps)
    assert model.efficiency("convolution", "backward") == pytest.approx(0.8, rel=1e-3)
    assert model.efficiency(POINTWISE, "forward") == pytest.approx(0.5, rel=1e-3)
    assert model.gap_s == pytest.approx(1e-6, rel=1e-2) and model.factor < 1.01
    assert model.unknown([NodeWork("Conv", "forward", 1, 1, GROUPED)]) == [GROUPED]


def bandwidth_of(node: NodeWork) -> float:
    """Bandwidth of the level that holds a node's bytes."""
    return 1e11 if node.bytes <= 1 << 20 else 1e10
