"""GoogLeNet with batch normalisation and without auxiliary classifiers.

Szegedy et al., "Going deeper with convolutions" (CVPR 2015), table 1, in the form that torchvision
has: batch normalisation (Ioffe and Szegedy, ICML 2015) after each convolution, no response
normalisation, and 3×3 kernels in the "5×5" branch, as in the TensorFlow code from which its weights
came (pytorch/vision issue 906). Initial weights are He-normal, the classifier's of standard
deviation 0.01. May import `d5suite.network` only.
"""

from __future__ import annotations

from d5suite.network.builder import Builder
from d5suite.network.model import Network

_MODULES = {
    "inception3a": (64, 96, 128, 16, 32, 32),
    "inception3b": (128, 128, 192, 32, 96, 64),
    "inception4a": (192, 96, 208, 16, 48, 64),
    "inception4b": (160, 112, 224, 24, 64, 64),
    "inception4c": (128, 128, 256, 24, 64, 64),
    "inception4d": (112, 144, 288, 32, 64, 64),
    "inception4e": (256, 160, 320, 32, 128, 128),
    "inception5a": (256, 160, 320, 32, 128, 128),
    "inception5b": (384, 192, 384, 48, 128, 128),
}
"""Channels of the branches: 1×1; before and after 3×3; before and after "5×5"; after pooling."""

_POOLS = {"inception3b": ("maxpool3", 3), "inception4e": ("maxpool4", 2)}
"""By module: name and kernel of the pooling layer after it."""


def _layer(b: Builder, x: str, name: str, width: int, kernel: int = 1, stride: int = 1) -> str:
    return b.relu(b.batch_norm(b.conv(x, f"{name}.conv", width, kernel, stride=stride), f"{name}.bn", epsilon=1e-3))


def _inception(b: Builder, x: str, name: str, widths: tuple[int, ...]) -> str:
    one, before_three, three, before_five, five, pooled = widths
    branches = [
        _layer(b, x, f"{name}.branch1", one),
        _layer(b, _layer(b, x, f"{name}.branch2.0", before_three), f"{name}.branch2.1", three, 3),
        _layer(b, _layer(b, x, f"{name}.branch3.0", before_five), f"{name}.branch3.1", five, 3),
        _layer(b, b.max_pool(x, f"{name}.branch4.0", 3, stride=1, padding=1), f"{name}.branch4.1", pooled),
    ]
    return b.concat(branches, name)


def _googlenet(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("googlenet", seed=seed, image_size=image_size, smallest=31)
    x = b.max_pool(_layer(b, b.image, "conv1", 64, 7, stride=2), "maxpool1", 3, stride=2, partial=True)
    x = _layer(b, _layer(b, x, "conv2", 64), "conv3", 192, 3)
    x = b.max_pool(x, "maxpool2", 3, stride=2, partial=True)
    for name, widths in _MODULES.items():
        x = _inception(b, x, name, widths)
        if name in _POOLS:
            pool, kernel = _POOLS[name]
            x = b.max_pool(x, pool, kernel, stride=2, partial=True)
    x = b.dropout(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "dropout", ratio=0.2)
    return b.classifier(b.linear(x, "fc", classes, deviation=0.01))


NETWORKS = {"googlenet": _googlenet}
