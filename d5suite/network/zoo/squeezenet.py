"""SqueezeNet 1.0 and 1.1.

Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and <0.5MB model size"
(arXiv 1602.07360, 2016), table 1; version 1.1, from the authors' repository, has a smaller first
layer and pools earlier. Initial weights follow torchvision: He's forward form, here normal, and a
last convolution of standard deviation 0.01. May import `d5suite.network` only.
"""

from __future__ import annotations

from functools import partial

from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _fire(b: Builder, x: str, name: str, squeezed: int, expanded: int) -> str:
    x = b.relu(b.conv(x, f"{name}.squeeze", squeezed, 1, bias=True, fan="in"))
    branches = [
        b.relu(b.conv(x, f"{name}.expand1x1", expanded, 1, bias=True, fan="in")),
        b.relu(b.conv(x, f"{name}.expand3x3", expanded, 3, bias=True, fan="in")),
    ]
    return b.concat(branches, name)


def _squeezenet(
    name: str,
    width: int,
    kernel: int,
    pools: tuple[int, ...],
    smallest: int,
    *,
    classes: int,
    image_size: int,
    seed: int,
) -> Network:
    """``width`` and ``kernel`` are the first convolution's; ``pools`` lists the pooling layers."""
    b = Builder(name, seed=seed, image_size=image_size, smallest=smallest)
    x = b.relu(b.conv(b.image, "features.0", width, kernel, stride=2, padding=0, bias=True, fan="in"))
    fires = iter(((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)))
    for layer in range(2, 13):
        if layer in pools:
            x = b.max_pool(x, f"features.{layer}", 3, stride=2, partial=True)
        else:
            x = _fire(b, x, f"features.{layer}", *next(fires))
    x = b.relu(b.conv(b.dropout(x, "classifier.0"), "classifier.1", classes, 1, bias=True, deviation=0.01))
    return b.classifier(b.flatten(b.global_average_pool(x, "classifier.3"), "flatten"))


NETWORKS = {
    "squeezenet1_0": partial(_squeezenet, "squeezenet1_0", 96, 7, (2, 6, 11), 29),
    "squeezenet1_1": partial(_squeezenet, "squeezenet1_1", 64, 3, (2, 5, 8), 25),
}
