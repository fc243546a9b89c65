"""Schemes on frameworks' own replicas: their rules in float64, and one process with all batches.

Ranks are threads, on the frameworks that allow it. The full form of the conformance kit proves the
same of every backend, with processes as ranks (`d5suite.testing.test_schemes`), and so does each
measurement of a distributed step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5suite.backends import discover
from d5suite.distributed.communicators.threads import run
from d5suite.distributed.schemes import SCHEMES, make_scheme, settings_from_dict
from d5suite.levels.distributed import Communicator, Replica
from d5suite.levels.network import Arrays
from d5suite.network import Network
from d5suite.optimizers.settings import SGD, Adam, Optimizer
from d5suite.testing.networks import classifier, layers, random_batch
from d5suite.training import checkpoint
from d5suite.training.loop import Progress
from d5suite.validate.distributed.rules import check_weights, expected
from tests.distributed import toy

RANKS, STEPS, EXACT = 3, 10, 1e-10
OPTIMIZER = SGD(0.0625, momentum=0.875, weight_decay=2.0**-10, clip_norm=4.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "all_reduce": {"bucket_bytes": 2000, "first_bucket_bytes": 500},
    "model_averaging": {"every": 3},
    "top_k": {"density": 0.05},
    "quantised": {"levels": 7},
}


def replica(backend: str, network: Network, precision: str, optimizer: Optimizer = OPTIMIZER) -> Replica:
    chosen = discover()[0][backend]
    if chosen.problem():
        pytest.skip(str(chosen.problem()))
    return chosen.replica(chosen.trainer(chosen.executor(network, precision=precision), optimizer))


def fed(of: Replica, network: Network, step: int, rank: int) -> Any:
    images, labels = random_batch(network, seed=RANKS * step + rank)
    return of.trainer.executor.feed({"image": images, "label": labels})


def trained(backend: str, network: Network, precision: str, name: str, settings: dict[str, Any]) -> list[list[Arrays]]:
    """By rank: its weights after each step and at the end."""
    replicas = [replica(backend, network, precision) for _ in range(RANKS)]
    work = [[fed(of, network, step, rank) for rank, of in enumerate(replicas)] for step in range(STEPS)]
    make = functools.partial(make_scheme, name, **settings)
    return [
        weights for _, weights in run(RANKS, lambda c: toy.course(make, work, replicas[c.rank])(c), algorithm="ring")
    ]


def held(found: Sequence[Sequence[Arrays]], right: Sequence[Sequence[Arrays]], name: str, tolerance: float) -> None:
    for rank, weights in enumerate(found):
        reference = [each[rank] for each in right][-len(weights) :]
        for check in check_weights(f"{name}, rank {rank}", weights, reference, tolerance):
            assert check.passed, check.finding


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["deep500", "torch"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_follows_its_rule(backend: str, name: str) -> None:
    network = classifier()
    chosen = toy.scheduled(name, SETTINGS.get(name, {}), RANKS)
    of = replica(backend, network, "fp64")
    start = of.weights()

    def gradient(weights: Arrays, batch: tuple[int, int]) -> Arrays:
        of.load_weights(weights)
        return {key: np.array(value) for key, value in of.gradients(fed(of, network, *batch))[1].items()}

    batches = [[(step, rank) for rank in range(RANKS)] for step in range(STEPS)]
    complete = settings_from_dict({"name": name, **chosen}).to_dict()
    right = expected(name, complete, gradient, start, batches, OPTIMIZER)
    held(trained(backend, network, "fp64", name, chosen), right, name, EXACT)


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["deep500", "torch"])
@pytest.mark.parametrize("name", [name for name, each in SCHEMES.items() if each.synchronous])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", EXACT), ("fp32", 1e-5)])
def test_synchronous_ranks_are_one_process_with_all_batches(
    backend: str, name: str, precision: str, tolerance: float
) -> None:
    network = classifier() if precision == "fp64" else layers()  # BatchNormalization amplifies roundings
    one = replica(backend, network, precision)
    alone = []
    for step in range(STEPS):
        one.trainer.step(*(fed(one, network, step, rank) for rank in range(RANKS)))
        alone.append([one.weights()] * RANKS)
    found = trained(backend, network, precision, name, SETTINGS.get(name, {}))
    held(found, [*alone, alone[-1]], name, tolerance)
    for weights in found:
        assert all(np.array_equal(value, found[0][-1][key]) for key, value in weights[-1].items())


@pytest.mark.parametrize("backend", ["deep500", "torch"])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_checkpoint_of_any_rank_holds_every_servers_state(backend: str, servers: int, tmp_path: Path) -> None:
    network = classifier()
    one = replica(backend, network, "fp64", Adam(0.01))
    for step in range(STEPS):
        one.trainer.step(*(fed(one, network, step, rank) for rank in range(RANKS)))
    replicas = [replica(backend, network, "fp64", Adam(0.01)) for _ in range(RANKS)]
    work = [[fed(of, network, step, rank) for rank, of in enumerate(replicas)] for step in range(STEPS)]
    make = functools.partial(make_scheme, "parameter_server", servers=servers)
    run(RANKS, lambda c: toy.course(make, work, replicas[c.rank])(c), algorithm="ring")
    for rank, of in enumerate(replicas):
        file = tmp_path / f"{rank}.h5"
        checkpoint.save(file, of.trainer, Progress())
        resumed = replica(backend, network, "fp64", Adam(0.01))
        checkpoint.load(file, resumed.trainer)
        for name, value in one.trainer.state().items():
            found = resumed.trainer.state()[name]
            np.testing.assert_allclose(found, value, rtol=EXACT, atol=EXACT, err_msg=f"rank {rank}, {name}")
        resumed.trainer.step(*(fed(resumed, network, STEPS, rank) for rank in range(RANKS)))
        again = replica(backend, network, "fp64", Adam(0.01))
        again.trainer.load_state(one.trainer.state())
        again.load_weights(one.weights())
        again.trainer.step(*(fed(again, network, STEPS, rank) for rank in range(RANKS)))
        for name, value in again.weights().items():
            # conv1.bias, before BatchNormalization, has roundings as gradient: Adam divides by 1e-8
            atol = 10 * EXACT if name == "conv1.bias" else EXACT
            np.testing.assert_allclose(resumed.weights()[name], value, rtol=EXACT, atol=atol, err_msg=name)


@pytest.mark.parametrize("backend", ["deep500", "torch"])
@pytest.mark.parametrize("optimizer", [SGD(0.0625, momentum=0.875, weight_decay=2.0**-10), Adam(0.01)], ids=str)
def test_a_step_across_the_barrier_is_the_same_step_and_waits_node_by_node(backend: str, optimizer: Optimizer) -> None:
    network = classifier()
    _, loss = network.require_loss()

    def course(asked: list[tuple[str, ...]], **settings: Any) -> list[Any]:
        replicas = [replica(backend, network, "fp64", optimizer) for _ in range(2)]
        work = [[fed(of, network, step, rank) for rank, of in enumerate(replicas)] for step in range(STEPS)]

        def one(communicator: Communicator) -> Any:
            of = replicas[communicator.rank]
            scheme: Any = make_scheme("all_reduce", of, communicator, **settings)
            means = scheme._means

            def asking(names: Sequence[str]) -> Any:
                asked.append(tuple(names))
                return means(names)

            if communicator.rank == 0:
                scheme._means = asking
            losses = []
            for number, feeds in enumerate(work):
                of.trainer.set_learning_rate(optimizer.learning_rate * 0.5**number)  # each update has its own
                losses.append(float(scheme.step(feeds[communicator.rank])[loss]))
            scheme.finish()
            return losses, of.weights(), of.trainer.state(), scheme.arrivals

        return run(2, one, algorithm="ring")

    asked: list[tuple[str, ...]] = []
    plain, across = course([]), course(asked, cross_barrier=True, order="tic")
    for (losses, weights, state, _), (its_losses, its_weights, its_state, arrivals) in zip(plain, across, strict=True):
        np.testing.assert_allclose(its_losses, losses, rtol=EXACT)
        for right, found in ((weights, its_weights), (state, its_state)):
            for name, value in right.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
        assert sum(arrivals["means"].values()) == STEPS and len(arrivals["means"]) == 1
    names = set(network.parameters)
    turns = [each for each in asked if len(each) < len(names)]  # the last update comes at the end, as one
    assert len(turns) > 2 * (STEPS - 1) and len(asked) == len(turns) + 1
    assert sum(map(len, turns)) == (STEPS - 1) * len(names)
