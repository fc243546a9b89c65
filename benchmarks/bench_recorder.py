"""What the recorder costs: a region, and a training step with and without it in turn.

The step is one that ``--passes trace`` records, ResNet-18 on small images on one thread, with its
phases and two samples of resources a second. Turns alternate, so a disturbance that slows both
cancels. The seconds of the processor are compared, too: other processes hardly change them. The
mark is a ratio of at most 1.01.

``pytest benchmarks/bench_recorder.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.instruments.recorder import Recorder
from d5suite.instruments.resources import sampled
from d5suite.measurements.base import STEP, Phase
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.passes.recording import recorded
from d5suite.statistics.ratios import paired_ratio
from d5suite.testing.networks import random_batch

BATCH, IMAGE_SIZE, WARM_UP, TURN, BUDGET_S = 2, 32, 3, 3, 25.0
LIMIT = 1.01
REGIONS = 50_000


class Steps:
    """A training step whose parts can be replaced by recorded ones."""

    def __init__(self, name: str) -> None:
        backend = discover()[0][name]
        backend.load("runtime").configure(threads=1, seed=0, device="cpu")
        network = build("resnet18", classes=10, image_size=IMAGE_SIZE, seed=0)
        self.executor = backend.executor(network)
        self.trainer = backend.trainer(self.executor, SGD(learning_rate=2.0**-9))
        images, labels = random_batch(network, BATCH)
        self.arrays = {network.input: images, network.require_loss()[0]: labels}

    def make_one(self) -> None:
        """Feed, train, wait."""
        self.trainer.step(self.executor.feed(self.arrays))
        self.executor.synchronize()

    def phases(self) -> list[Phase]:
        """Return what is recorded."""
        return [
            Phase(self, "make_one", STEP),
            Phase(self.executor, "feed", "feed"),
            Phase(self.trainer, "step", "forward, backward and update"),
            Phase(self.executor, "synchronize", "wait for the device"),
        ]


def timed(step: Callable[[], object], calls: int = 1) -> tuple[float, float]:
    """Return the seconds of some calls, and those of the processor."""
    start, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        step()
    return time.perf_counter() - start, time.process_time() - used


@pytest.mark.parametrize("name", ["torch"])
def test_a_step_with_the_recorder_over_one_without(benchmark: BenchmarkFixture, name: str, tmp_path: Path) -> None:
    if discover()[0][name].problem() is not None:
        pytest.skip(f"{name} is not installed")
    steps = Steps(name)
    for _ in range(WARM_UP):
        steps.make_one()
    recorder = Recorder(tmp_path / "recording", "rank 0", run="benchmark")
    plain: list[tuple[float, float]] = []
    watched: list[tuple[float, float]] = []
    end = time.monotonic() + BUDGET_S
    for number in itertools.count():
        for record in ((False, True), (True, False))[number % 2]:
            if record:
                with sampled(recorder), recorded(recorder, steps.phases(), None):
                    watched.append(timed(lambda: steps.make_one(), TURN))
            else:
                plain.append(timed(steps.make_one, TURN))
        if time.monotonic() > end and len(plain) >= 10:
            break
    recorder.close()
    for number, what in enumerate(("seconds", "seconds of the processor")):
        ratio = paired_ratio([each[number] for each in watched], [each[number] for each in plain])
        benchmark.extra_info[what] = ratio._asdict()
        print(f"\n{name}, {what}: {ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f}), {ratio.n} pairs")
        assert ratio.low <= LIMIT, "the recorder slows the step down"
    benchmark.pedantic(steps.make_one, rounds=1)


def test_a_region(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recording", "rank 0", run="benchmark", events=1 << 20)
    inside = recorder.recorded(lambda: None, recorder.region("region"))
    ours, bare = [], []
    for _ in range(7):
        ours.append(timed(inside, REGIONS)[1])
        bare.append(timed(lambda: None, REGIONS)[1])
    recorder.close()
    nanoseconds = (min(ours) - min(bare)) / REGIONS * 1e9
    benchmark.extra_info["nanoseconds"] = nanoseconds
    print(f"\na region: {nanoseconds:.0f} ns")
    benchmark.pedantic(lambda: None, rounds=1)
