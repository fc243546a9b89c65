"""Layer times of the backends whose profilers know scopes or names of operators."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from d5suite.backends import discover
from d5suite.levels.profile import OPTIMIZER, check_profile
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.optimizers.settings import SGD

STEPS = 3
FUSING = (
    *("tensorflow:graph", "tensorflow:xla", "tensorflow:stock", "jax:jit", "jax:stock", "mxnet:fused"),
    *("keras:tensorflow", "keras:jax", "torch:compile"),
)
"""Modes whose compilers fuse nodes."""

TELLS = ("tensorflow:graph", "mxnet:hybrid")
"""Modes of which oneDNN's kernels are told by a process of its own."""

UNNAMED = {"keras:jax": {"conv1"}}
"""Nodes of which XLA leaves only the gradient of the weights, and gives that no name in some
programs."""

if "optimization_level=0" in os.environ.get("XLA_FLAGS", ""):  # as `make test` compiles
    UNNAMED |= {name: {"conv1"} for name in ("tensorflow:xla", "jax:jit", "jax:stock")}

WITHOUT_WORK = ("Flatten", "Reshape", "Identity")
"""Operators that a compiler replaces by nothing."""


def network() -> Network:
    b = Builder("layered", seed=1, image_size=16, channels=1)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 8, kernel=3, padding=1), "norm1"))
    y = b.relu(b.batch_norm(b.conv(x, "conv2", 8, kernel=3, padding=1), "norm2"))
    x = b.max_pool(b.add(x, y, "sum"), "pool", 2, stride=2)
    return b.classifier(b.linear(b.tanh(b.linear(b.flatten(x, "flatten", size=8), "hidden", 16)), "output", 10))


KINDS = ("forward", "gradient", "training step")


def take(name: str, folder: Path, kinds: Sequence[str] = KINDS) -> None:
    """Profile the network in one mode: inference, gradients, and a training step; check all."""
    backend_name, mode = name.split(":")
    backend = discover()[0][backend_name]
    if problem := backend.problem(mode):
        pytest.skip(problem)
    net = network()
    executor = backend.executor(net, mode=mode)
    label, loss = net.require_loss()
    rng = np.random.default_rng(0)
    images: np.ndarray = rng.standard_normal((4, 1, 16, 16)).astype(np.float32)
    arrays: dict[str, np.ndarray] = {net.inputs[0]: images, label: rng.integers(0, 10, 4)}
    feed = executor.feed(arrays)
    before = executor.fetch(executor.forward(feed))
    trainer = backend.trainer(executor, SGD(0.01, momentum=0.9))
    grouped = False
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: executor.forward(feed),
        "gradient": lambda: executor.forward_backward(feed),
        "training step": lambda: trainer.step(feed),
    }
    for kind in kinds:
        call = calls[kind]
        directions = ["forward"] if kind == "forward" else ["forward", "backward"]

        def step(call: Callable[[], object] = call) -> None:
            call()
            executor.synchronize()

        update = trainer if kind == "training step" else None
        step()
        inner = folder / kind.replace(" ", "-")
        inner.mkdir()
        found = backend.load("profile", mode).profile(executor, step, STEPS, inner, update)
        check_profile(backend_name, found, net)
        assert found.coverage > 0, (name, kind)
        assert found.dropped == 0
        assert found.method
        assert ("waiting between operators" in found.other) == (backend_name == "mxnet")
        assert (OPTIMIZER in found.other) == bool(update), (name, kind, found.other)
        owned = {(node, each.direction) for each in found.layers for node in each.nodes}
        assert {direction for _, direction in owned} == set(directions)
        inferred = {node.name for node in net.nodes_for(net.outputs)}
        for node in net.nodes:
            if node.op_type in WITHOUT_WORK or (kind == "forward" and node.name not in inferred):
                continue
            assert (node.name, "forward") in owned, (name, kind, node.name)
            if node.name in UNNAMED.get(name, ()):
                continue
            if len(directions) > 1 and node.op_type != "Add":  # whose gradient is the gradient itself
                assert (node.name, "backward") in owned, (name, kind, node.name)
        grouped |= any(len(each.nodes) > 1 for each in found.layers)
        if kind == "gradient" and name in TELLS and platform.machine() == "x86_64":
            inner.joinpath("kernels").mkdir()
            told = backend.load("profile", mode).kernels(executor, step, feed, True, inner / "kernels")
            for direction in directions:
                for conv in ("conv1", "conv2"):
                    (own,) = [each for (nodes, way), each in told.of.items() if conv in nodes[:1] and way == direction]
                    assert "convolution" in {each.primitive for each in own}, (name, conv, direction, own)
            assert {one for nodes, _ in told.of for one in nodes} <= {each.name for each in net.nodes}
            assert sum(each.calls for each in told.apart) < sum(each.calls for own in told.of.values() for each in own)
        if kind == "forward":  # nothing is left behind
            after = executor.fetch(executor.forward(feed))
            np.testing.assert_array_equal(after[net.outputs[0]], before[net.outputs[0]])
    assert isinstance(trainer, Trainer)
    assert grouped == (name in FUSING)
    assert np.isfinite(executor.fetch({loss: trainer.step(feed)[loss]})[loss])


@pytest.mark.parametrize(
    "name",
    [
        *("tensorflow:graph", "tensorflow:xla", "tensorflow:eager", "tensorflow:stock"),
        *("jax:jit", "jax:stock"),
        *("mxnet:hybrid", "mxnet:imperative", "mxnet:fused", "mxnet:stock"),
        pytest.param("torch:compile", marks=pytest.mark.slow),
    ],
)
def test_every_node_has_its_time(name: str, tmp_path: Path) -> None:
    take(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras:torch", "keras:tensorflow", "keras:jax"])
def test_every_node_has_its_time_on_each_of_keras_backends(name: str, tmp_path: Path) -> None:
    if problem := discover()[0]["keras"].problem(name.split(":")[1]):
        pytest.skip(problem)
    code = "import sys, pathlib, tests.backends.test_layer_times as t; t.take(sys.argv[1], pathlib.Path(sys.argv[2]))"
    done = subprocess.run([sys.executable, "-c", code, name, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
