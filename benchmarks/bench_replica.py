"""Cost of a replica: gradients and update apart, by way of arrays, against the trainer's own step.

They alternate, step by step, on ResNet-18; their losses agree. A framework that fuses gradients and
update loses that, and one whose tensors cannot be written copies gradients out and back. So one
rank alone makes the trainer's own step; the figures say what level 3 costs before anything is sent.

``pytest benchmarks/bench_replica.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.instruments.threads import allowed_cpus
from d5suite.levels.backend import Backend
from d5suite.levels.training import Trainer
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.statistics.ratios import paired_ratio
from d5suite.testing.networks import random_batch

BATCH, IMAGE_SIZE = 16, 64
REDUCED_BATCH, REDUCED_IMAGE_SIZE = 2, 32
OPTIMIZER = SGD(learning_rate=2.0**-9, momentum=0.9)
WARM_UP, LEAST_ROUNDS, BUDGET_S = 3, 15, 20.0

BACKENDS = [backend.name for backend in discover()[0].values() if 3 in backend.levels]


class Parts:
    """Three trainers that make the same steps: whole, apart, and apart by way of arrays."""

    def __init__(self, backend: Backend) -> None:
        size, batch = (REDUCED_IMAGE_SIZE, REDUCED_BATCH) if backend.reduced else (IMAGE_SIZE, BATCH)
        network = build("resnet18", classes=10, image_size=size)
        self._images, self._labels = random_batch(network, batch)
        self.trainers = [backend.trainer(backend.executor(network), OPTIMIZER) for _ in range(3)]
        whole, apart, arrays = self.trainers
        replica = backend.replica(arrays)

        def as_one(trainer: Trainer = whole) -> object:
            return trainer.step(self.feeds[0])

        def apart_step() -> object:
            answer = apart.gradients(self.feeds[1])
            apart.apply(answer)
            return answer

        def by_arrays() -> object:
            loss, gradients = replica.gradients(self.feeds[2])
            replica.apply(gradients)
            return loss

        self.feeds = [t.executor.feed({"image": self._images, "label": self._labels}) for t in self.trainers]
        self.ways: dict[str, Callable[[], object]] = {"step": as_one, "apart": apart_step, "arrays": by_arrays}

    def times(self) -> dict[str, list[float]]:
        """Alternate the ways, in both orders, until time is spent; return each one's seconds."""
        found: dict[str, list[float]] = {name: [] for name in self.ways}
        begin, round_ = time.perf_counter(), 0
        while round_ < WARM_UP + LEAST_ROUNDS or time.perf_counter() - begin < BUDGET_S:
            order = list(zip(self.ways.items(), self.trainers, strict=True))
            losses = {}
            for (name, way), trainer in order[:: 1 if round_ % 2 else -1]:
                trainer.executor.synchronize()
                start = time.perf_counter()
                answer = way()
                trainer.executor.synchronize()
                seconds = time.perf_counter() - start
                losses[name] = float(trainer.executor.fetch({"loss": answer["loss"]})["loss"])  # type: ignore[index]
                if round_ >= WARM_UP:
                    found[name].append(seconds)
            if round_ < 5:  # the same work
                np.testing.assert_allclose(list(losses.values()), losses["step"], rtol=1e-3, atol=1e-4)
            round_ += 1
        return found


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_and_update_apart_cost_about_a_step(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    backend = discover()[0][name]
    problem = backend.problem()
    if problem:
        pytest.skip(problem)
    backend.load("runtime").configure(threads=len(allowed_cpus()), seed=0, device="cpu")
    times = benchmark.pedantic(Parts(backend).times, rounds=1)
    lines = []
    for way in ("apart", "arrays"):
        found = paired_ratio(times[way], times["step"])
        low, high = found.interval
        benchmark.extra_info[way] = {"ratio": found.value, "ratio_ci95": [low, high], "rounds": found.n}
        lines.append(f"{way} {found.value:.4f} ({low:.4f} to {high:.4f}, {found.n} rounds)")
    with capsys.disabled():
        step = sorted(times["step"])[len(times["step"]) // 2]
        print(f"\n{name}: {', '.join(lines)} times a step of {step * 1e3:.1f} ms")
