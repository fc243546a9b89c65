"""Overhead of the training loop: epochs of LeNet-5 on the digits against a loop written by hand.

The two alternate. The hand-written loop is in `benchmarks.handwritten`, which shares no code with
the adapter. It builds the network from the same weights, feeds the same batches and makes the same
updates; both must reach the same losses before they are timed. A backend that has nothing written
by hand is compared with a bare loop around its own step. The cost of checkpoints is measured too.

``pytest benchmarks/bench_training_loop.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.handwritten import Epoch, handwritten
from d5suite.backends import discover
from d5suite.data.arrays import ArrayBatches
from d5suite.data.digits import Digits
from d5suite.data.samplers import Shuffled
from d5suite.instruments.threads import allowed_cpus
from d5suite.levels.backend import Backend
from d5suite.levels.training import Trainer
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.statistics.ratios import Ratio, paired_ratio
from d5suite.training import checkpoint
from d5suite.training.checkpoint import INTERVAL_S
from d5suite.training.events import Series, StopOnDivergence
from d5suite.training.loop import Progress, Run

LIMIT = 1.03
BATCH = 32
OPTIMIZER = SGD(learning_rate=0.0625, momentum=0.9)
"""As in ``recipes/test_digits_lenet.py``."""

LEAST_ROUNDS = 15
BUDGET_S = 20.0
"""Time for rounds: an epoch takes 0.2 s, and the machine's noise exceeds the limit."""

LONGEST_S = 80.0
"""Time for rounds while the interval still includes the limit."""

BACKENDS = [backend.name for backend in discover()[0].values() if 2 in backend.levels]


def written_by_hand(backend: Backend, trainer: Trainer) -> Epoch:
    """Return the hand-written epoch or, without one, a bare loop around the adapter's step."""
    executor = trainer.executor
    module = handwritten(backend)
    if module is not None:
        epoch: Epoch = module.lenet5_epoch(
            executor.network, trainer.optimizer, mode=executor.mode, device=executor.device
        )
        return epoch
    label, loss = executor.network.require_loss()

    def bare(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        answers = [trainer.step(executor.feed({executor.network.input: x, label: y})) for x, y in batches]
        return [float(executor.fetch({loss: answer[loss]})[loss]) for answer in answers]

    return bare


class Pair:
    """Both loops over the same batches; each continues from its last epoch."""

    def __init__(self, backend: Backend) -> None:
        network = build("lenet5", classes=10, image_size=32)
        self.trainer = backend.trainer(backend.executor(network), OPTIMIZER)
        # The bare loop of a backend without one moves a trainer of its own.
        self._by_hand = written_by_hand(backend, backend.trainer(backend.executor(network), OPTIMIZER))
        data = Digits("train")
        self._images, self._labels, self._order = data.images, data.labels, Shuffled(len(data))
        self._batches = ArrayBatches(data.images, data.labels, self._order, batch_size=BATCH)

    def neutral(self) -> list[float]:
        """Run an epoch of the neutral loop with the usual events; return each step's loss."""
        series = Series()
        Run(self.trainer, self._batches, epochs=1, events=[StopOnDivergence(), series]).train()
        return [loss for _, loss in series.losses]

    def by_hand(self) -> list[float]:
        """Run the same epoch by hand; return each step's loss."""

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            order = self._order.order(0)
            for start in range(0, len(order) - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield self._images[chosen], self._labels[chosen]

        return self._by_hand(batches())


def require_same_losses(ours: list[float], theirs: list[float]) -> None:
    """Require the same work: in float32, LeNet-5's first-epoch losses differ by 1e-5."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_epoch_costs_what_one_written_by_hand_costs(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    backend = discover()[0][name]
    problem = backend.problem()
    if problem:
        pytest.skip(problem)
    backend.load("runtime").configure(threads=len(allowed_cpus()), seed=0, device="cpu")
    both = Pair(backend)
    times: dict[str, list[float]] = {"neutral": [], "by_hand": []}
    saves: list[float] = []

    def ratio() -> Ratio:
        return paired_ratio(times["neutral"], times["by_hand"])

    def goes_on(seconds: float) -> bool:
        if len(saves) < LEAST_ROUNDS or seconds < BUDGET_S:
            return True
        low, high = ratio().interval
        return low <= LIMIT <= high and seconds < LONGEST_S

    def run() -> None:
        require_same_losses(both.neutral(), both.by_hand())
        begin = time.perf_counter()
        while goes_on(time.perf_counter() - begin):
            for loop in (both.neutral, both.by_hand) if len(saves) % 2 else (both.by_hand, both.neutral):
                start = time.perf_counter()
                loop()
                times[loop.__name__].append(time.perf_counter() - start)
            start = time.perf_counter()
            checkpoint.save(tmp_path / "c.h5", both.trainer, Progress())
            saves.append(time.perf_counter() - start)

    benchmark.pedantic(run, rounds=1)
    found, part = ratio(), statistics.median(saves) / INTERVAL_S
    low, high = found.interval
    benchmark.extra_info.update(ratio=found.value, ratio_ci95=[low, high], rounds=found.n, checkpoint_part=part)
    with capsys.disabled():
        what = "a bare loop around its step" if handwritten(backend) is None else "a loop written by hand"
        noise = ", undecided" if low <= LIMIT <= high else ""
        print(
            f"\n{name}: {found.value:.4f} ({low:.4f} to {high:.4f}, {found.n} rounds) times {what} "
            f"(limit {LIMIT}{noise}); a checkpoint {part:.5%} of its interval (1%)"
        )
    assert found.value <= LIMIT
    assert part <= 0.01
