"""ResNet-18/34/50/101/152, version 1.5.

He et al., "Deep residual learning for image recognition" (CVPR 2016), table 1. Version 1.5 has a bottleneck's stride
in its 3×3 convolution (Goyal et al., "Accurate, large minibatch SGD", 2017, footnote 5). Initial weights are the
latter's (section 5.1): He-normal convolutions, a classifier of standard deviation 0.01, and a scale of zero at the end
of every residual branch, without which the first steps of training are chaotic and no two machines agree on them.
Imports the builder only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _basic(b: Builder, x: str, name: str, width: int, stride: int) -> str:
    y = b.relu(b.batch_norm(b.conv(x, f"{name}.conv1", width, 3, stride=stride), f"{name}.bn1"))
    return b.batch_norm(b.conv(y, f"{name}.conv2", width, 3), f"{name}.bn2", scale=0.0)


def _bottleneck(b: Builder, x: str, name: str, width: int, stride: int) -> str:
    y = b.relu(b.batch_norm(b.conv(x, f"{name}.conv1", width, 1), f"{name}.bn1"))
    y = b.relu(b.batch_norm(b.conv(y, f"{name}.conv2", width, 3, stride=stride), f"{name}.bn2"))
    return b.batch_norm(b.conv(y, f"{name}.conv3", 4 * width, 1), f"{name}.bn3", scale=0.0)


def _resnet(
    name: str,
    block: Callable[[Builder, str, str, int, int], str],
    expansion: int,
    blocks: tuple[int, int, int, int],
    *,
    classes: int,
    image_size: int,
    seed: int,
) -> Network:
    b = Builder(name, seed=seed, image_size=image_size)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 64, 7, stride=2), "bn1"))
    x = b.max_pool(x, "maxpool", 3, stride=2, padding=1)
    channels = 64
    for stage, repeats in enumerate(blocks):
        width = 64 << stage
        for index in range(repeats):
            layer = f"layer{stage + 1}.{index}"
            stride = 2 if stage > 0 and index == 0 else 1
            shortcut = x
            if stride != 1 or channels != expansion * width:
                shortcut = b.conv(x, f"{layer}.downsample.0", expansion * width, 1, stride=stride)
                shortcut = b.batch_norm(shortcut, f"{layer}.downsample.1")
            x = b.relu(b.add(block(b, x, layer, width, stride), shortcut, f"{layer}.add"))
            channels = expansion * width
    x = b.flatten(b.global_average_pool(x, "avgpool"), "flatten")
    return b.classifier(b.linear(x, "fc", classes, deviation=0.01))


NETWORKS: dict[str, Callable[..., Network]] = {
    "resnet18": partial(_resnet, "resnet18", _basic, 1, (2, 2, 2, 2)),
    "resnet34": partial(_resnet, "resnet34", _basic, 1, (3, 4, 6, 3)),
    "resnet50": partial(_resnet, "resnet50", _bottleneck, 4, (3, 4, 6, 3)),
    "resnet101": partial(_resnet, "resnet101", _bottleneck, 4, (3, 4, 23, 3)),
    "resnet152": partial(_resnet, "resnet152", _bottleneck, 4, (3, 8, 36, 3)),
}
"""Name to network; see `d5suite.network.zoo.build`."""
