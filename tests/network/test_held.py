"""Bytes that a step holds, by hand and against what PyTorch's autograd saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from d5suite.backends import discover
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.held import alive_bytes, held, passed
from d5suite.network.zoo import build


def chain() -> Network:
    """A convolution, a normalization and a ReLU of 1024 bytes an image, then smaller ones."""
    b = Builder("chain", image_size=8, channels=1)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 4, 3), "bn1"))
    x = b.global_average_pool(b.conv(x, "conv2", 2, 3), "average")
    return b.classifier(b.linear(b.flatten(x, "flatten"), "fc", 5))


def test_bytes_are_those_by_hand() -> None:
    found = held(chain(), batch_size=3)
    image, map1, average, logits, label = 256, 1024, 8, 20, 8
    assert found.forward == 3 * (image + 2 * map1)  # the ReLU writes over the normalization's output
    assert found.kept == 3 * (image + 2 * map1 + average + logits + label)
    assert found.step == alive_bytes(chain(), batch_size=3, training=True) >= found.kept
    assert alive_bytes(chain(), batch_size=3, bytes_per_value=2) == found.forward // 2


def test_what_is_kept_grows_with_the_batch_and_depth_and_not_with_recomputation() -> None:
    small, large = (held(build("resnet18", image_size=32, classes=10), batch_size=n) for n in (1, 4))
    deep = held(build("resnet34", image_size=32, classes=10), batch_size=4)
    assert large.kept == 4 * small.kept and large.forward == 4 * small.forward
    assert deep.kept > 1.4 * large.kept and deep.forward == large.forward
    assert deep.recomputed < 0.7 * deep.step and deep.segments > 1


@pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
def test_what_is_kept_is_what_autograd_saves(name: str) -> None:
    import torch

    network = build(name, image_size=64, classes=10).without_dropout()
    backend = discover()[0]["torch"]
    backend.load("runtime").configure(threads=1, seed=0, device="cpu")
    executor = backend.executor(network)
    rng = np.random.default_rng(0)
    feed = executor.feed(
        {"image": rng.standard_normal((2, 3, 64, 64)).astype(np.float32), "label": rng.integers(0, 10, 2)}
    )
    weights = {each.untyped_storage().data_ptr() for each in executor.tensors.values()}  # type: ignore[attr-defined]
    saved: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():  # not what a pool has chosen
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        executor.forward_backward(feed)
    assert held(network, batch_size=2).kept == pytest.approx(sum(saved.values()), rel=0.05)


def test_nodes_pass_on_what_later_ones_read() -> None:
    found, whole = passed(chain(), batch_size=3), held(chain(), batch_size=3)
    map1, map2, average, logits = 1024, 512, 8, 20
    crossing = [map1, map1, map1, map2, average, average, logits, 0]  # the last is the loss
    assert [each.crossing for each in found.values()] == [3 * each for each in crossing]
    assert sum(each.kept for each in found.values()) == whole.kept
    assert sum(each.parameters for each in found.values()) == whole.parameters
    residual = passed(build("resnet18", image_size=32, classes=10), batch_size=1)
    inside, after = residual["layer1.0.conv1"].crossing, residual["layer1.0.add"].crossing
    assert inside == 2 * after  # the shortcut crosses, too
