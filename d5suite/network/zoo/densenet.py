"""DenseNet-121.

Huang et al., "Densely connected convolutional networks" (CVPR 2017), table 1. Initial weights are
torchvision's, He-normal convolutions in the forward form, with a classifier of standard deviation
0.01. May import `d5suite.network` only.
"""

from __future__ import annotations

from functools import partial

from d5suite.network.builder import Builder
from d5suite.network.model import Network

_GROWTH = 32
"""Channels that each layer adds."""


def _layer(b: Builder, features: list[str], name: str) -> str:
    x = features[0] if len(features) == 1 else b.concat(features, f"{name}.concat")
    x = b.conv(b.relu(b.batch_norm(x, f"{name}.norm1")), f"{name}.conv1", 4 * _GROWTH, 1, fan="in")
    return b.conv(b.relu(b.batch_norm(x, f"{name}.norm2")), f"{name}.conv2", _GROWTH, 3, fan="in")


def _densenet(name: str, blocks: tuple[int, ...], *, classes: int, image_size: int, seed: int) -> Network:
    b = Builder(name, seed=seed, image_size=image_size, smallest=29)
    x = b.conv(b.image, "features.conv0", 64, 7, stride=2, fan="in")
    x = b.max_pool(b.relu(b.batch_norm(x, "features.norm0")), "features.pool0", 3, stride=2, padding=1)
    channels = 64
    for index, layers in enumerate(blocks, 1):
        features = [x]
        for layer in range(1, layers + 1):
            features.append(_layer(b, features, f"features.denseblock{index}.denselayer{layer}"))
        x = b.concat(features, f"features.denseblock{index}")
        channels += layers * _GROWTH
        if index < len(blocks):
            channels //= 2
            transition = f"features.transition{index}"
            x = b.conv(b.relu(b.batch_norm(x, f"{transition}.norm")), f"{transition}.conv", channels, 1, fan="in")
            x = b.average_pool(x, f"{transition}.pool", 2, stride=2)
    x = b.global_average_pool(b.relu(b.batch_norm(x, "features.norm5")), "avgpool")
    return b.classifier(b.linear(b.flatten(x, "flatten"), "classifier", classes, deviation=0.01))


NETWORKS = {"densenet121": partial(_densenet, "densenet121", (6, 12, 24, 16))}
