"""MobileNet v1 and v2.

Howard et al., "MobileNets: efficient convolutional neural networks for mobile vision applications" (arXiv 1704.04861,
2017), table 1, and Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks" (CVPR 2018), table 2. Both
cut ReLU off at 6, the first as its authors' code does (TF-slim, mobilenet_v1.py). Names are torchvision's for v2 and
timm's (``mobilenetv1_100``) for v1, which torchvision lacks. Initial weights are torchvision's: He-normal convolutions
and a classifier of standard deviation 0.01. Imports the builder only.
"""

from __future__ import annotations

from collections.abc import Callable

from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _depthwise(b: Builder, x: str, name: str, width: int, stride: int, norm: str) -> str:
    return b.relu6(b.batch_norm(b.conv(x, name, width, 3, stride=stride, groups=width), norm))


def _mobilenet_v1(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("mobilenet_v1", seed=seed, image_size=image_size)
    x = b.relu6(b.batch_norm(b.conv(b.image, "conv_stem", 32, 3, stride=2), "bn1"))
    channels = 32
    for stage, (width, repeats) in enumerate(((64, 1), (128, 2), (256, 2), (512, 6), (1024, 2))):
        for index in range(repeats):
            name = f"blocks.{stage}.{index}"
            stride = 2 if stage > 0 and index == 0 else 1
            x = _depthwise(b, x, f"{name}.conv_dw", channels, stride, f"{name}.bn1")
            x = b.relu6(b.batch_norm(b.conv(x, f"{name}.conv_pw", width, 1), f"{name}.bn2"))
            channels = width
    x = b.flatten(b.global_average_pool(x, "global_pool"), "flatten")
    return b.classifier(b.linear(x, "classifier", classes, deviation=0.01))


_V2_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, output channels, repeats and stride of the first (Sandler et al., table 2)."""


def _inverted_residual(b: Builder, x: str, name: str, *, inputs: int, expansion: int, outputs: int, stride: int) -> str:
    y, hidden, depthwise = x, inputs * expansion, 0
    if expansion != 1:
        y = b.relu6(b.batch_norm(b.conv(x, f"{name}.conv.0.0", hidden, 1), f"{name}.conv.0.1"))
        depthwise = 1
    y = _depthwise(b, y, f"{name}.conv.{depthwise}.0", hidden, stride, f"{name}.conv.{depthwise}.1")
    y = b.batch_norm(b.conv(y, f"{name}.conv.{depthwise + 1}", outputs, 1), f"{name}.conv.{depthwise + 2}")
    return b.add(x, y, name) if stride == 1 and inputs == outputs else y


def _mobilenet_v2(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("mobilenet_v2", seed=seed, image_size=image_size)
    x = b.relu6(b.batch_norm(b.conv(b.image, "features.0.0", 32, 3, stride=2), "features.0.1"))
    channels, layer = 32, 1
    for expansion, width, repeats, stride in _V2_STAGES:
        for index in range(repeats):
            x = _inverted_residual(
                b, x, f"features.{layer}", inputs=channels, expansion=expansion, outputs=width,
                stride=1 if index else stride,
            )  # fmt: skip
            channels, layer = width, layer + 1
    x = b.relu6(b.batch_norm(b.conv(x, "features.18.0", 1280, 1), "features.18.1"))
    x = b.dropout(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "classifier.0", ratio=0.2)
    return b.classifier(b.linear(x, "classifier.1", classes, deviation=0.01))


NETWORKS: dict[str, Callable[..., Network]] = {"mobilenet_v1": _mobilenet_v1, "mobilenet_v2": _mobilenet_v2}
"""Name to network; see `d5suite.network.zoo.build`."""
