"""TIC, TAC, E and S: as published, on graphs made by hand and at random."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.distributed.order import (
    Task,
    TaskGraph,
    divided,
    efficiency,
    goes_first,
    potential,
    properties,
    sequence,
    tac,
    tic,
)
from d5suite.errors import ConfigurationError


def chain(layers: int, computing: float = 1.0, sending: float = 1.0, *, each: int = 1) -> TaskGraph:
    """Make layers one behind the other, each with so many variables."""
    tasks = [Task(f"w{number:02}", "transfer", sending, 2**21) for number in range(layers * each)]
    for layer in range(layers):
        own = [task.name for task in tasks[layer * each : (layer + 1) * each]]
        before = [f"layer{layer - 1}"] if layer else []
        tasks.append(Task(f"layer{layer}", "compute", computing, depends_on=(*own, *before)))
    return TaskGraph(tuple(tasks))


def makespan(graph: TaskGraph, order: Sequence[str]) -> float:
    """Send in this order, one after the other; compute what is ready, as the graph has it."""
    ended, clock = dict[str, float](), 0.0
    for name in order:
        clock += graph.by_name[name].seconds
        ended[name] = clock
    waiting, clock = [each for each in graph.sorted if each.kind == "compute"], 0.0
    while waiting:
        ready = [each for each in waiting if all(name in ended for name in each.depends_on)]
        starts = [max([clock, *(ended[name] for name in each.depends_on)]) for each in ready]
        chosen = ready[starts.index(min(starts))]
        ended[chosen.name] = clock = min(starts) + chosen.seconds
        waiting.remove(chosen)
    return max(ended.values(), default=0.0)


def published(graph: TaskGraph) -> list[str]:
    """Order by TAC with sets and loops, as algorithm 3 of the paper is printed."""
    needs: dict[str, set[str]] = {}
    for task in graph.sorted:
        own = {task.name} if task.kind == "transfer" else set().union(*(needs[name] for name in task.depends_on))
        needs[task.name] = own
    left, found = [each.name for each in graph.transfers], list[str]()
    while left:
        unlocked, joint = dict.fromkeys(left, 0.0), dict.fromkeys(left, math.inf)
        for task in graph.tasks:
            wanted = [name for name in left if name in needs[task.name]] if task.kind == "compute" else []
            if len(wanted) == 1:
                unlocked[wanted[0]] += task.seconds
            for name in wanted if len(wanted) > 1 else []:
                joint[name] = min(joint[name], sum(graph.by_name[other].seconds for other in wanted))
        best = left[0]
        for name in left[1:]:
            a = min(unlocked[best], graph.by_name[name].seconds)
            b = min(unlocked[name], graph.by_name[best].seconds)
            if a < b or (a == b and joint[name] < joint[best]):
                best = name
        left.remove(best)
        found.append(best)
    return found


@st.composite
def graphs(draw: st.DrawFn, most: int = 6, least: int = 1) -> TaskGraph:
    """Draw transfers, and computations that each need some of them or of earlier computations."""
    times = st.integers(0, 8).map(float)
    tasks = [Task(f"w{number}", "transfer", draw(times)) for number in range(draw(st.integers(least, most)))]
    for number in range(draw(st.integers(1, 2 * most))):
        needed = draw(st.sets(st.sampled_from([each.name for each in tasks]), min_size=1, max_size=3))
        tasks.append(Task(f"c{number}", "compute", draw(times), depends_on=tuple(sorted(needed))))
    return TaskGraph(tuple(tasks))


@settings(max_examples=300, deadline=None)
@given(graphs(most=2, least=2))
def test_tac_puts_every_pair_in_its_best_order(graph: TaskGraph) -> None:
    orders = {order: makespan(graph, order) for order in itertools.permutations(["w0", "w1"])}
    assert orders[sequence(tac(graph))] == min(orders.values())


@settings(max_examples=300, deadline=None)
@given(graphs(most=9))
def test_tac_is_the_published_algorithm(graph: TaskGraph) -> None:
    assert list(sequence(tac(graph))) == published(graph)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.data())
def test_on_layers_one_behind_the_other_tac_is_the_best_of_all_orders(layers: int, data: st.DataObject) -> None:
    times = st.integers(1, 8).map(float)
    plain = chain(layers)
    graph = TaskGraph(tuple(Task(t.name, t.kind, data.draw(times), depends_on=t.depends_on) for t in plain.tasks))
    names = [each.name for each in graph.transfers]
    found = sequence(tac(graph))
    assert found == sequence(tic(graph)) == tuple(names)
    assert makespan(graph, found) == min(makespan(graph, order) for order in itertools.permutations(names))


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_properties_follow_their_definition(graph: TaskGraph) -> None:
    names = [each.name for each in graph.transfers]
    outstanding = names[::2]
    for name, found in properties(graph, outstanding).items():
        assert name in outstanding and found.seconds == graph.by_name[name].seconds
        alone, joint = 0.0, math.inf
        for task in graph.tasks:
            bits = graph.needs[task.name]
            wanted = [other for place, other in enumerate(names) if bits >> place & 1 and other in outstanding]
            if task.kind == "compute" and wanted == [name]:
                alone += task.seconds
            elif task.kind == "compute" and name in wanted:
                joint = min(joint, sum(graph.by_name[other].seconds for other in wanted))
        assert (found.unlocked, found.joint) == (alone, joint)


def test_two_branches_by_hand() -> None:
    # The example of the paper's figure 1: op2 needs both transfers, op1 only the first.
    graph = TaskGraph(
        (
            Task("recv2", "transfer", 1.0),
            Task("recv1", "transfer", 1.0),
            Task("op1", "compute", 1.0, depends_on=("recv1",)),
            Task("op2", "compute", 1.0, depends_on=("op1", "recv2")),
        )
    )
    assert sequence(tac(graph)) == ("recv1", "recv2")
    assert tic(graph) == {"recv2": 0, "recv1": 0}  # without times they are alike: each is in op2's pair
    found = properties(graph)
    assert (found["recv1"].unlocked, found["recv2"].unlocked, found["recv1"].joint) == (1.0, 0.0, 2.0)
    assert goes_first(found["recv1"], found["recv2"]) and not goes_first(found["recv2"], found["recv1"])
    assert (makespan(graph, ["recv1", "recv2"]), makespan(graph, ["recv2", "recv1"])) == (3.0, 4.0)


def test_tic_numbers_groups_by_the_transfers_before_them() -> None:
    assert tic(chain(4)) == {"w00": 0, "w01": 0, "w02": 2, "w03": 3}
    assert set(tic(chain(1, each=32)).values()) == {0}
    unused = TaskGraph((Task("unused", "transfer"), *chain(2).tasks))
    assert tic(unused) == {"unused": 2, "w00": 0, "w01": 0}


def alternating(layers: int, shift: int) -> Mapping[str, float]:
    """Clock a pipeline of equal layers by hand: transfer n + shift beside computation n."""
    return {"makespan": float(layers + shift), "computing": float(layers), "sending": float(layers)}


def test_efficiency_is_1_for_perfect_overlap_and_0_for_none() -> None:
    # Transfers of the next step beside this step's computations: nobody waits.
    hidden = TaskGraph((Task("w", "transfer", 2.0), Task("c", "compute", 3.0)))
    assert efficiency(makespan(hidden, ["w"]), hidden.busy.values()) == 1.0
    joined = chain(1, computing=3.0, sending=0.5, each=4)  # one layer needs all: no order helps
    assert efficiency(makespan(joined, sequence(tac(joined))), joined.busy.values()) == 0.0
    layers = chain(10)
    forward, backward = sequence(tac(layers)), tuple(reversed(sequence(tac(layers))))
    assert makespan(layers, forward) == alternating(10, 1)["makespan"]
    assert efficiency(makespan(layers, forward), layers.busy.values()) == pytest.approx(0.9)
    assert efficiency(makespan(layers, backward), layers.busy.values()) == 0.0
    assert potential(layers.busy.values()) == 1.0  # both are busy equally long: up to twice as fast


def test_nothing_to_overlap_has_no_efficiency() -> None:
    assert efficiency(3.0, [3.0]) is None and efficiency(0.0, []) is None and efficiency(1.0, [1.0, 0.0]) is None
    assert potential([]) == 0.0 and potential([2.0]) == 0.0 and potential([1.0, 3.0]) == pytest.approx(1 / 3)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4000), st.integers(0, 700), st.sampled_from([1, 4, 8]))
def test_slices_are_the_whole_array_once(length: int, slice_bytes: int, itemsize: int) -> None:
    found = divided(length * itemsize, slice_bytes, itemsize)
    assert [index for each in found for index in range(each.start, each.stop)] == list(range(length))
    assert all((each.stop - each.start) * itemsize <= max(slice_bytes, itemsize) for each in found if slice_bytes)
    assert len(found) <= 1 or slice_bytes


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TaskGraph((Task("a", "compute"), Task("a", "transfer"))), "two tasks have the name 'a'"),
        (lambda: TaskGraph((Task("a", "compute", depends_on=("b",)),)), "depends on 'b', which is no task"),
        (
            lambda: TaskGraph((Task("a", "compute", depends_on=("b",)), Task("b", "compute", depends_on=("a",)))),
            "tasks wait for each other",
        ),
        (lambda: Task("a", cast(Any, "wait")), "compute or transfer, not 'wait'"),
        (lambda: Task("a", "compute", math.nan), "finite and not negative"),
    ],
)
def test_a_graph_that_is_none_is_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_a_whole_network_is_ordered_in_a_second() -> None:
    graph = chain(200)
    assert sequence(tac(graph)) == tuple(each.name for each in graph.transfers)
