"""Step of one rank against the level-2 step, on LeNet-5: a short step, in which a call would show.

Each scheme's single rank and the trainer make steps in turn, of one and the same trainer, clocked
as `d5suite.measurements.distributed.steps` does.

``pytest benchmarks/bench_one_rank.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.schemes import SCHEMES, make_scheme
from d5suite.instruments.threads import allowed_cpus
from d5suite.levels.training import Trainer
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.statistics.ratios import paired_ratio
from d5suite.testing.networks import random_batch

BATCH = 32
WARM_UP, LEAST_ROUNDS, BUDGET_S = 10, 50, 10.0
LIMIT = 1.01
"""Limit of the time of a single rank's step over the trainer's own."""

BACKENDS = [backend.name for backend in discover()[0].values() if 3 in backend.levels]


def alternate(trainer: Trainer, steps: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Make steps in turn, in both orders, until time is spent; return the seconds of each kind."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    begin, turn = time.perf_counter(), 0
    while turn < WARM_UP + LEAST_ROUNDS or time.perf_counter() - begin < BUDGET_S:
        for name, step in list(steps.items())[:: 1 if turn % 2 else -1]:
            trainer.executor.synchronize()
            start = time.perf_counter()
            step()
            trainer.executor.synchronize()
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - start)
        turn += 1
    return times


@pytest.mark.parametrize("name", BACKENDS)
def test_a_single_rank_makes_the_trainers_step(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    backend = discover()[0][name]
    problem = backend.problem()
    if problem:
        pytest.skip(problem)
    backend.load("runtime").configure(threads=len(allowed_cpus()), seed=0, device="cpu")
    network = build("lenet5", classes=10, image_size=32)
    trainer = backend.trainer(backend.executor(network), SGD(2.0**-10, momentum=0.9))
    images, labels = random_batch(network, BATCH)
    feed = trainer.executor.feed({"image": images, "label": labels})
    communicator = open_communicator("local")
    schemes = [make_scheme(each, backend.replica(trainer), communicator) for each in SCHEMES]

    def ranked() -> None:
        for scheme in schemes:
            scheme.step(feed)

    def plain() -> None:
        for _ in schemes:
            trainer.step(feed)

    times = benchmark.pedantic(lambda: alternate(trainer, {"ranked": ranked, "plain": plain}), rounds=1)
    found = paired_ratio(times["ranked"], times["plain"])
    low, high = found.interval
    benchmark.extra_info.update(ratio=found.value, ratio_ci95=[low, high], rounds=found.n)
    with capsys.disabled():
        step = sorted(times["plain"])[len(times["plain"]) // 2] / len(schemes)
        print(
            f"\n{name}: one rank / trainer {found.value:.4f} ({low:.4f} to {high:.4f}), {found.n} rounds of "
            f"{len(schemes)} steps of {step * 1e3:.2f} ms (limit {LIMIT:g})"
        )
    assert low <= LIMIT
