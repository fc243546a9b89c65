"""A step of a framework's own scheme against the same by hand, on two ranks.

Both train ResNet-50 with the same optimizer over the same connections, in the same two processes of
one thread each, on disjoint cores, and alternate step by step. By hand is the network of the
adapter's ``baseline`` and what the framework's documentation says. Their weights agree.

``pytest benchmarks/bench_native.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``. As a script, one rank: ``python bench_native.py BACKEND SCHEME MEETING RANK``.
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
from d5suite.distributed.meeting import meet
from d5suite.distributed.schemes import make_scheme
from d5suite.instruments.threads import set_affinity, share_cpus
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

FIRST_KEY = 10**4
"""Of the arrays that MXNet's servers add by hand; d5suite numbers its own from 0."""

Hand = tuple[Callable[[], None], Callable[[], np.ndarray]]
"""A step, and the last layer's bias, which shows the errors of the whole network."""


def by_hand_in_torch(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import torch

    from d5suite.backends.torch import baseline

    model = baseline.ResNet((3, 4, 6, 3), num_classes=CLASSES)
    model.load_state_dict({name: torch.tensor(value) for name, value in _weights(network).items()}, strict=False)
    model.train()
    parallel = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    sgd = baseline.native_sgd(model, OPTIMIZER)
    x, y, criterion = torch.tensor(images), torch.tensor(labels), torch.nn.CrossEntropyLoss()

    def step() -> None:
        sgd.zero_grad()
        criterion(parallel(x), y).backward()
        sgd.step()

    return step, lambda: model.fc.bias.detach().numpy()


def by_hand_in_torch_sharded(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import torch
    from torch.distributed.fsdp import fully_shard

    from d5suite.backends.torch import baseline

    model = baseline.ResNet((3, 4, 6, 3), num_classes=CLASSES)
    model.load_state_dict({name: torch.tensor(value) for name, value in _weights(network).items()}, strict=False)
    model.train()
    fully_shard(model, reshard_after_forward=False)
    sgd = baseline.native_sgd(model, OPTIMIZER, fused=False)  # of DTensors PyTorch fuses Adam only
    x, y, criterion = torch.tensor(images), torch.tensor(labels), torch.nn.CrossEntropyLoss()

    def step() -> None:
        sgd.zero_grad()
        criterion(model(x), y).backward()
        sgd.step()

    bias: Any = model.fc.bias
    return step, lambda: bias.detach().full_tensor().numpy()


def by_hand_in_jax(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import functools

    import jax
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from d5suite.backends.jax import baseline

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    alike, parted = PartitionSpec(), PartitionSpec("ranks")
    sgd = baseline.native_sgd(OPTIMIZER)
    params, stats = baseline.resnet50_trees(network, np.float32)
    held = jax.device_put((params, stats, sgd.init(params)), NamedSharding(mesh, alike))
    own = images.transpose(0, 2, 3, 1), labels.astype(np.int32)
    x, y = (jax.make_array_from_process_local_data(NamedSharding(mesh, parted), each) for each in own)

    def loss_fn(params: Any, stats: Any, x: Any, y: Any) -> Any:
        logits, stats = baseline.resnet50(params, stats, x, precision=None)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), stats

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(alike, parted, parted), out_specs=(alike, alike), check_vma=False
    )
    def train(held: Any, x: Any, y: Any) -> Any:
        params, stats, state = held
        (loss, stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, x, y)
        updates, state = sgd.update(jax.lax.pmean(gradients, "ranks"), state, params)
        return loss, (optax.apply_updates(params, updates), stats, state)

    def step() -> None:
        nonlocal held
        loss, held = train(held, x, y)
        jax.block_until_ready(loss)

    return step, lambda: np.asarray(held[0]["bias"].addressable_data(0))


def by_hand_in_keras(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import keras
    import tensorflow as tf

    from d5suite.backends.keras import baseline
    from d5suite.backends.keras.native import MultiWorkerMirrored

    strategy = MultiWorkerMirrored.strategy  # a process has one only
    model = baseline.resnet50(SIZE, CLASSES, "channels_last", "float32")
    weights = _weights(network)
    named = baseline.variables_by_name(model)
    for name, (variable, order) in named.items():
        variable.assign(weights[name].transpose(np.argsort(order)))
    sgd, criterion = baseline.native_sgd(OPTIMIZER), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd.build(model.trainable_variables)
    x, y = tf.constant(np.ascontiguousarray(images.transpose(0, 2, 3, 1))), tf.constant(labels.astype(np.int32))

    def mean(gradients: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.MEAN, [tf.identity(each) for each in gradients]
        )

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = criterion(y, model(x, training=True))
        values = [variable.value for variable in model.trainable_variables]
        averaged = strategy.run(mean, (tape.gradient(loss, values),))  # Keras's optimizers would add over ranks
        sgd.apply(averaged, model.trainable_variables)
        return loss

    return lambda: train(x, y), lambda: named["fc.bias"][0].numpy()


def by_hand_in_tensorflow(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    import tensorflow as tf

    from d5suite.backends.tensorflow import baseline
    from d5suite.backends.tensorflow.native import MultiWorkerMirrored

    strategy = MultiWorkerMirrored.strategy  # a process has one only
    model = baseline.ResNet50(_weights(network), xla=False)
    variables = model.trainable_variables
    sgd = baseline.NativeSGD(variables, OPTIMIZER)
    x, y = tf.constant(np.ascontiguousarray(images.transpose(0, 2, 3, 1))), tf.constant(labels)

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        gradients = tape.gradient(loss, variables)
        sgd.apply(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients))
        return loss

    train = tf.function(lambda x, y: strategy.run(replica, (x, y)), autograph=False)
    return lambda: train(x, y), lambda: model.bias.numpy()


def by_hand_in_mxnet(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    from d5suite.backends.mxnet import baseline
    from d5suite.backends.mxnet.native import DistSync
    from d5suite.backends.mxnet.runtime import mx

    store = DistSync.store  # a process has one only
    model, named, gradients, backward = _in_gluon(network, images, labels)
    trainer = mx.gluon.Trainer(model.collect_params(), baseline.native_sgd(OPTIMIZER), kvstore=None)
    for key, gradient in enumerate(gradients, FIRST_KEY):
        store.init(key, mx.nd.zeros_like(gradient))

    def step() -> None:
        backward()
        for index, gradient in enumerate(gradients):  # as Trainer.allreduce_grads
            store.pushpull(FIRST_KEY + index, gradient, out=gradient, priority=-index)
        trainer.update(RANKS)
        mx.nd.waitall()

    return step, lambda: named["fc.bias"].data().asnumpy()


def by_hand_in_mxnet_served(network: Network, images: np.ndarray, labels: np.ndarray) -> Hand:
    from d5suite.backends.mxnet.native import DistAsync
    from d5suite.backends.mxnet.runtime import mx

    store = DistAsync.store  # a process has one only, and its servers have the scheme's optimizer
    _, named, gradients, backward = _in_gluon(network, images, labels)
    weights = [named[name].data() for name in network.parameters]
    for key, weight in enumerate(weights, FIRST_KEY):
        store.init(key, weight)

    def step() -> None:
        backward()
        for index, gradient in enumerate(gradients):  # as Trainer.step, which updates on the store
            store.push(FIRST_KEY + index, gradient, priority=-index)
        for index, weight in enumerate(weights):
            store.pull(FIRST_KEY + index, out=weight, priority=-index)
        mx.nd.waitall()

    def bias() -> np.ndarray:
        store._barrier()
        for index, weight in enumerate(weights):
            store.pull(FIRST_KEY + index, out=weight)
        return named["fc.bias"].data().asnumpy()

    return step, bias


def _in_gluon(network: Network, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any, Any, Callable[[], None]]:
    """The model, its parameters by name, their gradients, and what computes these.

    In the order of d5suite's keys: by its key an array belongs to one server, and another order
    gives most of the work to the other one, which shares its core with another rank.
    """
    from d5suite.backends.mxnet import baseline
    from d5suite.backends.mxnet.runtime import mx

    model = baseline.ResNet50(CLASSES)
    model.initialize()
    named = model.named()
    for name, value in _weights(network).items():
        named[name].set_data(mx.nd.array(value))
    model.hybridize(static_alloc=True, static_shape=True)
    x, y = mx.nd.array(images), mx.nd.array(labels)
    model(x, y)  # before, Gluon has no gradients
    gradients = [named[name].grad() for name in network.parameters]

    def backward() -> None:
        with mx.autograd.record():
            loss = model(x, y)
        loss.backward()

    return model, named, gradients, backward


BY_HAND = {
    ("torch", "ddp"): by_hand_in_torch,
    ("torch", "fsdp"): by_hand_in_torch_sharded,
    ("jax", "sharded"): by_hand_in_jax,
    ("tensorflow", "multi_worker_mirrored"): by_hand_in_tensorflow,
    ("keras", "multi_worker_mirrored"): by_hand_in_keras,
    ("mxnet", "dist_sync"): by_hand_in_mxnet,
    ("mxnet", "dist_async"): by_hand_in_mxnet_served,
}

AGREEMENT = {"dist_async": 5e-3}
"""How much weights may differ, if not by 1e-4: servers take ranks' gradients as they come."""


def _weights(network: Network) -> dict[str, np.ndarray]:
    return {name: network.initializers[name] for name in (*network.parameters, *network.statistics)}


def measure(name: str, scheme: str, folder: Path, rank: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of both kinds of steps, and the largest difference of weights."""
    backend = discover()[0][name]
    set_affinity(1, cpus=share_cpus(RANKS, RANKS, rank))
    backend.load("runtime").configure(threads=1, seed=0, device="cpu")
    communicator = open_communicator("gloo", rank=rank, size=RANKS, meeting=folder)
    leave = meet(
        backend, backend.default_mode, scheme, {}, communicator,
        device="cpu", precision="fp32", threads=1, local_rank=rank, folder=folder,
    )  # fmt: skip
    network = build("resnet50", classes=CLASSES, image_size=SIZE)
    ours = backend.trainer(backend.executor(network), OPTIMIZER)
    own = make_scheme(scheme, backend.replica(ours), communicator, backend)
    images, labels = random_batch(network, BATCH, seed=rank)
    feed = ours.executor.feed({"image": images, "label": labels})
    their_step, bias = BY_HAND[name, scheme](network, images, labels)

    def our_step() -> None:
        own.step(feed)
        ours.executor.synchronize()

    times: tuple[list[float], list[float]] = ([], [])
    both = list(zip((our_step, their_step), times, strict=True))
    for turn in range(WARM_UP + ROUNDS):
        for step, taken in both if turn % 2 else reversed(both):
            communicator.barrier()
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    own.finish()
    difference = float(np.abs(ours.executor.parameters()["fc.bias"] - bias()).max())
    leave()
    communicator.close()
    return times[0][WARM_UP:], times[1][WARM_UP:], difference


@pytest.mark.parametrize(("name", "scheme"), BY_HAND)
def test_a_step_costs_what_it_costs_by_hand(
    name: str, scheme: str, tmp_path: Path, benchmark: BenchmarkFixture
) -> None:
    backend = discover()[0][name]
    lacking = backend.problem() or backend.lacks_scheme(
        scheme, mode=backend.default_mode, device="cpu", precision="fp32"
    )
    if lacking:
        pytest.skip(lacking)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, name, scheme, str(tmp_path)]

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
    assert difference <= AGREEMENT.get(scheme, 1e-4)
    ratio = paired_ratio(ours, theirs)
    (low, high), verdict = ratio.interval, ratio.against(LIMIT)
    benchmark.extra_info.update(
        ours_s=ours, theirs_s=theirs, ratio=ratio.value, interval=[low, high], limit=LIMIT, verdict=verdict
    )
    figures = f"{np.median(ours) * 1e3:.4g} ms, ÷ by hand {ratio.value:.3f} ({low:.3f}–{high:.3f})"
    print(f"\n{name} {scheme}: {figures}, limit {LIMIT}: {verdict}")
    assert verdict != "exceeded"


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
