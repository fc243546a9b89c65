"""What each framework's performance options are worth: pairs of calls that alternate.

The calls are training steps, or with ``--inference`` forward passes.

Both calls of a pair are in one process and take the same batch. A round runs them in the order A B
B A, so that what drifts drifts for both; the figure is the median of the rounds' ratios with its
95% interval. `docs/modes.md` has the figures and says what was taken.

``pytest benchmarks/bench_modes.py`` measures each ``stock`` mode against the default;
``--benchmark-json`` keeps the figures in ``extra_info``. As a script, other pairs too:
``python benchmarks/bench_modes.py BACKEND [PAIR …]``. Options that a process reads once, such as
environment variables, are compared by ``d5suite ab --a here --b env:NAME=VALUE``.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.instruments.threads import allowed_cpus
from d5suite.levels.backend import Backend
from d5suite.levels.training import Trainer
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD, Adam, AdamW, Optimizer
from d5suite.statistics.ratios import Ratio, paired_ratio
from d5suite.testing.networks import random_batch

WARM_UP, LEAST_ROUNDS = 4, 9
BUDGET_S = 10.0
"""Time for a pair's rounds."""

LIMIT = 0.97
"""A default mode that takes longer than ``stock`` by more than 3% was chosen wrongly."""


class Workload(NamedTuple):
    """A network of the zoo and its batch, about as small as in the recipes' ``smoke`` presets."""

    network: str
    image_size: int
    batch: int
    optimizer: Optimizer


WORKLOADS = {
    "resnet50": Workload("resnet50", 64, 8, SGD(2.0**-10, momentum=0.9, weight_decay=1e-4)),
    "alexnet": Workload("alexnet", 64, 8, SGD(2.0**-10, momentum=0.9, weight_decay=1e-4)),
    "lenet": Workload("lenet5", 32, 32, SGD(2.0**-8, momentum=0.9)),
    "alexnet-adam": Workload("alexnet", 64, 8, Adam(2.0**-14)),
    "alexnet-adamw": Workload("alexnet", 64, 8, AdamW(2.0**-14)),
}


class Variant(NamedTuple):
    """A mode, and what else is changed in its trainer before the first step."""

    mode: str
    change: Callable[[Any], None] = lambda trainer: None


def _torch_flags(**flags: bool) -> Callable[[Any], None]:
    """Return a change of the optimizer's settings, which PyTorch reads in each step."""

    def change(trainer: Any) -> None:
        for group in trainer._optimizer.param_groups:
            group.update({"fused": None, "foreach": None, **flags})

    return change


def _jax_compiled(**options: bool | int) -> Callable[[Any], None]:
    """Return a change of XLA's options of the training step."""

    def change(trainer: Any) -> None:
        import jax

        trainer._step = jax.jit(trainer._update, donate_argnums=(0, 1, 2), compiler_options=options)

    return change


def _keras_compiled(trainer: Any) -> None:
    """Compile the training step with XLA."""
    with trainer.executor.scope():
        trainer._model.compile(optimizer=trainer._optimizer, jit_compile=True)
        trainer._model.make_train_function(force=True)


def _mxnet_together(tensors: int) -> Callable[[Any], None]:
    """Return a change to MXNet's own SGD, by the number of tensors that one kernel updates."""

    def change(trainer: Any) -> None:
        import mxnet

        rule, (updater,) = trainer._rule, trainer._trainer._updaters
        rule.__class__ = mxnet.optimizer.SGD
        rule.aggregate_num, updater.aggregate_updates = tensors, True

    return change


TRIED: Mapping[str, Mapping[str, tuple[Variant, Variant]]] = {
    "torch": {
        "stock": (Variant("stock"), Variant("eager")),
        "foreach": (Variant("eager", _torch_flags(foreach=True)), Variant("eager", _torch_flags(fused=True))),
        "for-loop": (Variant("eager", _torch_flags(foreach=False)), Variant("eager", _torch_flags(fused=True))),
        "channels_last": (Variant("channels_last"), Variant("eager")),
        "compile": (Variant("compile"), Variant("eager")),
    },
    "jax": {
        "stock": (Variant("stock"), Variant("jit")),
        "eager": (Variant("eager"), Variant("jit")),
        "concurrency": (
            Variant("jit", _jax_compiled(xla_cpu_enable_concurrency_optimized_scheduler=True)),
            Variant("jit"),
        ),
        "vectors-512": (Variant("jit", _jax_compiled(xla_cpu_prefer_vector_width=512)), Variant("jit")),
        "onednn": (Variant("jit", _jax_compiled(xla_cpu_experimental_onednn_custom_call=True)), Variant("jit")),
        "xnnpack": (Variant("jit", _jax_compiled(xla_cpu_use_xnnpack=True)), Variant("jit")),
    },
    "tensorflow": {
        "stock": (Variant("stock"), Variant("graph")),
        "xla": (Variant("xla"), Variant("graph")),
        "eager": (Variant("eager"), Variant("graph")),
    },
    "keras": {
        "jit_compile": (Variant("tensorflow", _keras_compiled), Variant("tensorflow")),
    },
    "mxnet": {
        "stock": (Variant("stock"), Variant("hybrid")),
        "imperative": (Variant("imperative"), Variant("hybrid")),
        "together-1": (Variant("hybrid", _mxnet_together(1)), Variant("hybrid")),
        "together-4": (Variant("hybrid", _mxnet_together(4)), Variant("hybrid")),
        "together-16": (Variant("hybrid", _mxnet_together(16)), Variant("hybrid")),
    },
}
"""By backend and option: the variant, and what it is compared with."""


INFERENCE: Mapping[str, Mapping[str, tuple[Variant, Variant]]] = {
    "torch": {
        "channels_last": (Variant("channels_last"), Variant("eager")),
        "compile": (Variant("compile"), Variant("eager")),
    },
    "jax": {"eager": (Variant("eager"), Variant("jit"))},
    "tensorflow": {
        "xla": (Variant("xla"), Variant("graph")),
        "eager": (Variant("eager"), Variant("graph")),
    },
    "mxnet": {
        "stock": (Variant("stock"), Variant("hybrid")),
        "imperative": (Variant("imperative"), Variant("hybrid")),
        "fused": (Variant("fused"), Variant("hybrid")),
    },
    "onnxruntime": {"basic": (Variant("basic"), Variant("all"))},
}
"""The same for forward passes; of a mode whose forward pass is the default's there is no pair."""


def inferring(backend: Backend, workload: Workload, variant: Variant) -> Callable[[], None]:
    """Return a forward pass on one batch that waits for its end."""
    network = build(workload.network, classes=10, image_size=workload.image_size)
    executor = backend.executor(network, mode=variant.mode)
    feed = executor.feed({network.input: random_batch(network, workload.batch)[0]})

    def infer() -> None:
        executor.forward(feed)
        executor.synchronize()

    return infer


def stepping(backend: Backend, workload: Workload, variant: Variant) -> tuple[Trainer, Callable[[], None]]:
    """Return a trainer and a step on one batch that waits for its end."""
    network = build(workload.network, classes=10, image_size=workload.image_size)
    executor = backend.executor(network, mode=variant.mode)
    trainer = backend.trainer(executor, workload.optimizer)
    variant.change(trainer)
    label, _ = network.require_loss()
    images, labels = random_batch(network, workload.batch)
    feed = executor.feed({network.input: images, label: labels})

    def step() -> None:
        trainer.step(feed)
        executor.synchronize()

    return trainer, step


def compare(
    backend: Backend,
    workload: Workload,
    pair: tuple[Variant, Variant],
    budget_s: float = BUDGET_S,
    *,
    inference: bool = False,
) -> tuple[Ratio, float]:
    """Return how many times as long the first variant takes, and the second's median seconds."""
    steps = [
        inferring(backend, workload, variant) if inference else stepping(backend, workload, variant)[1]
        for variant in pair
    ]
    for step in steps:
        for _ in range(WARM_UP):
            step()
    a: list[float] = []
    b: list[float] = []
    end = time.perf_counter() + budget_s
    for n in itertools.count():
        if n >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        taken = [0.0, 0.0]
        for which in (0, 1, 1, 0):
            start = time.perf_counter()
            steps[which]()
            taken[which] += time.perf_counter() - start
        a.append(taken[0])
        b.append(taken[1])
    return paired_ratio(a, b), sorted(b)[len(b) // 2] / 2


def _configured(name: str) -> Backend:
    backend = discover()[0][name]
    backend.load("runtime").configure(threads=len(allowed_cpus()), seed=0, device="cpu")
    return backend


def _text(ratio: Ratio, seconds: float) -> str:
    low, high = ratio.interval
    return f"{ratio.value:.3f} times ({low:.3f} to {high:.3f}, {ratio.n} rounds) {1000 * seconds:.2f} ms"


@pytest.mark.parametrize("workload", ["resnet50", "alexnet", "lenet"])
@pytest.mark.parametrize("name", [name for name, pairs in TRIED.items() if "stock" in pairs])
def test_the_default_mode_is_not_slower_than_stock(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], name: str, workload: str
) -> None:
    problem = discover()[0][name].problem()
    if problem:
        pytest.skip(problem)
    found: list[tuple[Ratio, float]] = []
    backend = _configured(name)
    benchmark.pedantic(lambda: found.append(compare(backend, WORKLOADS[workload], TRIED[name]["stock"])), rounds=1)
    ratio, seconds = found[0]
    benchmark.extra_info.update(ratio=ratio.value, ratio_ci95=list(ratio.interval), rounds=ratio.n, default_s=seconds)
    with capsys.disabled():
        print(f"\n{name}:stock on {workload}: {_text(ratio, seconds)}")
    assert ratio.interval[1] >= LIMIT


def main() -> None:
    """Measure pairs of one backend and print them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("backend", choices=list({**TRIED, **INFERENCE}))
    parser.add_argument("pair", nargs="*", help="of the backend's in TRIED or INFERENCE (default: all)")
    parser.add_argument("--inference", action="store_true", help="forward passes instead of training steps")
    parser.add_argument("--on", choices=list(WORKLOADS), nargs="+", default=["resnet50", "alexnet", "lenet"])
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="time for a pair's rounds")
    given = parser.parse_args()
    backend, pairs = _configured(given.backend), (INFERENCE if given.inference else TRIED).get(given.backend, {})
    for name in given.pair or pairs:
        for workload in given.on:
            found = compare(backend, WORKLOADS[workload], pairs[name], given.seconds, inference=given.inference)
            print(f"{given.backend} {name} on {workload}: {_text(*found)}", flush=True)


if __name__ == "__main__":
    main()
