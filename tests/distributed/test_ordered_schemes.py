"""Schemes that send tensors one by one: in the order that is asked for, with the same answers."""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from d5suite.distributed.communicators.threads import run
from d5suite.distributed.order import overtaken, planned, sequence, tac
from d5suite.distributed.order_tasks import layer_seconds, parameter_order, training_tasks
from d5suite.distributed.schemes import SCHEMES, all_reduce, make_scheme, settings_from_dict
from d5suite.distributed.schemes.all_reduce import TOLD, TOLD_BYTES, AllReduce, Bucket, Waiting
from d5suite.distributed.schemes.parameter_server import ParameterServer
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import Buffers, Communicator, Scheme
from d5suite.measurements.distributed.ordering import kept_order
from d5suite.network.model import Network
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.validate.distributed.rules import check_weights, expected
from tests.distributed import toy

STEPS, EXACT, WAIT_S = 4, 1e-10, 30
NODES = [SimpleNamespace(name=name, inputs=(name,), outputs=(f"{name} out",)) for name in ("weight", "bias", "scale")]
FORWARD = ("weight", "bias", "scale")

ORDERED: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("all_reduce", {"order": "forward"}),
    ("all_reduce", {"order": "backward", "slice_bytes": 24}),
    ("all_reduce", {"order": "random:3", "bucket_bytes": 64, "first_bucket_bytes": 8}),
    ("parameter_server", {"order": "forward"}),
    ("parameter_server", {"order": "random:1", "slice_bytes": 24}),
    ("parameter_server", {"order": "backward", "slice_bytes": 16, "credit_bytes": 40}),
    ("parameter_server", {"order": "framework", "credit_bytes": 1}),
    ("parameter_server", {"slice_bytes": 1}),
]
NAMES = [" ".join([name, *(f"{key}={value}" for key, value in given.items())]) for name, given in ORDERED]


def train(make: Any, ranks: int, steps: int = STEPS) -> list[tuple[Scheme, list[Buffers]]]:
    """By rank: its scheme, and its weights after each step and at the end."""
    work = toy.batches(steps, ranks)

    def one(communicator: Communicator) -> Any:
        replica = toy.replica(SGD(0.25, momentum=0.5), toy.start())
        replica.trainer.executor.network.nodes = NODES
        return toy.course(make, work, replica)(communicator)

    return run(ranks, one, algorithm="ring")


def orders(found: Sequence[tuple[Scheme, Any]]) -> list[dict[str, Counter[tuple[str, ...]]]]:
    return [scheme.arrivals for scheme, _ in found]


@pytest.mark.parametrize(("name", "given"), ORDERED, ids=NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_ordered_scheme_follows_its_rule(name: str, given: Mapping[str, Any], ranks: int) -> None:
    for servers in (1, 2) if name == "parameter_server" and ranks > 1 else (1,):
        more = {"servers": servers} if name == "parameter_server" else {}
        chosen = settings_from_dict({"name": name, **given, **more})
        found = train(functools.partial(SCHEMES[name], settings=chosen), ranks)
        work = toy.batches(STEPS, ranks)
        right = expected(name, chosen.to_dict(), toy.gradient, toy.start(), work, SGD(0.25, momentum=0.5))
        for rank, (_, weights) in enumerate(found):
            for each in check_weights(name, weights, [each[rank] for each in right], EXACT):
                assert each.passed, each.finding


@pytest.mark.parametrize("name", ["all_reduce", "parameter_server"])
@pytest.mark.parametrize(
    ("order", "asked"),
    [
        ("forward", FORWARD),
        ("backward", FORWARD[::-1]),
        ("random:1", ("scale", "weight", "bias")),
        ("framework", FORWARD[::-1]),
    ],
)
def test_transfers_arrive_in_the_order_that_is_asked_for(name: str, order: str, asked: tuple[str, ...]) -> None:
    if order == "random:1":
        asked = tuple(FORWARD[place] for place in np.random.default_rng(1).permutation(3))
    for arrivals in orders(train(functools.partial(make_scheme, name, order=order), 3)):
        assert arrivals and all(each == {asked: STEPS} for each in arrivals.values())


@pytest.mark.parametrize("slice_bytes", [8, 20, 64, 1000])
@pytest.mark.parametrize("servers", [1, 2])
def test_slices_are_all_bytes_once(slice_bytes: int, servers: int) -> None:
    def sent(steps: int, **given: Any) -> tuple[int, int]:
        found = train(functools.partial(make_scheme, "parameter_server", servers=servers, **given), 3, steps)
        traffic = [each for scheme, _ in found for each in scheme.communicator.traffic.values()]
        return sum(each.bytes_sent for each in traffic), sum(each.messages_sent for each in traffic)

    whole, sliced = sent(4)[0] - sent(2)[0], sent(4, slice_bytes=slice_bytes)
    before = sent(2, slice_bytes=slice_bytes)
    announced = 2 * 2 * (2 if servers == 1 else 4) * 4 * len(FORWARD)  # steps, directions, pairs, bytes
    assert sliced[0] - before[0] - whole == announced
    assert slice_bytes >= 1000 or sliced[1] > before[1] + 2 * 2 * 2 * 3


class Ignores(AllReduce):
    """Sends as it likes, whatever is asked for."""

    def _in_order(self, came: Sequence[str]) -> tuple[str, ...]:
        return tuple(came)


class IgnoresAtServers(ParameterServer):
    """Begins to send in another order in the third step."""

    steps = 0

    def _in_order(self, came: Sequence[str]) -> tuple[str, ...]:
        self.steps += 1
        return super()._in_order(came)[:: -1 if self.steps > 2 else 1]


class Silent(AllReduce):
    """Says nothing about its order."""

    def _arrived(self, *_: Any) -> None:
        return


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (AllReduce, ""),
        (ParameterServer, ""),
        (Ignores, "means at rank 0, means at rank 1"),
        (IgnoresAtServers, "gradients of rank 1 at rank 0, weights of rank 0 at rank 1"),
        (Silent, "nothing at rank 0, nothing at rank 1"),
    ],
)
def test_a_scheme_that_ignores_the_order_is_caught_by_the_arrivals(kind: type[Scheme], says: str) -> None:
    chosen = settings_from_dict({"name": kind.name, "order": "forward"})

    def one(communicator: Communicator) -> Any:
        replica = toy.replica(SGD(0.25), toy.start())
        replica.trainer.executor.network.nodes = NODES
        scheme, weights = toy.course(functools.partial(kind, settings=chosen), toy.batches(STEPS, 2), replica)(
            communicator
        )
        return weights, list(kept_order(scheme, replica.trainer.executor))

    for weights, (check,) in run(2, one, algorithm="ring"):
        assert np.isfinite(weights[-1]["weight"]).all()  # the answers do not tell: they are right
        assert check.passed is (not says)
        assert says in check.finding


class Early(toy.ToyReplica):
    """Hands out ``scale`` first; rank 0 the others once it was chosen, and rank 1 all after them.

    So ``scale`` alone is ready when the first choice is made, and both others when the second is.
    """

    step = -1
    rank = 0
    chosen: threading.Event
    given: Sequence[threading.Event]

    def gradients_early(self, feed: Any, ready: Callable[[str, np.ndarray], None]) -> tuple[Any, Buffers]:
        loss, gradients = self.gradients(feed)
        self.step += 1
        if self.rank == 0:
            self.chosen.clear()
        wait = self.step > 0  # the first step knows no buckets yet, and sends all at its end
        if wait and self.rank == 1:
            assert self.given[self.step].wait(WAIT_S)
        for name in reversed(self.names):
            ready(name, gradients[name])
            if wait and self.rank == 0 and name == "scale":
                assert self.chosen.wait(WAIT_S)
        self.given[self.step].set()
        return loss, gradients


class SaysNothing(AllReduce):
    """Keeps its choices to itself."""

    def _choosing(self, feed: Any) -> Any:
        found = super()._choosing(feed)
        self.choices.clear()
        return found


@pytest.mark.parametrize(
    ("kind", "backwards", "says"),
    [
        (AllReduce, False, ""),
        (AllReduce, True, f"rank 0 chose another in {STEPS - 1} of"),
        (SaysNothing, False, "no choice at rank 0"),
    ],
)
def test_of_the_gradients_that_are_ready_the_first_is_sent(
    kind: type[AllReduce], backwards: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backwards:  # takes the last of those that are ready
        monkeypatch.setattr(all_reduce, "sorted", lambda values: sorted(values, reverse=True), raising=False)
    chosen = settings_from_dict({"name": "all_reduce", "order": "forward"})
    chosen_one, given = threading.Event(), [threading.Event() for _ in range(STEPS)]

    class Told(Waiting):
        def choose(self) -> list[int]:
            found = super().choose()
            chosen_one.set()
            return found

    monkeypatch.setattr(all_reduce, "Waiting", Told)

    def one(communicator: Communicator) -> Any:
        trainer: Any = toy.ToyTrainer(SGD(0.25, momentum=0.5), toy.start())
        replica = Early(trainer)
        replica.trainer.executor.network.nodes = NODES
        replica.rank, replica.chosen, replica.given = communicator.rank, chosen_one, given
        scheme, weights = toy.course(functools.partial(kind, settings=chosen), toy.batches(STEPS, 2), replica)(
            communicator
        )
        return scheme, weights, list(kept_order(scheme, replica.trainer.executor))

    found = run(2, one, algorithm="ring")
    right = expected(
        "all_reduce", chosen.to_dict(), toy.gradient, toy.start(), toy.batches(STEPS, 2), SGD(0.25, momentum=0.5)
    )
    for rank, (scheme, weights, (check,)) in enumerate(found):
        assert all(each.passed for each in check_weights("all_reduce", weights, [each[rank] for each in right], EXACT))
        assert check.passed is (not says) and says in check.finding, check.finding
        if not says:  # the backward pass is overlapped, and what is ready goes in order
            assert scheme.arrivals == {"means": {FORWARD: 1, ("scale", "weight", "bias"): STEPS - 1}}


def test_a_step_across_the_barrier_leaves_its_update_to_the_next_one() -> None:
    chosen = settings_from_dict({"name": "all_reduce", "cross_barrier": True})
    work = toy.batches(STEPS, 2)
    right = expected(
        "all_reduce", settings_from_dict({"name": "all_reduce"}).to_dict(), toy.gradient, toy.start(), work, SGD(0.25)
    )

    def one(communicator: Communicator) -> Any:
        replica = toy.replica(SGD(0.25), toy.start())
        replica.trainer.executor.network.nodes = NODES
        scheme = AllReduce(replica, communicator, chosen)
        scheme.step(work[0][communicator.rank])
        before = replica.weights()
        for batches in work[1:]:
            scheme.step(batches[communicator.rank])
        late, weights = replica.weights(), scheme.weights()
        scheme.step(work[0][communicator.rank])
        scheme.restart()  # drops what it has left
        scheme.finish()
        return before, late, weights, replica.weights(), scheme, list(kept_order(scheme, replica.trainer.executor))

    for rank, (before, late, weights, end, scheme, (check,)) in enumerate(run(2, one, algorithm="ring")):
        for name, value in toy.start().items():
            np.testing.assert_array_equal(before[name], value)
            np.testing.assert_allclose(late[name], right[-3][rank][name], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(weights[name], right[-2][rank][name], rtol=1e-9, atol=1e-12)
            np.testing.assert_array_equal(end[name], weights[name])
        assert check.passed and scheme.arrivals == {"means": {FORWARD: STEPS + 1}}
        assert scheme.settings.to_dict()["order"] == "forward"
    assert "cross_barrier" not in settings_from_dict({"name": "all_reduce"}).to_dict()


def test_what_is_not_ready_is_not_late() -> None:
    a, b, c = ("a",), ("b",), ("c",)
    asked = ("a", "b", "c")
    for choices, wrong in (
        ([(True, c), (False, c), (True, a), (True, b), (False, a), (False, b)], 0),
        ([(True, c), (True, a), (False, c), (False, a), (True, b), (False, b)], 1),  # a was ready
        ([(True, b), (False, b), (True, a), (False, b), (False, a), (True, c), (False, c)], 1),  # slices of b
        ([(False, a), (True, a), (True, b), (False, b)], 3),  # a too early, so never, and before b
        ([(True, a), (True, b), (False, a)], 1),  # never chosen
    ):
        assert overtaken(choices, asked) == wrong, choices


@hypothesis.given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 5)), min_size=1, max_size=12),
)
def test_a_plan_never_leaves_the_link_idle_and_always_takes_the_first(tasks: list[tuple[float, float]]) -> None:
    ready_s, seconds = zip(*tasks, strict=True)
    found = planned(ready_s, seconds)
    assert sorted(found) == list(range(len(tasks)))
    now = 0.0
    for turn, number in enumerate(found):
        left = found[turn:]
        start = max(now, min(ready_s[each] for each in left))
        assert ready_s[number] <= start and number == min(each for each in left if ready_s[each] <= start)
        now = start + seconds[number]


def test_many_ready_slices_are_chosen_together_up_to_a_limit() -> None:
    def bucket(name: str, nbytes: int) -> Bucket:
        return Bucket({name: np.zeros(nbytes // 8)}, TOLD_BYTES // 2)

    buckets = [bucket("large", 2 * TOLD_BYTES), *(bucket(f"small {number}", 8) for number in range(2 * TOLD))]
    waiting = Waiting(buckets)
    for each in reversed(buckets):
        waiting.add(each.names[0], np.zeros(1))
    chosen = [waiting.choose() for _ in range(4)]
    assert chosen[:2] == [[0, 0], [0, 0]] and chosen[2] == list(range(1, TOLD + 1))
    assert chosen[3] == list(range(TOLD + 1, 2 * TOLD + 1))
    waiting.give_up()
    with pytest.raises(D5Error, match="backward pass failed"):
        waiting.choose()


def test_a_scheme_that_announces_an_order_and_sends_another_is_wrong() -> None:
    class Lies(ParameterServer):
        def _announce(self, order: Sequence[str], to: Sequence[int]) -> Any:
            return super()._announce(["bias", "weight", "scale"] if self.communicator.rank else order, to)

    same = {"order": "forward", "slice_bytes": 8}  # all messages have one size, so that none is refused
    chosen = settings_from_dict({"name": "parameter_server", **same})
    honest, lying = (train(functools.partial(kind, settings=chosen), 2)[0][1][-1] for kind in (ParameterServer, Lies))
    assert not np.allclose(honest["bias"], lying["bias"])


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in ("all_reduce", "parameter_server")])
def test_a_scheme_that_cannot_honour_an_order_says_why(name: str) -> None:
    for setting, value in (("order", "tic"), ("slice_bytes", 64), ("credit_bytes", 64)):
        with pytest.raises(ConfigurationError, match=f"{name} cannot honour {setting}: .*(message|array)"):
            settings_from_dict({"name": name, setting: value})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"order": "alphabetic"}, "there is no order 'alphabetic'"),
        ({"order": "random"}, "'random' has no seed"),
        ({"order": "tic:file.json"}, "'tic:file.json' is no order"),
        ({"order": 3}, "an order is a name, not 3"),
        ({"slice_bytes": -1}, "slice_bytes is a number of bytes, not -1"),
        ({"credit_bytes": 64}, "all_reduce cannot honour credit_bytes: ranks make one collective after the other"),
    ],
)
def test_wrong_orders_are_refused(given: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        settings_from_dict({"name": "all_reduce", **given})


def lenet() -> Network:
    return build("lenet5", classes=10, image_size=32)


def test_a_network_is_ordered_as_its_forward_pass_needs_its_parameters() -> None:
    network = lenet()
    forward = parameter_order("forward", network)
    assert set(forward) == set(network.parameters) and parameter_order("backward", network) == forward[::-1]
    layers = [name.rpartition(".")[0] or name for name in forward]
    for order in ("tic", "tac"):  # layers one behind the other: both find the forward order of layers
        found = [name.rpartition(".")[0] or name for name in parameter_order(order, network)]
        assert found == layers
    assert parameter_order("random:7", network) == parameter_order("random:7", network) != forward
    graph = training_tasks(network)
    assert {each.kind for each in graph.tasks} == {"compute", "transfer"}
    names = {each.name.partition(" ")[0] for each in graph.tasks}
    assert names == {"transfer", "forward", "backward"}
    last = max(graph.tasks, key=lambda each: graph.needs[each.name].bit_count())
    assert graph.needs[last.name].bit_count() == len(network.parameters)
    assert sum(each.bytes for each in graph.transfers) == 4 * sum(
        network.initializers[n].size for n in network.parameters
    )


def test_layer_times_of_a_result_file_order_by_tac(tmp_path: Path) -> None:
    network, path = lenet(), tmp_path / "out.json"
    first, second, *_ = [node.name for node in network.nodes]
    times = [
        {"nodes": [first, second], "direction": "forward", "seconds": 0.5},
        {"nodes": [first, second], "direction": "backward", "seconds": 0.25},
        {"nodes": ["of another network"], "direction": "forward", "seconds": 9.0},
    ]
    record = {"layers": {"times": times}, "measurement": "training_step"}
    path.write_text(json.dumps({"benchmarks": [{"extra_info": {"d5suite": record}}]}))
    found = layer_seconds(path, network)
    assert found == {(second, "forward"): 0.5, (first, "backward"): 0.25}
    graph = training_tasks(network, seconds=found)
    assert graph.busy["compute"] == 0.75
    assert [f"transfer {name}" for name in parameter_order(f"tac:{path}", network)] == list(sequence(tac(graph)))
    path.write_text('{"benchmarks": []}')
    with pytest.raises(ConfigurationError, match="no layer times of"):
        parameter_order(f"tac:{path}", network)
    with pytest.raises(ConfigurationError, match="cannot read layer times"):
        parameter_order(f"tac:{tmp_path / 'absent.json'}", network)
