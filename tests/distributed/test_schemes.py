"""Schemes follow their published rules, step by step, and send what their formulas say."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.distributed.algorithms.ring import RING
from d5suite.distributed.algorithms.tree import TREE
from d5suite.distributed.communicators.threads import run
from d5suite.distributed.schemes import SCHEMES, make_scheme, settings_from_dict
from d5suite.distributed.schemes.all_reduce import AllReduce
from d5suite.distributed.schemes.asynchronous import Asynchronous
from d5suite.distributed.schemes.gossip import Gossip
from d5suite.distributed.schemes.model_averaging import ModelAveraging
from d5suite.distributed.schemes.parameter_server import ParameterServer
from d5suite.distributed.schemes.quantised import Quantised, QuantisedSettings, quantise, restore
from d5suite.distributed.schemes.stale_synchronous import StaleSynchronous
from d5suite.distributed.schemes.top_k import TopK
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import Buffers, Communicator, Replica, Scheme
from d5suite.optimizers.settings import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from d5suite.validate.check import Check
from d5suite.validate.distributed.rules import check_weights, expected
from tests.distributed import toy

EXACT = 1e-10
STEPS = 10
MOMENTUM = SGD(0.25, momentum=0.875, weight_decay=0.0625, clip_norm=0.5)

VARIANTS: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("all_reduce", {}),
    ("all_reduce", {"bucket_bytes": 32, "first_bucket_bytes": 8}),
    ("parameter_server", {}),
    ("asynchronous", {}),
    ("stale_synchronous", {"bound": 0}),
    ("stale_synchronous", {"bound": 1}),
    ("model_averaging", {}),
    ("model_averaging", {"every": 3}),
    ("gossip", {}),
    ("gossip", {"own": 0.5}),
    ("top_k", {"density": 0.1}),
    ("top_k", {"density": 1.0}),
    ("quantised", {"bucket": 8, "levels": 1}),
    ("quantised", {"bucket": 4, "levels": 7, "seed": 3}),
    ("quantised", {}),
]
NAMES = [" ".join([name, *(f"{key}={value}" for key, value in given.items())]) for name, given in VARIANTS]


def train(
    make: Callable[[Replica, Communicator], Scheme],
    ranks: int,
    optimizer: Optimizer = MOMENTUM,
    steps: int = STEPS,
    start: Buffers | None = None,
) -> list[tuple[Scheme, list[Buffers]]]:
    """By rank: its scheme, and its weights after each step and at the end."""
    work, begin = toy.batches(steps, ranks), start or toy.start()
    return run(
        ranks,
        lambda communicator: toy.course(make, work, toy.replica(optimizer, begin))(communicator),
        algorithm="ring",
    )


def checks(
    name: str, given: Mapping[str, Any], ranks: int, optimizer: Optimizer = MOMENTUM, kind: type[Scheme] | None = None
) -> list[Check]:
    """Of every rank against the rule; ``kind`` is an implementation to accuse."""
    chosen = settings_from_dict({"name": name, **toy.scheduled(name, given, ranks)})
    found = train(functools.partial(kind or SCHEMES[name], settings=chosen), ranks, optimizer)
    right = expected(name, chosen.to_dict(), toy.gradient, toy.start(), toy.batches(STEPS, ranks), optimizer)
    answers = []
    for rank, (_, weights) in enumerate(found):
        reference = [each[rank] for each in right][-len(weights) :]  # a server's only at the end
        answers += check_weights(f"{name}, rank {rank}", weights, reference, EXACT)
    return answers


@pytest.mark.parametrize(("name", "given"), VARIANTS, ids=NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_scheme_follows_its_rule(name: str, given: Mapping[str, Any], ranks: int) -> None:
    for each in checks(name, given, ranks):
        assert each.passed, each.finding


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "optimizer", [SGD(0.5), RMSProp(0.01, momentum=0.5), Adagrad(0.1), Adam(0.01), AdamW(0.01)], ids=lambda o: o.name
)
def test_a_scheme_follows_its_rule_with_every_optimizer(name: str, optimizer: Optimizer) -> None:
    for each in checks(name, {}, 3, optimizer):
        assert each.passed, each.finding


@pytest.mark.parametrize(("ranks", "servers"), [(2, 2), (5, 2), (3, 3), (5, 4)])
def test_several_servers_own_a_segment_each(ranks: int, servers: int) -> None:
    for each in checks("parameter_server", {"servers": servers}, ranks, Adam(0.01, clip_value=0.25)):
        assert each.passed, each.finding


@pytest.mark.parametrize(
    ("name", "bound"), [("asynchronous", 0), *(("stale_synchronous", bound) for bound in (0, 1, 2, 20))]
)
def test_a_fast_worker_follows_the_rule(name: str, bound: int) -> None:
    given: dict[str, Any] = {"schedule": [1, 1, 1, 2, 3, 1, 3]}
    if name == "stale_synchronous":
        given["bound"] = bound
    for each in checks(name, given, 4):
        assert each.passed, each.finding


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_settings_follow_their_rule(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 5), "ranks")
    name = data.draw(st.sampled_from(list(SCHEMES)), "scheme")
    workers = st.permutations(range(1, ranks))
    more = st.lists(st.integers(1, ranks - 1), max_size=5)
    chosen: dict[str, st.SearchStrategy[Any]] = {
        "all_reduce": st.fixed_dictionaries({"bucket_bytes": st.integers(1, 200)}),
        "parameter_server": st.fixed_dictionaries({"servers": st.integers(1, ranks)}),
        "asynchronous": st.fixed_dictionaries({"schedule": st.builds(lambda a, b: [*b, *a], workers, more)}),
        "stale_synchronous": st.fixed_dictionaries(
            {"schedule": st.builds(lambda a, b: [*b, *a], workers, more), "bound": st.integers(0, 4)}
        ),
        "model_averaging": st.fixed_dictionaries({"every": st.integers(1, 12)}),
        "gossip": st.fixed_dictionaries({"own": st.floats(0.01, 0.99)}),
        "top_k": st.fixed_dictionaries({"density": st.floats(0.01, 1)}),
        "quantised": st.fixed_dictionaries(
            {"levels": st.integers(1, 127), "bucket": st.integers(1, 8).map(lambda n: 4 * n), "seed": st.integers(0, 9)}
        ),
    }
    for each in checks(name, data.draw(chosen[name], "settings"), ranks, SGD(0.25, momentum=0.5)):
        assert each.passed, each.finding


@pytest.mark.parametrize("name", [name for name, each in SCHEMES.items() if each.synchronous])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_synchronous_ranks_are_one_process_with_all_batches(name: str, dtype: str, tolerance: float) -> None:
    begin = {key: value.astype(dtype) for key, value in toy.start().items()}
    one = toy.replica(MOMENTUM, begin)
    alone = []
    for step in toy.batches(STEPS, 3):
        one.trainer.step(*step)
        alone.append(one.weights())
    found = train(functools.partial(make_scheme, name), 3, start=begin)
    for _, weights in found:
        for each in check_weights(name, weights, [*alone, alone[-1]], tolerance):
            assert each.passed, each.finding
        assert all(np.array_equal(weights[-1][key], found[0][1][-1][key]) for key in begin)  # to the last bit


@pytest.mark.parametrize("name", SCHEMES)
def test_one_rank_is_the_trainer_itself(name: str) -> None:
    one = toy.replica(MOMENTUM, toy.start())
    for (batch,) in toy.batches(STEPS, 1):
        one.trainer.step(batch)
    ((scheme, weights),) = train(functools.partial(make_scheme, name), 1)
    assert all(np.array_equal(weights[-1][key], value) for key, value in one.weights().items())
    assert not scheme.serves and not scheme.communicator.traffic


def test_averaging_after_each_plain_step_is_averaging_gradients() -> None:
    weights = [train(functools.partial(make_scheme, name), 4, SGD(0.5)) for name in ("model_averaging", "all_reduce")]
    for (_, averaged), (_, reduced) in zip(*weights, strict=True):
        for each in check_weights("averaged", averaged, reduced, EXACT):
            assert each.passed, each.finding


# Overlap


class Early(toy.ToyReplica):
    """Hands out gradients early: from the second step on, the last one once a bucket is sent."""

    def __init__(self, trainer: Any, communicator: Communicator) -> None:
        super().__init__(trainer)
        self.sending, self.steps, self.fails = threading.Event(), 0, False
        all_reduce = communicator.all_reduce

        def told(array: np.ndarray) -> None:
            self.sending.set()
            all_reduce(array)
            if self.fails:
                raise D5Error("the line is cut")

        communicator.all_reduce = told  # type: ignore[method-assign]

    def gradients_early(self, feed: Any, ready: Callable[[str, np.ndarray], None]) -> Any:
        loss, gradients = self.gradients(feed)
        self.steps += 1
        self.sending.clear()
        *before, last = reversed(self.names)
        for name in before:
            ready(name, gradients[name])
        assert self.steps == 1 or self.sending.wait(60)
        ready(last, gradients[last])
        return loss, gradients


@pytest.mark.parametrize("bucket", [8, 24])
def test_buckets_are_sent_while_gradients_follow(bucket: int) -> None:
    work = toy.batches(STEPS, 3)
    chosen: dict[str, Any] = {"bucket_bytes": bucket, "first_bucket_bytes": 8}

    def one(communicator: Communicator, early: bool) -> list[Buffers]:
        replica: Any = toy.replica(MOMENTUM, toy.start())
        if early:
            replica = Early(replica.trainer, communicator)
        found: list[Buffers] = toy.course(functools.partial(make_scheme, "all_reduce", **chosen), work, replica)(
            communicator
        )[1]
        return found

    late, overlapped = (run(3, functools.partial(one, early=each), algorithm="ring") for each in (False, True))
    for a, b in zip(late, overlapped, strict=True):
        assert all(np.array_equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)


def test_an_error_while_gradients_are_sent_is_raised_by_the_step() -> None:
    def one(communicator: Communicator) -> None:
        replica = Early(toy.replica(MOMENTUM, toy.start()).trainer, communicator)
        scheme = make_scheme("all_reduce", replica, communicator, first_bucket_bytes=8)
        first, second = toy.batches(2, 2)
        scheme.step(first[communicator.rank])
        replica.fails = True
        with pytest.raises(D5Error, match="line is cut"):
            scheme.step(second[communicator.rank])

    run(2, one, algorithm="ring")


# What is sent


@pytest.mark.parametrize(("name", "given"), VARIANTS, ids=NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_scheme_sends_the_bytes_of_its_formula(name: str, given: Mapping[str, Any], ranks: int, dtype: str) -> None:
    begin = {key: value.astype(dtype) for key, value in toy.start().items()}

    def sent(steps: int) -> int:
        ended = train(functools.partial(make_scheme, name, **given), ranks, steps=steps, start=begin)
        return sum(each.bytes_sent for scheme, _ in ended for each in scheme.communicator.traffic.values())

    elements = sum(value.size for value in begin.values())
    formula = settings_from_dict({"name": name, **given}).bytes_per_step(elements, np.dtype(dtype).itemsize, ranks)
    assert formula is not None
    assert sent(6) - sent(3) == 3 * formula  # what the end sends is not of a step


def test_compression_compresses() -> None:
    def sent(name: str, **given: Any) -> float:
        found = settings_from_dict({"name": name, **given}).bytes_per_step(10**6, 4, 2)
        assert found is not None
        return found

    dense = sent("all_reduce")
    assert sent("top_k") < 0.021 * dense
    assert sent("quantised") < 0.26 * dense
    assert sent("quantised", levels=1) < 0.07 * dense


# Bounds, statistics, mistakes


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_runs_further_ahead_than_the_bound(bound: int) -> None:
    begun = [0] * 4
    ahead: list[int] = []

    class Watched(toy.ToyReplica):
        rank = 0

        def gradients(self, feed: Any) -> Any:
            ahead.append(begun[self.rank] - min(begun[1:]))
            answer = super().gradients(feed)
            begun[self.rank] += 1  # made, once it is pushed; that follows at once
            return answer

    def one(communicator: Communicator) -> None:
        replica = Watched(toy.replica(SGD(0.1), toy.start()).trainer)
        replica.rank = communicator.rank
        make = functools.partial(make_scheme, "stale_synchronous", bound=bound)
        toy.course(make, toy.batches(12, 4), replica)(communicator)

    run(4, one, algorithm="ring")
    assert max(ahead) <= bound + 1  # another's push may be on its way
    assert min(begun[1:]) == 12


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("statistics", ["local", "averaged"])
def test_running_statistics_are_local_or_averaged(name: str, statistics: str) -> None:
    def one(communicator: Communicator) -> float:
        replica = toy.replica(SGD(0.1), toy.start())
        replica.trainer.statistics["seen"] += 10.0 * communicator.rank
        toy.course(functools.partial(make_scheme, name, statistics=statistics), toy.batches(2, 3), replica)(
            communicator
        )
        return float(replica.trainer.statistics["seen"][0])

    found = run(3, one, algorithm="ring")
    served = "synchronous" in name
    if statistics == "local":
        assert found == ([12, 12, 22] if served else [2, 12, 22])
    else:
        assert found == [17] * 3 if served else [12] * 3


def test_settings_are_checked_before_anything_runs() -> None:
    wrong_ones: list[tuple[str, dict[str, Any]]] = [
        ("ring", {}),
        ("all_reduce", {"bucket": 1}),
        ("all_reduce", {"bucket_bytes": 0}),
        ("parameter_server", {"servers": 0}),
        ("model_averaging", {"every": 0}),
        ("gossip", {"own": 1.0}),
        ("top_k", {"density": 0.0}),
        ("top_k", {"density": float("nan")}),
        ("quantised", {"levels": 128}),
        ("quantised", {"bucket": 6}),
        ("asynchronous", {"schedule": [0]}),
        ("stale_synchronous", {"bound": -1}),
        ("gossip", {"statistics": "none"}),
    ]
    for name, wrong in wrong_ones:
        with pytest.raises(ConfigurationError):
            settings_from_dict({"name": name, **wrong})
    for each in SCHEMES.values():
        default = each.settings_type()
        assert settings_from_dict(default.to_dict()) == default


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("parameter_server", {"servers": 3}, "as many ranks"),
        ("parameter_server", {"servers": 2}, "norm clipping needs one server"),
        ("asynchronous", {"schedule": [1, 2]}, "must name all workers"),
    ],
)
def test_settings_that_do_not_fit_the_ranks_are_refused(name: str, given: Mapping[str, Any], why: str) -> None:
    with pytest.raises(D5Error, match=why):
        train(functools.partial(make_scheme, name, **given), 2)


def test_a_gradient_that_is_not_finite_spreads() -> None:
    def one(communicator: Communicator) -> bool:
        replica = toy.replica(SGD(0.1), toy.start())
        scheme = make_scheme("top_k", replica, communicator)
        batch = toy.batches(1, 2)[0][communicator.rank]
        if communicator.rank:
            batch["x"][0, 0] = np.nan
        scheme.step(batch)
        return bool(np.isnan(replica.weights()["weight"]).any() or np.isnan(replica.weights()["bias"]).any())

    assert run(2, one, algorithm="ring") == [True, True]


# Liars: each is caught by the rule


class Sums(AllReduce):
    """Adds gradients and forgets to divide."""

    def average(self, bucket: Any, gradients: Buffers, parts: Any = ()) -> Buffers:
        averaged = super().average(bucket, gradients, parts)
        for value in averaged.values():
            value *= self.communicator.size
        return averaged


class Drops(ParameterServer):
    """Forgets rank 0's own gradient, as deep500's server does."""

    def _gather(self, own: np.ndarray) -> None:
        super()._gather(np.zeros_like(own))


class NeverMixes(Gossip):
    """Averages gradients with neighbours but never weights."""

    def _step(self, feed: Any) -> Any:
        loss, gradients = self.replica.gradients(feed)
        mixed = {}
        for name, value in gradients.items():
            total = value.copy()
            self.communicator.all_reduce(total)
            mixed[name] = total / self.communicator.size
        self.replica.apply(mixed)
        return loss


class Forgets(TopK):
    """Has no memory of what it did not send."""

    def _step(self, feed: Any) -> Any:
        if self._mean is not None:
            self._unsent[:] = 0
        return super()._step(feed)


class LeavesOut(ModelAveraging):
    """Averages without the last rank."""

    def _average_weights(self) -> None:
        held = self.replica.weights()
        last = self.communicator.rank == self.communicator.size - 1
        for value in held.values():
            value *= not last
            self.communicator.all_reduce(value)
            value /= self.communicator.size - 1
        self.replica.load_weights(held)


class Ignores(Asynchronous):
    """Answers with the weights of the start."""

    def _step(self, feed: Any) -> Any:
        held = self.replica.weights()
        loss = super()._step(feed)
        self.replica.load_weights(held)
        return loss


class Draws:
    """Draws the same number always: of rounding, 0 is down and 0.5 to the nearest."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, self.number, dtype)


class RoundsDown(Quantised):
    """Rounds towards zero, so that gradients shrink."""

    def _random(self) -> Any:
        return Draws(0.0)


class RoundsToNearest(Quantised):
    """Rounds to the nearest level, so that what is below half a level is never sent."""

    def _random(self) -> Any:
        return Draws(0.5)


LIARS = [Sums, Drops, NeverMixes, Forgets, LeavesOut, Ignores, RoundsDown, RoundsToNearest]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("liar", LIARS, ids=lambda each: each.__name__)
def test_a_scheme_that_breaks_its_rule_is_caught(liar: type[Scheme], ranks: int) -> None:
    # Clipping would hide a sum: after it, a sum is a mean.
    found = checks(liar.name, {}, ranks, SGD(0.25, momentum=0.875), kind=liar)
    assert not all(each.passed for each in found)


def test_rounding_at_random_has_no_bias_and_other_rounding_has() -> None:
    values = np.random.default_rng(0).normal(size=64)
    rows = 4000

    def bias(random: Any, levels: int) -> float:
        """The largest error of the mean, in standard errors of rounding at random."""
        settings = QuantisedSettings(levels=levels, bucket=8)
        many = np.tile(values, rows)
        found = restore(quantise(many, settings, random), settings, many.dtype).reshape(rows, -1)
        level = np.repeat(np.linalg.norm(values.reshape(-1, 8), axis=1), 8) / levels
        share = np.abs(values) / level % 1
        spread = np.maximum(level * np.sqrt(share * (1 - share) / rows), 1e-12)
        return float((np.abs(found.mean(axis=0) - values) / spread).max())

    for levels in (1, 7, 127):
        assert bias(np.random.default_rng(1), levels) < 5
        assert bias(Draws(0.0), levels) > 20
        assert bias(Draws(0.5), levels) > 20


class RunsAhead(StaleSynchronous):
    """Lets workers go one step further than the bound."""

    def __init__(self, replica: Replica, communicator: Communicator, settings: Any) -> None:
        super().__init__(replica, communicator, replace(settings, bound=settings.bound + 1))


class HasNoBound(StaleSynchronous):
    """Never waits for the slowest."""

    def __init__(self, replica: Replica, communicator: Communicator, settings: Any) -> None:
        super().__init__(replica, communicator, replace(settings, bound=STEPS))


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("liar", [RunsAhead, HasNoBound], ids=lambda each: each.__name__)
def test_a_bound_that_is_not_held_is_caught(liar: type[Scheme], bound: int) -> None:
    given = {"bound": bound, "schedule": [1, 1, 1, 2, 3, 1, 3]}
    assert all(each.passed for each in checks(liar.name, given, 4))
    assert not all(each.passed for each in checks(liar.name, given, 4, kind=liar))


def test_in_turn_each_gradient_is_applied_by_itself_to_weights_that_the_rank_then_takes() -> None:
    """Of f(w) = w^2/2 + b w, by hand: rank 0 sees rank 1's update a step later."""
    batches = [[1.0, -2.0], [0.5, 0.25]]
    found = expected(
        "in_turn", {}, lambda weights, b: {"w": weights["w"] + b}, {"w": np.array([8.0])}, batches, SGD(0.5)
    )
    w0 = 8 - 0.5 * (8 + 1.0)
    w1 = w0 - 0.5 * (8 - 2.0)
    w2 = w1 - 0.5 * (w0 + 0.5)
    w3 = w2 - 0.5 * (w1 + 0.25)
    by_hand = [[w0, w1], [w2, w3], [w3, w3]]
    assert [[float(each["w"][0]) for each in ranks] for ranks in found] == by_hand


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_says_which_collective_its_steps_make(name: str) -> None:
    """For one that makes none, an algorithm of collectives is another name of the same thing."""
    for scheme, _ in train(functools.partial(make_scheme, name), 3):
        made = {
            call: each.calls
            for call, each in scheme.communicator.traffic.items()
            if call in {*RING, *TREE} and each.calls >= STEPS
        }
        assert set(made) == ({SCHEMES[name].collective} - {""})
