"""A step of the scheme ``horovod`` against Horovod's loop by hand, on two ranks.

Both train ResNet-50 with the same optimizer over the same Horovod, in the same two processes of one
thread each, on disjoint cores, and alternate step by step. The loop by hand is what Horovod's
documentation says for each framework, on the network of the adapter's ``baseline``. Their weights
agree.

``pytest benchmarks/bench_horovod.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``. As a script, one rank: ``python bench_horovod.py BACKEND MEETING RANK``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.gathering import gather
from d5suite.distributed.schemes import make_scheme, settings_from_dict
from d5suite.instruments.threads import set_affinity, share_cpus
from d5suite.levels.native import Meeting, NativeSettings
from d5suite.network import Network
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.statistics.ratios import paired_ratio
from d5suite.testing.networks import random_batch

RANKS, BATCH, SIZE, CLASSES = 2, 8, 64, 10
OPTIMIZER = SGD(2.0**-10, momentum=0.875)
WARM_UP, ROUNDS = 3, 60
TIMEOUT_S = 900
LIMIT = 1.02
"""Limit of a step's time over the hand-written step's. An interval above it fails, and one that
includes it is undecided."""

Hand = tuple[Callable[[], None], Callable[[], np.ndarray]]
"""A step, and the last layer's bias, which shows the errors of the whole network."""


def by_hand_in_torch(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import horovod.torch as hvd
    import torch

    from d5suite.backends.torch import baseline

    model = baseline.ResNet((3, 4, 6, 3), num_classes=CLASSES)
    model.load_state_dict({name: torch.tensor(value) for name, value in _weights(network).items()}, strict=False)
    model.train()
    sgd = hvd.DistributedOptimizer(
        baseline.native_sgd(model, OPTIMIZER), named_parameters=list(model.named_parameters())
    )
    x, y, criterion = torch.tensor(images), torch.tensor(labels), torch.nn.CrossEntropyLoss()

    def step() -> None:
        sgd.zero_grad()
        criterion(model(x), y).backward()
        sgd.step()

    return step, lambda: model.fc.bias.detach().numpy()


def by_hand_in_tensorflow(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from d5suite.backends.tensorflow import baseline

    model = baseline.ResNet50(_weights(network), xla=False)
    variables = model.trainable_variables
    sgd = baseline.NativeSGD(variables, OPTIMIZER)
    x, y = tf.constant(np.ascontiguousarray(images.transpose(0, 2, 3, 1))), tf.constant(labels)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        sgd.apply(hvd.DistributedGradientTape(tape).gradient(loss, variables))
        return loss

    return lambda: train(x, y), lambda: model.bias.numpy()


def by_hand_in_keras(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from d5suite.backends.keras import baseline

    model = baseline.resnet50(SIZE, CLASSES, "channels_last", "float32")
    weights = _weights(network)
    named = baseline.variables_by_name(model)
    for name, (variable, order) in named.items():
        variable.assign(weights[name].transpose(np.argsort(order)))
    sgd, criterion = baseline.native_sgd(OPTIMIZER), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd.build(model.trainable_variables)
    x, y = tf.constant(np.ascontiguousarray(images.transpose(0, 2, 3, 1))), tf.constant(labels.astype(np.int32))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = criterion(y, model(x, training=True))
        values = [variable.value for variable in model.trainable_variables]
        sgd.apply(hvd.DistributedGradientTape(tape).gradient(loss, values), model.trainable_variables)
        return loss

    return lambda: train(x, y), lambda: named["fc.bias"][0].numpy()


def by_hand_in_mxnet(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    from d5suite.backends.mxnet import baseline
    from d5suite.backends.mxnet.runtime import mx

    import horovod.mxnet as hvd  # isort: skip  it imports MXNet

    model = baseline.ResNet50(CLASSES)
    model.initialize()
    named = model.named()
    for name, value in _weights(network).items():
        named[name].set_data(mx.nd.array(value))
    model.hybridize(static_alloc=True, static_shape=True)
    x, y = mx.nd.array(images), mx.nd.array(labels)
    trainer = hvd.DistributedTrainer(model.collect_params(), baseline.native_sgd(OPTIMIZER))

    def step() -> None:
        with mx.autograd.record():
            loss = model(x, y)
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()

    return step, lambda: named["fc.bias"].data().asnumpy()


BY_HAND = {
    "torch": by_hand_in_torch,
    "tensorflow": by_hand_in_tensorflow,
    "keras": by_hand_in_keras,
    "mxnet": by_hand_in_mxnet,
}


def _weights(network: Network) -> dict[str, np.ndarray]:
    return {name: network.initializers[name] for name in (*network.parameters, *network.statistics)}


def measure(name: str, folder: Path, rank: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of both kinds of steps, and the largest difference of weights."""
    backend = discover()[0][name]
    set_affinity(1, cpus=share_cpus(RANKS, RANKS, rank))
    backend.load("runtime").configure(threads=1, seed=0, device="cpu")
    communicator = open_communicator("gloo", rank=rank, size=RANKS, meeting=folder)
    settings = settings_from_dict({"name": "horovod"}, backend)
    assert isinstance(settings, NativeSettings)
    meeting = Meeting(
        rank, RANKS, rank, communicator.hosts, "cpu", 1, folder, lambda value: gather(communicator, value)
    )
    leave = backend.framework_scheme("horovod", backend.default_mode).meet(meeting, settings)
    network = build("resnet50", classes=CLASSES, image_size=SIZE)
    ours = backend.trainer(backend.executor(network), OPTIMIZER)
    scheme = make_scheme("horovod", backend.replica(ours), communicator, backend)
    images, labels = random_batch(network, BATCH, seed=rank)
    feed = ours.executor.feed({"image": images, "label": labels})
    their_step, bias = BY_HAND[name](network, images, labels)

    def our_step() -> None:
        scheme.step(feed)
        ours.executor.synchronize()

    times: tuple[list[float], list[float]] = ([], [])
    both = list(zip((our_step, their_step), times, strict=True))
    for turn in range(WARM_UP + ROUNDS):
        for step, own in both if turn % 2 else reversed(both):
            communicator.barrier()
            start = time.perf_counter()
            step()
            own.append(time.perf_counter() - start)
    difference = float(np.abs(ours.executor.parameters()["fc.bias"] - bias()).max())
    leave()
    communicator.close()
    return times[0][WARM_UP:], times[1][WARM_UP:], difference


@pytest.mark.parametrize("name", BY_HAND)
def test_a_step_costs_what_horovod_costs_by_hand(name: str, tmp_path: Path, benchmark: BenchmarkFixture) -> None:
    backend = discover()[0][name]
    lacking = backend.problem() or backend.lacks_scheme(
        "horovod", mode=backend.default_mode, device="cpu", precision="fp32"
    )
    if lacking:
        pytest.skip(lacking)
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
    ours, theirs, difference = json.loads(said[0].splitlines()[-1])
    assert difference <= 1e-4
    ratio = paired_ratio(ours, theirs)
    (low, high), verdict = ratio.interval, ratio.against(LIMIT)
    benchmark.extra_info.update(
        ours_s=ours, theirs_s=theirs, ratio=ratio.value, interval=[low, high], limit=LIMIT, verdict=verdict
    )
    figures = f"{np.median(ours) * 1e3:.4g} ms, ÷ by hand {ratio.value:.3f} ({low:.3f}–{high:.3f})"
    print(f"\n{name}: {figures}, limit {LIMIT}: {verdict}")
    assert verdict != "exceeded"


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
