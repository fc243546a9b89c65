"""What the neutral training loop and its checkpoints add: epochs of LeNet-5 on the digits, in turn with a bare loop.

The bare loop feeds the same batches to the same native step, with nothing of d5suite's loop around it; what the step
itself costs beside a hand-written one is measured by ``recipes/test_cost_of_neutrality.py``.
``pytest benchmarks/bench_training_loop.py`` prints the figures; ``--benchmark-json`` keeps them, in ``extra_info``.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.data.arrays import ArrayBatches
from d5suite.data.digits import Digits
from d5suite.data.samplers import Shuffled
from d5suite.levels.training import SGD, Trainer
from d5suite.measure.sampling import paired_ratio
from d5suite.measure.threads import allowed_cpus
from d5suite.network.zoo import build
from d5suite.training import checkpoint
from d5suite.training.checkpoint import INTERVAL_S
from d5suite.training.events import Series, StopOnDivergence
from d5suite.training.loop import Progress, Run

LEAST_ROUNDS = 15
BUDGET_S = 20.0
"""Rounds go on for so long: an epoch takes a fifth of a second, and the machine's noise is larger than the limit."""

BACKENDS = [backend.name for backend in discover()[0].values() if 2 in backend.levels]


def neutral(trainer: Trainer, batches: ArrayBatches) -> float:
    """Seconds of one epoch of the neutral loop, with the events of a usual run."""
    start = time.perf_counter()
    Run(trainer, batches, epochs=1, events=[StopOnDivergence(), Series()]).train()
    return time.perf_counter() - start


def bare(trainer: Trainer, batches: ArrayBatches) -> float:
    """Seconds of the same epoch in a bare loop that reads its losses at the end."""
    executor = trainer.executor
    label, loss = executor.network.require_loss()
    start = time.perf_counter()
    pending = []
    for images, labels in batches.epoch(0):
        pending.append(trainer.step(executor.feed({executor.network.input: images, label: labels})))
    executor.synchronize()
    for answer in pending:
        float(executor.fetch({loss: answer[loss]})[loss])
    return time.perf_counter() - start


@pytest.mark.parametrize("name", BACKENDS)
def test_the_loop_costs_what_a_bare_loop_costs(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    backend = discover()[0][name]
    problem = backend.problem()
    if problem:
        pytest.skip(problem)
    backend.load("runtime").configure(threads=len(allowed_cpus()), seed=0, device="cpu")
    executor = backend.executor(build("lenet5", classes=10, image_size=32))
    trainer = backend.trainer(executor, SGD(0.01, momentum=0.9))
    data = Digits("train")
    batches = ArrayBatches(data.images, data.labels, Shuffled(len(data)), batch_size=32)
    times: dict[str, list[float]] = {"neutral": [], "bare": []}
    saves: list[float] = []

    def run() -> None:
        neutral(trainer, batches)
        end = time.perf_counter() + BUDGET_S
        while len(saves) < LEAST_ROUNDS or time.perf_counter() < end:
            for loop in (neutral, bare) if len(saves) % 2 else (bare, neutral):
                times[loop.__name__].append(loop(trainer, batches))
            start = time.perf_counter()
            checkpoint.save(tmp_path / "c.h5", trainer, Progress())
            saves.append(time.perf_counter() - start)

    benchmark.pedantic(run, rounds=1)
    ratio, part = paired_ratio(times["neutral"], times["bare"]), statistics.median(saves) / INTERVAL_S
    low, high = ratio.ci95
    benchmark.extra_info.update(ratio=ratio.median, ratio_ci95=[low, high], rounds=ratio.n, checkpoint_part=part)
    with capsys.disabled():
        print(
            f"\n{name}: {ratio.median:.4f} ({low:.4f} to {high:.4f}, {ratio.n} rounds) times the bare loop "
            f"(limit 1.03); a checkpoint {part:.5%} of its interval (1%)"
        )
    assert low <= 1.03  # above it the loop is too slow whatever the noise
    assert part <= 0.01
