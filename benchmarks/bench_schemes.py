"""Step of the all-reduce scheme on PyTorch against DistributedDataParallel's, on two ranks.

Both train the same network with the same optimizer over Gloo, in the same two processes of one
thread each, on disjoint cores, and alternate. Each turn is two steps, of which the second is timed:
the first one finds the memory that the other kind needs, and VGG-16's 537 MB of gradients cost a
second there if the system has to find other pages. Their weights agree.

``pytest benchmarks/bench_schemes.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``. As a script, one rank: ``python bench_schemes.py NETWORK MEETING RANK``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.distributed.communicators import open_communicator, problem
from d5suite.distributed.schemes import make_scheme
from d5suite.instruments.threads import allowed_cpus
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.statistics.ratios import paired_ratio
from d5suite.testing.networks import random_batch

RANKS, BATCH = 2, 8
SIZES = {"resnet50": 64, "vgg16": 63}
WARM_UP, ROUNDS = 3, {"resnet50": 60, "vgg16": 16}
COMPARED = 10
"""Rounds after which the two networks' weights are compared; later, roundings have grown."""

TIMEOUT_S = 600
LIMIT = 1.05
"""Limit of a step's time over DistributedDataParallel's."""


def measure(name: str, meeting: Path, rank: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of both kinds of steps, and the largest difference of weights."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(allowed_cpus())[rank::RANKS] or allowed_cpus())
    communicator = open_communicator("gloo", rank=rank, size=RANKS, meeting=meeting)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(meeting / "ddp"), RANKS), rank=rank, world_size=RANKS
    )
    backend, network = discover()[0]["torch"], build(name, classes=10, image_size=SIZES[name])
    ours, theirs = (backend.trainer(backend.executor(network), SGD(2.0**-10, momentum=0.9)) for _ in range(2))
    scheme = make_scheme("all_reduce", backend.replica(ours), communicator)
    executor: Any = theirs.executor

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index, parameter in enumerate(network.parameters):
                self._parameters[str(index)] = executor.tensors[parameter]

        def forward(self, feed: Any) -> torch.Tensor:
            return executor.loss(feed)

    parallel = torch.nn.parallel.DistributedDataParallel(Module(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=2.0**-10, momentum=0.9)
    images, labels = random_batch(network, BATCH, seed=rank)
    feeds = [trainer.executor.feed({"image": images, "label": labels}) for trainer in (ours, theirs)]

    def our_step() -> None:
        scheme.step(feeds[0])

    def their_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        parallel(feeds[1]).backward()
        optimizer.step()

    times: tuple[list[float], list[float]] = ([], [])
    both = list(zip((our_step, their_step), times, strict=True))
    for turn in range(WARM_UP + ROUNDS[name]):
        for step, own in both if turn % 2 else reversed(both):
            step()
            communicator.barrier()
            start = time.perf_counter()
            step()
            own.append(time.perf_counter() - start)
        if turn == COMPARED:
            found, expected = (trainer.executor.parameters() for trainer in (ours, theirs))
            difference = max(float(np.abs(found[key] - expected[key]).max()) for key in network.parameters)
    communicator.close()
    return times[0][WARM_UP:], times[1][WARM_UP:], 0.0 if ours.executor.drops else difference


@pytest.mark.skipif(bool(problem("gloo")), reason="no torch")
@pytest.mark.parametrize("name", SIZES)
def test_a_step_costs_what_distributed_data_parallel_costs(
    name: str, tmp_path: Path, benchmark: BenchmarkFixture
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, name, str(tmp_path)]

    def run() -> list[str]:
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        try:
            return [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    said = benchmark.pedantic(run, rounds=1)
    ours, theirs, difference = json.loads(said[0])
    assert difference <= 1e-5
    ratio = paired_ratio(ours, theirs)
    benchmark.extra_info.update(
        ours_s=ours, theirs_s=theirs, ratio=ratio.value, interval=list(ratio.interval), limit=LIMIT
    )
    (low, high), verdict = ratio.interval, ratio.against(LIMIT)
    figures = f"{ratio.value:.3f} ({low:.3f}–{high:.3f})"
    print(f"\n{name}: scheme / DistributedDataParallel {figures}, limit {LIMIT}: {verdict}")
    assert verdict != "exceeded"


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
