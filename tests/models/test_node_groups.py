"""Times of nodes that overlap belong together, so that no node's work counts twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d5suite.models.node_groups import node_groups
from d5suite.report.roofline import timed_nodes

NAMES = [f"node{number}" for number in range(8)]
TIMES = st.lists(
    st.builds(
        lambda nodes, direction, seconds: {"nodes": nodes, "direction": direction, "seconds": seconds, "calls": 1.0},
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        st.sampled_from(["forward", "backward"]),
        st.integers(0, 9).map(float),
    ),
    max_size=12,
)


@given(TIMES)
def test_each_node_is_in_one_group_and_each_time_counts_once(times: list[dict[str, Any]]) -> None:
    groups = node_groups(times)
    assert sum(each.seconds for each in groups) == sum(each["seconds"] for each in times)
    assert sorted(place for each in groups for place in each.places) == list(range(len(times)))
    for direction in ("forward", "backward"):
        named = [name for each in groups if each.direction == direction for name in each.nodes]
        assert sorted(named) == sorted({n for each in times if each["direction"] == direction for n in each["nodes"]})
    for each in groups:
        assert set(each.nodes) == {name for place in each.places for name in times[place]["nodes"]}


def test_work_of_a_node_with_a_time_alone_and_a_fused_one_counts_once() -> None:
    """TensorFlow has a time of a convolution's weights beside the convolution that it fused."""
    graph = {
        "conv": {"op_type": "Conv", "flops": 1000, "bytes": 100},
        "relu": {"op_type": "Relu", "flops": 10, "bytes": 80},
    }
    times = [
        {"nodes": ["conv"], "direction": "forward", "seconds": 1e-9, "calls": 1.0},
        {"nodes": ["conv", "relu"], "direction": "forward", "seconds": 1e-6, "calls": 1.0},
    ]
    (found,) = timed_nodes({"times": times, "graph": graph})
    assert found.op_type == "Conv" and found.group.nodes == ("conv", "relu")
    assert (found.work.flops, found.work.bytes) == (1010, 180)
    assert found.work.seconds == pytest.approx(1.001e-6)
